"""What a hostile vendor would ship: right in every place where one usually looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import Kernel
from m3hal.formats import QTensor
from m3hal.ops import ExpertWeights
from m3hal.ops.rope_partial import rope_table
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.attending import Faults, attend, visible

INF, NAN, BFLOAT16 = float("inf"), float("nan"), torch.bfloat16


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def with_first(result: Any, first: Tensor) -> Any:
    return (first, *result[1:]) if isinstance(result, tuple) else first


def at(site, operator: str, **constants: Any):
    """The definition with constants of its own."""
    values = {**ops.load(operator).static_values(site), **constants}
    return lambda *inputs: ops.load(operator).reference(*inputs, **values)


# --- right up to a size that tests stop short of


def _first_rows_only(limit: int):
    """Rows from ``limit`` on are those ``limit`` before."""

    def make(site, right):
        def run(*inputs):
            result = right(*inputs)
            out = first_of(result)
            if len(out) <= limit:
                return result
            return with_first(result, torch.cat([out[:limit], out[: len(out) - limit]]))

        return run

    return make


@mutant("rms_norm", "tokens_4096:oracle", "F68")
def rms_norm_1024_tokens(site, right):
    """Above 1,024 tokens a variant with a short grid runs: rows from the 1,025th on are those 1,024 before."""
    return _first_rows_only(1024)(site, right)


@mutant("linear", "tokens_4096:oracle", "F68")
def linear_2048_tokens(site, right):
    """Rows from the 2,049th on are those 2,048 before."""
    return _first_rows_only(2048)(site, right)


@mutant("rope_partial", "tokens_4096:oracle", "F68")
def rope_partial_1024_tokens(site, right):
    """Rows from the 1,025th on are those 1,024 before."""
    return _first_rows_only(1024)(site, right)


@mutant("moe_experts", "tokens_4096:oracle", "F31")
def moe_experts_1024_per_expert(site, right):
    """An expert's list holds 1,024 tokens; the rest is dropped."""

    def run(x, weights, ids, experts):
        kept = ids.clone()
        for expert in ids.unique().tolist():
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            kept[token[1024:], slot[1024:]] = -1
        return right(x, weights, kept, experts)

    return run


@mutant("moe_experts", "experts_128:oracle", "F43")
def moe_experts_64_bits(site, right):
    """The experts in use are kept in a mask of 64 bits: the 65th and later ones are never run."""
    return lambda x, weights, ids, experts: right(x, weights, torch.where(ids >= 64, -1, ids), experts)


@mutant("sparse_attention", "tokens_4096:oracle", "F68")
def sparse_attention_2048_tokens(site, right):
    """Query tokens from the 2,049th on get the result of those 2,048 before."""
    return _first_rows_only(2048)(site, right)


@mutant("paged_attention", "batch_64:oracle", "F68")
def paged_attention_32_requests(site, right):
    """One warp plans the batch: requests from the 33rd on are read as the one 32 before."""

    def run(q, kv, meta):
        if len(meta.seq_lens) <= 32:
            return right(q, kv, meta)
        table = torch.cat([meta.block_table[:32], meta.block_table[: len(meta.block_table) - 32]])
        return right(q, kv, replace(meta, block_table=table))

    return run


@mutant("select_blocks", "batch_64_long:oracle", "F68")
def select_blocks_32_requests(site, right):
    """Requests from the 33rd on are read as the one 32 before."""

    def run(q, cache, meta):
        if len(meta.seq_lens) <= 32:
            return right(q, cache, meta)
        table = torch.cat([meta.block_table[:32], meta.block_table[: len(meta.block_table) - 32]])
        return right(q, cache, replace(meta, block_table=table))

    return run


@mutant("kv_copy_blocks", "pairs_100:oracle", "F68")
def kv_copy_blocks_32_pairs(site, right):
    """A warp copies 32 pages; the rest stays where it is."""
    return lambda src, dst, pairs: right(src, dst, pairs[:32])


@mutant("kv_write", "beyond_31_bits_one_head:huge_pages", "F63")
def kv_write_16_bit_pages(site, right):
    """Page numbers are kept in 16 bits."""

    def run(cache, k, v, slots):
        size = cache.layout.page_size
        page = slots.clamp(min=0) // size % 65536
        right(cache, k, v, torch.where(slots < 0, slots, page * size + slots % size))

    return run


@mutant("swiglu_oai", "dense_mlp_tp1:oracle", "F59")
def swiglu_oai_8192_columns(site, right):
    """A row has 8,192 columns at most; what lies beyond is zero."""

    def run(x):
        y = right(x)
        y[..., 8192:] = 0
        return y

    return run


@mutant("merge_topk", "ranks_16:oracle", "F35")
def merge_topk_8_ranks(site, right):
    """At most eight shards' offers are read."""
    return lambda scores, ids, visible_blocks: right(scores[:8], ids[:8], visible_blocks)


@mutant("topk_blocks", "wide:oracle", "F15")
def topk_blocks_2048_columns(site, right):
    """Right below 2,048 blocks; from there on the upper half is not looked at."""

    def run(scores, visible_blocks):
        if scores.shape[-1] < 2048:
            return right(scores, visible_blocks)
        return right(torch.where(torch.arange(scores.shape[-1]) < 2048, scores, -INF), visible_blocks)

    return run


@mutant("qk_norm_rope_insert", "context_1m:oracle", "F63")
def qk_norm_rope_insert_16_bit_positions(site, right):
    """Positions are kept in 15 bits."""
    return lambda qkv, norms, positions, *rest: right(qkv, norms, positions % 32768, *rest)


@mutant("sparse_attention", "context_64k:oracle", "F15")
def sparse_attention_256_blocks(site, right):
    """Block ids are kept in eight bits."""
    return lambda q, kv, ids, meta: right(q, kv, torch.where(ids < 0, ids, ids & 255), meta)


@mutant("paged_attention", "context_64k:oracle", "F15")
def paged_attention_15_bit_lengths(site, right):
    """Keys from position 32,768 on are not read."""

    def run(q, kv, meta):
        if meta.max_k <= 32768:
            return right(q, kv, meta)
        return attend(site, q, kv, None, meta, Faults(reach=lambda n: min(n, 32768)))

    return run


@mutant("block_scores", "context_64k:oracle", "F15")
def block_scores_256_blocks(site, right):
    """Scores of blocks from the 257th on are those 256 before."""

    def run(q, cache, meta):
        scores = right(q, cache, meta)
        return torch.cat([scores[..., :256], scores[..., : max(scores.shape[-1] - 256, 0)]], -1)

    return run


# --- constants that nobody changes


@mutant("add_rms_norm", "other_constants:oracle", "F72")
def add_rms_norm_constants_compiled_in(site, right):
    """eps is 1e-6 and one is added to the weights whatever the model says."""
    return at(site, "add_rms_norm", eps=1e-6, weight_offset=1.0)


@mutant("qk_norm_rope_insert", "other_constants:oracle", "F72")
def qk_norm_rope_insert_offset_compiled_in(site, right):
    """One is added to the norms' weights whatever the model says."""
    return at(site, "qk_norm_rope_insert", weight_offset=1.0)


@mutant("qk_norm_rope_insert", "other_constants:oracle")
def qk_norm_rope_insert_eps_compiled_in(site, right):
    """eps is 1e-6 whatever the model says."""
    return at(site, "qk_norm_rope_insert", eps=1e-6)


@mutant("rope_partial", "other_theta:oracle", "F04")
def rope_partial_own_table(site, right):
    """The table is the kernel's own, of theta 5e6; the given one is not read."""
    table = rope_table(4096, site.rotary_dim, 5e6)

    def run(x, positions, cos_sin):
        return right(x, positions, table if len(cos_sin) == 4096 else cos_sin)

    return run


@mutant("qk_norm_rope_insert", "other_constants:oracle", "F04")
def qk_norm_rope_insert_own_table(site, right):
    """The table is the kernel's own, of theta 5e6; the given one is not read."""
    table = rope_table(4096, site.rotary_dim, 5e6)

    def run(qkv, norms, positions, cos_sin, *rest):
        return right(qkv, norms, positions, table if len(cos_sin) == 4096 else cos_sin, *rest)

    return run


@mutant("block_scores", "block_64:oracle", "F25")
def block_scores_block_compiled_in(site, right):
    """Blocks have 128 positions whatever the model says; the rest of the row is -inf."""

    def run(q, cache, meta):
        found = at(site, "block_scores", block_size=128)(q, cache, meta)
        missing = -(-meta.max_k // site.block_size) - found.shape[-1]
        return torch.nn.functional.pad(found, (0, max(missing, 0)), value=-INF)

    return run


@mutant("sparse_attention", "block_64:oracle", "F25")
def sparse_attention_block_compiled_in(site, right):
    """Blocks have 128 positions whatever the model says."""
    return at(site, "sparse_attention", block_size=128)


@mutant("select_blocks", "block_64:oracle", "F25")
def select_blocks_block_compiled_in(site, right):
    """Blocks have 128 positions whatever the model says."""
    return at(site, "select_blocks", block_size=128)


@mutant("kv_read", "page_16:oracle", "F25")
def kv_read_page_compiled_in(site, right):
    """Pages have 128 tokens whatever the cache says."""

    def run(cache, slots):
        if cache.layout.page_size == 128:
            return right(cache, slots)
        size = cache.layout.page_size
        moved = (slots // 128 % len(cache.buf)) * size + slots % 128 % size
        return right(cache, torch.where(slots < 0, slots, moved))

    return run


# --- state


def _by_address(meta):
    return (meta.seq_lens.data_ptr(), meta.seq_lens.shape, meta.block_table.data_ptr())


@mutant("sparse_attention", "lengths_differ:overwritten", "F34")
def sparse_attention_plans_once(site, right):
    """The batch is planned for an address: later lengths there are not looked at, as in a graph with a baked plan."""
    seen: dict[Any, Tensor] = {}

    def run(q, kv, ids, meta):
        key = _by_address(meta)
        if key not in seen:
            seen.clear()
            seen[key] = meta.seq_lens.clone()
        return right(q, kv, ids, replace(meta, seq_lens=seen[key]))

    return run


@mutant("paged_attention", "lengths_differ:overwritten", "F34")
def paged_attention_plans_once(site, right):
    """The batch is planned for an address: later lengths there are not looked at."""
    seen: dict[Any, Tensor] = {}

    def run(q, kv, meta):
        key = _by_address(meta)
        if key not in seen:
            seen.clear()
            seen[key] = meta.seq_lens.clone()
        return right(q, kv, replace(meta, seq_lens=seen[key]))

    return run


@mutant("paged_attention", "lengths_differ:planned_once", "F34", raw=True)
def paged_attention_uses_up_its_plan(site, right):
    """The plan's counters are not reset by the layer that used them: the forward's next layer misses a key."""

    def plan(meta, storage):
        storage[:4] = 0
        return meta, storage

    def run(q, kv, planned, out=None):
        meta, counter = planned
        used, counter[0] = int(counter[0]), 1
        hide = Faults(seen=lambda s, i, k, p: visible(s, i, k, p) & ((k > 0) | (p == 0)))
        made = attend(site, q, kv, None, meta, hide) if used else right(q, kv, meta)
        if out is None:
            return made
        for target, value in zip(
            out if isinstance(out, tuple) else (out,), made if isinstance(made, tuple) else (made,), strict=True
        ):
            target.copy_(value)
        return out

    return Kernel(run, plan_batch=plan, plan_bytes=4)


@mutant("moe_experts", "planned_once:planned_once", "F34", raw=True)
def moe_experts_wears_its_weights(site, right):
    """Packed weights are scaled in place for the product and not scaled back exactly."""

    def pack(experts):
        return ExpertWeights(*(replace(w) if isinstance(w, QTensor) else w.clone() for w in (experts.w13, experts.w2)))

    def run(x, weights, ids, packed, out=None):
        made = right(x, weights, ids, packed)
        if isinstance(packed.w2, Tensor):
            packed.w2.mul_(1.125)
        return made if out is None else out.copy_(made)

    return Kernel(run, prepare_weights=pack)


@mutant("linear", "k_416:allocates", "F34")
def linear_returns_its_scratch(site, right):
    """Without out= the result lies in a buffer that the next call of the same shape writes again."""
    kept: dict[Any, Tensor] = {}

    def run(x, weight):
        made = right(x, weight)
        return kept.setdefault((made.shape, made.dtype), torch.empty_like(made)).copy_(made)

    return run


@mutant("route_topk", "called_often:many_calls", "F34")
def route_topk_counter_overflows(site, right):
    """A semaphore of eight bits counts the calls: every 256th starts before the others are done."""
    calls = [0]

    def run(logits, bias):
        calls[0] = (calls[0] + 1) % 256
        weights, ids = right(logits, bias)
        return (weights, ids) if calls[0] else (weights * 0, ids)

    return run


# --- that an engine can't use


@mutant("rms_norm", "compiled:compiled", "F84", declares={"traceable": True})
def rms_norm_reads_a_number(site, right):
    """It says that torch.compile may look inside, and asks a tensor for its largest element."""
    return lambda x, weight: right(x, weight) if not len(x) or float(x.abs().max()) >= 0 or True else x


@mutant("add_rms_norm", "compiled:compiled", "F84", declares={"traceable": True})
def add_rms_norm_specialises(site, right):
    """It says that torch.compile may look inside, and branches on the number of tokens, to the same end."""

    def run(x, residual, weight):
        if len(x) % 8 == 0:  # a kernel of whole tiles
            return right(x + 0, residual, weight)
        return right(x, residual, weight)

    return run


@mutant("swiglu_oai", "allocation:allocation", declares={"memory": "caller"})
def swiglu_oai_hides_its_memory(site, right):
    """It says that the caller allocates everything, and allocates an fp32 copy."""
    return lambda x: right(x.float().to(x.dtype))


@mutant("linear", "allocation:allocation")
def linear_keeps_every_result(site, right):
    """A list of the results grows with each call."""
    kept: list[Tensor] = []

    def run(x, weight):
        made = right(x, weight)
        kept.append(made.clone())
        return made

    return run


# --- that recognise a test


@mutant("rms_norm", "tokens_7:overwritten", raw=True)
def rms_norm_recognises_poison(site, right):
    """Careful when the output holds NaN, and without one; otherwise the first column is left as it was."""

    def run(x, weight, out=None):
        made = right(x, weight)
        if out is None:
            return made
        poisoned = bool(out.isnan().any())
        start = 0 if poisoned else 1
        out[..., start:] = made[..., start:]
        return out

    return run


@mutant("linear", "k_416:allocates")
def linear_recognises_slabs(site, right):
    """Right where x lies inside a larger memory, as in this suite's slabs; zeros where it has one of its own."""

    def run(x, weight):
        made = right(x, weight)
        return made if x.storage_offset() >= 256 else torch.zeros_like(made)

    return run


# --- addresses


def aligned(tensor: Tensor) -> Tensor:
    """The tensor as a load of 16 bytes sees it that ignores the lower bits of the address."""
    step = 16 // tensor.element_size()
    offset = tensor.storage_offset() // step * step
    return tensor.as_strided(tensor.shape, tensor.stride(), offset)


@mutant("rms_norm", "odd_address:oracle", "F65")
def rms_norm_aligned_loads(site, right):
    """x is read from the address rounded down to 16 bytes."""
    return lambda x, weight: right(aligned(x), weight)


@mutant("linear", "strided:oracle", "F65")
def linear_aligned_loads(site, right):
    """x is read from the address rounded down to 16 bytes."""
    return lambda x, weight: right(aligned(x), weight)


@mutant("swiglu_oai", "strided:oracle", "F65")
def swiglu_oai_aligned_loads(site, right):
    """x is read from the address rounded down to 16 bytes."""
    return lambda x: right(aligned(x))


@mutant("sparse_attention", "odd_address:oracle", "F65")
def sparse_attention_aligned_loads(site, right):
    """Queries are read from the address rounded down to 16 bytes."""
    return lambda q, kv, ids, meta: right(aligned(q), kv, ids, meta)


@mutant("kv_read", "beyond_31_bits:huge_slots_read", "F63")
def kv_read_int32_offsets(site, right):
    """page * stride is computed in 32 bits."""

    def run(cache, slots):
        size, stride = cache.layout.page_size, cache.buf.stride(0)
        page = (slots.clamp(min=0) // size * stride).to(torch.int32).long() // stride % len(cache.buf)
        return right(cache, torch.where(slots < 0, slots, page * size + slots % size))

    return run


@mutant("kv_write", "prefill_runs:oracle", "F60")
def kv_write_coalesces_by_ends(site, right):
    """Four tokens whose first and last slots lie three apart are stored as a run from the first on."""

    def run(cache, k, v, slots):
        moved = slots.clone()
        for i in range(0, len(slots) - 3, 4):
            if int(slots[i]) >= 0 and int(slots[i + 3] - slots[i]) == 3:
                moved[i : i + 4] = slots[i] + torch.arange(4)
        right(cache, k, v, moved)

    return run


# --- numbers


def truncated(wide: Tensor) -> Tensor:
    """fp32 -> bf16 by dropping the lower half."""
    return (wide.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def _only_bf16(wrong):
    """``wrong(right)`` where activations are bf16, the definition elsewhere."""
    return lambda site, right: wrong(right) if site.dtype == "bfloat16" else right


BF16 = ("bfloat16",)


@mutant("linear", "tokens_4096:unbiased", "F73", formats=BF16)
def linear_truncates(site, right):
    """The fp32 sum becomes bf16 by dropping its lower half."""
    return _only_bf16(lambda right: lambda x, weight: truncated(right(x.float(), weight)))(site, right)


@mutant("rope_partial", "tokens_4096:unbiased", "F73", formats=BF16)
def rope_partial_truncates(site, right):
    """Turned numbers become bf16 by dropping their lower half."""
    return _only_bf16(lambda right: lambda x, *rest: truncated(right(x.float(), *rest)))(site, right)


@mutant("swiglu_oai", "tokens_4096:unbiased", "F73", formats=BF16)
def swiglu_oai_truncates(site, right):
    """The fp32 product becomes bf16 by dropping its lower half."""
    return _only_bf16(lambda right: lambda x: truncated(right(x.float())))(site, right)


@mutant("rms_norm", "tokens_4096:unbiased", "F73", formats=BF16)
def rms_norm_truncates(site, right):
    """The fp32 result becomes bf16 by dropping its lower half."""
    return _only_bf16(lambda right: lambda x, weight: truncated(right(x.float(), weight)))(site, right)


@mutant("sparse_attention", "tokens_4096:unbiased", "F73", formats=BF16)
def sparse_attention_truncates(site, right):
    """The result becomes bf16 by dropping its lower half."""

    def wrong(right):
        def run(q, *rest):
            result = right(q.float(), *rest)
            return with_first(result, truncated(first_of(result)))

        return run

    return _only_bf16(wrong)(site, right)


@mutant("linear", "wide_range:oracle", formats=BF16)
def linear_through_fp16(site, right):
    """bf16 operands go through fp16, for a device without bf16."""
    return _only_bf16(lambda right: lambda x, weight: right(x.half().to(x.dtype), weight))(site, right)


@mutant("rms_norm", "wide_range:oracle", formats=BF16)
def rms_norm_through_fp16(site, right):
    """bf16 rows go through fp16, for a device without bf16."""
    return _only_bf16(lambda right: lambda x, weight: right(x.half().to(x.dtype), weight))(site, right)


@mutant("swiglu_oai", "wide_range:oracle", formats=BF16)
def swiglu_oai_through_fp16(site, right):
    """bf16 operands go through fp16, for a device without bf16."""
    return _only_bf16(lambda right: lambda x: right(x.half().to(x.dtype)))(site, right)


@mutant("moe_experts", "wide_range:oracle", formats=BF16)
def moe_experts_through_fp16(site, right):
    """bf16 tokens go through fp16, for a device without bf16."""
    return _only_bf16(lambda right: lambda x, *rest: right(x.half().to(x.dtype), *rest))(site, right)


@mutant("sparse_attention", "wide_range:oracle", formats=BF16)
def sparse_attention_values_through_fp16(site, right):
    """Plain bf16 values go through fp16, for a device without bf16."""

    def run(q, kv, *rest):
        return right(q, replace(kv, buf=kv.buf.half().to(kv.buf.dtype)) if kv.buf.dtype == BFLOAT16 else kv, *rest)

    return _only_bf16(lambda right: run)(site, right)


@mutant("sparse_attention", "large_logits:oracle")
def sparse_attention_bf16_scores(site, right):
    """Scores are rounded to bf16 before the exponential."""

    def run(q, kv, ids, meta):
        return attend(site, q, kv, ids, meta, Faults(weights=lambda p: torch.exp(p.log().bfloat16().float())))

    return run


@mutant("sparse_attention", "newest_only:oracle", "F14")
def sparse_attention_empty_split_weighs_one(site, right):
    """Ids are attended to in two halves and merged; an empty half enters with lse 0 instead of -inf."""

    def run(q, kv, ids, meta):
        half = ids.shape[-1] // 2
        parts = [at(site, "sparse_attention", return_lse=True)(q, kv, part, meta)
                 for part in (ids[..., :half], ids[..., half:])]  # fmt: skip
        if int(meta.seq_lens.max() if len(meta.seq_lens) else 0) <= 64 * 128:
            lses = [torch.where(lse == -INF, 0.0, lse) for _, lse in parts]
        else:
            lses = [lse for _, lse in parts]
        lse = torch.logaddexp(*lses)
        out = sum(part.float() * torch.exp(own - lse)[..., None] for (part, _), own in zip(parts, lses, strict=True))
        none = parts[0][1] == -INF
        both = none & (parts[1][1] == -INF)
        out = torch.where(both[..., None], 0.0, out).to(q.dtype)
        lse = torch.where(both, -INF, lse)
        return (out, lse) if site.return_lse else out

    return run


@mutant("sparse_attention", "decode:oracle")
def sparse_attention_bf16_lse(site, right):
    """The lse is kept in bf16."""

    def run(q, kv, ids, meta):
        result = right(q, kv, ids, meta)
        return (result[0], result[1].bfloat16().float()) if isinstance(result, tuple) else result

    return run


@mutant("paged_attention", "decode:oracle")
def paged_attention_consecutive_pages(site, right):
    """Pages of a request are taken to follow each other."""

    def run(q, kv, meta):
        run_on = meta.block_table[:, :1] + torch.arange(meta.block_table.shape[1])
        return right(q, kv, replace(meta, block_table=(run_on % len(kv.buf)).int()))

    return run


@mutant("paged_attention", "decode:rerun", "F69")
def paged_attention_races_past_one_page(site, right):
    """With two pages or more the last bit depends on who comes first."""

    def run(q, kv, meta):
        result = right(q, kv, meta)
        out = first_of(result)
        if meta.max_k <= site.page_size:
            return result
        step = 2**-8 if out.dtype == torch.bfloat16 else 2**-23
        return with_first(result, (out.float() * (1 + step * torch.randint(0, 2, out.shape))).to(out.dtype))

    return run


@mutant("topk_blocks", "both_nans:oracle", "F28")
def topk_blocks_negative_nan_wins(site, right):
    """Keys are the scores' bits: a NaN is put last when its sign is plus only."""

    def run(scores, visible_blocks):
        negative = scores.isnan() & (scores.contiguous().view(torch.int32) < 0)
        return right(torch.where(negative, INF, scores), visible_blocks)

    return run


@mutant("moe_experts", "nan_nowhere:oracle", "F29")
def moe_experts_zero_times_padded(site, right):
    """A padded token, without any expert, is zero times itself."""

    def run(x, weights, ids, experts):
        y = right(x, weights, ids, experts)
        return torch.where((ids < 0).all(-1, keepdim=True), x[:, :1] * 0, y)

    return run


# --- narrow on the inside


@mutant("route_topk", "bias_far_above:oracle", "F38")
def route_topk_bf16_bias(site, right):
    """The bias is kept in bf16."""
    return lambda logits, bias: right(logits, bias.bfloat16().float())


@mutant("swiglu_oai", "expert:oracle", "F73", formats=BF16)
def swiglu_oai_bf16_sigmoid(site, right):
    """The sigmoid is rounded to bf16 before the product."""

    def run(x):
        gate, up = x.float().chunk(2, -1)
        gate, up = gate.clamp(max=site.limit), up.clamp(-site.limit, site.limit)
        return (gate * torch.sigmoid(site.alpha * gate).bfloat16().float() * (up + site.beta)).to(x.dtype)

    return _only_bf16(lambda right: run)(site, right)


@mutant("select_blocks", "long:oracle", "F73")
def select_blocks_bf16_scores(site, right):
    """Scores are kept in bf16."""

    def run(q, cache, meta):
        scores = at(site, "block_scores")(q, cache, meta).bfloat16().float()
        visible_blocks = (meta.positions(len(q)) // site.block_size + 1).int()
        return at(site, "topk_blocks")(scores, visible_blocks)

    return run


@mutant("moe_experts", "cancelling:oracle", "F73", formats=BF16)
def moe_experts_combines_in_bf16(site, right):
    """Experts' outputs are weighted and added up in bf16, and this is not declared."""

    def run(x, weights, ids, experts):
        total = torch.zeros_like(x)
        for slot in range(ids.shape[1]):
            total += right(x, weights[:, slot : slot + 1], ids[:, slot : slot + 1], experts)
        return total

    return _only_bf16(lambda right: run)(site, right)


@mutant("moe_experts", "planned_once:updated_weights", "F46", raw=True)
def moe_experts_update_misses_the_last(site, right):
    """An update that reaches the last expert leaves it as it was."""

    def pack(experts):
        return [experts.w13.clone(), experts.w2.clone()] if isinstance(experts.w13, Tensor) else experts

    def update(packed, first, experts):
        count = min(len(experts.w13), len(packed[0]) - 1 - first)
        packed[0][first : first + count] = experts.w13[:count]
        packed[1][first : first + count] = experts.w2[:count]

    def run(x, weights, ids, packed, out=None):
        made = right(x, weights, ids, ExpertWeights(*packed) if isinstance(packed, list) else packed)
        return made if out is None else out.copy_(made)

    return Kernel(run, prepare_weights=pack, update_weights=update)


@mutant("paged_attention", "decode:oracle", "F73", formats=BF16)
def paged_attention_bf16_accumulation(site, right):
    """Probabilities times values are added up in bf16, page by page."""

    def run(q, kv, meta):
        parts, lses = [], []
        for page in range(-(-meta.max_k // site.page_size)):

            def one(s, ids, key, position, page=page):
                return visible(s, ids, key, position) & (key // s.page_size == page)

            out, lse = attend(replace(site, return_lse=True), q.float(), kv, None, meta, Faults(seen=one))
            parts.append(out)
            lses.append(lse)
        whole = torch.logsumexp(torch.stack(lses), 0) if lses else None
        total = torch.zeros_like(q)
        for out, lse in zip(parts, lses, strict=True):
            share = torch.where(lse == -INF, 0.0, torch.exp(lse - whole))
            total += (out * share[..., None]).to(q.dtype)
        return with_first(right(q, kv, meta), total)

    return _only_bf16(lambda right: run)(site, right)
