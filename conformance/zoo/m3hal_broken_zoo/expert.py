"""Wrong routing, experts and fused insertion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from m3hal.dispatch import Kernel
from m3hal.ops import ExpertWeights, QKNorms
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.rows import dense

NAN = float("nan")

# --- route_topk


def routed(site, logits, bias, *, choice=None, weight=None, total=None, order=None):
    score = torch.sigmoid(logits)
    ranking = score + bias if choice is None else choice(score)
    ids = (order or (lambda r: torch.sort(-r, dim=-1, stable=True).indices))(ranking)[:, : site.top_k_experts]
    weights = (score if weight is None else weight(score)).gather(-1, ids)
    if total is None:
        weights = weights.nan_to_num(nan=0.0)
    if site.renormalize:
        whole = weights.sum(-1, keepdim=True)
        weights = weights / (torch.where(whole > 0, whole, 1.0) if total is None else total(whole))
    return weights * site.routed_scale, ids.int()


@mutant("route_topk", "published_numbers:oracle", "F38")
def route_topk_biased_weights(site, right):
    """Weights come from the biased scores."""
    return lambda logits, bias: routed(site, logits, bias, weight=lambda s: s + bias)


@mutant("route_topk", "bias_decides:oracle", "F38")
def route_topk_no_bias(site, right):
    """The bias is dropped."""
    return lambda logits, bias: right(logits, torch.zeros_like(bias))


@mutant("route_topk", "bias_far_above:oracle", "F38")
def route_topk_unbiased_by_subtraction(site, right):
    """Weights are won back as (score + bias) - bias."""
    return lambda logits, bias: routed(site, logits, bias, weight=lambda s: (s + bias) - bias)


@mutant("route_topk", "broken_rows:oracle", "F28")
def route_topk_argmax_loop(site, right):
    """A loop of arg-max that masks what it found: a NaN row gives expert 0 four times."""

    def run(logits, bias):
        weights, ids = right(logits, bias)
        bad = logits.isnan().all(-1)
        return weights, torch.where(bad[:, None], 0, ids).int()

    return run


@mutant("route_topk", "broken_rows:oracle", "F28")
def route_topk_nan_first(site, right):
    """NaN sorts first, as torch.topk has it."""

    def run(logits, bias):
        return routed(
            site,
            logits,
            bias,
            order=lambda r: torch.sort(r.nan_to_num(nan=1e9), dim=-1, descending=True, stable=True).indices,
        )

    return run


@mutant("route_topk", "scale_2_sums_to_2:oracle", "F36")
def route_topk_scaled_twice(site, right):
    """The routed scale is applied twice."""
    return lambda logits, bias: (right(logits, bias)[0] * site.routed_scale, right(logits, bias)[1])


@mutant("route_topk", "scale_1:oracle", "F36")
def route_topk_scale_compiled_in(site, right):
    """The routed scale is 2 whatever the model says."""
    return lambda logits, bias: (right(logits, bias)[0] / site.routed_scale * 2.0, right(logits, bias)[1])


@mutant("route_topk", "ties:oracle", "F16")
def route_topk_higher_id_wins(site, right):
    """Among equal scores the higher id wins."""

    def order(ranking):
        return ranking.shape[-1] - 1 - torch.sort(-ranking.flip(-1), dim=-1, stable=True).indices

    return lambda logits, bias: routed(site, logits, bias, order=order)


@mutant("route_topk", "vanishing:oracle", "F28")
def route_topk_zero_by_zero(site, right):
    """A sum of zero divides: NaN."""
    return lambda logits, bias: routed(site, logits, bias, total=lambda whole: whole)


@mutant("route_topk", "tokens_65:oracle")
def route_topk_epsilon_in_sum(site, right):
    """1e-5 is added to the sum of the weights."""
    return lambda logits, bias: routed(site, logits, bias, total=lambda whole: whole + 1e-5)


@mutant("route_topk", "not_renormalized:oracle")
def route_topk_always_renormalizes(site, right):
    """Weights are divided by their sum whatever the model says."""
    return lambda logits, bias: routed(replace(site, renormalize=True), logits, bias)


@mutant("route_topk", "all_negative:oracle", "F17")
def route_topk_masks_with_zero(site, right):
    """Choice scores are clamped at 0, as a masked group's are."""
    return lambda logits, bias: routed(site, logits, bias, choice=lambda s: (s + bias).clamp(min=0))


@mutant("route_topk", "tokens_65:oracle")
def route_topk_softmax(site, right):
    """Weights are a softmax."""
    return lambda logits, bias: routed(site, logits, bias, weight=lambda s: torch.softmax(logits, -1))


@mutant("route_topk", "fused_row:oracle", "F65")
def route_topk_assumes_contiguous(site, right):
    """Logits are read as if they were contiguous."""
    return lambda logits, bias: right(dense(logits), bias)


@mutant("route_topk", "tokens_65:written", raw=True)
def route_topk_last_token_unwritten(site, right):
    """An odd last token is not written."""

    def run(logits, bias, out=None):
        made = right(logits, bias)
        if out is None:
            return made
        whole = len(logits) // 2 * 2 if len(logits) > 1 else len(logits)
        out[0][:whole], out[1][:whole] = made[0][:whole], made[1][:whole]
        return out

    return run


# --- moe_experts


@mutant("moe_experts", "unused_are_nan:oracle", "F29")
def moe_experts_last_for_absent(site, right):
    """-1 is the last expert, with weight 0: its NaN comes through."""

    def run(x, weights, ids, experts):
        gone = ids < 0
        last = torch.where(gone, len(experts.w13) - 1, ids)
        return right(x, torch.where(gone, 0.0, weights), last, experts)

    return run


@mutant("moe_experts", "nowhere:oracle", "F29")
def moe_experts_weighs_absent(site, right):
    """An absent expert adds zero times its weight: NaN when the weight is."""

    def run(x, weights, ids, experts):
        extra = torch.where(ids < 0, weights * 0, 0.0).sum(-1, keepdim=True)
        return (right(x, weights, ids, experts) + extra).to(x.dtype)

    return run


@mutant("moe_experts", "all_on_one_512:oracle", "F31")
def moe_experts_capacity(site, right):
    """An expert takes 64 tokens; the rest is dropped."""

    def run(x, weights, ids, experts):
        kept = ids.clone()
        for expert in range(len(experts.w13)):
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            kept[token[64:], slot[64:]] = -1
        return right(x, weights, kept, experts)

    return run


@mutant("moe_experts", "hot_expert:oracle", "F05")
def moe_experts_interleaved(site, right):
    """Even rows of w13 are the gate, odd ones the up projection."""

    def run(x, weights, ids, experts):
        w13 = torch.cat([experts.w13[:, ::2], experts.w13[:, 1::2]], 1)
        return right(x, weights, ids, ExpertWeights(w13, experts.w2))

    return run


@mutant("moe_experts", "published_halves:oracle", "F05")
def moe_experts_up_first(site, right):
    """w13 is read as [up | gate]."""

    def run(x, weights, ids, experts):
        return right(x, weights, ids, ExpertWeights(torch.cat(experts.w13.chunk(2, 1)[::-1], 1), experts.w2))

    return run


def _with(**constants: float):
    def make(site, right):
        from m3hal.ops import load

        values = {name: constants.get(name, getattr(site, name)) for name in ("alpha", "beta", "limit")}
        return lambda *inputs: load("moe_experts").reference(*inputs, **values)

    return make


@mutant("moe_experts", "clamped:oracle", "F03")
def moe_experts_no_limit(site, right):
    """The limit is dropped."""
    return _with(limit=float("inf"))(site, right)


@mutant("moe_experts", "other_constants:oracle", "F02")
def moe_experts_constants_compiled_in(site, right):
    """alpha, beta and limit are MiniMax-M3's, whatever the model says."""
    return _with(alpha=1.702, beta=1.0, limit=7.0)(site, right)


@mutant("moe_experts", "hot_expert:oracle", "F01")
def moe_experts_plain_silu(site, right):
    """alpha 1 and beta 0: what missing parameters are replaced by."""
    return _with(alpha=1.0, beta=0.0)(site, right)


@mutant("moe_experts", "identity:oracle", "F36")
def moe_experts_scaled_twice(site, right):
    """The routed scale is applied to the output as well."""
    return lambda x, weights, ids, experts: right(x, weights * site.routed_scale, ids, experts)


@mutant("moe_experts", "few_resident:oracle")
def moe_experts_renormalizes(site, right):
    """The weights of the experts of this rank are made to sum to the routed scale."""

    def run(x, weights, ids, experts):
        mine = torch.where(ids < 0, 0.0, weights)
        total = mine.sum(-1, keepdim=True)
        return right(x, mine / torch.where(total > 0, total, 1.0) * site.routed_scale, ids, experts)

    return run


@mutant("moe_experts", "unequal_experts:oracle")
def moe_experts_weights_before_down(site, right):
    """Each token's weights are sorted with its experts, but only the experts come back in order."""
    return lambda x, weights, ids, experts: right(
        x, weights.gather(-1, ids.argsort(-1)), ids.gather(-1, ids.argsort(-1)).flip(-1), experts
    )


@mutant("moe_experts", "twice_the_same:oracle")
def moe_experts_counts_once(site, right):
    """An expert that a token chose more than once counts once."""

    def run(x, weights, ids, experts):
        once = ids.clone()
        for slot in range(1, ids.shape[1]):
            once[(ids[:, :slot] == ids[:, slot : slot + 1]).any(-1), slot] = -1
        return right(x, weights, once, experts)

    return run


@mutant("moe_experts", "one_token:oracle", "F32")
def moe_experts_one_token_path(site, right):
    """The path for one token leaves the last 8 of the inner dimensions out."""

    def run(x, weights, ids, experts):
        if len(x) != 1:
            return right(x, weights, ids, experts)
        w2 = experts.w2.clone()
        w2[..., -8:] = 0
        return right(x, weights, ids, ExpertWeights(experts.w13, w2))

    return run


@mutant("moe_experts", "inner_416:oracle", "F59")
def moe_experts_inner_tile(site, right):
    """The inner dimension is cut to whole tiles of 32, and of 128 when it is larger."""

    def run(x, weights, ids, experts):
        inner = experts.w2.shape[-1]
        whole = inner // 128 * 128 if inner > 384 else inner
        gate, up = experts.w13.chunk(2, 1)
        cut = ExpertWeights(torch.cat([gate[:, :whole], up[:, :whole]], 1), experts.w2[..., :whole])
        return right(x, weights, ids, cut)

    return run


@mutant("moe_experts", "bad_token:oracle", "F28")
def moe_experts_nan_spreads(site, right):
    """A NaN token reaches every token of the same expert's tile."""

    def run(x, weights, ids, experts):
        y = right(x, weights, ids, experts)
        bad = x.isnan().any(-1)
        if bad.any():
            experts_hit = set(ids[bad].flatten().tolist()) - {-1}
            hit = torch.tensor([[int(e) in experts_hit for e in row] for row in ids.tolist()]).any(-1)
            y[hit] = NAN
        return y

    return run


@mutant("moe_experts", "hot_expert:overwritten", "F34")
def moe_experts_accumulates(site, right):
    """The workspace that is summed into is cleared by the first call only."""
    kept: dict[Any, torch.Tensor] = {}

    def run(x, weights, ids, experts):
        y = right(x, weights, ids, experts)
        last = kept.get(x.shape)
        kept[x.shape] = y.float().nan_to_num()
        return y if last is None or torch.equal(last, kept[x.shape]) else (y + 1e-2 * last).to(y.dtype)

    return run


@mutant("moe_experts", "few_resident:expert_slices", "F43")
def moe_experts_global_ids(site, right):
    """With half the experts resident, ids are taken for those of the first half."""

    def run(x, weights, ids, experts):
        if len(experts.w13) == site.num_local_experts:
            return right(x, weights, ids, experts)
        return right(x, weights, torch.where(ids >= 2, -1, ids).int(), experts)

    return run


@mutant("moe_experts", "hot_expert:packed_once", "F05", raw=True)
def moe_experts_packs_twice(site, right):
    """Packing what is packed interleaves it again, without a word."""

    def pack(experts):
        w13 = experts.w13
        half = w13.shape[1] // 2
        return ExpertWeights(torch.stack([w13[:, :half], w13[:, half:]], 2).flatten(1, 2), experts.w2)

    def run(x, weights, ids, packed, out=None):
        w13 = torch.cat([packed.w13[:, ::2], packed.w13[:, 1::2]], 1)
        made = right(x, weights, ids, ExpertWeights(w13, packed.w2))
        return made if out is None else out.copy_(made)

    return Kernel(run, prepare_weights=pack)


@mutant("moe_experts", "hot_expert:packed_once", "F05", raw=True)
def moe_experts_unpacks_wrong(site, right):
    """Unpacking gives the halves back in the other order."""

    def pack(experts):
        return (experts.w13.clone(), experts.w2.clone())

    def run(x, weights, ids, packed, out=None):
        made = right(x, weights, ids, ExpertWeights(*packed))
        return made if out is None else out.copy_(made)

    return Kernel(run, prepare_weights=pack, unpack=lambda p: ExpertWeights(torch.cat(p[0].chunk(2, 1)[::-1], 1), p[1]))


@mutant("moe_experts", "hot_expert:updated_weights", "F46", raw=True)
def moe_experts_updates_from_zero(site, right):
    """An update of some experts is written from the first expert on."""

    def pack(experts):
        return [experts.w13.clone(), experts.w2.clone()]

    def update(packed, first, experts):
        packed[0][: len(experts.w13)] = experts.w13
        packed[1][: len(experts.w2)] = experts.w2

    def run(x, weights, ids, packed, out=None):
        made = right(x, weights, ids, ExpertWeights(*packed))
        return made if out is None else out.copy_(made)

    return Kernel(run, prepare_weights=pack, update_weights=update)


@mutant("moe_experts", "every_expert:oracle", "F46")
def moe_experts_last_expert(site, right):
    """The last expert has the weights of the one before."""

    def run(x, weights, ids, experts):
        return right(x, weights, torch.where(ids == len(experts.w13) - 1, ids - 1, ids).int(), experts)

    return run


@mutant("moe_experts", "every_chunk:oracle", "F59")
def moe_experts_short_hidden(site, right):
    """The last 64 columns of the hidden size are left out of the first product."""

    def run(x, weights, ids, experts):
        short = x.clone()
        short[..., -64:] = 0
        return right(short, weights, ids, experts)

    return run


@mutant("moe_experts", "hot_expert:oracle", "F33", raw=True)
def moe_experts_adds_to_out(site, right):
    """The result is added to what out= holds."""

    def run(x, weights, ids, experts, out=None):
        made = right(x, weights, ids, experts)
        return made if out is None else out.add_(made)

    return run


# --- qk_norm_rope_insert


@mutant("qk_norm_rope_insert", "page_boundaries:oracle", "F29")
def qk_norm_rope_insert_negative_slot(site, right):
    """Slot -1 is the last slot."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        total = len(kv.buf) * kv.layout.page_size
        return right(
            qkv, norms, positions, cos_sin, kv, index_cache, torch.where(slots < 0, slots + total, slots), index_slots
        )

    return run


@mutant("qk_norm_rope_insert", "own_index_slots:oracle", "F24")
def qk_norm_rope_insert_same_slots(site, right):
    """The index cache is written at the main cache's slots."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        return right(qkv, norms, positions, cos_sin, kv, index_cache, slots, None if index_slots is None else slots)

    return run


@mutant("qk_norm_rope_insert", "page_boundaries:oracle")
def qk_norm_rope_insert_skips_padded_q(site, right):
    """A padded row's q is not made."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        q, iq = right(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots)
        q[slots < 0] = 0
        return q, iq

    return run


@mutant("qk_norm_rope_insert", "page_boundaries:oracle")
def qk_norm_rope_insert_one_weight(site, right):
    """q's norm weight serves k as well."""

    def run(qkv, norms, *rest):
        return right(qkv, QKNorms(norms.q, norms.q, norms.index_q, norms.index_k), *rest)

    return run


def _heads(site, qkv, edit):
    """qkv with its heads [T, n, dim] edited."""
    x = edit(qkv.unflatten(1, (-1, site.head_dim)).clone())
    return x.flatten(1)


@mutant("qk_norm_rope_insert", "tokens_64:oracle", "F68")
def qk_norm_rope_insert_variant_by_tokens(site, right):
    """From 64 tokens on another variant runs, whose second head has the first one's numbers."""

    def run(qkv, *rest):
        def edit(x):
            x[:, 1] = x[:, 0]
            return x

        return right(_heads(site, qkv, edit) if len(qkv) >= 64 else qkv, *rest)

    return run


@mutant("qk_norm_rope_insert", "scaled_heads:oracle", "F75")
def qk_norm_rope_insert_norm_over_projection(site, right):
    """q is normalised over all its heads together."""

    def run(qkv, *rest):
        q, iq = right(qkv, *rest)
        part = qkv[:, : site.num_q_heads * site.head_dim].unflatten(1, (-1, site.head_dim)).float()
        own = part.square().mean(-1, keepdim=True) + site.eps
        together = part.square().mean((-2, -1), keepdim=True) + site.eps
        return (q.float() * torch.sqrt(own / together)).to(q.dtype), iq

    return run


@mutant("qk_norm_rope_insert", "tail_of_heads:oracle", "F74")
def qk_norm_rope_insert_norm_of_rotary_part(site, right):
    """The norm of q counts the rotating dimensions only."""

    def run(qkv, *rest):
        q, iq = right(qkv, *rest)
        part = qkv[:, : site.num_q_heads * site.head_dim].unflatten(1, (-1, site.head_dim)).float()
        own = part.square().mean(-1, keepdim=True) + site.eps
        short = part[..., : site.rotary_dim].square().mean(-1, keepdim=True) + site.eps
        return (q.float() * torch.sqrt(own / short)).to(q.dtype), iq

    return run


@mutant("qk_norm_rope_insert", "page_boundaries:oracle")
def qk_norm_rope_insert_norms_v(site, right):
    """V is rounded once more on its way into the cache."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        start = (site.num_q_heads + site.num_kv_heads) * site.head_dim
        row = qkv.clone()
        v = row[:, start : start + site.num_kv_heads * site.head_dim]
        v.copy_((v.float() * 1.0039).to(torch.bfloat16))
        return right(row, norms, positions, cos_sin, kv, index_cache, slots, index_slots)

    return run


@mutant("qk_norm_rope_insert", "block_outer:oracle", "F64")
def qk_norm_rope_insert_assumes_contiguous(site, right):
    """The cache's strides are assumed."""

    def run(qkv, norms, positions, cos_sin, kv, *rest):
        return right(qkv, norms, positions, cos_sin, replace(kv, buf=dense(kv.buf)), *rest)

    return run


@mutant("qk_norm_rope_insert", "fused_row:oracle", "F65")
def qk_norm_rope_insert_dense_row(site, right):
    """The projection's row is read as if it were contiguous."""
    return lambda qkv, *rest: right(dense(qkv), *rest)


@mutant("qk_norm_rope_insert", "page_boundaries:oracle")
def qk_norm_rope_insert_position_of_slot(site, right):
    """k is turned by its slot instead of its position, where the table is long enough."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        wrong = torch.where((slots >= 0) & (slots < len(cos_sin)), slots, positions)
        return right(qkv, norms, wrong, cos_sin, kv, index_cache, slots, index_slots)

    return run


@mutant("qk_norm_rope_insert", "page_boundaries:inputs", "F85")
def qk_norm_rope_insert_works_in_place(site, right):
    """q is left in the projection's row as well, as a peer does."""

    def run(qkv, *rest):
        q, iq = right(qkv, *rest)
        qkv[:, : q.shape[1] * q.shape[2]] = q.flatten(1)
        return q, iq

    return run
