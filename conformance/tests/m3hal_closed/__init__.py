"""A closed backend: a compiled shared object with an allocator and a weight layout of its own, behind ctypes."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import torch

from m3hal.dispatch import Impl, Kernel, Manifest, one_of
from m3hal.ops import ExpertWeights
from m3hal.shape import Site

FP32 = one_of("dtype", "float32")


def manifest() -> Manifest:
    plain = {"memory": "self", "views": "contiguous", "traceable": False, "files": ("libacme.so",)}
    fp32 = one_of("weight_format", "float32")
    return Manifest(
        name="closed",
        vendor="m3hal tests",
        api=">=1,<2",
        devices=("cpu",),
        operators={
            "rms_norm": (Impl("m3hal_closed:rms_norm", limits=(FP32,), **plain),),
            "moe_experts": (Impl("m3hal_closed:moe_experts", limits=(FP32, fp32), **plain),),
        },
    )


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(__file__).with_name("libacme.so")))
    library.acme_pack.restype = ctypes.c_void_p
    return library


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class Packed:
    """Weights in the library's own memory."""

    def __init__(self, library: ctypes.CDLL, experts: ExpertWeights) -> None:
        self.shapes = experts.w13.shape, experts.w2.shape
        count, hidden, inner = experts.w2.shape
        self.handle = ctypes.c_void_p(library.acme_pack(_at(experts.w13), _at(experts.w2), count, inner, hidden))
        weakref.finalize(self, library.acme_free, self.handle)


def moe_experts(site: Site) -> Kernel:
    library = _library()

    def pack(experts: Any) -> Packed:
        if isinstance(experts, Packed):
            raise TypeError("these weights are packed already")
        return Packed(library, experts)

    def unpack(packed: Packed) -> ExpertWeights:
        w13, w2 = (torch.empty(shape) for shape in packed.shapes)
        library.acme_unpack(packed.handle, _at(w13), _at(w2))
        return ExpertWeights(w13, w2)

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed, out: Any = None) -> torch.Tensor:
        out = torch.empty_like(x) if out is None else out
        constants = (ctypes.c_float(value) for value in (site.alpha, site.beta, site.limit))
        library.acme_experts(packed.handle, _at(x), _at(weights), _at(ids), *ids.shape, *constants, _at(out))
        return out

    return Kernel(run, prepare_weights=pack, unpack=unpack)


def rms_norm(site: Site) -> Any:
    library = _library()

    def run(x: torch.Tensor, weight: torch.Tensor, out: Any = None) -> torch.Tensor:
        out = torch.empty_like(x) if out is None else out
        width = x.shape[-1]
        rows, constants = ctypes.c_long(x.numel() // width), (ctypes.c_float(v) for v in (site.eps, site.weight_offset))
        library.acme_norm(_at(x), _at(weight), rows, ctypes.c_long(width), *constants, _at(out))
        return out

    return run
