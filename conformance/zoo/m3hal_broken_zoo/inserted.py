"""Wrong insertions into quantised caches, and attention that looks at what it should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.layouts import PagedCache
from m3hal.layouts.stored import Stored, stored
from m3hal.ops.kv_read import read_sequence
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.attending import Faults, attend, visible
from m3hal_broken_zoo.quantised import FP8, parts, places, swap_nibbles

NAN = float("nan")


def _insert(site: Any, **traits: str) -> Callable[..., Any]:
    """The definition with freedoms that nobody declared."""
    operator = ops.load("qk_norm_rope_insert")
    values = operator.static_values(site)
    return lambda *inputs: operator.reference(*inputs, **values, traits=traits)


def _afterwards(edit: Callable[[Stored, Tensor, Tensor], None], formats: tuple[str, ...]) -> Any:
    """Insertion whose stored vectors are edited in caches of some formats."""

    def make(site, right):
        def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
            found = right(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots)
            for cache, where in ((kv, slots), (index_cache, index_slots)):
                if cache is not None and cache.layout.format in formats:
                    for part in parts(cache):
                        edit(part, *places(cache, where))
            return found

        return run

    return make


@mutant("qk_norm_rope_insert", "fp8_e4m3_page_boundaries:oracle", "F73")
def qk_norm_rope_insert_double_rounding(site, right):
    """What is stored is rounded to bf16 first, without declaring it."""
    return _insert(site, double_rounding="bfloat16")


@mutant("qk_norm_rope_insert", "fp8_e4m3_page_boundaries:oracle", "F57")
def qk_norm_rope_insert_ignores_the_scale(site, right):
    """FP8 keys and values are stored as they are, whatever the checkpoint's scales, without declaring it."""
    return _insert(site, kv_scale_used="no")


def _truncated(part: Stored, page: Tensor, offset: Tensor) -> None:
    """Codes of odd magnitude step down: within one code of the right one, and rounded towards zero."""
    codes = part.codes[page, :, offset]
    part.codes[page, :, offset] = torch.where((codes & 1 == 1) & (codes & 0x7F > 1), codes - 1, codes)


@mutant("qk_norm_rope_insert", "fp8_e4m3_page_boundaries:oracle", "F73")
def qk_norm_rope_insert_one_code_off(site, right):
    """Every second code is its neighbour: within one code step everywhere."""
    return _afterwards(_truncated, FP8)(site, right)


@mutant("qk_norm_rope_insert", "nvfp4_page_boundaries:oracle", "F55")
def qk_norm_rope_insert_swaps_nibbles(site, right):
    """The even element of a pair lies in the high half of its byte."""
    return _afterwards(swap_nibbles, ("nvfp4",))(site, right)


def _next_groups_scale(part: Stored, page: Tensor, offset: Tensor) -> None:
    assert part.scales is not None
    at = (page, slice(None), offset // 4, offset % 4)
    part.scales[at] = part.scales[at].roll(1, -1)


@mutant("qk_norm_rope_insert", "nvfp4_mxfp4_groups:oracle", "F70")
def qk_norm_rope_insert_group_of_16(site, right):
    """MXFP4 scales are addressed as if a group had 16 elements: each lies where another belongs."""
    return _afterwards(_next_groups_scale, ("mxfp4",))(site, right)


@mutant("qk_norm_rope_insert", "nvfp4_groups:oracle", "F60")
def qk_norm_rope_insert_linear_value_scales(site, right):
    """The scales of values lie token after token, like those of keys."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        found = right(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots)
        if kv.layout.format == "nvfp4":
            part, (page, offset) = stored(kv, "v"), places(kv, slots)
            scales = part.scales[page, :, offset // 4, offset % 4].clone()
            strides = (*part.scales.stride()[:2], 4 * part.scales.shape[-1], part.scales.shape[-1], 1)
            linear = part.scales.as_strided(part.scales.shape, strides, part.scales.storage_offset())
            linear[page, :, offset // 4, offset % 4] = scales
        return found

    return run


@mutant("qk_norm_rope_insert", "fp8_e4m3_own_index_slots:oracle", "F24")
def qk_norm_rope_insert_quantised_index_at_main_slots(site, right):
    """Quantised index keys go to the slots of the main cache."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        quantised = index_cache is not None and index_cache.buf.element_size() == 1
        return right(qkv, norms, positions, cos_sin, kv, index_cache, slots, slots if quantised else index_slots)

    return run


# --- what a row does not see


def _finite_mask(site: Any, q: Tensor, kv: PagedCache, ids: Tensor | None, meta: Any) -> Any:
    """Attention whose hidden scores are 1e4 lower, and so take part where they are large."""
    groups, (tokens, heads, _) = kv.layout.heads, q.shape
    out, lse = torch.zeros(q.shape), torch.full((tokens, heads), -torch.inf)
    for b, length in enumerate(meta.seq_lens.tolist()):
        lo, hi = meta.cu_q[b : b + 2].tolist()
        if lo == hi or length == 0:
            continue
        k, v = read_sequence(kv, meta.block_table[b], length)
        position = torch.arange(length - (hi - lo), length)[:, None]
        for g in range(groups):
            own = slice(g * heads // groups, (g + 1) * heads // groups)
            seen = visible(site, None if ids is None else ids[lo:hi, g], torch.arange(length), position)[:, None]
            s = torch.einsum("thd,sd->ths", q[lo:hi, own].float(), k[g]) * site.scale + torch.where(seen, 0.0, -1e4)
            value = torch.where(seen.any(0).any(0)[:, None], v[g], 0.0)
            out[lo:hi, own] = (s.softmax(-1) @ value).masked_fill(~seen.any(-1, keepdim=True), 0.0)
            lse[lo:hi, own] = s.logsumexp(-1).masked_fill(~seen.any(-1), -torch.inf)
    return (out.to(q.dtype), lse) if site.return_lse else out.to(q.dtype)


@mutant("sparse_attention", "unseen_future:oracle", "F22")
def sparse_attention_finite_mask(site, right):
    """Hidden keys are masked by subtracting 1e4, which a large score outweighs."""
    return lambda q, kv, ids, meta: _finite_mask(site, q, kv, ids, meta)


@mutant("paged_attention", "outside_window:oracle", "F22")
def paged_attention_finite_mask(site, right):
    """Hidden keys are masked by subtracting 1e4, which a large score outweighs."""
    return lambda q, kv, meta: _finite_mask(site, q, kv, None, meta)


@mutant("sparse_attention", "unselected:oracle", "F21")
def sparse_attention_weighs_all_blocks(site, right):
    """Blocks that nobody selected take part with a weight of zero: 0 * NaN."""
    return lambda q, kv, ids, meta: attend(site, q, kv, ids, meta, Faults(masked_values=False))


@mutant("sparse_attention", "one_rows_block:oracle", "F21")
def sparse_attention_tile_of_all_rows(site, right):
    """A tile is of all blocks that some row of the request selects: a NaN that one row sees is in every row."""
    return lambda q, kv, ids, meta: attend(site, q, kv, ids, meta, Faults())


@mutant("block_scores", "future_nan:oracle", "F28")
def block_scores_masks_by_adding(site, right):
    """Hidden scores get -inf added, and a NaN stays one."""

    def run(index_q, cache, meta):
        scores = right(index_q, cache, meta)
        for b, length in enumerate(meta.seq_lens.tolist()):
            lo, hi = meta.cu_q[b : b + 2].tolist()
            if lo < hi and length:
                (keys,), _ = read_sequence(cache, meta.block_table[b], length)
                scores[lo:hi, :, keys.isnan().any(-1).nonzero().flatten() // site.block_size] = NAN
        return scores

    return run


# --- host bounds


def _past_the_bound(right: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs are indexed by live lengths: with a bound below one, a row more than there is gets written."""

    def run(*inputs, out=None):
        result = right(*inputs) if out is None else right(*inputs, out=out)
        meta, first = inputs[-1], out[0] if isinstance(out, tuple) else out
        if first is not None and len(meta.seq_lens) and int(meta.seq_lens.max()) > meta.max_k:
            first.as_strided((8,), (1,), first.storage_offset() + first.numel()).zero_()
        return result

    return run


@mutant("sparse_attention", "bound_too_small:host_bound", "F18", raw=True)
def sparse_attention_past_the_bound(site, right):
    """Partial results are sized by the host's bound and indexed by live lengths."""
    return _past_the_bound(right)


@mutant("paged_attention", "bound_too_small:host_bound", "F18", raw=True)
def paged_attention_past_the_bound(site, right):
    """Partial results are sized by the host's bound and indexed by live lengths."""
    return _past_the_bound(right)


@mutant("qkv_norm_rope_insert", "slots_apart:oracle", "F29")
def qkv_norm_rope_insert_minus_one_alone(site, right):
    """-1 is no slot; another negative number counts from the end of the cache."""

    def run(x, weight, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        count = kv.buf.shape[0] * kv.layout.page_size
        slots = torch.where(slots < -1, slots % count, slots)
        return right(x, weight, norms, positions, cos_sin, kv, index_cache, slots, index_slots)

    return run
