"""Wrong fused forms: the projection with what follows it, the selection among ranks, a whole layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch.manifest import at_least
from m3hal.formats import QTensor
from m3hal.ops import QKNorms
from m3hal.ops._group import ranks
from m3hal.ops.select_blocks import shard
from m3hal_broken_zoo._zoo import mutant

BF16 = ("bfloat16",)


def _with(name: str, site: Any, **traits: str) -> Callable[..., Any]:
    """A definition with freedoms that nobody declared."""
    operator = ops.load(name)
    values = operator.static_values(site)
    return lambda *inputs: operator.reference(*inputs, **values, traits=traits)


# --- qkv_norm_rope_insert


@mutant("qkv_norm_rope_insert", "fp8_e4m3_page_boundaries:oracle", formats=BF16)
def qkv_norm_rope_insert_rounds_rows(site, right):
    """The projection's rows are rounded to bf16 before the norms, without declaring it."""
    return _with("qkv_norm_rope_insert", site, qkv_round="bfloat16")


@mutant("qkv_norm_rope_insert", "fp8_e4m3_groups:oracle", "F73")
def qkv_norm_rope_insert_double_rounding(site, right):
    """What is stored is rounded to bf16 first, without declaring it."""
    return _with("qkv_norm_rope_insert", site, double_rounding="bfloat16")


@mutant("qkv_norm_rope_insert", "cancels:oracle")
def qkv_norm_rope_insert_bf16_accumulator(site, right):
    """The product is accumulated in bf16."""

    def run(x, weight, *rest):
        if isinstance(weight, QTensor):
            return right(x, weight, *rest)
        total = torch.zeros(len(x), len(weight), dtype=torch.bfloat16)
        for start in range(0, x.shape[1], 32):
            total += (x[:, start : start + 32].float() @ weight[:, start : start + 32].float().T).bfloat16()
        q, index_q = ops.load("qk_norm_rope_insert").reference(
            total.float(), *rest, **ops.load("qk_norm_rope_insert").static_values(site)
        )
        return q.to(x.dtype), None if index_q is None else index_q.to(x.dtype)

    return run


def _narrow(right: Callable[..., Any], width: int) -> Callable[..., Any]:
    """Columns past the last whole tile of K are left out."""

    def run(x, weight, *rest):
        if isinstance(weight, QTensor):
            return right(x, weight, *rest)
        kept = x.shape[1] // width * width
        return right(x[:, :kept], weight[:, :kept], *rest)

    return run


@mutant("qkv_norm_rope_insert", "odd_hidden:oracle", "F69")
def qkv_norm_rope_insert_whole_tiles_of_k(site, right):
    """Columns past the last whole tile of 64 are left out."""
    return _narrow(right, 64)


@mutant("qkv_norm_rope_insert", "spiked:oracle")
def qkv_norm_rope_insert_drops_last_columns(site, right):
    """The last 16 columns of K are left out."""

    def run(x, weight, *rest):
        if isinstance(weight, QTensor):
            return right(x, weight, *rest)
        return right(x[:, :-16], weight[:, :-16], *rest)

    return run


@mutant("qkv_norm_rope_insert", "strided:oracle", "F65")
def qkv_norm_rope_insert_dense_rows(site, right):
    """Hidden states are read as if their rows were dense."""
    return lambda x, *rest: right(x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()), *rest)


@mutant("qkv_norm_rope_insert", "scaled_heads:oracle", "F75")
def qkv_norm_rope_insert_norm_over_the_row(site, right):
    """One norm over all heads of a kind."""

    def run(x, weight, norms, *rest):
        if isinstance(weight, QTensor):
            return right(x, weight, norms, *rest)
        heads = weight.float().unflatten(0, (-1, site.head_dim))
        row = (x.float() @ weight.float().T).unflatten(1, (-1, site.head_dim))
        size = row.square().mean(-1, keepdim=True).sqrt()
        factor = (size / size[:, : site.num_q_heads].square().mean(1, keepdim=True).sqrt())[0]
        q, index_q = right(x, heads.flatten(0, 1).to(weight.dtype), norms, *rest)
        return (q.float() * factor[: site.num_q_heads]).to(q.dtype), index_q

    return run


@mutant("qkv_norm_rope_insert", "page_boundaries:oracle", "F74")
def qkv_norm_rope_insert_one_norm(site, right):
    """Keys are normalised with the weight of the queries."""
    return lambda x, w, norms, *rest: right(x, w, QKNorms(norms.q, norms.q, norms.index_q, norms.index_k), *rest)


@mutant("qkv_norm_rope_insert", "own_index_slots:oracle", "F24")
def qkv_norm_rope_insert_index_at_main_slots(site, right):
    """Index keys go to the slots of the main cache."""

    def run(*inputs):
        *given, slots, index_slots = inputs
        return right(*given, slots, None if index_slots is None else slots)

    return run


@mutant("qkv_norm_rope_insert", "all_padded:oracle", "F29")
def qkv_norm_rope_insert_padding_wraps(site, right):
    """A negative slot counts from the end of the cache."""

    def run(*inputs):
        *given, kv, index_cache, slots, index_slots = inputs
        size = len(kv.buf) * kv.layout.page_size
        wrapped = [where if where is None else where % size for where in (slots, index_slots)]
        return right(*given, kv, index_cache, *wrapped)

    return run


@mutant("qkv_norm_rope_insert", "mxfp8_weight:oracle")
def qkv_norm_rope_insert_scales_of_the_next_rows(site, right):
    """Block scales of a stored weight belong to the row before."""

    def run(x, weight, *rest):
        if isinstance(weight, QTensor) and weight.scale is not None:
            weight = replace(weight, scale=weight.scale.roll(1, 0))
        return right(x, weight, *rest)

    return run


# --- select_blocks among ranks

GROUPED: Any = MappingProxyType({"limits": (at_least("context_parallel", 0),)})


def _selection(site: Any, right: Callable[..., Any], offer: Callable[..., Any]) -> Callable[..., Any]:
    """The definition but for what a rank makes of its scores: ``offer(scores, mine, group) -> scores, ids``."""
    merge = ops.load("merge_topk")
    values = merge.static_values(site)

    def run(index_q, cache, meta, group=None):
        if ranks(group).size == 1:
            return right(index_q, cache, meta)
        position = meta.positions(len(index_q))
        own, mine = shard(meta, position, group, cache.layout.page_size, site.block_size)
        scores = ops.load("block_scores").reference(index_q, cache, own, block_size=site.block_size)
        offered, ids = offer(scores, mine, group)
        visible = (position // site.block_size + 1).to(torch.int32)
        return merge.reference(group.all_gather(offered), group.all_gather(ids), visible, **values)

    return run


def _best(site: Any, scores: Tensor, mine: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
    topk = ops.load("topk_blocks")
    local = topk.reference(scores, mine, **{**topk.static_values(site), **({"top_k_blocks": k} if k else {})})
    return scores.gather(-1, local.clamp(min=0).long()), local


def _global(local: Tensor, group: Any) -> Tensor:
    return torch.where(local < 0, -1, local * group.size + group.rank)


@mutant("select_blocks", "ranks_4_around_k:oracle", declares=GROUPED)
def select_blocks_local_ids(site, right):
    """A rank offers the places of its blocks in its own part, not in the whole context."""
    return _selection(site, right, lambda scores, mine, group: _best(site, scores, mine))


@mutant("select_blocks", "ranks_8_empty_shards:oracle", declares=GROUPED)
def select_blocks_absent_is_block_0(site, right):
    """A rank with fewer blocks than k offers its first block in place of the others."""

    def offer(scores, mine, group):
        offered, local = _best(site, scores, mine)
        absent = local < 0
        return offered.masked_fill(absent, 1e30), local.clamp(min=0) * group.size + group.rank

    return _selection(site, right, offer)


@mutant("select_blocks", "ranks_4_strided:oracle", "F65", formats=BF16, declares=GROUPED)
def select_blocks_dense_queries_among_ranks(site, right):
    """With several ranks the queries are taken for contiguous."""

    def run(index_q, index_cache, meta, group=None):
        if ranks(group).size > 1:
            index_q = torch.as_strided(index_q, index_q.shape, torch.empty(index_q.shape, device="meta").stride())
        return right(index_q, index_cache, meta, group)

    return run


@mutant("select_blocks", "ranks_4_blocks_260:oracle", "F15", formats=BF16, declares=GROUPED)
def select_blocks_ids_of_eight_bits(site, right):
    """Ranks exchange the ids of blocks in eight bits."""

    def offer(scores, mine, group):
        offered, local = _best(site, scores, mine)
        ids = _global(local, group)
        return offered, torch.where(ids < 0, ids, ids & 0xFF)

    return _selection(site, right, offer)


@mutant("select_blocks", "ranks_4_clustered:oracle", "F16", declares=GROUPED)
def select_blocks_a_share_of_k(site, right):
    """Each rank offers its share of k, as if the best blocks were spread evenly."""

    def offer(scores, mine, group):
        count = max(site.top_k_blocks // group.size, site.init_blocks + site.local_blocks)
        offered, local = _best(site, scores, mine, count)
        return offered, _global(local, group)

    return _selection(site, right, offer)


@mutant("select_blocks", "ranks_4_clustered:one_rank", "F16", declares=GROUPED)
def select_blocks_ties_to_the_lower_rank(site, right):
    """Among equal scores the block of the lower rank wins, whatever its id."""

    def offer(scores, mine, group):
        offered, local = _best(site, scores, mine)
        return offered * (1 - 1e-6 * group.rank), _global(local, group)

    return _selection(site, right, offer)


@mutant("select_blocks", "ranks_4_nothing_forced:oracle", "F20", declares=GROUPED)
def select_blocks_whole_newest_block(site, right):
    """The rank that owns the newest block scores all of it, future keys and stale bytes too."""

    def run(index_q, cache, meta, group=None):
        if ranks(group).size == 1:
            return right(index_q, cache, meta)
        whole = -(-meta.seq_lens // site.block_size) * site.block_size
        longer = replace(meta, seq_lens=whole, max_k=int(whole.max()) if len(whole) else 0)
        part = _selection(site, right, lambda s, m, g: (lambda o, i: (o, _global(i, g)))(*_best(site, s, m)))
        return part(index_q, cache, longer, group)

    return run


@mutant("select_blocks", "ranks_4_visible_nan:oracle", "F28", declares=GROUPED)
def select_blocks_nan_is_offered_first(site, right):
    """A score that is NaN is offered as the largest."""

    def offer(scores, mine, group):
        offered, local = _best(site, scores.nan_to_num(nan=1e30), mine)
        return offered, _global(local, group)

    return _selection(site, right, offer)


@mutant("select_blocks", "ranks_4_around_k:one_rank", declares=GROUPED)
def select_blocks_each_its_own(site, right):
    """Ranks do not meet: each chooses among its own blocks."""

    def run(index_q, cache, meta, group=None):
        if ranks(group).size == 1:
            return right(index_q, cache, meta)
        own, mine = shard(meta, meta.positions(len(index_q)), group, cache.layout.page_size, site.block_size)
        scores = ops.load("block_scores").reference(index_q, cache, own, block_size=site.block_size)
        return _global(_best(site, scores, mine)[1], group).to(torch.int32)

    return run


# --- sparse_decoder_layer

WHOLE: Any = MappingProxyType({"limits": (at_least("shared_intermediate_size", 0),)})


def _layer(right: Callable[..., Any], edit: Callable[..., Any]) -> Callable[..., Any]:
    """The definition with the layer's weights edited."""
    return lambda x, residual, layer, *rest: right(x, residual, edit(layer), *rest)


@mutant("sparse_decoder_layer", "decode:oracle", declares=WHOLE)
def sparse_decoder_layer_no_shared_expert(site, right):
    """The shared expert is left out."""
    return _layer(right, lambda layer: replace(layer, experts=replace(layer.experts, shared=None)))


@mutant("sparse_decoder_layer", "decode:oracle", declares=WHOLE)
def sparse_decoder_layer_scales_the_shared_expert(site, right):
    """The routed scale multiplies the shared expert too."""

    def edit(layer):
        shared = layer.experts.shared
        if shared is None or isinstance(shared.w2, QTensor):
            return layer
        return replace(layer, experts=replace(layer.experts, shared=replace(shared, w2=shared.w2 * site.routed_scale)))

    return _layer(right, edit)


@mutant("sparse_decoder_layer", "decode:oracle", "F75", declares=WHOLE)
def sparse_decoder_layer_one_norm_weight(site, right):
    """The norm after attention takes the weight of the one before it."""
    return _layer(right, lambda layer: replace(layer, post_norm=layer.input_norm))


@mutant("sparse_decoder_layer", "decode:oracle", declares=WHOLE)
def sparse_decoder_layer_not_renormalised(site, right):
    """The chosen experts' weights do not sum to the routed scale."""
    operator = ops.load("sparse_decoder_layer")
    values = {**operator.static_values(site), "renormalize": not site.renormalize}
    return lambda *inputs: operator.reference(*inputs, **values)


@mutant("sparse_decoder_layer", "decode:oracle", declares=WHOLE)
def sparse_decoder_layer_residual_before(site, right):
    """The residual that comes back is the one from before the attention."""

    def run(x, residual, *rest):
        out, _ = right(x, residual, *rest)
        return out, (x.float() + residual.float()).to(residual.dtype)

    return run


@mutant("sparse_decoder_layer", "chunks:oracle", "F20", declares=WHOLE)
def sparse_decoder_layer_reads_before_it_writes(site, right):
    """Attention reads the caches before the new keys are in them; they are written at the end."""

    def run(x, residual, layer, positions, cos_sin, kv, index_cache, slots, index_slots, meta, group=None):
        copies = [replace(cache, buf=cache.buf.clone()) for cache in (kv, index_cache)]
        for cache in copies:
            cache.buf.view(torch.uint8)[torch.isnan(cache.buf.float())[..., None].expand(*cache.buf.shape, 1).reshape(
                *cache.buf.shape[:-1], -1).repeat_interleave(cache.buf.element_size(), -1)] = 0  # fmt: skip
        nowhere = torch.full_like(slots, -1)
        found = right(x, residual, layer, positions, cos_sin, *copies, nowhere, nowhere, meta, group)
        right(x, residual, layer, positions, cos_sin, kv, index_cache, slots, index_slots, meta, group)
        return found

    return run


@mutant("sparse_decoder_layer", "published_choice:oracle", "F16", declares=WHOLE)
def sparse_decoder_layer_attends_to_all(site, right):
    """Every visible block is attended to: dense attention in place of MSA."""
    operator = ops.load("sparse_decoder_layer")
    values = {**operator.static_values(site), "top_k_blocks": 64}
    return lambda *inputs: operator.reference(*inputs, **values)


@mutant("sparse_decoder_layer", "two_ranks:oracle", declares=WHOLE)
def sparse_decoder_layer_never_reduces(site, right):
    """Ranks do not sum up what they hold."""
    return lambda *inputs: right(*inputs[:10])


@mutant("sparse_decoder_layer", "two_ranks_of_experts:oracle", declares=WHOLE)
def sparse_decoder_layer_global_ids(site, right):
    """A rank takes the ids of all experts for its own: every rank runs its first ones."""

    def run(*inputs):
        group = inputs[10] if len(inputs) > 10 else None
        first = ranks(group)

        class Zeroth:
            rank, size = 0, first.size
            all_reduce, all_gather = staticmethod(first.all_reduce), staticmethod(first.all_gather)

        return right(*inputs[:10], group and Zeroth())

    return run


@mutant("sparse_decoder_layer", "two_ranks:oracle", declares=WHOLE)
def sparse_decoder_layer_reduces_its_output(site, right):
    """The output is summed over the ranks, and the next norm sums it again."""

    def run(*inputs):
        out, residual = right(*inputs)
        group = ranks(inputs[10] if len(inputs) > 10 else None)
        return group.all_reduce(out), residual

    return run


@mutant("sparse_decoder_layer", "nvfp4_caches:oracle", "F57", formats=BF16, declares=WHOLE)
def sparse_decoder_layer_ignores_the_scales(site, right):
    """Quantised caches are read and written as if their global scales were one."""

    def run(*inputs):
        given = [replace(i, k_scale=None, v_scale=None) if hasattr(i, "k_scale") else i for i in inputs]
        return right(*given)

    return run


@mutant("sparse_decoder_layer", "biased:oracle", declares=WHOLE)
def sparse_decoder_layer_unbiased(site, right):
    """The router chooses by the scores alone."""

    def run(x, residual, layer, *rest):
        return right(x, residual, replace(layer, bias=torch.zeros_like(layer.bias)), *rest)

    return run


def _constants(**values: Any) -> Callable[..., Any]:
    """The projection and what follows, with constants that are M3's whatever the site says."""

    def made(site: Any, right: Callable[..., Any]) -> Callable[..., Any]:
        operator = ops.load("qkv_norm_rope_insert")
        return lambda *inputs: operator.reference(*inputs, **{**operator.static_values(site), **values})

    return made


@mutant("qkv_norm_rope_insert", "other_constants:oracle", "F71")
def qkv_norm_rope_insert_offset_one(site, right):
    """One is added to the weights of the norms, whatever the site says."""
    return _constants(weight_offset=1.0)(site, right)


@mutant("qkv_norm_rope_insert", "other_constants:oracle", "F71")
def qkv_norm_rope_insert_own_eps(site, right):
    """The epsilon of the norms is 1e-6, whatever the site says."""
    return _constants(eps=1e-6)(site, right)
