"""``paged_attention``: dense attention over a paged cache, for the dense layers and the drafter.

One program takes a tile of a request's query tokens and one kv head and walks the keys that the tile can see. A small
batch splits them, by their real number, over several programs; ``merge_splits`` puts the parts together.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import (
    DOT_PRECISION,
    LOG2_E,
    after,
    common_power_of_two,
    multiprocessors,
    power_of_two_below,
    programmatic,
)
from m3hal_triton._plan import BatchPlan, plan_batch, plan_bytes
from m3hal_triton._sparse_decode import merge_splits

#: query tokens of one program
MAX_QUERY_TILE = 8
#: rows of the matrix unit's smallest tile
MIN_ROWS = 16
#: of one program's work, and programs of a split batch, at most
MAX_SPLITS = 32
MAX_SPLIT_PROGRAMS = 1024

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def paged_attention(site: Site) -> Kernel:
    """The kernel for a site."""
    rows = MAX_SPLIT_PROGRAMS * MAX_QUERY_TILE * (site.num_q_heads // site.num_kv_heads)
    return Kernel(
        run=_Run(site),
        workspace_bytes=4 * min(rows, site.max_tokens * site.num_q_heads * MAX_SPLITS) * (site.head_dim + 1),
        plan_batch=partial(plan_batch, max_tokens=site.max_tokens, max_seqs=site.max_seqs, block_size=site.page_size),
        plan_bytes=plan_bytes(site.max_tokens, site.max_seqs),
    )


class _Run:
    """``run(q, kv, batch, out=None, workspace=None)``."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._group = site.num_q_heads // site.num_kv_heads
        self._narrow = site.dtype == "float32"  # IEEE products of fp32 hold their operands in registers
        self._keys = min(common_power_of_two(site.page_size), 16 if self._narrow else 64)
        self._tile = max(1, MIN_ROWS // self._group) if self._narrow else MAX_QUERY_TILE
        self._fake = partial(load("paged_attention").fake, return_lse=site.return_lse)

    def __call__(
        self,
        q: torch.Tensor,
        kv: PagedCache,
        batch: BatchPlan,
        out: Output | None = None,
        workspace: torch.Tensor | None = None,
    ) -> Output:
        site, meta = self._site, batch.meta
        result = self._fake(q, kv, meta) if out is None else out
        requests = meta.seq_lens.shape[0]
        output, lse = result if site.return_lse else (result, result)
        if not q.shape[0] or not requests:
            output.zero_()
            if site.return_lse:
                lse.fill_(float("-inf"))
            return result
        tile = power_of_two_below(min(triton.next_power_of_2(max(meta.max_q, 1)), self._tile))
        chunks = triton.cdiv(max(meta.max_q, 1), tile)
        programs = requests * chunks * site.num_kv_heads
        splits = min(power_of_two_below(min(2 * multiprocessors(q.device), MAX_SPLIT_PROGRAMS) // programs), MAX_SPLITS)
        early = splits > 1 and programmatic(q.device)
        words = workspace.view(torch.float32)
        rows = q.shape[0] * site.num_q_heads * splits if splits > 1 else 0
        partials, partial_lse = words[: rows * site.head_dim], words[rows * site.head_dim :]
        k, v = kv.k, kv.v
        padded = max(MIN_ROWS, triton.next_power_of_2(tile * self._group))
        attend_dense[(splits, site.num_kv_heads, requests * chunks)](
            q, k, v, meta.cu_q, meta.seq_lens, meta.block_table, partials, partial_lse, output, lse,
            site.scale * LOG2_E, q.shape[0], requests, chunks,
            *q.stride(), *k.stride(), *v.stride(), *meta.block_table.stride(), *output.stride(), *lse.stride()[:2],
            GROUP=self._group,
            ROWS=padded,
            QT=tile,
            DIM=site.head_dim,
            PAGE=site.page_size,
            KEYS=self._keys,
            CAUSAL=site.causal,
            WINDOW=site.window_left,
            SPLITS=splits,
            LSE=site.return_lse,
            PRECISION=DOT_PRECISION,
            EARLY=early,
            num_warps=8 if self._narrow or padded > 64 else 4,
            num_stages=2 if self._narrow else 3,
        )  # fmt: skip
        if splits > 1:
            merge_splits[(q.shape[0], site.num_q_heads)](
                partials, partial_lse, batch.request, output, lse, site.num_q_heads,
                *output.stride(), *lse.stride()[:2],
                DIM=site.head_dim, SPLITS=splits, LSE=site.return_lse, EARLY=early,
                num_warps=max(1, splits // 16), **after(early),
            )  # fmt: skip
        return result


@triton.jit
def attend_dense(
    q,
    k,
    v,
    cu_q,
    seq_lens,
    block_table,
    partial,
    partial_lse,
    out,
    lse,
    scale,  # includes log2(e)
    tokens,
    requests,
    chunks,  # programs along the tokens of one request
    q_token,
    q_head,
    q_dim,
    k_page,
    k_head,
    k_slot,
    k_dim,
    v_page,
    v_head,
    v_slot,
    v_dim,
    table_row,
    table_slot,
    out_token,
    out_head,
    out_dim,
    lse_token,
    lse_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QT: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    group = tl.program_id(1)
    work = tl.program_id(2)
    request = work // chunks
    first = tl.load(cu_q + request) + work % chunks * QT
    last = tl.load(cu_q + request + 1)
    owned = tl.load(cu_q + requests)
    seq_len = tl.load(seq_lens + request)
    row = tl.arange(0, ROWS)
    head = group * GROUP + row % GROUP
    dim = tl.arange(0, DIM)
    if split == 0:  # tokens that belong to no request: rows of zeros
        for loose in range(owned + work, tokens, tl.num_programs(2)):
            one = row < GROUP
            to = out + tl.cast(loose, tl.int64) * out_token + head[:, None] * out_head + dim[None, :] * out_dim
            tl.store(to, tl.zeros((ROWS, DIM), out.dtype.element_ty), mask=one[:, None])
            if LSE:
                tl.store(lse + tl.cast(loose, tl.int64) * lse_token + head * lse_head, float("-inf"), mask=one)
    if first >= last:
        return

    token = (first + row // GROUP).to(tl.int64)
    live = (token < last) & (row < QT * GROUP)
    position = seq_len - (last - token).to(tl.int32)
    at_q = q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :] * q_dim
    queries = tl.load(at_q, mask=live[:, None], other=0.0)
    oldest = seq_len - (last - first)
    newest = seq_len - (last - tl.minimum(first + QT, last)) - 1
    low = 0
    if WINDOW >= 0:
        low = tl.maximum(oldest - WINDOW, 0) // KEYS
    high = tl.cdiv(newest + 1, KEYS) if CAUSAL else tl.cdiv(seq_len, KEYS)
    high = tl.where(seq_len > 0, tl.maximum(high, low), low)
    begin = low + split * (high - low) // SPLITS
    end = low + (split + 1) * (high - low) // SPLITS

    table = block_table + request.to(tl.int64) * table_row
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for step in range(begin, end):
        start = step * KEYS
        page = tl.load(table + (start // PAGE) * table_slot).to(tl.int64)
        offset = start % PAGE + tl.arange(0, KEYS)
        key = start + tl.arange(0, KEYS)
        written = key < seq_len
        at_k = k + page * k_page + group * k_head + offset[None, :] * k_slot + dim[:, None] * k_dim
        keys = tl.load(at_k, mask=written[None, :], other=0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        visible = written[None, :] & live[:, None]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        if WINDOW >= 0:
            visible = visible & (key[None, :] >= position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        at_v = v + page * v_page + group * v_head + offset[:, None] * v_slot + dim[None, :] * v_dim
        values = tl.load(at_v, mask=written[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        top = higher

    seen = total > 0
    result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    result = tl.where((total != total)[:, None], float("nan"), result)
    base2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    base2 = tl.where(total != total, float("nan"), base2)
    if SPLITS > 1:
        part = (token * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        tl.store(partial + part[:, None] * DIM + dim[None, :], result, mask=live[:, None])
        tl.store(partial_lse + part, base2, mask=live)
    else:
        at = out + token[:, None] * out_token + head[:, None] * out_head + dim[None, :] * out_dim
        tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None])
        if LSE:
            tl.store(lse + token * lse_token + head * lse_head, base2 * 0.6931471805599453, mask=live)
