"""Sums what the ranks of a tensor-parallel layer hold, adds the residual and normalises the sum, unrounded throughout.

    sum          = sum over ranks of x + residual                in fp32
    out          = rms_norm(sum)
    residual_out = sum

Every rank gets the same bits. Kernels that exchange their sum in bf16, or accumulate in it, say so with the trait
``reduce_dtype``; so does a composition in bf16, whose ``add_rms_norm`` takes a rounded sum.
Source: vLLM ``fused_allreduce_gemma_rms_norm``; FlashInfer and aiter all-reduce fusions, one-shot and two-shot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from m3hal._lazy import torch
from m3hal.ops._group import Group, ranks
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import EXACT
from m3hal.ops.add_rms_norm import OPERATOR as ADD_RMS_NORM
from m3hal.ops.add_rms_norm import add_rms_norm


def allreduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: Group | None = None,
    *,
    eps: float,
    weight_offset: float,
    traits: Mapping[str, str] = EXACT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce, residual addition and norm over the last axis.

    Args:
        x: [..., n], this rank's share of what the previous block adds to the residual stream.
        residual: [..., n], the same on every rank.
        weight, eps, weight_offset: as in ``rms_norm``.
        group: the ranks that hold the other shares; None: x is the whole.

    Returns:
        out [..., n] in x's dtype, and the new residual [..., n] in the residual's dtype, rounded once; the same on
        every rank. Neither input is written.
    """
    compute = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    total = _reduced(x.to(compute), ranks(group), traits)
    out, residual_out = add_rms_norm(
        total, residual.to(compute), weight, eps=eps, weight_offset=weight_offset, traits=traits
    )
    return out.to(x.dtype), residual_out.to(residual.dtype)


def _reduced(x: torch.Tensor, group: Group, traits: Mapping[str, str]) -> torch.Tensor:
    """The sum over the ranks in x's dtype, with the roundings of ``reduce_dtype``; one rank alone rounds nothing."""
    how = traits.get("reduce_dtype", "float32")
    if how == "float32" or group.size == 1:
        return group.all_reduce(x)
    if how == "bfloat16":
        return group.all_reduce(x).to(torch.bfloat16).to(x.dtype)
    shares = group.all_gather(x).to(torch.bfloat16)
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total.to(x.dtype)


def compose(*, add_rms_norm: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """The operator as a composition: the sum in fp32, rounded to x's dtype, then the given ``add_rms_norm``."""

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, group: Group | None = None) -> Any:
        total = ranks(group).all_reduce(x.to(torch.promote_types(x.dtype, torch.float32)))
        return add_rms_norm(total.to(x.dtype), residual, weight)

    return run


def fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, group: Group | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty and contiguous, one like ``x``, one like ``residual``."""
    made: tuple[torch.Tensor, torch.Tensor] = ADD_RMS_NORM.fake(x, residual, weight)
    return made


OPERATOR = Operator(
    name="allreduce_add_rms_norm",
    kind="fused",
    reference=allreduce_add_rms_norm,
    fake=fake,
    numeric=Numeric("U1", "in fp32 of the sum of the shares' sizes; the same bits on every rank"),
    sites=ADD_RMS_NORM.sites,
    traits=(
        Trait(
            "reduce_dtype",
            ("float32", "bfloat16", "bfloat16_stepwise"),
            True,
            "what the sum over the ranks is rounded to before the residual joins it; stepwise: after each rank's "
            "share, in the order of the ranks",
        ),
        *ADD_RMS_NORM.traits,
    ),
    covers=("add_rms_norm",),
    compose=compose,
    composed_traits={"reduce_dtype": "bfloat16"},
    source="vLLM fused_allreduce_gemma_rms_norm",
)
