"""Host code of a sparse prefill: the sort by key block, piece by piece, and what walks before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton import _sparse_prefill as kernels
from m3hal_triton import _sparse_sort as sorting
from m3hal_triton import _sparse_union as union
from m3hal_triton._decode import native
from m3hal_triton._launch import DOT_PRECISION, LOG2_E, common_power_of_two, multiprocessors, power_of_two_below

#: rows of a tile of queries in fp32
NARROW_ROWS = 16
#: keys times elements of a block that a program keeps in shared memory, at most
WHOLE_BLOCK = 256 * 128
#: keys of a step where a block is walked, by cache format; in fp32, operands are held in registers
STEP_KEYS, NARROW_KEYS = {"bfloat16": 64, "fp8_e4m3": 128, "nvfp4": 128}, 16
#: bytes of the workspace, and of the partial sums at least
MOST_BYTES, PIECE_BYTES = 256 << 20, 32 << 20
#: counters of the sort that are kept at least, so that all pieces of a chunk are sorted together
SORT_COUNTERS = 1 << 20
#: entries of one program of the sort
ENTRIES = 1024


@dataclass
class Tuning:
    """Launch parameters."""

    chunk: int = 32  # entries of a work item
    rows: int = 64
    warps: int = 4
    merge_warps: int = 1
    merge_heads: int = 4


TUNING = Tuning()


class Prefill:
    """``run(q, kv, block_ids, batch, output, lse, workspace)``; lse is any tensor where the site returns none.

    walks: whether neighbours may walk the union of their blocks. A unit walks or not by what its neighbours chose, so
    then no row is computed alike in any batch.
    """

    def __init__(self, site: Site, walks: bool) -> None:
        self._site = site
        self._group = site.num_q_heads // site.num_kv_heads
        self._narrow = site.dtype == "float32"
        walks = walks and site.dtype == "bfloat16" and site.kv_format in union.WALKS and site.head_dim <= union.WIDEST
        self._walks = walks and site.page_size >= site.block_size and self._group in (2, 4, 8, 16)
        self._slots = max(site.max_seqs * self._slots_of(site.max_context), SORT_COUNTERS)
        walk_bytes = union.room(site.max_tokens, site.num_kv_heads) if self._walks else 0
        per_token = site.num_q_heads * site.top_k_blocks * (site.head_dim * (4 if self._narrow else 2) + 8)
        for pieces in range(1, site.max_tokens + 1):
            self.piece = triton.cdiv(site.max_tokens, pieces)
            self.sort_words = self._words_of_sort(pieces)
            self.sort_bytes = 4 * self.sort_words + walk_bytes
            if self.piece * per_token <= max(MOST_BYTES - self.sort_bytes, min(PIECE_BYTES, MOST_BYTES)):
                break
        self.workspace_bytes = self.sort_bytes + self.piece * per_token

    def _slots_of(self, context: int) -> int:
        """Blocks of a request of that many keys, times kv heads."""
        return max(triton.cdiv(context, self._site.block_size), 1) * self._site.num_kv_heads

    def _words_of_sort(self, pieces: int) -> int:
        """Room for a :class:`Sort` of ``max_tokens`` in so many pieces, or of fewer tokens in pieces no larger."""
        site = self._site
        per_token = site.num_kv_heads * site.top_k_blocks
        most = site.max_seqs * self._slots_of(site.max_context)
        sizes = _sizes(site.max_tokens, triton.cdiv(site.max_tokens, pieces), pieces, most, per_token)
        sizes[3:6] = [self._slots] * 3  # as many pieces are sorted at once as have counters
        return triton.cdiv(sum(sizes), 64) * 64  # partial sums follow, and are stored 16 bytes at a time

    def run(self, q, kv, block_ids, batch, output, lse, workspace) -> None:  # type: ignore[no-untyped-def]
        """Any number of query tokens a request."""
        site, meta = self._site, batch.meta
        tokens, ids = q.shape[0], block_ids.shape[2]
        slots = meta.seq_lens.shape[0] * self._slots_of(meta.max_k)
        at_once = max(1, self._slots // slots) * self.piece  # tokens that are sorted together
        walk = self._walk(q, kv, block_ids, batch, output, lse, workspace)
        for low in range(0, tokens, at_once):
            n = min(at_once, tokens - low)
            sort = Sort(workspace, n, self.piece, slots, site.num_kv_heads * ids)
            self._sort(sort, walk, block_ids[low : low + n], batch, low, n)
            room = workspace[self.sort_bytes :]
            for index in range(sort.pieces):
                count = min(sort.piece, n - index * sort.piece)
                self._piece_of(sort, index, low + index * sort.piece, count, room, q, kv, ids, batch, output, lse)

    def _walk(self, q, kv, block_ids, batch, output, lse, workspace) -> union.Walk | None:  # type: ignore[no-untyped-def]
        """Attention of the units that walk the union of their blocks, before the others are sorted."""
        site, tokens = self._site, q.shape[0]
        minimum = union.LEAST * multiprocessors(q.device)
        if not self._walks or tokens // union.TILE * site.num_kv_heads < minimum:
            return None
        walk = union.Walk(workspace[4 * self.sort_words :], tokens, site, minimum)
        walk.unite(block_ids, batch)
        walk.attend(q, kv, batch, output, lse)
        return walk

    def _sort(self, sort, walk, block_ids, batch, low, n) -> None:  # type: ignore[no-untyped-def]
        """Entries in the order of their blocks, and work items, for each piece."""
        site, meta = self._site, batch.meta
        groups, ids = site.num_kv_heads, block_ids.shape[2]
        grid = (triton.cdiv(n * groups * ids, ENTRIES),)
        request, position = batch.request[low:], batch.position[low:]
        statics: dict[str, Any] = {"GROUPS": groups, "IDS": ids, "BLOCK": site.block_size, "ENTRIES": ENTRIES}
        sort.counts.zero_()
        sizes, walking, minimum = (walk.sizes, walk.walking, walk.minimum) if walk else (sort.counts, sort.counts, 0)
        sorting.count[grid](
            block_ids, request, position, batch.first_block, sort.counts, sort.ranks, sizes, walking, low, n,
            sort.slots, sort.piece, *block_ids.stride(), minimum, **statics, TILE=union.TILE if walk else 0,
            num_warps=4,
        )  # fmt: skip
        sorting.offsets[(sort.pieces,)](
            sort.counts, sort.starts, sort.items, sort.totals, batch.first_block, meta.seq_lens.shape[0], sort.slots,
            GROUPS=groups, CHUNK=TUNING.chunk, WIDE=2048, num_warps=8,
        )  # fmt: skip
        sorting.scatter[grid](
            block_ids, request, position, meta.seq_lens, batch.first_block, meta.block_table, sort.counts, sort.starts,
            sort.items, sort.ranks, sort.order, sort.work, n, sort.slots, sort.piece, sort.max_items,
            *block_ids.stride(), *meta.block_table.stride(), **statics, PAGE=site.page_size,
            CHUNK=TUNING.chunk, num_warps=4,
        )  # fmt: skip

    def _piece_of(self, sort, index, first_token, count, room, q, kv, ids, batch, output, lse) -> None:  # type: ignore[no-untyped-def]
        """Attention of one piece: partial sums by block, then their merge by token."""
        site, meta, group = self._site, batch.meta, self._group
        rows = count * site.num_q_heads * ids
        kind = torch.float32 if self._narrow else torch.float16
        split = rows * site.head_dim * kind.itemsize
        partials, sums = room[:split].view(kind), room[split : split + 8 * rows].view(torch.int64)
        local = index * sort.piece
        even = site.block_size == common_power_of_two(site.block_size)  # as a tile's side must be
        fits = even and site.block_size * site.head_dim <= WHOLE_BLOCK
        whole = not self._narrow and fits and site.page_size >= site.block_size
        kernels.attend_block[(sort.max_items,)](
            q,
            _pages.memory(kv),
            _pages.keys(kv),
            _pages.values(kv),
            kv.k_scale,
            sort.order[local * site.num_kv_heads * ids :],
            sort.work[index],
            sort.totals[index:],
            meta.block_table,
            partials,
            sums,
            site.scale * LOG2_E,
            first_token,
            count,
            q.stride(),
            *meta.block_table.stride(),
            HEADS=site.num_q_heads,
            GROUP=group,
            GROUPS=site.num_kv_heads,
            IDS=ids,
            ROWS=max(NARROW_ROWS if self._narrow else TUNING.rows, triton.next_power_of_2(group)),
            DIM=site.head_dim,
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=site.block_size if whole else self._step_keys(),
            FORMAT=site.kv_format,
            COMPUTE=tl.float32 if self._narrow else tl.bfloat16,
            NATIVE=native(q.device, site.head_dim, site.dtype),
            PRECISION=DOT_PRECISION,
            PAIRS=not self._narrow and _are_pairs(q),
            num_warps=4 if self._narrow else TUNING.warps,
        )
        heads = min(TUNING.merge_heads, power_of_two_below(group & -group))
        kernels.merge[(site.num_q_heads // heads, count)](
            partials,
            sums,
            sort.ranks[local * site.num_kv_heads * ids :],
            kv.v_scale,
            output,
            lse,
            first_token,
            count,
            output.stride(),
            *lse.stride()[:2],
            HEADS=site.num_q_heads,
            GROUP=group,
            GROUPS=site.num_kv_heads,
            IDS=ids,
            IDS_PADDED=triton.next_power_of_2(ids),
            DIM=site.head_dim,
            FORMAT=site.kv_format,
            LSE=site.return_lse,
            num_warps=TUNING.merge_warps,
            HEADS_AT_ONCE=heads,
        )

    def _step_keys(self) -> int:
        keys = NARROW_KEYS if self._narrow else STEP_KEYS[self._site.kv_format]
        return min(keys, common_power_of_two(self._site.block_size, self._site.page_size))


def _are_pairs(q: torch.Tensor) -> bool:
    """Whether the elements of bf16 queries lie in words of 4 bytes, two by two."""
    return q.stride(2) == 1 and (q.stride(0) | q.stride(1)) % 2 == 0 and q.data_ptr() % 4 == 0


class Sort:
    """The sort's arrays in a workspace, for ``n`` tokens in equal pieces of ``most`` at most."""

    def __init__(self, workspace: torch.Tensor, n: int, most: int, slots: int, per_token: int) -> None:
        self.slots, self.pieces = slots, triton.cdiv(n, most)
        self.piece = triton.cdiv(n, self.pieces)
        self.max_items = _max_items(self.piece, slots, per_token)
        sizes = _sizes(n, self.piece, self.pieces, slots, per_token)
        words = workspace.view(torch.int32)[: sum(sizes)].split(sizes)
        self.ranks, self.order, work, self.counts, self.starts, self.items, self.totals = words
        self.work = work.view(self.pieces, self.max_items, 8)


def _max_items(piece: int, slots: int, per_token: int) -> int:
    """Work items of a piece at most."""
    return min(slots, piece * per_token) + triton.cdiv(piece * per_token, TUNING.chunk)


def _sizes(n: int, piece: int, pieces: int, slots: int, per_token: int) -> list[int]:
    """Words of ranks, order, work items, three counters of each slot, and totals."""
    return [n * per_token] * 2 + [8 * pieces * _max_items(piece, slots, per_token)] + [pieces * slots] * 3 + [pieces]
