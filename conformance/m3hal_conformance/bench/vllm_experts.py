"""vLLM's kernels of the experts half, called as its layers call them: routing, experts, activation, norms.

Where one of its compiled operators is not loaded, the method returns None and the row has no column for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from m3hal.formats import QTensor
from m3hal.ops import ExpertWeights
from m3hal.shape import Site
from m3hal_conformance.bench.work import Call

_LAYERS = "vllm.model_executor.layers.fused_moe"
_AMD = "vllm.models.minimax_m3.amd.ops"
#: columns that Marlin's kernel takes in another order, of scales and of four of them
_SCALES = [i + 8 * j for i in range(8) for j in range(8)]
_FOUR = [0, 2, 1, 3]


#: what its Triton experts run fastest with for thousands of tokens in FP8 on an H200, which its tables lack
_TUNED = {
    "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "SPLIT_K": 1, "num_warps": 8,
    "num_stages": 3,
}  # fmt: skip


class ExpertsPeer:
    """The experts half of :class:`~m3hal_conformance.bench.vllm_peer.Peer`."""

    _repacked: tuple[ExpertWeights, _Marlin] | None = None

    def compiled(self, name: str, library: str = "_C") -> Any:
        """One of vLLM's compiled operators; None where they are not loaded."""
        return getattr(getattr(torch.ops, library), name, None)

    def norms(self, site: Site, xs: Sequence[torch.Tensor], weight: torch.Tensor) -> dict[str, list[Call]]:
        """Gemma RMSNorm: its Triton kernel, and its CUDA kernel on weights that have their offset."""
        found: dict[str, list[Call]] = {}
        with suppress(ImportError):
            kernel = importlib.import_module(f"{_AMD}.gemma_rmsnorm").gemma_rmsnorm
            found["vllm triton"] = [partial(kernel, x, weight, site.eps) for x in xs]
        step = self.compiled("rms_norm")
        if step:
            plain, out = (site.weight_offset + weight.float()).to(weight.dtype), torch.empty_like(xs[0])
            found["vllm cuda"] = [partial(step, out, x, plain, site.eps) for x in xs]
        return found

    def add_norms(
        self, site: Site, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor
    ) -> dict[str, list[Call]]:
        """The same after a sum; both work in place, on copies."""
        found: dict[str, list[Call]] = {}
        copies = [(x.clone(), residual.clone()) for x, residual in pairs]
        with suppress(ImportError):
            kernel = importlib.import_module(f"{_AMD}.gemma_rmsnorm").gemma_fused_add_rmsnorm
            found["vllm triton"] = [partial(kernel, *pair, weight, site.eps) for pair in copies]
        step = self.compiled("fused_add_rms_norm")
        if step:
            plain = (site.weight_offset + weight.float()).to(weight.dtype)
            found["vllm cuda"] = [partial(step, *pair, plain, site.eps) for pair in copies]
        return found

    def activation(self, site: Site, xs: Sequence[torch.Tensor]) -> dict[str, list[Call]]:
        """SwiGLU-OAI of halves side by side."""
        found: dict[str, list[Call]] = {}
        with suppress(ImportError):
            kernel = importlib.import_module(f"{_AMD}.swiglu_oai").swiglu_oai_split
            found["vllm triton"] = [partial(kernel, x, site.alpha, site.beta, site.limit) for x in xs]
        step = self.compiled("silu_and_mul_with_clamp")
        if step:
            out = torch.empty(*xs[0].shape[:-1], xs[0].shape[-1] // 2, dtype=xs[0].dtype, device=xs[0].device)
            found["vllm cuda"] = [partial(step, out, x, site.limit, site.alpha, site.beta) for x in xs]
        return found

    def route(self, site: Site, logits: Sequence[torch.Tensor], bias: torch.Tensor) -> list[Call] | None:
        """Sigmoid top-k."""
        step = self.compiled("topk_sigmoid", "_moe_C")
        if not step:
            return None
        shape, device = (len(logits[0]), site.top_k_experts), bias.device
        weights = torch.empty(shape, device=device)
        ids, unused = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        rest = (site.renormalize, bias, site.routed_scale, None)
        return [partial(step, weights, ids, unused, row, *rest) for row in logits]

    def gate(self, xs: Sequence[torch.Tensor], weight: torch.Tensor) -> list[Call]:
        """The router's fp32 product."""
        step, out = self.compiled("fp32_router_gemm"), torch.empty(len(xs[0]), len(weight), device=weight.device)
        if step and len(xs[0]) <= 32:
            return [partial(step, out, x, weight) for x in xs]
        return [partial(_wide_product, x, weight) for x in xs]

    def align(self, site: Site, ids: Sequence[torch.Tensor]) -> list[Call] | None:
        """The order of tokens by experts, in blocks of the size that its experts take."""
        step = self.compiled("moe_align_block_size", "_moe_C")
        if not step:
            return None
        (tokens, k), experts, device = ids[0].shape, site.num_local_experts, ids[0].device
        block = 16 if tokens <= 64 else 64 if tokens <= 512 else 128
        room = tokens * k + experts * (block - 1)
        sizes = (room, -(-room // block), 1)
        made = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
        return [partial(step, chosen, experts, block, *made, None, None) for chosen in ids]

    def experts(
        self, site: Site, experts: ExpertWeights, given: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> dict[str, list[Call]]:
        """bf16 and FP8 per channel by its Triton kernels, MXFP8 by Marlin, as it serves these checkpoints on Hopper."""
        if not self.compiled("silu_and_mul_with_clamp"):
            return {}
        if site.weight_format == "mxfp8":
            if self._repacked is None or self._repacked[0] is not experts:
                self._repacked = None  # freed before the next is made
                self._repacked = experts, _Marlin(self, site, experts)
            run = self._repacked[1]
            return {"vllm marlin": [partial(run, *values) for values in given]}
        if site.weight_format not in ("bfloat16", "fp8_e4m3"):
            return {}
        triton = _triton_experts(site)
        w13, w2, more = experts.w13, experts.w2, {}
        if isinstance(w13, QTensor) and isinstance(w2, QTensor):
            more = {"use_fp8_w8a8": True, "per_channel_quant": True, "w1_scale": w13.scale, "w2_scale": w2.scale}
            w13, w2 = (part.data.view(torch.float8_e4m3fn) for part in (w13, w2))
        named = {"activation": "swigluoai_uninterleave", **more}
        calls: list[Call] = [partial(triton, x, w13, w2, weights, ids, **named) for x, weights, ids in given]
        if not more or len(given[0][0]) <= 512:
            return {"vllm": calls}
        return {"vllm": calls, "vllm tuned": [partial(_with_tiles, call) for call in calls]}


def _wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight)


def _triton_experts(site: Site) -> Any:
    """vLLM's ``fused_experts_impl``, with the activation's numbers that its Triton experts pass."""
    experts: Any = importlib.import_module(f"{_LAYERS}.fused_moe")
    acts = importlib.import_module(f"{_LAYERS}.activation")
    config = acts.ApplyMoEActivationConfig(clamp_limit=site.limit, alpha=site.alpha, beta=site.beta)
    experts.apply_moe_activation = partial(acts.apply_moe_activation, activation_config=config)
    return experts.fused_experts_impl


def _with_tiles(call: Call) -> object:
    """The call with :data:`_TUNED` in place of what its tables say."""
    package: Any = importlib.import_module(_LAYERS)
    shipped, package.get_config = package.get_config, lambda: _TUNED
    try:
        return call()
    finally:
        package.get_config = shipped


class _Marlin:
    """MXFP8 weights with bf16 activations, repacked as vLLM does when it loads them."""

    def __init__(self, peer: ExpertsPeer, site: Site, experts: ExpertWeights) -> None:
        assert isinstance(experts.w13, QTensor)
        assert isinstance(experts.w2, QTensor)
        self._align = importlib.import_module(f"{_LAYERS}.moe_align_block_size").moe_align_block_size
        self._type = importlib.import_module("vllm.scalar_type").scalar_types.float8_e4m3fn.id
        self._step, self._repack = peer.compiled("moe_wna16_marlin_gemm", "_moe_C"), peer.compiled("gptq_marlin_repack")
        self._activate, self._site = peer.compiled("silu_and_mul_with_clamp"), site
        self._w13, self._w2 = self._codes(experts.w13), self._codes(experts.w2)
        self._s13, self._s2 = _marlin_scales(experts.w13), _marlin_scales(experts.w2)
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self._space = torch.zeros(4 * count, dtype=torch.int, device=experts.w13.data.device)

    def _codes(self, weights: QTensor) -> torch.Tensor:
        rows, columns = weights.data.shape[1:]
        made = [self._repack(e.view(torch.int32).T.contiguous(), columns, rows, 8, False) for e in weights.data]
        return torch.stack(made)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        site, (tokens, hidden), k = self._site, x.shape, ids.shape[1]
        inner, experts = site.intermediate_size, site.num_local_experts
        block = next((b for b in (8, 16, 32, 48) if tokens * k / experts / b < 0.9), 64)
        sorted_ids, expert_ids, padded = self._align(ids, block, experts, None, ignore_invalid_experts=True)
        wide = torch.empty(tokens * k, 2 * inner, dtype=x.dtype, device=x.device)
        narrow = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
        parts = torch.empty(tokens * k, hidden, dtype=x.dtype, device=x.device)
        order = (self._space, sorted_ids, expert_ids, padded, weights, block)
        rest = (False, True, False, -1, -1, -1)
        none = (None, None, None)
        wide = self._step(
            x, wide, self._w13, None, self._s13, *none, *order, k, False, self._type, tokens, 2 * inner, hidden, *rest
        )
        self._activate(narrow, wide, site.limit, site.alpha, site.beta)
        parts = self._step(
            narrow,
            parts,
            self._w2,
            None,
            self._s2,
            *none,
            *order,
            1,
            True,
            self._type,
            tokens * k,
            hidden,
            inner,
            *rest,
        )
        return torch.sum(parts.view(tokens, k, hidden), dim=1)


def _marlin_scales(weights: QTensor) -> torch.Tensor:
    """E8M0 scales in the order of Marlin's fragments."""
    assert weights.scale is not None
    rows, made = weights.data.shape[1], []
    for scale in weights.scale.view(torch.float8_e8m0fnu):
        wide = scale.to(torch.bfloat16).T.contiguous().reshape(-1, 64)[:, _SCALES].reshape(-1, rows).contiguous()
        turned = wide.view(-1, 4)[:, _FOUR].view(wide.size(0), -1).to(torch.float8_e8m0fnu)
        made.append(turned.view(torch.uint8))
    return torch.stack(made).view(torch.float8_e8m0fnu)
