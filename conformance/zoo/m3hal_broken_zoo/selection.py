"""Wrong block scores, rankings, merges and selections."""

from __future__ import annotations

from dataclasses import replace

import torch

from m3hal.ops.kv_read import read_sequence
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.rows import dense

INF = float("inf")

# --- block_scores


def scored(site, index_q, index_cache, meta, *, hidden=None, start=-INF, reach=None, first=None, edit=None):
    """Scores, with the mask, the initial value, the keys read and the first position replaced."""
    blocks = -(-meta.max_k // site.block_size)
    scores = torch.full((*index_q.shape[:2], blocks), -INF)
    for b, length in enumerate(meta.seq_lens.tolist()):
        lo, hi = meta.cu_q[b : b + 2].tolist()
        if lo == hi or length == 0:
            continue
        count = min(reach(length), meta.block_table.shape[1] * site.page_size) if reach else length
        (keys,), _ = read_sequence(index_cache, meta.block_table[b], count)
        position = torch.arange(hi - lo) + (length - (hi - lo) if first is None else first(length, hi - lo))
        dots = index_q[lo:hi].float() @ keys.float().T
        future = (hidden or (lambda key, at: key > at))(torch.arange(count), position[:, None])
        dots = dots.masked_fill(future[:, None], -INF)
        seen = -(-count // site.block_size)
        dots = torch.nn.functional.pad(dots, (0, seen * site.block_size - count), value=-INF)
        best = dots.unflatten(-1, (seen, site.block_size)).amax(-1)
        best = torch.where(best > -INF, best.clamp(min=start), best) if start > -INF else best
        scores[lo:hi, :, : min(seen, blocks)] = best[..., :blocks]
    return edit(scores) if edit else scores


@mutant("block_scores", "all_negative:oracle", "F17")
def block_scores_starts_at_zero(site, right):
    """The running maximum starts at 0."""
    return lambda q, c, m: scored(site, q, c, m, start=0.0)


@mutant("block_scores", "ramp:oracle", "F20")
def block_scores_unmasked_tail(site, right):
    """The last page is read to its end; decode has no mask."""

    def run(q, c, m):
        return scored(
            site, q, c, m, reach=lambda n: -(-n // 128) * 128, hidden=lambda key, at: (key // 128) > (at // 128)
        )

    return run


@mutant("block_scores", "chunks:oracle")
def block_scores_sees_next_key(site, right):
    """The causal mask lets the next key through."""
    return lambda q, c, m: scored(site, q, c, m, hidden=lambda key, at: key > at + 1)


@mutant("block_scores", "ramp:oracle")
def block_scores_misses_own_key(site, right):
    """The causal mask hides the query's own key, except in the first block."""
    return lambda q, c, m: scored(site, q, c, m, hidden=lambda key, at: (key > at) | ((key == at) & (at % 128 > 0)))


@mutant("block_scores", "chunks:chunked", "F23")
def block_scores_chunk_starts_at_zero(site, right):
    """A chunk is masked as if the sequence began with it."""
    return lambda q, c, m: scored(site, q, c, m, first=lambda length, queries: 0 if queries > 1 else length - 1)


@mutant("block_scores", "mixed:oracle")
def block_scores_scaled(site, right):
    """The softmax scale is applied."""
    return lambda q, c, m: right(q, c, m) * site.index_dim**-0.5


@mutant("block_scores", "heads_differ:oracle")
def block_scores_max_over_heads(site, right):
    """A second maximum runs over the index heads, as in a popular port."""
    return lambda q, c, m: right(q, c, m).amax(1, keepdim=True).expand(-1, q.shape[1], -1).contiguous()


@mutant("block_scores", "tokens_equal_heads:oracle")
def block_scores_head_major_if_square(site, right):
    """With as many tokens as heads the buffer is taken for head-major."""

    def run(q, c, m):
        y = right(q, c, m)
        return y.transpose(0, 1).contiguous() if len(q) == q.shape[1] else y

    return run


@mutant("block_scores", "padded_only:oracle", "F14")
def block_scores_padded_zero(site, right):
    """Rows of padded requests are zero instead of -inf."""

    def run(q, c, m):
        y = right(q, c, m)
        y[m.positions(len(q)) < 0] = 0
        return y

    return run


@mutant("block_scores", "bound_too_small:host_bound", "F18")
def block_scores_wraps_past_bound(site, right):
    """Past the host's bound scores are folded back into the buffer."""

    def run(q, c, m):
        if int(m.seq_lens.max() if len(m.seq_lens) else 0) <= m.max_k:
            return right(q, c, m)
        y = right(q, c, replace(m, max_k=int(m.seq_lens.max())))
        width = -(-m.max_k // site.block_size)
        return torch.maximum(y[..., :width], y[..., -width:])

    return run


@mutant("block_scores", "block_outer:oracle", "F64")
def block_scores_assumes_contiguous(site, right):
    """The cache's strides are assumed."""
    return lambda q, c, m: right(q, replace(c, buf=dense(c.buf)), m)


@mutant("block_scores", "fused_row:oracle", "F65")
def block_scores_dense_queries(site, right):
    """Queries are read as if they were contiguous."""
    return lambda q, c, m: right(dense(q), c, m)


@mutant("block_scores", "walking_needle:oracle")
def block_scores_every_second_key(site, right):
    """Only every second key of a full block is looked at."""
    return lambda q, c, m: scored(site, q, c, m, hidden=lambda key, at: (key > at) | ((key % 2 == 1) & (key < at)))


@mutant("block_scores", "last_dimensions:oracle")
def block_scores_short_dimension(site, right):
    """The last eight dimensions are left out."""

    def run(q, c, m):
        short = q.clone()
        short[..., -8:] = 0
        return right(short, c, m)

    return run


@mutant("block_scores", "visible_nan:oracle")
def block_scores_hides_nan(site, right):
    """A maximum that prefers numbers hides a visible NaN."""

    def run(q, c, m):
        return right(q, replace(c, buf=torch.where(c.buf.isnan(), torch.full_like(c.buf, -1e4), c.buf)), m)

    return run


@mutant("block_scores", "page_64:oracle", "F25")
def block_scores_page_is_block(site, right):
    """Blocks are as long as pages."""

    def run(q, c, m):
        if site.page_size == site.block_size:
            return right(q, c, m)
        y = right(q, c, m)
        small = scored(replace(site, block_size=site.page_size), q, c, replace(m, max_k=y.shape[-1] * site.page_size),
                       reach=lambda n: min(n, y.shape[-1] * site.page_size), first=lambda n, t: n - t)  # fmt: skip
        return small[..., : y.shape[-1]]

    return run


# --- topk_blocks


def ranked(site, scores, visible, *, lower=True, nan=-INF, force="set", fill=-1, order="up", zeros=False):
    """A ranking written apart from the definition, with its rules replaceable."""
    k = site.top_k_blocks
    out = torch.full((*scores.shape[:2], k), fill, dtype=torch.int32)
    for t in range(scores.shape[0]):
        end = int(visible[t])
        for h in range(scores.shape[1]):
            row = scores[t, h, :end].double().clone()
            if zeros:
                row = torch.where((row == 0) & torch.signbit(row), -1e-300, row)
            row = torch.where(row.isnan(), nan, row)
            missing = scores[t, h, :end].isnan() if nan == -INF else torch.zeros(end, dtype=torch.bool)
            ids = range(end)
            forced = (
                {b for b in ids if b < site.init_blocks or b >= end - site.local_blocks} if force == "set" else set()
            )
            if force == "score":
                row[max(end - site.local_blocks, 0) :] = 1e29
            values, gone = row.tolist(), missing.tolist()
            best = sorted(ids, key=lambda b: (b not in forced, gone[b], -values[b], b if lower else -b))[:k]
            best = sorted(best) if order == "up" else best
            out[t, h, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return out


@mutant("topk_blocks", "all_equal:oracle", "F16")
def topk_blocks_higher_id_wins(site, right):
    """Among equal scores the higher id wins."""
    return lambda s, v: ranked(site, s, v, lower=False)


@mutant("topk_blocks", "mostly_nan:oracle", "F28")
def topk_blocks_nan_wins(site, right):
    """NaN counts as the best score."""
    return lambda s, v: ranked(site, s, v, nan=INF)


@mutant("topk_blocks", "extreme:oracle")
def topk_blocks_magic_score(site, right):
    """Local blocks are forced by a score of 1e29, which infinite ones beat."""
    return lambda s, v: ranked(site, s, v, force="score")


@mutant("topk_blocks", "newest_is_worst:oracle")
def topk_blocks_forgets_local(site, right):
    """Nothing is forced."""
    return lambda s, v: ranked(site, s, v, force="")


@mutant("topk_blocks", "around_k:oracle", "F12")
def topk_blocks_tail_of_zeros(site, right):
    """The tail is 0 instead of -1."""
    return lambda s, v: ranked(site, s, v, fill=0)


@mutant("topk_blocks", "around_k:oracle")
def topk_blocks_by_score(site, right):
    """Ids come by falling score."""
    return lambda s, v: ranked(site, s, v, order="score")


@mutant("topk_blocks", "wide:oracle", "F15")
def topk_blocks_4096_columns(site, right):
    """Blocks from 4,096 on are not looked at."""
    return lambda s, v: right(s[..., :4096].contiguous(), v.clamp(max=4096))


@mutant("topk_blocks", "beyond_16_bits:oracle", "F15")
def topk_blocks_16_bit_ids(site, right):
    """Ids are kept in 16 bits."""
    return lambda s, v: torch.where(right(s, v) < 0, -1, right(s, v) & 0xFFFF).int()


@mutant("topk_blocks", "one_ulp_apart:oracle")
def topk_blocks_29_bits(site, right):
    """Scores are ranked by their upper 29 bits, and nobody declares it."""
    return lambda s, v: right((s.contiguous().view(torch.int32) & ~7).view(torch.float32), v)


@mutant("topk_blocks", "all_negative:oracle", "F17")
def topk_blocks_masks_with_zero(site, right):
    """Hidden blocks score 0 and may win over negative ones."""

    def run(s, v):
        end = v[:, None, None]
        hidden = torch.arange(s.shape[-1]) >= end
        full = torch.full_like(v, s.shape[-1])
        chosen = right(torch.where(hidden, 0.0, s), torch.where(v > 0, full, v))
        return torch.where(chosen < end, chosen, -1).int()

    return run


@mutant("topk_blocks", "tokens_equal_heads:oracle")
def topk_blocks_head_major_if_square(site, right):
    """With as many tokens as heads the scores are taken for head-major."""

    def run(s, v):
        if s.shape[0] != s.shape[1]:
            return right(s, v)
        return right(s.transpose(0, 1).contiguous(), v).transpose(0, 1).contiguous()

    return run


@mutant("topk_blocks", "tokens_130:oracle", "F68")
def topk_blocks_second_tile(site, right):
    """Rows from the 65th on rank by the scores of the row 64 before."""

    def run(s, v):
        moved = torch.cat([s[:64], s[: max(len(s) - 64, 0)]]) if len(s) > 64 else s
        return right(moved, v)

    return run


@mutant("merge_topk", "tokens_130:oracle", "F68")
def merge_topk_second_tile(site, right):
    """Rows from the 65th on lose the offers of the last rank."""

    def run(s, i, v):
        i = i.clone()
        i[-1, 64:] = -1
        return right(s, i, v)

    return run


@mutant("select_blocks", "chunk_130:oracle", "F68")
def select_blocks_second_tile(site, right):
    """Query tokens from the 129th on get the blocks of the 128th."""

    def run(q, c, m):
        y = right(q, c, m)
        y[128:130] = y[127:128]
        return y

    return run


@mutant("topk_blocks", "head_major:oracle", "F08")
def topk_blocks_dense_scores(site, right):
    """Scores are read as if they were contiguous."""
    return lambda s, v: right(dense(s), v)


@mutant("topk_blocks", "signed_zeros:oracle", "F56")
def topk_blocks_orders_zeros(site, right):
    """Integer keys put -0 below +0."""
    return lambda s, v: ranked(site, s, v, zeros=True)


@mutant("topk_blocks", "fewer_than_k_columns:oracle", "F12")
def topk_blocks_too_few(site, right):
    """Fewer columns than k: an exception."""

    def run(s, v):
        torch.topk(s, site.top_k_blocks) if s.numel() else None
        return right(s, v)

    return run


@mutant("topk_blocks", "around_k:oracle", "F14")
def topk_blocks_padded_zero(site, right):
    """A row that sees nothing gets block 0."""

    def run(s, v):
        y = right(s, v)
        y[v == 0, :, 0] = 0
        return y

    return run


# --- merge_topk


@mutant("merge_topk", "ranks_4_normal:oracle", "F35")
def merge_topk_counts_absent(site, right):
    """An absent offer counts with the score that stands there, as block 0."""
    return lambda s, i, v: right(
        s, torch.where(i < 0, (v - 1).clamp(min=0)[None, :, None, None].int() // 2, i).int(), v
    )


@mutant("merge_topk", "ranks_4_few_values:oracle", "F16")
def merge_topk_lower_rank_wins(site, right):
    """Among equal scores the lower rank wins, not the lower id."""

    def run(s, i, v):
        ranks = torch.arange(len(s)).view(-1, 1, 1, 1)
        return right(torch.where(s.isfinite() & (s.abs() < 1e6), s - 1e-3 * ranks, s), i, v)

    return run


@mutant("merge_topk", "newest_is_worst:oracle")
def merge_topk_forced_if_offered(site, right):
    """The newest block is chosen only when a shard offered it."""

    def run(s, i, v):
        y = right(s, i, v)
        newest = (v - 1)[:, None, None]
        offered = (i == newest[None]).any(-1).any(0)[..., None]
        kept = torch.where((y == newest) & ~offered, -1, y)
        big = torch.iinfo(torch.int32).max
        kept = torch.where(kept < 0, big, kept).sort(-1).values
        return torch.where(kept == big, -1, kept).int()

    return run


@mutant("merge_topk", "ranks_8_normal:oracle")
def merge_topk_two_ranks(site, right):
    """Offers from the fourth rank on are not read."""
    return lambda s, i, v: right(s[:4], i[:4], v)


@mutant("merge_topk", "mostly_nan:oracle", "F28")
def merge_topk_nan_wins(site, right):
    """NaN counts as the best score."""
    return lambda s, i, v: right(torch.where(s.isnan(), INF, s), i, v)


@mutant("merge_topk", "unordered_offers:oracle")
def merge_topk_stops_at_absent(site, right):
    """A shard's offers end at the first -1."""
    return lambda s, i, v: right(s, torch.where((i < 0).cumsum(-1) > 0, -1, i).int(), v)


@mutant("merge_topk", "ranks_4_normal:stale")
def merge_topk_stale_offer(site, right):
    """Where a shard has no offer, a score above 1e3 makes its first block count."""

    def run(s, i, v):
        absent = (i < 0) & (s > 1e3) & (s < 1e38)
        return right(torch.where(absent, 1e3, s), torch.where(absent & (v[None, :, None, None] > 17), 0, i).int(), v)

    return run


# --- select_blocks


@mutant("select_blocks", "all_negative:oracle", "F17")
def select_blocks_starts_at_zero(site, right):
    """The running maximum starts at 0."""

    def run(q, c, m):
        visible = (m.positions(len(q)) // site.block_size + 1).int()
        return ranked(site, scored(site, q, c, m, start=0.0), visible)

    return run


@mutant("select_blocks", "nothing_forced:oracle", "F20")
def select_blocks_unmasked_tail(site, right):
    """The last page is read to its end, and forced blocks are forced by score."""

    def run(q, c, m):
        visible = (m.positions(len(q)) // site.block_size + 1).int()
        s = scored(site, q, c, m, reach=lambda n: -(-n // 128) * 128, hidden=lambda k, at: k // 128 > at // 128)
        return ranked(site, s, visible, nan=INF, force="")

    return run


@mutant("select_blocks", "chunks:chunked", "F23")
def select_blocks_chunk_context(site, right):
    """A chunk sees the blocks of the chunk only."""

    def run(q, c, m):
        if m.max_q <= 1 or len(m.seq_lens) != 1:
            return right(q, c, m)
        y = right(q, c, m)
        start = (int(m.seq_lens[0]) - len(q)) // site.block_size
        return torch.where((y >= start) | (y < 0), y, y * 0 + torch.arange(site.top_k_blocks)).sort(-1).values.int()

    return run


@mutant("select_blocks", "heads_differ:oracle")
def select_blocks_same_for_all_heads(site, right):
    """One selection serves all groups: a maximum over heads."""
    return lambda q, c, m: right(q[:, :1].expand_as(q).contiguous(), c, m)


@mutant("select_blocks", "tokens_equal_heads:oracle")
def select_blocks_head_major_if_square(site, right):
    """With as many tokens as heads the ids are written head-major."""

    def run(q, c, m):
        y = right(q, c, m)
        return y.transpose(0, 1).contiguous() if len(q) == q.shape[1] else y

    return run


@mutant("select_blocks", "padded_only:oracle", "F14")
def select_blocks_padded_zero(site, right):
    """A padded row gets block 0."""

    def run(q, c, m):
        y = right(q, c, m)
        y[m.positions(len(q)) < 0, :, 0] = 0
        return y

    return run


@mutant("select_blocks", "init_1_local_2:oracle")
def select_blocks_ignores_init(site, right):
    """init_blocks and local_blocks are compiled in as 0 and 1."""

    def run(q, c, m):
        visible = (m.positions(len(q)) // site.block_size + 1).int()
        return ranked(replace(site, init_blocks=0, local_blocks=1), scored(site, q, c, m), visible)

    return run
