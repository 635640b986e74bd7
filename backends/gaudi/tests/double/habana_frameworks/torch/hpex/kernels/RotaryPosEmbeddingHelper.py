"""Halves of the last axis turn; cosines and sines are as wide as it."""

import torch


class RotaryPosEmbeddingHelperV1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, cos, sin, offset):
        assert offset == 0 and cos.shape == sin.shape and cos.shape[-1] == p.shape[-1]
        dtype = torch.float32 if torch.float32 in (p.dtype, cos.dtype, sin.dtype) else p.dtype
        p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
        first, second = p.chunk(2, dim=-1)
        return p * cos + torch.cat([-second, first], dim=-1) * sin
