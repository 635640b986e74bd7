"""The running softmax that the attention kernels share, and the merge of results over parts of the keys."""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def accumulate(scores, values, top, total, acc, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, theirs=None):
    """One step: scores [ROWS, KEYS] in units of log2 with -inf where hidden, values [KEYS, DIM].

    theirs: the rows that these values are for; NaN among them spreads to no other row.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    more = tl.dot(weights.to(COMPUTE), values, input_precision=PRECISION)
    if theirs is not None:
        more = tl.where(theirs[:, None], more, 0.0)
    return higher, total, acc * shrink[:, None] + more


@triton.jit
def finish(
    top, total, acc, value_factor, token, head, dim, live, split,
    partial, partial_lse, out, lse, heads, out_strides, lse_token, lse_head,
    DIM: tl.constexpr, SPLITS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Stores rows of results: into out and lse, or as one of SPLITS parts. A row that saw no key is zeros and -inf."""
    seen = total > 0
    result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0) * value_factor
    result = tl.where((total != total)[:, None], float("nan"), result)
    base2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    base2 = tl.where(total != total, float("nan"), base2)
    if SPLITS > 1:
        part = (token * heads + head) * SPLITS + split
        tl.store(partial + part[:, None] * DIM + dim[None, :], result, mask=live[:, None])
        tl.store(partial_lse + part, base2, mask=live)
    else:
        at = out + token[:, None] * out_strides[0] + head[:, None] * out_strides[1] + dim[None, :] * out_strides[2]
        tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None])
        if LSE:
            tl.store(lse + token * lse_token + head * lse_head, base2 * LN_2, mask=live)


@triton.jit
def merge_arrived(
    arrivals, first_part, first_head, token, partial, partial_lse, out, lse, out_strides, lse_token, lse_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """The program that arrives last of a token's splits merges them for its GROUP heads, in the splits' order.

    arrivals: a counter, zero before and after. first_part: of head ``first_head``; a head has SPLITS parts.
    """
    AT_ONCE: tl.constexpr = 128 // SPLITS if SPLITS > 8 else 16
    tl.debug_barrier()  # all threads' parts are stored before one says so
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        tl.store(arrivals, 0)
        split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
        for first in tl.static_range(0, GROUP, AT_ONCE):
            row = first + tl.arange(0, AT_ONCE)
            real = row < GROUP
            part = first_part + row[None, :] * SPLITS + split[:, None]
            base2 = tl.load(partial_lse + part, mask=real[None, :], other=float("-inf"), cache_modifier=".cg")
            at = partial + part[:, :, None] * DIM + dim[None, None, :]
            at = tl.max_contiguous(at, [1, 2, 4])  # warps along rows: a sum over splits stays within a thread
            values = tl.load(at, mask=real[None, :, None], other=0.0, cache_modifier=".cg")
            top = tl.max(base2, 0)
            weight = tl.exp2(base2 - tl.where(top == float("-inf"), 0.0, top)[None, :])
            total = tl.sum(weight, 0)
            empty = total == 0
            result = tl.sum(values * weight[:, :, None], 0) / tl.where(empty, 1.0, total)[:, None]
            to = out + token * out_strides[0] + (first_head + row)[:, None] * out_strides[1]
            to = to + dim[None, :] * out_strides[2]
            tl.store(to, result.to(out.dtype.element_ty), mask=real[:, None])
            if LSE:
                natural = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
                tl.store(lse + token * lse_token + (first_head + row) * lse_head, natural, mask=real)


@triton.jit
def clear_loose(
    first, tokens, step, head, dim, one, out, lse, out_strides, lse_token, lse_head,
    ROWS: tl.constexpr, DIM: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Zeros and -inf for every ``step``-th token from ``first`` on: tokens that belong to no request."""
    for loose in range(first, tokens, step):
        token = tl.cast(loose, tl.int64)
        at = out + token * out_strides[0] + head[:, None] * out_strides[1] + dim[None, :] * out_strides[2]
        tl.store(at, tl.zeros((ROWS, DIM), out.dtype.element_ty), mask=one[:, None])
        if LSE:
            tl.store(lse + token * lse_token + head * lse_head, float("-inf"), mask=one)


@triton.jit(
    do_not_specialize=["heads", "lse_token", "lse_head"],
    do_not_specialize_on_alignment=["partial_lse", "request_of", "lse"],
)
def merge_splits(
    partial,
    partial_lse,
    request_of,
    out,
    lse,
    heads,
    out_strides,
    lse_token,
    lse_head,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    LSE: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel that it waits for has ended, and lets the next one be too
    LOOSE: tl.constexpr = True,  # a token without a request has no parts
    DIVIDED: tl.constexpr = True,  # else parts are sums; partial_lse holds largest scores, behind them weights' sums
):
    """One row of the result: a token's head, over its splits. A token without a request gets zeros."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    part = (token * heads + head) * SPLITS + split
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if LOOSE:
        real = tl.load(request_of + token) + split * 0 >= 0
        base2 = tl.load(partial_lse + part, mask=real, other=float("-inf"))
        values = tl.load(partial + part[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
    else:
        base2 = tl.load(partial_lse + part)
        amount = 1.0
        if not DIVIDED:
            amount = tl.load(partial_lse + tl.num_programs(0) * heads * SPLITS + part)
        values = tl.load(partial + part[:, None] * DIM + dim[None, :])
    top = tl.max(base2, 0)
    weight = tl.exp2(base2 - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0) if DIVIDED else tl.sum(weight * amount, 0)
    empty = total == 0
    result = tl.sum(values * weight[:, None], 0) / tl.where(empty, 1.0, total)
    if not DIVIDED:
        result = tl.where(empty, 0.0, result)
    at = out + token * out_strides[0] + head * out_strides[1] + dim * out_strides[2]
    tl.store(at, result.to(out.dtype.element_ty))
    if LSE:
        natural = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
        tl.store(lse + token * lse_token + head * lse_head, natural)
