"""Wrong shared experts, adapters and forced routing; each is right where a site asks for none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal import formats
from m3hal.dispatch import Kernel, at_least
from m3hal.formats import QTensor
from m3hal.ops import ExpertLoRA, ExpertWeights
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.rows import dense

ADDED = {"limits": (at_least("shared_intermediate_size", 0), at_least("lora_rank", 0))}
FORCED = {"limits": (at_least("forced_routing", 0),)}


def apart(right, x, weights, ids, experts, lora=None) -> tuple[Tensor, Tensor | float]:
    """What the routed experts give and what the shared one gives, neither rounded."""
    routed = right(x.float(), weights, ids, replace(experts, shared=None), lora)
    if experts.shared is None:
        return routed, 0.0
    return routed, right(x.float(), weights, torch.full_like(ids, -1), experts)


def shared(change):
    """``change(own, weights, ids)``: what is added in place of the shared expert's own output."""

    def made(site, right):
        def run(x, weights, ids, experts, lora=None):
            routed, own = apart(right, x, weights, ids, experts, lora)
            return (routed + (own if experts.shared is None else change(site, own, weights, ids))).to(x.dtype)

        return run

    return made


@mutant("moe_experts", "shared_hot:oracle", "F36", declares=ADDED)
def moe_experts_shared_scaled(site, right):
    """The shared expert is multiplied by the routed scale."""
    return shared(lambda site, own, weights, ids: own * site.routed_scale)(site, right)


@mutant("moe_experts", "shared_nowhere:oracle", "F29", declares=ADDED)
def moe_experts_shared_of_routed_tokens(site, right):
    """A token without an expert here does not get the shared one either."""
    return shared(lambda site, own, weights, ids: own * (ids >= 0).any(-1, keepdim=True))(site, right)


@mutant("moe_experts", "shared_hot:oracle", declares=ADDED)
def moe_experts_shared_per_choice(site, right):
    """The shared expert is added once for each choice of a token."""
    return shared(lambda site, own, weights, ids: own * ids.shape[1])(site, right)


@mutant("moe_experts", "shared_hot:oracle", declares=ADDED)
def moe_experts_shared_forgotten(site, right):
    """The shared expert is not added."""
    return shared(lambda site, own, weights, ids: 0.0)(site, right)


@mutant("moe_experts", "shared_cancelling:oracle", "F73", formats=("bfloat16",), declares=ADDED)
def moe_experts_shared_rounded_apart(site, right):
    """Routed and shared output are rounded to bf16, then added."""

    def run(x, weights, ids, experts, lora=None):
        routed, own = apart(right, x, weights, ids, experts, lora)
        return routed.to(x.dtype) + (own.to(x.dtype) if experts.shared is not None else 0.0)

    return run


@mutant("moe_experts", "shared_few_resident:expert_slices", "F43", declares=ADDED)
def moe_experts_shared_on_every_rank(site, right):
    """The shared expert that was met last is added on ranks that hold none."""
    kept: list[ExpertWeights] = []

    def run(x, weights, ids, experts, lora=None):
        if experts.shared is not None:
            kept[:] = [experts.shared]
        return right(x, weights, ids, replace(experts, shared=kept[0] if kept else None), lora)

    return run


def other_shared(change):
    """``change(site, own, experts)``: the shared expert that is computed in place of the given one."""

    def made(site, right):
        def run(x, weights, ids, experts, lora=None):
            own = experts.shared and change(site, experts.shared, experts)
            return right(x, weights, ids, replace(experts, shared=own), lora)

        return run

    return made


def _rows(weight: Tensor | QTensor, order) -> Tensor:
    """The rows of w13, decoded, in another order."""
    plain = formats.dequantize(weight) if isinstance(weight, QTensor) else weight
    return order(plain)


def _pairs(w13: Tensor) -> Tensor:
    return torch.cat([w13[:, ::2], w13[:, 1::2]], 1)


def _swapped(w13: Tensor) -> Tensor:
    return torch.cat(w13.chunk(2, 1)[::-1], 1)


@mutant("moe_experts", "shared_hot:oracle", "F05", declares=ADDED)
def moe_experts_shared_interleaved(site, right):
    """Even rows of the shared expert's w13 are its gate."""
    return other_shared(lambda site, own, _: replace(own, w13=_rows(own.w13, _pairs)))(site, right)


@mutant("moe_experts", "shared_hot:oracle", "F05", declares=ADDED)
def moe_experts_shared_up_first(site, right):
    """The shared expert's w13 is read as [up | gate]."""
    return other_shared(lambda site, own, _: replace(own, w13=_rows(own.w13, _swapped)))(site, right)


def _cut(own: ExpertWeights, inner: int) -> ExpertWeights:
    """The first so many inner dimensions of a shared expert."""
    w13, w2 = _rows(own.w13, lambda w: w), _rows(own.w2, lambda w: w)
    gate, up = w13.chunk(2, 1)
    return ExpertWeights(torch.cat([gate[:, :inner], up[:, :inner]], 1), w2[..., :inner])


@mutant("moe_experts", "shared_hot:oracle", declares=ADDED)
def moe_experts_shared_of_routed_size(site, right):
    """The shared expert is taken to be as wide as a routed one."""
    return other_shared(lambda site, own, _: _cut(own, site.intermediate_size))(site, right)


@mutant("moe_experts", "shared_inner_416:oracle", "F59", declares=ADDED)
def moe_experts_shared_inner_tile(site, right):
    """The shared expert's inner dimension is cut to whole tiles of 64, where it has one."""

    def cut(site, own, _):
        inner = site.shared_intermediate_size
        return _cut(own, inner // 64 * 64) if inner > 64 else own

    return other_shared(cut)(site, right)


@mutant("moe_experts", "shared_mxfp8_beside_nvfp4:oracle", "F57", declares=ADDED)
def moe_experts_shared_in_the_experts_format(site, right):
    """A shared expert of another format is converted to that of the routed ones."""

    def converted(site, own, experts):
        if not isinstance(experts.w13, QTensor):
            return own
        spec = experts.w13.spec
        w13, w2 = (formats.quantize(_rows(w, lambda w: w).float(), spec) for w in (own.w13, own.w2))
        return ExpertWeights(w13, w2)

    return other_shared(converted)(site, right)


@mutant("moe_experts", "shared_hot:oracle", "F03", declares=ADDED)
def moe_experts_shared_no_limit(site, right):
    """The shared expert's activation has no limit."""
    from m3hal.ops import load

    def run(x, weights, ids, experts, lora=None):
        routed, _ = apart(right, x, weights, ids, experts, lora)
        none = torch.full_like(ids, -1)
        own = load("moe_experts").reference(
            x.float(), weights, none, experts, alpha=site.alpha, beta=site.beta, limit=float("inf")
        )
        return (routed + own).to(x.dtype)

    return run


def packed(right, pack, update=None, unpack=None) -> Kernel:
    """A kernel that packs, and is right about everything else; what is packed is a list of one ExpertWeights."""

    def run(x, weights, ids, held, lora=None, out=None):
        made = right(x, weights, ids, held[0], lora)
        return made if out is None else out.copy_(made)

    return Kernel(run, prepare_weights=pack, update_weights=update, unpack=unpack)


def _copy(experts: ExpertWeights) -> ExpertWeights:
    def own(weight):
        return weight.clone() if isinstance(weight, Tensor) else weight

    shared = experts.shared and _copy(experts.shared)
    return replace(experts, w13=own(experts.w13), w2=own(experts.w2), shared=shared)


def _replace_some(held, first, experts) -> None:
    """What an update does to the routed experts."""
    for name in ("w13", "w2"):
        target, source = getattr(held[0], name), getattr(experts, name)
        target[first : first + len(source)] = source


@mutant("moe_experts", "shared_hot:oracle", raw=True, declares=ADDED)
def moe_experts_shared_not_packed(site, right):
    """Packing leaves the shared expert behind."""
    return packed(right, lambda experts: [replace(_copy(experts), shared=None)])


@mutant("moe_experts", "shared_hot:packed_once", raw=True, declares=ADDED)
def moe_experts_shared_not_unpacked(site, right):
    """Unpacking leaves the shared expert behind."""
    return packed(right, lambda experts: [_copy(experts)], unpack=lambda held: replace(held[0], shared=None))


@mutant("moe_experts", "shared_hot:updated_weights", "F46", raw=True, declares=ADDED)
def moe_experts_shared_not_updated(site, right):
    """An update keeps the shared expert as it was."""
    return packed(right, lambda experts: [_copy(experts)], _replace_some)


@mutant("moe_experts", "shared_hot:updated_weights", "F46", raw=True, declares=ADDED)
def moe_experts_shared_lost_in_update(site, right):
    """An update of routed experts alone drops the shared one."""

    def update(held, first, experts):
        _replace_some(held, first, experts)
        held[0] = replace(held[0], shared=experts.shared)

    return packed(right, lambda experts: [_copy(experts)], update)


# --- adapters


def adapted(change):
    """``change(site, lora)``: the adapters that are taken in place of the given ones."""

    def made(site, right):
        def run(x, weights, ids, experts, lora=None):
            return right(x, weights, ids, experts, lora and change(site, lora))

        return run

    return made


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_ignored(site, right):
    """Adapters are left out."""
    return lambda x, weights, ids, experts, lora=None: right(x, weights, ids, experts)


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_unscaled(site, right):
    """The adapters' scales are left out."""
    return adapted(lambda site, lora: replace(lora, scales=torch.ones_like(lora.scales)))(site, right)


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_one_scale(site, right):
    """All adapters have the first one's scale."""
    return adapted(lambda site, lora: replace(lora, scales=lora.scales[:1].expand(len(lora.scales))))(site, right)


@mutant("moe_experts", "lora_alone:oracle", declares=ADDED)
def moe_experts_lora_scales_first_product(site, right):
    """The addition to the second product is not scaled."""
    return adapted(lambda site, lora: replace(lora, b2=lora.b2.float() / lora.scales[:, None, None, None]))(site, right)


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_first_product_only(site, right):
    """Nothing is added to the second product."""
    return adapted(lambda site, lora: replace(lora, b2=torch.zeros_like(lora.b2), a2=torch.zeros_like(lora.a2)))(
        site, right
    )


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_second_product_only(site, right):
    """Nothing is added to the first product."""
    return adapted(lambda site, lora: replace(lora, b13=torch.zeros_like(lora.b13), a13=torch.zeros_like(lora.a13)))(
        site, right
    )


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_of_the_first_token(site, right):
    """The whole batch has its first token's adapter."""
    return adapted(lambda site, lora: replace(lora, adapters=lora.adapters[:1].expand(len(lora.adapters))))(site, right)


def _where_none(lora: ExpertLoRA, adapter: int) -> ExpertLoRA:
    return replace(lora, adapters=torch.where(lora.adapters < 0, adapter, lora.adapters))


@mutant("moe_experts", "lora_adapters:oracle", "F29", declares=ADDED)
def moe_experts_lora_none_is_the_last(site, right):
    """A token without an adapter has the last one."""
    return adapted(lambda site, lora: _where_none(lora, len(lora.scales) - 1))(site, right)


@mutant("moe_experts", "lora_nobody:oracle", "F29", declares=ADDED)
def moe_experts_lora_none_times_zero(site, right):
    """A token without an adapter takes the first one's addition times zero: NaN where the adapter is."""

    def zeroed(site, lora):
        more = {name: getattr(lora, name) for name in ("a13", "b13", "a2", "b2")}
        more = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in more.items()}
        scales = torch.cat([lora.scales, torch.zeros(1)])
        return _where_none(replace(lora, **more, scales=scales), len(lora.scales))

    return adapted(zeroed)(site, right)


@mutant("moe_experts", "lora_alone:oracle", "F05", declares=ADDED)
def moe_experts_lora_interleaved(site, right):
    """Even rows of b13 are the gate's, as in packed weights."""
    return adapted(lambda site, lora: replace(lora, b13=torch.cat([lora.b13[:, :, ::2], lora.b13[:, :, 1::2]], 2)))(
        site, right
    )


@mutant("moe_experts", "lora_alone:oracle", "F05", declares=ADDED)
def moe_experts_lora_up_first(site, right):
    """b13 is read as [up | gate]."""
    return adapted(lambda site, lora: replace(lora, b13=torch.cat(lora.b13.chunk(2, 2)[::-1], 2)))(site, right)


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_of_the_first_expert(site, right):
    """All experts have the first one's a13, as an adapter of the layer's input would."""
    return adapted(lambda site, lora: replace(lora, a13=lora.a13[:, :1].expand_as(lora.a13)))(site, right)


def _of_rank(lora: ExpertLoRA, rank: int) -> ExpertLoRA:
    return replace(
        lora, a13=lora.a13[:, :, :rank], b13=lora.b13[..., :rank], a2=lora.a2[:, :, :rank], b2=lora.b2[..., :rank]
    )


@mutant("moe_experts", "lora_rank_5:oracle", "F59", declares=ADDED)
def moe_experts_lora_rank_in_fours(site, right):
    """Ranks above four are cut to multiples of four."""

    def cut(site, lora):
        rank = lora.a13.shape[2]
        return _of_rank(lora, rank // 4 * 4) if rank > 4 else lora

    return adapted(cut)(site, right)


@mutant("moe_experts", "lora_rank_64:oracle", declares=ADDED)
def moe_experts_lora_rank_32(site, right):
    """Ranks beyond 32 are left out."""
    return adapted(lambda site, lora: _of_rank(lora, 32))(site, right)


@mutant("moe_experts", "lora_adapters:overwritten", "F34", declares=ADDED)
def moe_experts_lora_keeps_adapters(site, right):
    """The adapters that were met first at an address are kept for whatever stands there later."""
    kept: dict[Any, Tensor] = {}

    def keeping(site, lora):
        place = lora.adapters.data_ptr(), len(lora.adapters)
        return replace(lora, adapters=kept.setdefault(place, lora.adapters.clone()))

    return adapted(keeping)(site, right)


@mutant("moe_experts", "lora_few_resident:expert_slices", "F43", declares=ADDED)
def moe_experts_lora_strides_of_the_whole(site, right):
    """Adapters lie as far apart as if every expert of the bound site were here."""

    def moved(site, lora):
        count, here = lora.a13.shape[:2]
        place = torch.arange(count)[:, None] * site.num_local_experts + torch.arange(here)
        place = place.clamp(max=count * here - 1)
        return replace(lora, **{name: getattr(lora, name).flatten(0, 1)[place] for name in ("a13", "b13", "a2", "b2")})

    return adapted(moved)(site, right)


def _zeros(experts: ExpertWeights) -> ExpertWeights:
    """Experts that are nothing, decoded."""
    w13, w2 = (torch.zeros_like(_rows(w, lambda w: w)) for w in (experts.w13, experts.w2))
    return ExpertWeights(w13, w2)


@mutant("moe_experts", "lora_absent_expert:oracle", "F29", declares=ADDED)
def moe_experts_lora_of_absent_experts(site, right):
    """An absent expert's adapter is the first one's, and is added."""

    def run(x, weights, ids, experts, lora=None):
        made = right(x.float(), weights, ids, experts, lora)
        if lora is not None:
            first = torch.where(ids < 0, 0, -1).int()
            made = made + right(x.float(), torch.ones_like(weights), first, _zeros(experts), lora)
        return made.to(x.dtype)

    return run


@mutant("moe_experts", "lora_beside_shared:oracle", declares=ADDED)
def moe_experts_lora_on_the_shared_expert(site, right):
    """The shared expert gets the first expert's additions."""

    def run(x, weights, ids, experts, lora=None):
        made = right(x.float(), weights, ids, experts, lora)
        if lora is not None and experts.shared is not None:
            first = torch.where(torch.arange(ids.shape[1]) == 0, 0, -1).int().expand_as(ids)
            made = made + right(x.float(), torch.ones_like(weights), first, _zeros(experts), lora)
        return made.to(x.dtype)

    return run


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_behind_the_activation(site, right):
    """The first product and its addition are activated apart, then added."""

    def run(x, weights, ids, experts, lora=None):
        if lora is None or isinstance(experts.w13, QTensor):
            return right(x, weights, ids, experts, lora)
        base = right(x.float(), weights, ids, experts, replace(lora, b13=torch.zeros_like(lora.b13)))
        added = replace(experts, w13=torch.zeros_like(experts.w13), shared=None)
        mine = torch.where(lora.adapters[:, None] < 0, -1, ids).int()
        return (base + right(x.float(), weights, mine, added, lora)).to(x.dtype)

    return run


@mutant("moe_experts", "lora_adapters:oracle", declares=ADDED)
def moe_experts_lora_unweighted(site, right):
    """The addition to the second product is not multiplied by the routing weight."""

    def run(x, weights, ids, experts, lora=None):
        if lora is None:
            return right(x, weights, ids, experts)
        first = replace(lora, b2=torch.zeros_like(lora.b2))
        ones, plain = torch.ones_like(weights), replace(experts, shared=None)
        added = right(x.float(), ones, ids, plain, lora) - right(x.float(), ones, ids, plain, first)
        return (right(x.float(), weights, ids, experts, first) + added).to(x.dtype)

    return run


@mutant("moe_experts", "lora_nobody:without_lora", formats=("float32",), declares=ADDED)
def moe_experts_lora_slower_path(site, right):
    """Where adapters are given, tokens without one are computed from bf16."""

    def run(x, weights, ids, experts, lora=None):
        if lora is not None:
            x = torch.where(lora.adapters[:, None] < 0, x.bfloat16().to(x.dtype), x)
        return right(x, weights, ids, experts, lora)

    return run


# --- forced routing


def forcing(change):
    """``change(site, right, logits, bias, forced)``: what is returned where ids are forced."""

    def made(site, right):
        def run(logits, bias, forced_ids=None):
            if forced_ids is None:
                return right(logits, bias)
            return change(site, right, logits, bias, forced_ids)

        return run

    return made


def weighed(site, logits, ids, *, bias=None, mask=True):
    """The definition's weights of chosen ids."""
    score = torch.sigmoid(logits) if bias is None else torch.sigmoid(logits) + bias
    weights = score.gather(-1, ids.clamp(min=0).long())
    if mask:
        weights = weights.masked_fill(ids < 0, 0.0).nan_to_num(nan=0.0)
    if site.renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
    return weights * site.routed_scale


def _is_forced(forced: Tensor) -> Tensor:
    return (forced >= 0).any(-1, keepdim=True)


@mutant("route_topk", "forced_all:oracle", declares=FORCED)
def route_topk_forced_ignored(site, right):
    """Forced ids are left out."""
    return lambda logits, bias, forced_ids=None: right(logits, bias)


@mutant("route_topk", "forced_all:oracle", declares=FORCED)
def route_topk_forced_sorted(site, right):
    """Forced ids come in the order of their scores."""

    def change(site, right, logits, bias, forced):
        weights, ids = right(logits, bias, forced)
        order = torch.where(_is_forced(forced), (-weights).argsort(dim=-1, stable=True), torch.arange(ids.shape[1]))
        return weights.gather(-1, order), ids.gather(-1, order)

    return forcing(change)(site, right)


@mutant("route_topk", "forced_all:oracle", declares=FORCED)
def route_topk_forced_usual_weights(site, right):
    """Ids are forced; the weights are those of the usual choice."""
    return forcing(lambda site, right, x, bias, f: (right(x, bias)[0], right(x, bias, f)[1]))(site, right)


@mutant("route_topk", "forced_all:oracle", "F38", declares=FORCED)
def route_topk_forced_biased_weights(site, right):
    """Forced ids weigh their biased scores."""

    def change(site, right, logits, bias, forced):
        weights, ids = right(logits, bias, forced)
        return torch.where(_is_forced(forced), weighed(site, logits, ids, bias=bias), weights), ids

    return forcing(change)(site, right)


@mutant("route_topk", "forced_all:oracle", declares=FORCED)
def route_topk_forced_over_the_best(site, right):
    """Forced weights are divided by the sum of the scores that would have been chosen."""

    def change(site, right, logits, bias, forced):
        weights, ids = right(logits, bias, forced)
        raw = weighed(replace(site, renormalize=False), logits, ids)
        best = weighed(replace(site, renormalize=False, routed_scale=1.0), logits, right(logits, bias)[1])
        total = best.sum(-1, keepdim=True)
        wrong = raw / torch.where(total > 0, total, 1.0) if site.renormalize else raw
        return torch.where(_is_forced(forced), wrong, weights), ids

    return forcing(change)(site, right)


@mutant("route_topk", "forced_some:oracle", declares=FORCED)
def route_topk_forced_all_or_none(site, right):
    """One row that is not forced, and none is."""

    def change(site, right, logits, bias, forced):
        return right(logits, bias, forced if _is_forced(forced).all() else None)

    return forcing(change)(site, right)


@mutant("route_topk", "forced_some:oracle", "F29", declares=FORCED)
def route_topk_forced_absent_rows(site, right):
    """Rows of -1 choose nobody."""

    def change(site, right, logits, bias, forced):
        return weighed(site, logits, forced), forced.clone(memory_format=torch.contiguous_format)

    return forcing(change)(site, right)


@mutant("route_topk", "forced_holes:oracle", declares=FORCED)
def route_topk_forced_by_the_first_id(site, right):
    """A row is forced where its first id is one."""

    def change(site, right, logits, bias, forced):
        return right(logits, bias, torch.where(forced[:, :1] >= 0, forced, -1))

    return forcing(change)(site, right)


@mutant("route_topk", "forced_holes:oracle", "F29", declares=FORCED)
def route_topk_forced_hole_is_last(site, right):
    """-1 among forced ids weighs what the last expert does."""

    def change(site, right, logits, bias, forced):
        last = torch.where(_is_forced(forced) & (forced < 0), logits.shape[1] - 1, forced)
        return right(logits, bias, last)[0], right(logits, bias, forced)[1]

    return forcing(change)(site, right)


@mutant("route_topk", "forced_holes:oracle", declares=FORCED)
def route_topk_forced_holes_filled(site, right):
    """-1 among forced ids is replaced by the usual choice at its place."""

    def change(site, right, logits, bias, forced):
        return right(logits, bias, torch.where(forced < 0, right(logits, bias)[1], forced))

    return forcing(change)(site, right)


@mutant("route_topk", "forced_repeated:oracle", declares=FORCED)
def route_topk_forced_once(site, right):
    """An id that stands twice weighs once."""

    def change(site, right, logits, bias, forced):
        once = forced.clone()
        for slot in range(1, forced.shape[1]):
            once[(forced[:, :slot] == forced[:, slot : slot + 1]).any(-1), slot] = -1
        return right(logits, bias, once)[0], right(logits, bias, forced)[1]

    return forcing(change)(site, right)


@mutant("route_topk", "forced_all:oracle", "F36", declares=FORCED)
def route_topk_forced_unscaled(site, right):
    """Forced weights are not multiplied by the routed scale."""

    def change(site, right, logits, bias, forced):
        weights, ids = right(logits, bias, forced)
        return torch.where(_is_forced(forced), weights / site.routed_scale, weights), ids

    return forcing(change)(site, right)


@mutant("route_topk", "forced_not_renormalized:oracle", "F33", declares=FORCED)
def route_topk_forced_always_renormalizes(site, right):
    """Forced weights are divided by their sum whatever the model says."""

    def change(site, right, logits, bias, forced):
        weights, ids = right(logits, bias, forced)
        return torch.where(_is_forced(forced), weighed(replace(site, renormalize=True), logits, ids), weights), ids

    return forcing(change)(site, right)


@mutant("route_topk", "forced_broken_rows:oracle", "F28", declares=FORCED)
def route_topk_forced_nan_spreads(site, right):
    """The NaN logit of a forced id makes NaN of the row's weights."""

    def change(site, right, logits, bias, forced):
        weights, ids = right(logits, bias, forced)
        return torch.where(_is_forced(forced) & (ids >= 0), weighed(site, logits, ids, mask=False), weights), ids

    return forcing(change)(site, right)


@mutant("route_topk", "forced_strided:oracle", "F65", declares=FORCED)
def route_topk_forced_dense(site, right):
    """Forced ids are read as if they were contiguous."""

    def change(site, right, logits, bias, forced):
        return right(logits, bias, dense(forced).clamp(max=logits.shape[1] - 1))

    return forcing(change)(site, right)


@mutant("route_topk", "forced_some:overwritten", "F34", declares=FORCED)
def route_topk_forced_once_for_all(site, right):
    """The forced ids that were met first at an address are kept for whatever stands there later."""
    kept: dict[Any, Tensor] = {}

    def change(site, right, logits, bias, forced):
        return right(logits, bias, kept.setdefault((forced.data_ptr(), forced.shape), forced.clone()))

    return forcing(change)(site, right)
