"""What a vendor shipped that had the documentation and not the suite: wrong between the sizes that were asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from m3hal.formats import QTensor
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.hostile import at, first_of

INF = float("inf")
BF16 = ("bfloat16",)


def _last_row_lost(lost, fill=0):
    """Where ``lost(tokens)``, the last row of the first output is ``fill``."""

    def make(site, right):
        def run(*inputs):
            result = right(*inputs)
            out = first_of(result)
            if lost(len(out)):
                out[-1] = fill
            return result

        return run

    return make


def _few(tokens):
    """A variant for half a tile, up to the size at which another takes over."""
    return 18 <= tokens <= 62


def _many(tokens):
    """A persistent variant whose last tile is not full."""
    return tokens > 1024 and tokens % 128


@mutant("rms_norm", "tokens_32:oracle", "F68")
def rms_norm_last_of_32(site, right):
    """With 18 to 62 tokens the last row is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("rms_norm", "tokens_1100:oracle", "F68")
def rms_norm_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row is zero."""
    return _last_row_lost(_many)(site, right)


@mutant("add_rms_norm", "tokens_32:oracle", "F68")
def add_rms_norm_last_of_32(site, right):
    """With 18 to 62 tokens the last row is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("add_rms_norm", "tokens_1100:oracle", "F68")
def add_rms_norm_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row is zero."""
    return _last_row_lost(_many)(site, right)


@mutant("linear", "tokens_1100:oracle", "F68")
def linear_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row is zero."""
    return _last_row_lost(_many)(site, right)


@mutant("linear", "tokens_32:oracle", "F68")
def linear_last_of_32(site, right):
    """With 18 to 62 tokens the last row is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("swiglu_oai", "tokens_32:oracle", "F68")
def swiglu_oai_last_of_32(site, right):
    """With 18 to 62 tokens the last row is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("swiglu_oai", "tokens_1100:oracle", "F68")
def swiglu_oai_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row is zero."""
    return _last_row_lost(_many)(site, right)


@mutant("rope_partial", "tokens_32:oracle", "F68")
def rope_partial_last_of_32(site, right):
    """With 18 to 62 tokens the last row is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("rope_partial", "tokens_1100:oracle", "F68")
def rope_partial_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row is zero."""
    return _last_row_lost(_many)(site, right)


@mutant("moe_experts", "tokens_32:oracle", "F68")
def moe_experts_last_of_32(site, right):
    """With 18 to 62 tokens the last row is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("moe_experts", "tokens_1100:oracle", "F68")
def moe_experts_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row is zero."""
    return _last_row_lost(_many)(site, right)


@mutant("route_topk", "tokens_32:oracle", "F68")
def route_topk_last_of_32(site, right):
    """With 18 to 62 tokens the last token has no weight."""
    return _last_row_lost(_few)(site, right)


@mutant("route_topk", "tokens_1100:oracle", "F68")
def route_topk_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last token has no weight."""
    return _last_row_lost(_many)(site, right)


@mutant("topk_blocks", "tokens_32:oracle", "F68")
def topk_blocks_last_of_32(site, right):
    """With 18 to 62 tokens the last one selects nothing."""
    return _last_row_lost(_few, -1)(site, right)


@mutant("topk_blocks", "tokens_1100:oracle", "F68")
def topk_blocks_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last one selects nothing."""
    return _last_row_lost(_many, -1)(site, right)


@mutant("merge_topk", "tokens_32:oracle", "F68")
def merge_topk_last_of_32(site, right):
    """With 18 to 62 tokens the last one selects nothing."""
    return _last_row_lost(_few, -1)(site, right)


@mutant("merge_topk", "tokens_1100:oracle", "F68")
def merge_topk_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last one selects nothing."""
    return _last_row_lost(_many, -1)(site, right)


@mutant("qk_norm_rope_insert", "tokens_32:oracle", "F68")
def qk_norm_rope_insert_last_of_32(site, right):
    """With 18 to 62 tokens the last query is zero."""
    return _last_row_lost(_few)(site, right)


@mutant("qk_norm_rope_insert", "tokens_1100:oracle", "F68")
def qk_norm_rope_insert_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last query is zero."""
    return _last_row_lost(_many)(site, right)


def _last_code_lost(lost):
    def make(site, right):
        def run(x):
            q = right(x)
            if lost(len(x)):
                q.data[-1] = 0
            return q

        return run

    return make


@mutant("quantize", "tokens_32:oracle", "F68")
def quantize_last_of_32(site, right):
    """With 18 to 62 tokens the last row's codes are zero."""
    return _last_code_lost(_few)(site, right)


@mutant("quantize", "tokens_1100:oracle", "F68")
def quantize_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last row's codes are zero."""
    return _last_code_lost(_many)(site, right)


def _last_unwritten(lost):
    def make(site, right):
        def run(cache, k, v, slots):
            if lost(len(slots)):
                slots = torch.cat([slots[:-1], slots.new_full((1,), -1)])
            right(cache, k, v, slots)

        return run

    return make


@mutant("kv_write", "tokens_32:oracle", "F68")
def kv_write_last_of_32(site, right):
    """With 18 to 62 tokens the last one is not written."""
    return _last_unwritten(_few)(site, right)


@mutant("kv_write", "tokens_1100:oracle", "F68")
def kv_write_last_of_1100(site, right):
    """With more than 1,024 tokens that don't fill tiles the last one is not written."""
    return _last_unwritten(_many)(site, right)


# --- formats, widths


@mutant("quantize", "to_mxfp8:oracle", "F61", formats=BF16)
def quantize_bf16_gives_zeros(site, right):
    """Only fp32 activations are read; bf16 ones give codes of zero."""

    def run(x):
        q = right(x)
        if x.dtype == torch.bfloat16 and q.scale is not None:
            q.data.zero_()
        return q

    return run


@mutant("quantize", "to_mxfp8_broken_rows:oracle", "F28")
def quantize_broken_rows_are_zeros(site, right):
    """A row with a number that is not finite becomes zeros."""

    def run(x):
        finite = torch.isfinite(x).all(-1, keepdim=True)
        return right(x if site.activation_format in ("float32", "bfloat16") else torch.where(finite, x, 0.0))

    return run


@mutant("quantize", "to_nvfp4_broken_rows:oracle", "F28")
def quantize_nan_spreads(site, right):
    """One NaN or infinity in the batch makes the next row's codes those of zeros, too."""

    def run(x):
        broken = ~torch.isfinite(x).all(-1, keepdim=True)
        plain = site.activation_format in ("float32", "bfloat16")
        return right(x if plain or x.ndim != 2 else torch.where(broken.roll(1, 0) & ~broken, 0.0, x))

    return run


@mutant("linear", "dense_down_tp1:oracle", "F59")
def linear_k_6144(site, right):
    """The sum ends at 6,144 columns."""

    def run(x, weight):
        if isinstance(weight, QTensor) or x.shape[-1] <= 6144:
            return right(x, weight)
        return right(x[:, :6144], weight[:, :6144])

    return run


@mutant("linear", "dense_gate_up_tp1:oracle", "F59")
def linear_n_16384(site, right):
    """Columns of the output from the 16,385th on are those 16,384 before."""

    def run(x, weight):
        out = right(x, weight)
        if out.shape[-1] > 16384:
            out[:, 16384:] = out[:, : out.shape[-1] - 16384]
        return out

    return run


@mutant("swiglu_oai", "dense_mlp_tp1_3:oracle", "F59")
def swiglu_oai_4096_columns(site, right):
    """Columns from the 4,097th on are zero."""

    def run(gate_up):
        out = right(gate_up)
        out[..., 4096:] = 0
        return out

    return run


# --- prompts, batches, contexts, pages


def _query_tiles(limit):
    """Query tokens of a request past ``limit`` get what its first one has."""

    def make(site, right):
        def run(*inputs):
            result, meta = right(*inputs), inputs[-1]
            out, starts = first_of(result), meta.cu_q.tolist()
            for first, last in pairwise(starts):
                if last - first > limit:
                    out[first + limit : last] = out[first]
            return result

        return run

    return make


def _requests(limit):
    """Requests from number ``limit`` on are read in the pages of those ``limit`` before."""

    def make(site, right):
        def run(*inputs):
            *most, meta = inputs
            if len(meta.seq_lens) <= limit:
                return right(*inputs)
            table = meta.block_table
            return right(*most, replace(meta, block_table=torch.cat([table[:limit], table[: len(table) - limit]])))

        return run

    return make


def _pages(*sizes):
    """Pages of these sizes are taken in the reverse order."""

    def make(site, right):
        def run(*inputs):
            *most, meta = inputs
            if site.page_size not in sizes:
                return right(*inputs)
            return right(*most, replace(meta, block_table=meta.block_table.flip(0)))

        return run

    return make


@mutant("sparse_attention", "prompt_1100:oracle", "F68")
def sparse_attention_1024_queries(site, right):
    """A request has 1,024 query tokens at most; the later ones get what its first has."""
    return _query_tiles(1024)(site, right)


@mutant("paged_attention", "prompt_1100:oracle", "F68")
def paged_attention_1024_queries(site, right):
    """A request has 1,024 query tokens at most; the later ones get what its first has."""
    return _query_tiles(1024)(site, right)


@mutant("block_scores", "prompt_1100:oracle", "F68")
def block_scores_1024_queries(site, right):
    """A request has 1,024 query tokens at most; the later ones get what its first has."""
    return _query_tiles(1024)(site, right)


@mutant("select_blocks", "prompt_1100:oracle", "F68")
def select_blocks_1024_queries(site, right):
    """A request has 1,024 query tokens at most; the later ones get what its first has."""
    return _query_tiles(1024)(site, right)


@mutant("sparse_attention", "batch_300:oracle", "F68")
def sparse_attention_256_requests(site, right):
    """Requests from the 257th on are read in the pages of those 256 before."""
    return _requests(256)(site, right)


@mutant("paged_attention", "batch_300:oracle", "F68")
def paged_attention_256_requests(site, right):
    """Requests from the 257th on are read in the pages of those 256 before."""
    return _requests(256)(site, right)


@mutant("block_scores", "batch_300:oracle", "F68")
def block_scores_256_requests(site, right):
    """Requests from the 257th on are read in the pages of those 256 before."""
    return _requests(256)(site, right)


@mutant("select_blocks", "batch_300:oracle", "F68")
def select_blocks_256_requests(site, right):
    """Requests from the 257th on select nothing."""

    def run(index_q, cache, meta):
        ids = right(index_q, cache, meta)
        if len(meta.seq_lens) > 256:
            ids[int(meta.cu_q[256]) :] = -1
        return ids

    return run


@mutant("sparse_attention", "page_16_odd_lengths:oracle", "F25")
def sparse_attention_small_pages(site, right):
    """Pages of 16, 32 and 512 are looked up in the table of another request."""
    return _pages(16, 32, 512)(site, right)


@mutant("paged_attention", "page_32_odd_lengths:oracle", "F25")
def paged_attention_small_pages(site, right):
    """Pages of 16, 32 and 256 are looked up in the table of another request."""
    return _pages(16, 32, 256)(site, right)


@mutant("block_scores", "page_16_odd_lengths:oracle", "F25")
def block_scores_small_pages(site, right):
    """Pages of 16, 32 and 512 are looked up in the table of another request."""
    return _pages(16, 32, 512)(site, right)


@mutant("sparse_attention", "context_140k:oracle", "F15", formats=BF16)
def sparse_attention_1024_blocks(site, right):
    """The bit set of selected blocks has 1,024 places; blocks past it are not seen."""
    return lambda q, kv, ids, meta: right(q, kv, torch.where(ids >= 1024, -1, ids), meta)


@mutant("paged_attention", "context_140k:oracle", "F15", formats=BF16)
def paged_attention_half_past_131072(site, right):
    """Past 131,072 tokens of context the splits' sums are not divided by their whole weight."""

    def run(q, kv, meta):
        result = right(q, kv, meta)
        first_of(result).mul_(2.0 if meta.max_k > 131_072 else 1.0)
        return result

    return run


@mutant("block_scores", "context_1m:oracle", "F15", formats=BF16)
def block_scores_4096_blocks(site, right):
    """A row of scores has 4,096 places; what lies past them is -inf."""

    def run(index_q, cache, meta):
        scores = right(index_q, cache, meta)
        scores[..., 4096:] = -INF
        return scores

    return run


@mutant("select_blocks", "context_1m:oracle", "F15", formats=BF16)
def select_blocks_4096_blocks(site, right):
    """Only the first 4,096 blocks are ranked, and the newest one."""

    def run(index_q, cache, meta):
        scores = at(site, "block_scores")(index_q, cache, meta)
        scores[..., 4096:] = -INF
        return at(site, "topk_blocks")(scores, (meta.positions(len(index_q)) // site.block_size + 1).int())

    return run


# --- slots and pages that name nothing


def _wrapped(numbers, size):
    """Only -1 is taken for nothing; other negative numbers count from the end."""
    return torch.where(numbers == -1, -1, numbers % size)


@mutant("kv_write", "other_negatives:oracle", "F29")
def kv_write_only_minus_one(site, right):
    """Only -1 writes nothing; other negative slots count from the end of the cache."""

    def run(cache, k, v, slots):
        right(cache, k, v, _wrapped(slots, len(cache.buf) * cache.layout.page_size))

    return run


@mutant("kv_write", "other_negatives:oracle", "F63")
def kv_write_slots_in_32_bits(site, right):
    """Slots are narrowed to 32 bits before their sign is read."""
    return lambda cache, k, v, slots: right(cache, k, v, slots.to(torch.int32).long())


@mutant("kv_read", "other_negatives:oracle", "F63")
def kv_read_slots_in_32_bits(site, right):
    """Slots are narrowed to 32 bits before their sign is read."""
    return lambda cache, slots: right(cache, slots.to(torch.int32).long())


@mutant("kv_copy_blocks", "other_negatives:oracle", "F29")
def kv_copy_blocks_only_minus_one(site, right):
    """Only -1 skips a pair; other negative pages count from the end."""

    def run(src, dst, pairs):
        right(src, dst, torch.stack([_wrapped(pairs[:, 0], len(src.buf)), _wrapped(pairs[:, 1], len(dst.buf))], 1))

    return run


@mutant("qk_norm_rope_insert", "other_negatives:oracle", "F29")
def qk_norm_rope_insert_only_minus_one(site, right):
    """Only -1 writes nothing; other negative slots count from the end of the cache."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, slots, index_slots):
        size = len(kv.buf) * kv.layout.page_size
        index = None if index_slots is None else _wrapped(index_slots, size)
        return right(qkv, norms, positions, cos_sin, kv, index_cache, _wrapped(slots, size), index)

    return run


# --- shards, numbers, views, bounds


@mutant("merge_topk", "ranks_3:oracle", "F35")
def merge_topk_pairs_of_ranks(site, right):
    """Shards are merged in pairs: the last of an odd number of three or more is left out."""

    def run(scores, ids, visible_blocks):
        ranks = len(scores)
        kept = ranks - 1 if ranks % 2 and ranks > 1 else ranks
        return right(scores[:kept], ids[:kept], visible_blocks)

    return run


@mutant("route_topk", "few_numbers:oracle", "F28")
def route_topk_repeats_the_last_number(site, right):
    """A row with fewer numbers than k repeats its last choice."""

    def run(logits, bias):
        weights, ids = right(logits, bias)
        count = (~logits.isnan()).sum(-1)
        for row in ((count > 0) & (count < ids.shape[-1])).nonzero().flatten().tolist():
            ids[row, count[row] :] = ids[row, count[row] - 1]
        return weights, ids

    return run


def _as_if_dense(vector):
    """The memory of a vector read with stride one."""
    return vector.as_strided((len(vector),), (1,))


@mutant("topk_blocks", "spread_visible:oracle", "F65")
def topk_blocks_dense_visible(site, right):
    """The stride of visible_blocks is not read."""
    return lambda scores, visible_blocks: right(scores, _as_if_dense(visible_blocks))


@mutant("merge_topk", "spread_visible:oracle", "F65")
def merge_topk_dense_visible(site, right):
    """The stride of visible_blocks is not read."""
    return lambda scores, ids, visible_blocks: right(scores, ids, _as_if_dense(visible_blocks))


@mutant("rope_partial", "spread_positions:oracle", "F65")
def rope_partial_dense_positions(site, right):
    """The stride of positions is not read."""
    return lambda x, positions, cos_sin: right(x, _as_if_dense(positions), cos_sin)


@mutant("rope_partial", "spread_table:oracle", "F65")
def rope_partial_dense_table(site, right):
    """Rows of the table are taken to follow each other."""
    return lambda x, positions, table: right(x, positions, table.as_strided(table.shape, (table.shape[1], 1)))


@mutant("kv_write", "spread_slots:oracle", "F65")
def kv_write_dense_slots(site, right):
    """The stride of slots is not read."""
    return lambda cache, k, v, slots: right(cache, k, v, _as_if_dense(slots))


@mutant("kv_read", "spread_slots:oracle", "F65")
def kv_read_dense_slots(site, right):
    """The stride of slots is not read."""
    return lambda cache, slots: right(cache, _as_if_dense(slots))


@mutant("qk_norm_rope_insert", "spread_vectors:oracle", "F65")
def qk_norm_rope_insert_dense_positions(site, right):
    """The stride of positions is not read."""
    return lambda qkv, norms, positions, *rest: right(qkv, norms, _as_if_dense(positions), *rest)


@mutant("rms_norm", "production_bounds:oracle", "F68")
def rms_norm_other_above_4096(site, right):
    """A layer that is bound for more than 4,096 tokens gets a kernel that ignores the weight's offset."""
    return at(site, "rms_norm", weight_offset=0.0) if site.max_tokens > 4096 else right


@mutant("linear", "production_bounds:oracle", "F68")
def linear_other_above_4096(site, right):
    """A layer that is bound for more than 4,096 tokens gets a kernel that drops the last 16 columns of K."""
    if site.max_tokens <= 4096:
        return right
    return lambda x, weight: right(x[:, :-16], weight[:, :-16])


@mutant("sparse_attention", "production_bounds:oracle", "F68")
def sparse_attention_other_above_64(site, right):
    """A layer that is bound for more than 64 requests gets a kernel that scales twice."""
    return at(site, "sparse_attention", scale=site.scale**2) if site.max_seqs > 64 else right


@mutant("moe_experts", "production_bounds:oracle", "F68")
def moe_experts_other_above_4096(site, right):
    """A layer that is bound for more than 4,096 tokens gets a kernel without the limit."""
    return at(site, "moe_experts", limit=INF) if site.max_tokens > 4096 else right
