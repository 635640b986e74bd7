"""Wrong sparse and dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.ops.kv_read import read_sequence
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.rows import dense

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Faults:
    """Attention written apart from the definition, with its parts replaceable.

    reach: keys read of a sequence. seen: (ids or None, key, position) -> visible. group: query head -> kv head.
    weights: what becomes of the probabilities. values: of the values read. first: position of the first query.
    """

    reach: Callable[[int], int] = lambda n: n
    seen: Callable[..., Tensor] | None = None
    group: Callable[[int, int, int], int] = lambda h, heads, groups: h * groups // heads
    weights: Callable[[Tensor], Tensor] = lambda p: p
    values: Callable[[Tensor], Tensor] = lambda v: v
    first: Callable[[int, int], int] = lambda length, queries: length - queries
    scale: float = 1.0
    maximum: bool = True
    empty: float = 0.0
    masked_values: bool = True


def attend(site: Any, q: Tensor, kv: Any, ids: Tensor | None, meta: Any, faults: Faults) -> Any:
    groups, (tokens, heads, _) = kv.layout.heads, q.shape
    out, lse = torch.full(q.shape, faults.empty), torch.full((tokens, heads), -INF)
    for b, length in enumerate(meta.seq_lens.tolist()):
        lo, hi = meta.cu_q[b : b + 2].tolist()
        if lo == hi or length == 0:
            continue
        count = min(faults.reach(length), meta.block_table.shape[1] * site.page_size)
        k, v = read_sequence(kv, meta.block_table[b], count)
        key = torch.arange(count)
        position = (torch.arange(hi - lo) + faults.first(length, hi - lo))[:, None]
        for g in range(groups):
            own = [h for h in range(heads) if faults.group(h, heads, groups) == g]
            seen = (faults.seen or visible)(site, None if ids is None else ids[lo:hi, g], key, position)[:, None]
            s = torch.einsum("thd,sd->ths", q[lo:hi, own].float(), k[g].float()) * site.scale * faults.scale
            s = s.masked_fill(~seen, -INF)
            top = s.amax(-1, keepdim=True) if faults.maximum else torch.zeros(*s.shape[:2], 1)
            p = faults.weights(torch.exp(s - torch.where(top.isinf(), 0.0, top)))
            total = p.sum(-1, keepdim=True)
            value = faults.values(v[g].float())
            if faults.masked_values:
                value = torch.where(seen.any(0).any(0)[:, None], value, 0.0)
            mixed = p @ value / total
            row = torch.where(total > 0, mixed, faults.empty) if faults.empty == 0 else mixed
            out[lo:hi, own] = torch.where(seen.any(-1, keepdim=True), row, faults.empty)
            lse[lo:hi, own] = (total.log() + torch.where(top.isinf(), 0.0, top)).squeeze(-1)
    return (out.to(q.dtype), lse) if site.return_lse else out.to(q.dtype)


def visible(site: Any, ids: Tensor | None, key: Tensor, position: Tensor) -> Tensor:
    """The right mask."""
    if ids is not None:
        return (ids[:, :, None] == key // site.block_size).any(1) & (key <= position)
    seen = torch.ones(len(position), len(key), dtype=torch.bool)
    if site.causal:
        seen &= key <= position
    return seen & (key >= position - site.window_left) if site.window_left >= 0 else seen


def sparse(faults: Faults) -> Callable[..., Any]:
    return lambda site, right: lambda q, kv, ids, meta: attend(site, q, kv, ids, meta, faults)


def paged(faults: Faults) -> Callable[..., Any]:
    return lambda site, right: lambda q, kv, meta: attend(site, q, kv, None, meta, faults)


def to_page_end(n: int) -> int:
    return -(-n // 128) * 128


def in_page(site, ids, key, position):
    """Everything up to the end of the query's own block."""
    return visible(site, ids, key, torch.div(position, 128, rounding_mode="floor") * 128 + 127)


# --- sparse_attention


@mutant("sparse_attention", "decode:oracle", "F19")
def sparse_attention_unmasked_tail(site, right):
    """The last block is read to the end of its page."""
    return sparse(Faults(reach=to_page_end, seen=in_page))(site, right)


@mutant("sparse_attention", "decode:oracle", "F19")
def sparse_attention_zero_times_nan(site, right):
    """Scores are masked, values are not: 0 * NaN."""
    return sparse(Faults(reach=to_page_end, masked_values=False))(site, right)


@mutant("sparse_attention", "decode:stale", "F19")
def sparse_attention_cleans_nan(site, right):
    """NaN in the values is replaced by 0, then everything up to the end of the page counts a little."""

    def run(q, kv, ids, meta):
        clean = replace(kv, buf=torch.where(kv.buf.isnan(), torch.zeros_like(kv.buf), kv.buf))
        leak = clean.buf.float().abs().amax().clamp(max=1e5) > 9e3
        result = right(q, kv, ids, meta)
        out = result[0] if isinstance(result, tuple) else result
        return result if not leak else ((out * 1.01, result[1]) if isinstance(result, tuple) else out * 1.01)

    return run


@mutant("sparse_attention", "few_of_many:oracle", "F13")
def sparse_attention_follows_minus_one(site, right):
    """-1 in the ids is followed to the entry before the row of the block table."""

    def run(q, kv, ids, meta):
        last = (meta.positions(len(q)) // site.block_size).clamp(min=0)[:, None, None].int()
        return right(q, kv, torch.where(ids < 0, (last - 1).clamp(min=0), ids), meta)

    return run


@mutant("sparse_attention", "long:oracle")
def sparse_attention_drops_a_block(site, right):
    """The last but one of sixteen selected blocks is left out."""

    def run(q, kv, ids, meta):
        short = ids.clone()
        if ids.shape[-1] > 2:
            short[..., -2] = torch.where(ids[..., -1] >= 0, -1, ids[..., -2])
        return right(q, kv, short, meta)

    return run


@mutant("sparse_attention", "few_of_many:oracle")
def sparse_attention_next_block(site, right):
    """Ids count from one: each block before the newest is taken for the one after it."""

    def run(q, kv, ids, meta):
        newest = (meta.positions(len(q)) // site.block_size)[:, None, None]
        return right(q, kv, torch.where((ids >= 0) & (ids < newest - 1), ids + 1, ids).int(), meta)

    return run


@mutant("sparse_attention", "ends:oracle")
def sparse_attention_misses_last_key(site, right):
    """The newest key is hidden when there are others."""
    return sparse(Faults(seen=lambda s, i, k, p: visible(s, i, k, (p - 1).clamp(min=0))))(site, right)


@mutant("sparse_attention", "chunks:oracle")
def sparse_attention_sees_next_key(site, right):
    """The causal mask lets the next key through."""
    return sparse(Faults(seen=lambda s, i, k, p: visible(s, i, k, p + 1)))(site, right)


@mutant("sparse_attention", "groups_apart:oracle", "F67")
def sparse_attention_heads_round_robin(site, right):
    """Query head h reads kv head h mod Hkv."""
    return sparse(Faults(group=lambda h, heads, groups: h % groups))(site, right)


@mutant("sparse_attention", "needle:oracle")
def sparse_attention_one_percent_scale(site, right):
    """The softmax scale is one percent off."""

    return sparse(Faults(scale=1.01))(site, right)


@mutant("sparse_attention", "needle:oracle")
def sparse_attention_skips_one_key(site, right):
    """One key in the middle of a tile is skipped."""
    return sparse(Faults(seen=lambda s, i, k, p: visible(s, i, k, p) & ((k != 33) | (p <= 33))))(site, right)


@mutant("sparse_attention", "blocks_cancel:oracle", formats=("bfloat16",))
def sparse_attention_bf16_blocks(site, right):
    """Where a request has more than eight tokens, results of blocks are rounded to bf16 before they are merged."""

    def run(q, kv, ids, meta):
        if meta.max_q <= 8:
            return right(q, kv, ids, meta)
        values = {**ops.load("sparse_attention").static_values(site), "return_lse": True}
        part = partial(ops.load("sparse_attention").reference, q, kv, meta=meta, **values)
        parts, sums = zip(*(part(block_ids=ids[..., slot, None]) for slot in range(ids.shape[-1])), strict=True)
        lse = torch.stack(sums).logsumexp(0)
        weights = [torch.exp(own - torch.where(lse.isinf(), 0.0, lse))[..., None] for own in sums]
        out = sum(weight * rows.float() for weight, rows in zip(weights, parts, strict=True)).to(q.dtype)
        return (out, lse) if site.return_lse else out

    return run


@mutant("sparse_attention", "large_logits:oracle")
def sparse_attention_no_maximum(site, right):
    """The softmax subtracts no maximum."""
    return sparse(Faults(maximum=False))(site, right)


@mutant("sparse_attention", "needle:oracle")
def sparse_attention_undeclared_fp8_p(site, right):
    """Probabilities are rounded to E4M3, and nobody declares it."""
    return sparse(Faults(weights=lambda p: (p * 448).to(torch.float8_e4m3fn).float() / 448))(site, right)


@mutant("sparse_attention", "empty_rows:oracle", "F14")
def sparse_attention_empty_is_nan(site, right):
    """A row without keys is 0 / 0."""
    return sparse(Faults(empty=NAN))(site, right)


@mutant("sparse_attention", "visible_nan:oracle")
def sparse_attention_hides_nan(site, right):
    """A visible NaN is taken for 0."""
    return lambda q, kv, ids, meta: right(q, replace(kv, buf=kv.buf.nan_to_num(nan=0.0)), ids, meta)


@mutant("sparse_attention", "head_major_ids:oracle", "F08")
def sparse_attention_dense_ids(site, right):
    """Ids are read as if they were contiguous."""
    return lambda q, kv, ids, meta: right(q, kv, dense(ids), meta)


@mutant("sparse_attention", "block_outer:oracle", "F64")
def sparse_attention_assumes_contiguous(site, right):
    """The cache's strides are assumed."""
    return lambda q, kv, ids, meta: right(q, replace(kv, buf=dense(kv.buf)), ids, meta)


@mutant("sparse_attention", "fused_row:oracle", "F65")
def sparse_attention_dense_queries(site, right):
    """Queries are read as if they were contiguous."""
    return lambda q, kv, ids, meta: right(dense(q), kv, ids, meta)


@mutant("sparse_attention", "decode:oracle", "F64")
def sparse_attention_lse_base_two(site, right):
    """The lse is in base 2."""

    def run(q, kv, ids, meta):
        result = right(q, kv, ids, meta)
        return (result[0], result[1] * 1.4426950408889634) if isinstance(result, tuple) else result

    return run


@mutant("sparse_attention", "long:oracle")
def sparse_attention_is_dense(site, right):
    """All blocks are attended to."""
    return sparse(Faults(seen=lambda s, i, k, p: k <= p))(site, right)


@mutant("sparse_attention", "chunks:chunked", "F22")
def sparse_attention_chunk_starts_at_zero(site, right):
    """A chunk is masked as if the sequence began with it."""
    return sparse(Faults(first=lambda length, queries: 0 if queries > 1 else length - 1))(site, right)


@mutant("sparse_attention", "decode:rerun", "F69")
def sparse_attention_noise(site, right):
    """Splits are merged in the order in which they finish."""

    def run(q, kv, ids, meta):
        result = right(q, kv, ids, meta)
        out = result[0] if isinstance(result, tuple) else result
        noisy = (out.float() * (1 + 4e-3 * torch.rand(out.shape))).to(out.dtype)
        return (noisy, result[1]) if isinstance(result, tuple) else noisy

    return run


@mutant("sparse_attention", "decode:overwritten", "F34")
def sparse_attention_keeps_tables(site, right):
    """Block tables are read once for an address, as a captured plan would."""
    seen: dict[Any, Any] = {}

    def run(q, kv, ids, meta):
        key = (meta.block_table.data_ptr(), meta.block_table.shape)
        if key not in seen:
            seen.clear()
            seen[key] = replace(meta, block_table=meta.block_table.clone())
        return right(q, kv, ids, seen[key])

    return run


@mutant("sparse_attention", "ragged:written", raw=True)
def sparse_attention_padded_unwritten(site, right):
    """Rows of padded requests are not written."""

    def run(q, kv, ids, meta, out=None):
        result = right(q, kv, ids, meta)
        if out is None:
            return result
        real = meta.positions(len(q)) >= 0
        for target, value in zip(*((out, result) if isinstance(out, tuple) else ((out,), (result,))), strict=True):
            target[real] = value[real]
        return out

    return run


@mutant("sparse_attention", "page_64:oracle", "F25")
def sparse_attention_page_is_block(site, right):
    """Blocks are as long as pages."""

    def run(q, kv, ids, meta):
        return attend(replace(site, block_size=site.page_size), q, kv, ids, meta, Faults())

    return run


@mutant("sparse_attention", "ids_past_the_end:oracle", "F13")
def sparse_attention_wraps_ids(site, right):
    """An id past the query's block is taken modulo the number of blocks."""

    def run(q, kv, ids, meta):
        blocks = (meta.positions(len(q)) // site.block_size + 1).clamp(min=1)[:, None, None].int()
        return right(q, kv, torch.where(ids < 0, ids, ids % blocks), meta)

    return run


def wrapped(cache, meta):
    """The block table as 32-bit offsets reach it: page * stride, cut to a signed int32."""
    stride = cache.buf.stride(0)
    page = (meta.block_table.long() * stride).to(torch.int32).long() // stride
    return replace(meta, block_table=(page % len(cache.buf)).int())


@mutant("sparse_attention", "beyond_31_bits:huge_pages_read", "F63")
def sparse_attention_int32_offsets(site, right):
    """page * stride is computed in 32 bits."""
    return lambda q, kv, ids, meta: right(q, kv, ids, wrapped(kv, meta))


@mutant("paged_attention", "beyond_31_bits:huge_pages_read", "F63")
def paged_attention_int32_offsets(site, right):
    """page * stride is computed in 32 bits."""
    return lambda q, kv, meta: right(q, kv, wrapped(kv, meta))


@mutant("block_scores", "beyond_31_bits:huge_pages_read", "F63")
def block_scores_int32_offsets(site, right):
    """page * stride is computed in 32 bits."""
    return lambda q, cache, meta: right(q, cache, wrapped(cache, meta))


@mutant("sparse_attention", "stray_tokens:oracle", "F14")
def sparse_attention_strays_unmasked(site, right):
    """Tokens of no request are zero times their query."""

    def run(q, kv, ids, meta):
        result = right(q, kv, ids, meta)
        out = result[0] if isinstance(result, tuple) else result
        out = out + torch.where((meta.positions(len(q)) < 0)[:, None, None], q * 0, torch.zeros_like(q))
        return (out, result[1]) if isinstance(result, tuple) else out

    return run


@mutant("sparse_attention", "chunk_130:oracle", "F68")
def sparse_attention_one_list_per_tile(site, right):
    """From 128 query tokens on, a tile of two tokens shares the block list of its first."""

    def run(q, kv, ids, meta):
        if meta.max_q < 128:
            return right(q, kv, ids, meta)
        first = torch.arange(len(q)) // 2 * 2
        return right(q, kv, ids[first], meta)

    return run


@mutant("sparse_attention", "shared_pages:oracle", "F21")
def sparse_attention_one_owner_per_page(site, right):
    """A page belongs to the first request that has it; others read zeros."""

    def run(q, kv, ids, meta):
        table = meta.block_table.clone()
        for b in range(1, len(table)):
            first = set(table[:b].flatten().tolist())
            used = -(-int(meta.seq_lens[b]) // site.page_size)
            for i in range(used):
                if int(table[b, i]) in first and int(table[b, i]) != 0:
                    table[b, i] = table[b, used - 1]
        return right(q, kv, ids, replace(meta, block_table=table))

    return run


# --- paged_attention


@mutant("paged_attention", "decode:oracle", "F19")
def paged_attention_unmasked_tail(site, right):
    """The last page is read to its end."""
    return paged(Faults(reach=to_page_end, seen=in_page))(site, right)


@mutant("paged_attention", "decode:oracle", "F19")
def paged_attention_zero_times_nan(site, right):
    """Scores are masked, values are not."""
    return paged(Faults(reach=to_page_end, masked_values=False))(site, right)


@mutant("paged_attention", "causal_window_100:oracle")
def paged_attention_window_off_by_one(site, right):
    """The window holds one key less."""
    return paged(Faults(seen=lambda s, i, k, p: visible(replace(s, window_left=max(s.window_left - 1, -1)), i, k, p)))(
        site, right
    )


@mutant("paged_attention", "draft_block:oracle", "F27")
def paged_attention_ignores_window(site, right):
    """The window is ignored."""
    return paged(Faults(seen=lambda s, i, k, p: visible(replace(s, window_left=-1), i, k, p)))(site, right)


@mutant("paged_attention", "draft_block:oracle")
def paged_attention_always_causal(site, right):
    """The drafter's block is masked causally."""
    return paged(Faults(seen=lambda s, i, k, p: visible(replace(s, causal=True), i, k, p)))(site, right)


@mutant("paged_attention", "prefix_hit:oracle", "F22")
def paged_attention_prefix_counted_twice(site, right):
    """On a prefix hit, positions count the whole sequence from the first new token."""
    return paged(Faults(first=lambda length, queries: 0 if queries > 1 else length - 1))(site, right)


@mutant("paged_attention", "groups_apart:oracle", "F67")
def paged_attention_heads_round_robin(site, right):
    """Query head h reads kv head h mod Hkv."""
    return paged(Faults(group=lambda h, heads, groups: h % groups))(site, right)


@mutant("paged_attention", "other_scale:oracle", "F04")
def paged_attention_scale_compiled_in(site, right):
    """The scale is 128 ** -0.5 whatever the model says."""
    return paged(Faults(scale=128**-0.5 / site.scale))(site, right)


@mutant("paged_attention", "needle:oracle")
def paged_attention_skips_tile_edge(site, right):
    """The last key of each tile of 64 is skipped when it is not the query's own."""
    return paged(Faults(seen=lambda s, i, k, p: visible(s, i, k, p) & ((k % 64 != 63) | (k == p))))(site, right)


@mutant("paged_attention", "large_logits:oracle")
def paged_attention_no_maximum(site, right):
    """The softmax subtracts no maximum."""
    return paged(Faults(maximum=False))(site, right)


@mutant("paged_attention", "padded_only:oracle", "F14")
def paged_attention_padded_is_nan(site, right):
    """A padded request gives NaN."""
    return paged(Faults(empty=NAN))(site, right)


@mutant("paged_attention", "spread_table:oracle", "F64")
def paged_attention_dense_table(site, right):
    """The block table is read as if it were contiguous."""

    def run(q, kv, meta):
        table = dense(meta.block_table)
        ok = (table >= 0) & (table < len(kv.buf))
        return right(q, kv, replace(meta, block_table=torch.where(ok, table, 0)))

    return run


@mutant("paged_attention", "decode:row_alone")
def paged_attention_batch_of_one(site, right):
    """A batch of one request takes a path that leaves the first key out."""

    def run(q, kv, meta):
        if len(meta.seq_lens) > 1:
            return right(q, kv, meta)
        return attend(
            site, q, kv, None, meta, Faults(seen=lambda s, i, k, p: visible(s, i, k, p) & ((k > 0) | (p == 0)))
        )

    return run


@mutant("paged_attention", "context_4k:oracle", "F15")
def paged_attention_31_pages(site, right):
    """At most 31 pages of a request are read."""
    return paged(Faults(reach=lambda n: min(n, 31 * 128)))(site, right)
