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
from m3hal_triton import _pages
from m3hal_triton._decode import (
    as_queries,
    check_alignment,
    compute_dtype,
    dims,
    factor,
    key_dims,
    load_keys,
    load_rows,
    load_scales,
    native,
)
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
from m3hal_triton._softmax import accumulate, clear_loose, finish, merge_splits

#: query tokens of one program
MAX_QUERY_TILE = 8
#: rows of the matrix unit's smallest tile, and of one that several query tokens share
MIN_ROWS, MAX_ROWS = 16, 128
#: of one step, at most
KEYS = 64
#: of one program's work, and programs of a split batch, at most
MAX_SPLITS = 32
MAX_SPLIT_PROGRAMS = 1024

#: arguments of the kernel whose values and addresses make no other kernel
_NUMBERS = ["tokens", "requests", "chunks", "table_row", "table_slot", "lse_token", "lse_head"]
_ARRAYS = ["cu_q", "seq_lens", "block_table", "partial_lse", "lse"]

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def paged_attention(site: Site) -> Kernel:
    """The kernel for a site."""
    rows = MAX_SPLIT_PROGRAMS * MAX_QUERY_TILE * (site.num_q_heads // site.num_kv_heads)
    workspace_bytes = 4 * min(rows, site.max_tokens * site.num_q_heads * MAX_SPLITS) * (site.head_dim + 1)
    return _kernel(site, _Run(site), workspace_bytes)


def batch_invariant(site: Site) -> Kernel:
    """The same, where a request's rows have the same bits alone and in any batch: all tiles are alike, none split."""
    return _kernel(site, _Run(site, fixed=True), 0)


def _kernel(site: Site, run: _Run, workspace_bytes: int) -> Kernel:
    return Kernel(
        run=run,
        workspace_bytes=workspace_bytes,
        plan_batch=partial(plan_batch, max_tokens=site.max_tokens, max_seqs=site.max_seqs, block_size=site.page_size),
        plan_bytes=plan_bytes(site.max_tokens, site.max_seqs),
    )


class _Run:
    """``run(q, kv, batch, out=None, workspace=None)``."""

    def __init__(self, site: Site, fixed: bool = False) -> None:
        self._site = site
        self._fixed = fixed
        self._group = site.num_q_heads // site.num_kv_heads
        self._narrow = site.dtype == "float32"  # IEEE products of fp32 hold their operands in registers
        self._keys = min(common_power_of_two(site.page_size), 16 if self._narrow else KEYS)
        self._tile = max(1, min(MAX_QUERY_TILE, (MIN_ROWS if self._narrow else MAX_ROWS) // self._group))
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
        check_alignment(kv)
        requests = meta.seq_lens.shape[0]
        output, lse = result if site.return_lse else (result, result)
        if not q.shape[0] or not requests:
            output.zero_()
            if site.return_lse:
                lse.fill_(float("-inf"))
            return result
        tile = self._tile if self._fixed else min(triton.next_power_of_2(max(meta.max_q, 1)), self._tile)
        tile = power_of_two_below(tile)
        chunks = triton.cdiv(max(meta.max_q, 1), tile)
        # parts are of all tokens, those of no request too
        programs = max(requests * chunks, triton.cdiv(q.shape[0], tile)) * site.num_kv_heads
        splits = min(power_of_two_below(min(2 * multiprocessors(q.device), MAX_SPLIT_PROGRAMS) // programs), MAX_SPLITS)
        splits = 1 if self._fixed or workspace is None else splits
        early = splits > 1 and programmatic(q.device)
        words = q.new_empty(0, dtype=torch.float32) if workspace is None else workspace.view(torch.float32)
        rows = q.shape[0] * site.num_q_heads * splits if splits > 1 else 0
        partials, partial_lse = words[: rows * site.head_dim], words[rows * site.head_dim :]
        padded = max(MIN_ROWS, triton.next_power_of_2(tile * self._group))
        # a prompt beside many decodes: most tiles of as many as the longest request has would be empty
        tiles = triton.cdiv(q.shape[0], tile) + requests
        ragged = requests * chunks > 2 * tiles
        attend_dense[(tiles if ragged else requests * chunks, site.num_kv_heads, splits)](
            q, _pages.memory(kv), _pages.keys(kv), _pages.values(kv), kv.k_scale, kv.v_scale,
            meta.cu_q, meta.seq_lens, meta.block_table, partials, partial_lse, output, lse,
            site.scale * LOG2_E, q.shape[0], requests, chunks,
            q.stride(), *meta.block_table.stride(), output.stride(), *lse.stride()[:2],
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
            FORMAT=site.kv_format,
            COMPUTE=compute_dtype(site.kv_format, site.dtype),
            NATIVE=native(q.device, site.head_dim, site.dtype),
            PRECISION=DOT_PRECISION,
            EARLY=early,
            REQUESTS=triton.next_power_of_2(site.max_seqs) if ragged else 0,
            num_warps=8 if self._narrow or padded > 64 else 4,
            num_stages=2 if self._narrow else 3,
        )  # fmt: skip
        if splits > 1:
            merge_splits[(q.shape[0], site.num_q_heads)](
                partials, partial_lse, batch.request, output, lse, site.num_q_heads, output.stride(), *lse.stride()[:2],
                DIM=site.head_dim, SPLITS=splits, LSE=site.return_lse, EARLY=early,
                num_warps=max(1, splits // 16), **after(early),
            )  # fmt: skip
        return result


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_dense(
    q,
    cache,
    keys,  # _pages.Part
    values,
    k_scale,
    v_scale,
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
    q_strides,
    table_row,
    table_slot,
    out_strides,
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
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # let the merge be launched now; it waits for this kernel's end by itself
    REQUESTS: tl.constexpr,  # at least the requests of any batch, whose tiles are counted; 0: each has ``chunks``
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    SMALL: tl.constexpr = ROWS < 64
    work = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    request, chunk = work // chunks, work % chunks
    if REQUESTS > 0:
        b = tl.arange(0, REQUESTS)
        begin = tl.load(cu_q + b, mask=b < requests, other=0)
        tiles = tl.cdiv(tl.load(cu_q + b + 1, mask=b < requests, other=0) - begin, QT)
        ends = tl.cumsum(tiles, 0)
        request = tl.sum(((ends <= work) & (b < requests)).to(tl.int32), 0)
        # past all tiles: the last request's, from its end on
        chunk = work - tl.sum(tl.where(b < request, tiles, 0), 0)
        chunk = tl.where(request < requests, chunk, tl.max(tiles, 0))
        request = tl.minimum(request, requests - 1)
    first = tl.load(cu_q + request) + chunk * QT
    last = tl.load(cu_q + request + 1)
    seq_len = tl.load(seq_lens + request)
    row = tl.arange(0, ROWS)
    head = group * GROUP + row % GROUP
    dim = dims(DIM, FORMAT)
    q_dim = key_dims(DIM, FORMAT, SMALL)
    if split == 0 and SPLITS == 1:
        loose = tl.load(cu_q + requests) + work
        clear_loose(
            loose, tokens, tl.num_programs(0), head, dim, row < GROUP, out, lse, out_strides, lse_token, lse_head,
            ROWS, DIM, LSE,
        )  # fmt: skip
    if first >= last:
        return

    token = (first + row // GROUP).to(tl.int64)
    live = (token < last) & (row < QT * GROUP)
    position = seq_len - (last - token).to(tl.int32)
    at_q = q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + q_dim[None, :] * q_strides[2]
    queries, q_factor = as_queries(tl.load(at_q, mask=live[:, None], other=0.0), COMPUTE, 1)
    score_factor = q_factor * (scale * factor(k_scale, FORMAT))
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
    k_next, v_next = 0, 0
    if FORMAT == "nvfp4":
        key = begin * KEYS + tl.arange(0, KEYS)
        page = tl.load(table + begin * KEYS // PAGE * table_slot, mask=begin < end, other=0).to(tl.int64)
        k_next = load_scales(cache, keys, page, group, key % PAGE, None, DIM, FORMAT, False)
        v_next = load_scales(cache, values, page, group, key % PAGE, key < seq_len, DIM, FORMAT, True)
    for step in range(begin, end):
        start = step * KEYS
        page = tl.load(table + (start // PAGE) * table_slot).to(tl.int64)
        offset = start % PAGE + tl.arange(0, KEYS)
        key = start + tl.arange(0, KEYS)
        written = key < seq_len
        k_scales, v_scales = k_next, v_next
        if FORMAT == "nvfp4":
            later = key + KEYS
            page_after = tl.load(
                table + (start + KEYS) // PAGE * table_slot, mask=step + 1 < end, other=0
            ).to(tl.int64)  # fmt: skip
            k_next = load_scales(cache, keys, page_after, group, later % PAGE, None, DIM, FORMAT, False)
            v_next = load_scales(cache, values, page_after, group, later % PAGE, later < seq_len, DIM, FORMAT, True)
        k_tile = load_keys(cache, keys, page, group, offset, None, k_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, SMALL)
        scores = tl.dot(queries, k_tile, input_precision=PRECISION) * score_factor[:, None]
        visible = written[None, :] & live[:, None]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        if WINDOW >= 0:
            visible = visible & (key[None, :] >= position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        v_tile = load_rows(cache, values, page, group, offset, written, v_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
        top, total, acc = accumulate(scores, v_tile, top, total, acc, COMPUTE, PRECISION)
    finish(
        top, total, acc, factor(v_scale, FORMAT), token, head, dim, live, split, partial, partial_lse, out, lse,
        tl.num_programs(1) * GROUP, out_strides, lse_token, lse_head, DIM, SPLITS, LSE,
    )  # fmt: skip
