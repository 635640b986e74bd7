"""Wrong experts and routing that were written before the zoo was read, and that the suite of their day let through."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from m3hal.formats import QTensor
from m3hal.ops import ExpertLoRA
from m3hal.ops.swiglu_oai import activate
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.optional import ADDED, FORCED

_FACTORS = ("a13", "b13", "a2", "b2")


def _as_if_dense(tensor: Tensor) -> Tensor:
    """What a kernel reads that computes addresses from the shape alone, as far as the memory goes."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    strides = torch.empty(tensor.shape, device="meta").stride()
    return torch.as_strided(tensor, tensor.shape, strides) if tensor.numel() <= size else tensor.contiguous()


def _lora(change):
    """The definition with other adapters: ``change(lora)``."""

    def made(site, right):
        def run(x, weights, ids, experts, lora=None):
            return right(x, weights, ids, experts, None if lora is None else change(lora))

        return run

    return made


def _renumbered(change):
    """The definition with other numbers of the tokens' adapters: ``change(adapters, lora)``."""
    return _lora(lambda lora: replace(lora, adapters=change(lora.adapters, lora)))


@mutant("moe_experts", "lora_views:oracle", "F65", declares=ADDED)
def moe_experts_lora_dense_numbers(site, right):
    """The tokens' adapters are taken for contiguous."""
    return _renumbered(lambda adapters, lora: _as_if_dense(adapters).clamp(max=len(lora.scales) - 1))(site, right)


@mutant("moe_experts", "lora_views:oracle", "F65", declares=ADDED)
def moe_experts_lora_dense_scales(site, right):
    """The adapters' scales are taken for contiguous."""
    return _lora(lambda lora: replace(lora, scales=_as_if_dense(lora.scales)))(site, right)


@mutant("moe_experts", "lora_views:oracle", "F65", declares=ADDED)
def moe_experts_lora_dense_factors(site, right):
    """The adapters' factors are taken for contiguous."""
    return _lora(lambda lora: replace(lora, **{name: _as_if_dense(getattr(lora, name)) for name in _FACTORS}))(
        site, right
    )


@mutant("moe_experts", "lora_views:oracle", "F29", declares=ADDED)
def moe_experts_lora_minus_one_alone(site, right):
    """-1 is no adapter; another negative number counts from the end."""
    return _renumbered(lambda adapters, lora: torch.where(adapters < -1, adapters % len(lora.scales), adapters))(
        site, right
    )


@mutant("moe_experts", "lora_views:oracle", formats=("float32",), declares=ADDED)
def moe_experts_lora_scales_in_bf16(site, right):
    """An adapter's scale is kept in bf16."""
    return _lora(lambda lora: replace(lora, scales=lora.scales.bfloat16().float()))(site, right)


@mutant("moe_experts", "lora_views:oracle", declares=ADDED)
def moe_experts_lora_scales_from_zero_to_two(site, right):
    """An adapter's scale is clamped to what lora_alpha / rank usually is."""
    return _lora(lambda lora: replace(lora, scales=lora.scales.clamp(0, 2)))(site, right)


@mutant("moe_experts", "lora_rank_144:oracle", "F59", declares=ADDED)
def moe_experts_lora_rank_64(site, right):
    """Ranks beyond 64 are cut off."""

    def first(lora: ExpertLoRA) -> ExpertLoRA:
        rows, columns = slice(64), (..., slice(64))
        return replace(lora, a13=lora.a13[:, :, rows], b13=lora.b13[columns], a2=lora.a2[:, :, rows],
                       b2=lora.b2[columns])  # fmt: skip

    return _lora(first)(site, right)


@mutant("moe_experts", "lora_adapters_70:oracle", declares=ADDED)
def moe_experts_lora_sixty_four_adapters(site, right):
    """A token's adapter is kept in six bits."""
    return _renumbered(lambda adapters, lora: torch.where(adapters >= 0, adapters & 63, adapters))(site, right)


@mutant("moe_experts", "lora_beside_shared_300:oracle", "F68", declares=ADDED)
def moe_experts_lora_of_256_tokens(site, right):
    """Tokens past 256, the most that a decode step has, get no adapter."""

    def of_the_first(adapters: Tensor, lora: ExpertLoRA) -> Tensor:
        return adapters.masked_fill(torch.arange(len(adapters)) >= 256, -1)

    return _renumbered(of_the_first)(site, right)


@mutant("moe_experts", "lora_beside_shared_300:oracle", "F68", declares=ADDED)
def moe_experts_shared_of_256_tokens(site, right):
    """Tokens past 256 get no shared expert."""

    def run(x, weights, ids, experts, lora=None):
        routed = right(x, weights, ids, replace(experts, shared=None), lora)
        whole = right(x, weights, ids, experts, lora)
        return torch.where((torch.arange(len(x)) < 256)[:, None], whole, routed)

    return run


@mutant("moe_experts", "shared_views:oracle", "F65", declares=ADDED)
def moe_experts_shared_dense(site, right):
    """The shared expert's matrices are taken for contiguous."""

    def run(x, weights, ids, experts, lora=None):
        own = experts.shared
        if own is not None and not isinstance(own.w13, QTensor):
            experts = replace(experts, shared=replace(own, w13=_as_if_dense(own.w13), w2=_as_if_dense(own.w2)))
        return right(x, weights, ids, experts, lora)

    return run


@mutant("moe_experts", "lora_cancelling:oracle", "F73", declares=ADDED)
def moe_experts_lora_added_to_rounded(site, right):
    """The first product is rounded to bf16 before the adapter's part is added, without declaring it."""

    def run(x, weights, ids, experts, lora=None):
        if lora is None or isinstance(experts.w13, QTensor) or len(x) > 17:
            return right(x, weights, ids, experts, lora)
        out = right(x.float(), weights, torch.full_like(ids, -1), experts)
        for token, slot in torch.nonzero(ids >= 0).tolist():
            expert, adapter = int(ids[token, slot]), int(lora.adapters[token])
            row = x[token].float()
            gate_up = (experts.w13[expert].float() @ row).bfloat16().float()
            if adapter >= 0:
                gate_up += _delta(lora.a13, lora.b13, lora, adapter, expert, row)
            hidden = activate(gate_up, site.alpha, site.beta, site.limit)
            part = experts.w2[expert].float() @ hidden
            if adapter >= 0:
                part += _delta(lora.a2, lora.b2, lora, adapter, expert, hidden)
            out[token] += weights[token, slot] * part
        return out.to(x.dtype)

    return run


def _delta(a: Tensor, b: Tensor, lora: ExpertLoRA, adapter: int, expert: int, x: Tensor) -> Tensor:
    return lora.scales[adapter] * (b[adapter, expert].float() @ (a[adapter, expert].float() @ x))


@mutant("route_topk", "forced_first_expert:oracle", "F29", declares=FORCED)
def route_topk_forced_zero_is_none(site, right):
    """A row is forced if one of its ids is above 0, so expert 0 alone is not replayed."""

    def run(logits, bias, forced_ids=None):
        if forced_ids is not None:
            forced_ids = torch.where((forced_ids > 0).any(-1, keepdim=True), forced_ids, -1)
        return right(logits, bias, forced_ids)

    return run


@mutant("route_topk", "forced_vanishing:oracle", declares=FORCED)
def route_topk_forced_epsilon(site, right):
    """The sum of forced weights gets an epsilon of 1e-9."""

    def run(logits, bias, forced_ids=None):
        weights, ids = right(logits, bias, forced_ids)
        if forced_ids is None or not site.renormalize:
            return weights, ids
        score = logits.sigmoid().gather(-1, ids.long().clamp(min=0)).masked_fill(ids < 0, 0.0).nan_to_num(nan=0.0)
        added = score / (score.sum(-1, keepdim=True) + 1e-9) * site.routed_scale
        return torch.where((forced_ids >= 0).any(-1, keepdim=True), added, weights), ids

    return run
