"""``sparse_attention``: each query attends to the key blocks that the indexer chose for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton import _sparse_prefill as prefill
from m3hal_triton import _sparse_union as union
from m3hal_triton._decode import check_alignment, compute_dtype, native
from m3hal_triton._launch import (
    DOT_PRECISION,
    LOG2_E,
    Again,
    Launcher,
    Settings,
    Tail,
    after,
    common_power_of_two,
    is_hopper,
    multiprocessors,
    power_of_two_above,
    power_of_two_below,
    programmatic,
)
from m3hal_triton._plan import BatchPlan, Kept, plan_batch, plan_bytes
from m3hal_triton._softmax import merge_splits
from m3hal_triton._sparse_by_warps import ROWS, attend_by_warps
from m3hal_triton._sparse_by_warps_fp8 import attend_fp8_by_warps
from m3hal_triton._sparse_decode import attend
from m3hal_triton._sparse_tiles import DIM, KEYS, LANES, LIVE, WARPS, attend_tiles

#: query tokens of a request up to which it is decoded or verified, not prefilled
FEW_TOKENS = 8
#: query tokens of one request that share a program, and so the reading of a block
MAX_QUERY_TILE = 4
#: programs of a split decode, at most
MAX_SPLIT_PROGRAMS = 1024
#: parts of one token's keys, at most
MAX_SPLITS = 32
#: splits of a decode by warps up to which its last program merges them, in place of a launch
MERGE_SPLITS = 8
#: rows of the matrix unit's smallest tile, and of a decode's that several query tokens share
MIN_ROWS, MAX_ROWS = 16, 128
#: keys times elements of a block that a prefill's program keeps in shared memory, at most
WHOLE_BLOCK = 256 * 128
#: bytes of a prefill's workspace, and of its partial results at least
PREFILL_BYTES, PIECE_BYTES = 256 << 20, 32 << 20
#: counters of the sort that are kept at least, so that all pieces of a chunk are sorted together
SORT_COUNTERS = 1 << 20
#: entries of one program of the sort
ENTRIES = 1024


@dataclass(frozen=True)
class Decode:
    """Launch parameters of a decode. programs: that it is split into at most, a multiple of the multiprocessors."""

    programs: int = 2
    keys: int = 64
    warps: int = 4
    stages: int = 3


@dataclass
class Prefill:
    """Launch parameters of a prefill."""

    chunk: int = 32  # entries of a work item
    rows: int = 64
    warps: int = 4
    merge_warps: int = 1
    merge_heads: int = 4


#: found on an H200, by cache format: of a decode in one part, of one that is split, and of verify
DECODE = {
    "bfloat16": (Decode(), Decode(), Decode()),
    "fp8_e4m3": (Decode(keys=128), Decode(keys=128, stages=2), Decode(keys=128)),
    "nvfp4": (Decode(keys=128), Decode(keys=128), Decode(keys=128, stages=2)),
}
#: of one query token a request where each warp loads its own operands
BY_WARPS = {"fp8_e4m3": Decode(keys=128), "nvfp4": Decode(keys=128)}
#: IEEE products of fp32 hold their operands in registers
NARROW = Decode(keys=16, warps=8, stages=2)
PREFILL = Prefill()

_attend, _attend_tiles, _merge_splits = Launcher(attend), Launcher(attend_tiles), Launcher(merge_splits)
_attend_by_warps = {"fp8_e4m3": Launcher(attend_fp8_by_warps), "nvfp4": Launcher(attend_by_warps)}

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def sparse_attention(site: Site) -> Kernel:
    """The kernel for a site: split-K decode, and prefill organised by key block."""
    return _kernel(site, _Run(site))


def batch_invariant(site: Site) -> Kernel:
    """The same, where a request's rows have the same bits alone and in any batch: all tokens go through prefill.

    A decode's splits depend on how many requests share the GPU, and with them the order of its sums.
    """
    return _kernel(site, _Run(site, few_tokens=0))


def _kernel(site: Site, run: _Run) -> Kernel:
    bounds = {"max_tokens": site.max_tokens, "max_seqs": site.max_seqs, "block_size": site.block_size}
    return Kernel(
        run=run,
        workspace_bytes=run.workspace_bytes,
        plan_batch=partial(plan_batch, **bounds),
        plan_bytes=plan_bytes(site.max_tokens, site.max_seqs),
    )


class _Run:
    """``run(q, kv, block_ids, batch, out=None, workspace=None)``."""

    def __init__(self, site: Site, few_tokens: int = FEW_TOKENS) -> None:
        self._site = site
        self._few_tokens = few_tokens
        self._group = site.num_q_heads // site.num_kv_heads
        rows = MAX_ROWS if site.head_dim <= 128 else MAX_ROWS // 2
        self._query_tile = min(MAX_QUERY_TILE, power_of_two_below(rows // self._group))
        self._narrow = site.dtype == "float32"
        most = common_power_of_two(site.block_size, site.page_size)
        tuned = (NARROW,) * 3 if self._narrow else DECODE[site.kv_format]
        self._tuning = tuple(replace(tuning, keys=min(tuning.keys, most)) for tuning in tuned)
        self._scale = site.scale * LOG2_E
        self._settings: dict[tuple[object, ...], Settings] = {}
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._fake = partial(load("sparse_attention").fake, return_lse=site.return_lse)
        self._decode_bytes = self._decode_workspace()
        self.workspace_bytes = self._decode_bytes
        # a unit walks or not by what its neighbours chose, so no row is computed alike in any batch
        walks = few_tokens > 0 and site.dtype == "bfloat16" and site.kv_format in union.WALKS
        self._walks = walks and site.page_size >= site.block_size and self._group in (2, 4, 8, 16)
        if site.max_tokens > few_tokens:
            self._sort_bytes = self._prefill_sort_bytes()
            per_token = site.num_q_heads * site.top_k_blocks * (site.head_dim * (4 if self._narrow else 2) + 4)
            room = max(PREFILL_BYTES - self._sort_bytes, min(PIECE_BYTES, PREFILL_BYTES), per_token)
            self._piece = min(site.max_tokens, room // per_token)
            self.workspace_bytes = max(self._decode_bytes, self._sort_bytes + self._piece * per_token)

    def _decode_workspace(self) -> int:
        """Bytes of the partial results: a batch is split only while its splits are at most MAX_SPLIT_PROGRAMS."""
        rows = MAX_SPLIT_PROGRAMS * MAX_QUERY_TILE * self._group
        return 4 * min(rows, self._site.max_tokens * self._site.num_q_heads * MAX_SPLITS) * (self._site.head_dim + 1)

    def _prefill_sort_bytes(self) -> int:
        """Bytes of ranks, order, work items and counters."""
        site = self._site
        entries = site.max_tokens * site.num_kv_heads * site.top_k_blocks
        slots = max(site.max_seqs * triton.cdiv(site.max_context, site.block_size) * site.num_kv_heads, SORT_COUNTERS)
        self._slots = slots
        # pieces may hold nearly twice the tokens that there are, each piece one work item and one counter more
        items = 2 * (entries + triton.cdiv(entries, PREFILL.chunk)) + site.max_tokens
        words = 2 * entries + 8 * (items + 1024) + 3 * slots + site.max_tokens + 1024
        self._sort_words = triton.cdiv(words, 64) * 64  # partial results follow, and are stored 16 bytes at a time
        return 4 * self._sort_words + (union.room(site.max_tokens, site.num_kv_heads) if self._walks else 0)

    def __call__(
        self,
        q: torch.Tensor,
        kv: PagedCache,
        block_ids: torch.Tensor,
        batch: BatchPlan,
        out: Output | None = None,
        workspace: torch.Tensor | None = None,
    ) -> Output:
        result = self._fake(q, kv, block_ids, batch.meta) if out is None else out
        output, lse = result if self._site.return_lse else (result, result)
        kept = batch.calls.get(self)
        if kept is not None and _repeat(kept, q, kv, block_ids, output, lse, workspace):
            return result
        check_alignment(kv)
        if q.shape[0] and batch.meta.seq_lens.shape[0]:
            run = self._decode if batch.meta.max_q <= self._few_tokens else self._prefill
            run(q, kv, block_ids, batch, output, lse, workspace)
        else:
            output.zero_()
            if self._site.return_lse:
                lse.fill_(float("-inf"))
        return result

    def _decode(self, q, kv, block_ids, batch, output, lse, workspace) -> None:  # type: ignore[no-untyped-def]
        site, meta = self._site, batch.meta
        requests, tokens = meta.seq_lens.shape[0], q.shape[0]
        tile = min(power_of_two_above(max(meta.max_q, 1)), self._query_tile)
        chunks = -(-max(meta.max_q, 1) // tile)
        tiles = tokens if tile == 1 else requests * chunks
        if tile == 1 and self._by_warps(kv):
            self._decode_by_warps(q, kv, block_ids, batch, output, lse, workspace)
            return
        whole, split, verify = self._tuning
        programs = min(split.programs * multiprocessors(q.device), MAX_SPLIT_PROGRAMS)
        # parts are of all tokens, those of no request too
        room = programs // (max(tiles, -(-tokens // tile)) * site.num_kv_heads)
        tuning = verify if tile > 1 else split if room > 1 else whole
        steps = site.top_k_blocks * site.block_size // tuning.keys
        splits = min(power_of_two_below(room), power_of_two_below(steps), MAX_SPLITS)
        if tile == 1 and splits > 1 and self._by_tiles(kv, block_ids):
            # one program a multiprocessor, with more on its way, is quicker than two, if they are that many
            few = multiprocessors(q.device) // (tokens * site.num_kv_heads)
            parts = min(power_of_two_below(few), splits) if few > 1 else splits
            self._decode_by_tiles(q, kv, block_ids, batch, output, lse, workspace, parts, 3 if few > 1 else 2)
            return
        early = programmatic(q.device)
        words, rows = self._words(workspace), tokens * site.num_q_heads * splits
        tensors = (
            q,
            _pages.memory(kv),
            kv.k_scale,
            kv.v_scale,
            block_ids,
            meta.cu_q,
            meta.seq_lens,
            batch.request,
            batch.position,
            meta.block_table,
            words,
            Tail(words, rows * site.head_dim),
            output,
            lse,
        )
        numbers = (
            _pages.keys(kv),
            _pages.values(kv),
            self._scale,
            tokens,
            requests,
            chunks,
            q.stride(),
            *block_ids.stride(),
            *meta.block_table.stride(),
            output.stride(),
            *lse.stride()[:2],
        )
        settings = self._decode_settings(tile, splits, tuning, block_ids.shape[2], q.device, early)
        made = _attend((splits, site.num_kv_heads, tiles), tensors, numbers, settings)
        launches = [made.again(0, 1, 2, 3, 4, 12, 13)]
        if splits > 1:
            launches.append(self._merge(splits, tile > 1, words, batch, output, lse, early))
        batch.keep(self, workspace, _key(q, kv, block_ids, output, lse), launches)

    def _decode_settings(
        self, tile: int, splits: int, tuning: Decode, ids: int, device: torch.device, early: bool
    ) -> Settings:
        key, site = (tile, splits, tuning, ids, device, early), self._site
        if key not in self._settings:
            constants = {
                "GROUP": self._group,
                "ROWS": max(MIN_ROWS, power_of_two_above(tile * self._group)),
                "QT": tile,
                "DIM": site.head_dim,
                "IDS": ids,
                "IDS_PADDED": power_of_two_above(max(ids, LANES.value) if tile == 1 else ids),
                "BLOCK": site.block_size,
                "PAGE": site.page_size,
                "KEYS": tuning.keys,
                "SPLITS": splits,
                "LSE": site.return_lse,
                "FORMAT": site.kv_format,
                "COMPUTE": compute_dtype(site.kv_format, site.dtype),
                "NATIVE": native(device, site.head_dim, site.dtype),
                "PRECISION": DOT_PRECISION,
                "EARLY": early,
            }
            options = {"num_warps": tuning.warps, "num_stages": tuning.stages, **after(early)}
            self._settings[key] = Settings(constants, **options)
        return self._settings[key]

    def _by_tiles(self, kv: PagedCache, block_ids: torch.Tensor) -> bool:
        """Whether the parts of one query token a request are made by :func:`attend_tiles`."""
        site = self._site
        if not is_hopper(kv.buf.device) or site.dtype != "bfloat16" or site.kv_format != "bfloat16":
            return False
        if site.head_dim != DIM.value or self._group > LIVE.value or block_ids.shape[2] > LANES.value:
            return False
        if site.block_size % KEYS.value or site.page_size % site.block_size or kv.buf.data_ptr() % 16:
            return False
        return _pages.are_pairs(kv)

    def _decode_by_tiles(  # type: ignore[no-untyped-def]
        self, q, kv, block_ids, batch, output, lse, workspace, splits, most_tiles
    ) -> None:
        site, meta, tokens = self._site, batch.meta, q.shape[0]
        words, table = self._words(workspace), meta.block_table
        parts = Tail(words, tokens * site.num_q_heads * splits * site.head_dim)
        cache, rows, k, v = _pages.memory(kv), _pages.pairs(kv), _pages.keys(kv), _pages.values(kv)
        tensors = (q, cache, block_ids, batch.request, batch.position, table, words, parts, rows)
        places = k.page // k.token, k.head // k.token, k.codes, v.codes
        numbers = (self._scale, places, *table.shape, q.stride(), *block_ids.stride(), *table.stride())
        known = bool(batch.calls)
        key = "tiles", splits, most_tiles, block_ids.shape[2], known
        if key not in self._settings:
            constants = {"GROUP": self._group, "IDS": block_ids.shape[2], "BLOCK": site.block_size}
            constants |= {"PAGE": site.page_size, "SPLITS": splits, "KNOWN": known}
            constants["TILES"] = min(most_tiles, -(-site.top_k_blocks * site.block_size // (KEYS.value * splits)))
            self._settings[key] = Settings(constants, num_warps=WARPS.value, **after(True))
        made = _attend_tiles((splits, site.num_kv_heads, tokens), tensors, numbers, self._settings[key])
        launches = made.again(0, 1, 2, 8), self._merge(splits, False, words, batch, output, lse, True)
        again = self in batch.calls  # else the next launch is another: the plan is complete then
        batch.keep(self, workspace, _key(q, kv, block_ids, output, lse) if again else None, launches)

    def _by_warps(self, kv: PagedCache) -> bool:
        """Whether one query token a request is served by :func:`attend_by_warps`, which loads 16 bytes at a time."""
        site, tuning = self._site, BY_WARPS.get(self._site.kv_format)
        if tuning is None or site.block_size != tuning.keys or site.page_size % site.block_size:
            return False
        if site.dtype != "bfloat16" or site.head_dim != 128 or self._group > ROWS.value:
            return False
        if not (native(kv.buf.device, site.head_dim, site.dtype) or _attend.interpreted):
            return False
        part = _pages.keys(kv)
        return part.column == 1 and (kv.buf.data_ptr() | part.codes | part.page | part.head | part.token) % 16 == 0

    def _decode_by_warps(self, q, kv, block_ids, batch, output, lse, workspace) -> None:  # type: ignore[no-untyped-def]
        site, meta, tokens = self._site, batch.meta, q.shape[0]
        tuning = BY_WARPS[site.kv_format]
        programs = min(tuning.programs * multiprocessors(q.device), MAX_SPLIT_PROGRAMS)
        room = programs // (tokens * site.num_kv_heads)
        steps = site.top_k_blocks * site.block_size // tuning.keys
        splits = min(power_of_two_below(room), power_of_two_below(steps), MAX_SPLITS)
        early = programmatic(q.device)
        words, rows = self._words(workspace), tokens * site.num_q_heads * splits
        tensors = (
            q,
            _pages.memory(kv),
            kv.k_scale,
            kv.v_scale,
            block_ids,
            batch.request,
            batch.position,
            meta.block_table,
            words,
            Tail(words, rows * site.head_dim),
            output,
            lse,
            batch.arrivals,
        )
        keys = _pages.keys(kv)
        numbers = (
            keys,
            _pages.values(kv),
            self._scale,
            q.stride(),
            *block_ids.stride(),
            *meta.block_table.stride(),
            output.stride(),
            *lse.stride()[:2],
        )
        merge = 1 < splits <= MERGE_SPLITS
        settings = self._warps_settings(splits, merge, keys.token, block_ids.shape[2], q.device, early)
        made = _attend_by_warps[site.kv_format]((splits, site.num_kv_heads, tokens), tensors, numbers, settings)
        launches = [made.again(0, 1, 2, 3, 4, 10, 11)]
        if splits > 1 and not merge:
            launches.append(self._merge(splits, False, words, batch, output, lse, early))
        batch.keep(self, workspace, _key(q, kv, block_ids, output, lse), launches)

    def _warps_settings(
        self, splits: int, merge: bool, token: int, ids: int, device: torch.device, early: bool
    ) -> Settings:
        key, site = ("warps", splits, merge, token, ids, device, early), self._site
        if key not in self._settings:
            tuning = BY_WARPS[site.kv_format]
            constants = {
                "GROUP": self._group,
                "IDS": ids,
                "IDS_PADDED": power_of_two_above(max(ids, LANES.value) if site.kv_format == "nvfp4" else ids),
                "BLOCK": site.block_size,
                "PAGE": site.page_size,
                "SPLITS": splits,
                "MERGE": merge,
                "WARPS": tuning.warps,
                "TOKEN": token,
                "LSE": site.return_lse,
                "FORMAT": site.kv_format,
                "NATIVE": native(device, site.head_dim, site.dtype),
                "EARLY": early,
            }
            self._settings[key] = Settings(constants, num_warps=tuning.warps, num_stages=1, **after(early))
        return self._settings[key]

    def _words(self, workspace: torch.Tensor) -> torch.Tensor:
        """The workspace as fp32."""
        kept = self._scratch
        if kept is None or kept[0] is not workspace:
            kept = self._scratch = workspace, workspace.view(torch.float32)
        return kept[1]

    def _merge(self, splits, loose, words, batch, output, lse, early) -> Again | None:  # type: ignore[no-untyped-def]
        site, heads = self._site, self._site.num_q_heads
        key = "merge", splits, loose, early
        if key not in self._settings:
            constants = {"DIM": site.head_dim, "SPLITS": splits, "LSE": site.return_lse, "EARLY": early, "LOOSE": loose}
            self._settings[key] = Settings(constants, num_warps=1, **after(early))
        parts = Tail(words, output.shape[0] * heads * splits * site.head_dim)
        numbers = (heads, output.stride(), *lse.stride()[:2])
        grid = (output.shape[0], heads, 1)
        tensors = words, parts, batch.request, output, lse
        return _merge_splits(grid, tensors, numbers, self._settings[key]).again(3, 4)

    def _prefill(self, q, kv, block_ids, batch, output, lse, workspace) -> None:  # type: ignore[no-untyped-def]
        site, meta = self._site, batch.meta
        tokens, piece = q.shape[0], min(self._piece, q.shape[0])
        ids = block_ids.shape[2]
        slots = meta.seq_lens.shape[0] * max(triton.cdiv(meta.max_k, site.block_size), 1) * site.num_kv_heads
        at_once = max(1, self._slots // slots) * piece  # tokens that are sorted together
        walk = self._walk(q, kv, block_ids, batch, output, lse, workspace)
        for low in range(0, tokens, at_once):
            n = min(at_once, tokens - low)
            sort = _Sort(workspace, n, piece, slots, site.num_kv_heads * ids)
            self._sort(sort, walk, block_ids[low : low + n], batch, low, n, piece)
            room = workspace[self._sort_bytes :]
            for index in range(sort.pieces):
                count = min(piece, n - index * piece)
                self._piece_of(sort, index, low + index * piece, count, room, q, kv, ids, batch, output, lse)

    def _walk(self, q, kv, block_ids, batch, output, lse, workspace) -> union.Walk | None:  # type: ignore[no-untyped-def]
        """Attention of the units that walk the union of their blocks, before the others are sorted."""
        site, tokens = self._site, q.shape[0]
        minimum = union.LEAST * multiprocessors(q.device)
        if not self._walks or tokens // union.TILE * site.num_kv_heads < minimum:
            return None
        walk = union.Walk(workspace[4 * self._sort_words :], tokens, site, minimum)
        walk.unite(block_ids, batch)
        walk.attend(q, kv, batch, output, lse)
        return walk

    def _sort(self, sort, walk, block_ids, batch, low, n, piece) -> None:  # type: ignore[no-untyped-def]
        """Entries in the order of their blocks, and work items, for each piece."""
        site, meta = self._site, batch.meta
        groups, ids = site.num_kv_heads, block_ids.shape[2]
        grid = (triton.cdiv(n * groups * ids, ENTRIES),)
        request, position = batch.request[low:], batch.position[low:]
        statics: dict[str, Any] = {"GROUPS": groups, "IDS": ids, "BLOCK": site.block_size, "ENTRIES": ENTRIES}
        sort.counts.zero_()
        sizes, walking, minimum = (walk.sizes, walk.walking, walk.minimum) if walk else (sort.counts, sort.counts, 0)
        prefill.count[grid](
            block_ids, request, position, batch.first_block, sort.counts, sort.ranks, sizes, walking, low, n,
            sort.slots, piece, *block_ids.stride(), minimum, **statics, TILE=union.TILE if walk else 0, num_warps=4,
        )  # fmt: skip
        prefill.offsets[(sort.pieces,)](
            sort.counts, sort.starts, sort.items, sort.totals, batch.first_block, meta.seq_lens.shape[0], sort.slots,
            GROUPS=groups, CHUNK=PREFILL.chunk, WIDE=2048, num_warps=8,
        )  # fmt: skip
        prefill.scatter[grid](
            block_ids, request, position, meta.seq_lens, batch.first_block, meta.block_table, sort.counts, sort.starts,
            sort.items, sort.ranks, sort.order, sort.work, n, sort.slots, piece, sort.max_items,
            *block_ids.stride(), *meta.block_table.stride(), **statics, PAGE=site.page_size,
            CHUNK=PREFILL.chunk, num_warps=4,
        )  # fmt: skip

    def _piece_of(self, sort, index, first_token, count, room, q, kv, ids, batch, output, lse) -> None:  # type: ignore[no-untyped-def]
        """Attention of one piece: partial results by block, then their merge by token."""
        site, meta, group = self._site, batch.meta, self._group
        rows = count * site.num_q_heads * ids
        split = rows * site.head_dim * q.element_size()
        partials = room[:split].view(q.dtype)
        partial_lse = room[split : split + 4 * rows].view(torch.float32)
        local = index * sort.piece
        even = site.block_size == common_power_of_two(site.block_size)  # as a tile's side must be
        fits = even and site.block_size * site.head_dim <= WHOLE_BLOCK
        whole = not self._narrow and fits and site.page_size >= site.block_size
        prefill.attend_block[(sort.max_items,)](
            q,
            _pages.memory(kv),
            _pages.keys(kv),
            _pages.values(kv),
            kv.k_scale,
            kv.v_scale,
            sort.order[local * site.num_kv_heads * ids :],
            sort.work[index],
            sort.totals[index:],
            meta.block_table,
            partials,
            partial_lse,
            site.scale * LOG2_E,
            first_token,
            q.stride(),
            *meta.block_table.stride(),
            HEADS=site.num_q_heads,
            GROUP=group,
            GROUPS=site.num_kv_heads,
            IDS=ids,
            ROWS=max(MIN_ROWS if self._narrow else PREFILL.rows, triton.next_power_of_2(group)),
            DIM=site.head_dim,
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=site.block_size if whole else self._tuning[0].keys,
            FORMAT=site.kv_format,
            COMPUTE=tl.float32 if self._narrow else tl.bfloat16,
            NATIVE=native(q.device, site.head_dim, site.dtype),
            PRECISION=DOT_PRECISION,
            num_warps=4 if self._narrow else PREFILL.warps,
        )
        heads = min(PREFILL.merge_heads, power_of_two_below(group & -group))
        prefill.merge[(site.num_q_heads // heads, count)](
            partials,
            partial_lse,
            sort.ranks[local * site.num_kv_heads * ids :],
            output,
            lse,
            first_token,
            output.stride(),
            *lse.stride()[:2],
            HEADS=site.num_q_heads,
            GROUP=group,
            GROUPS=site.num_kv_heads,
            IDS=ids,
            IDS_PADDED=triton.next_power_of_2(ids),
            DIM=site.head_dim,
            LSE=site.return_lse,
            num_warps=PREFILL.merge_warps,
            HEADS_AT_ONCE=heads,
        )


class _Sort:
    """The sort's arrays in a workspace, for ``n`` tokens in pieces."""

    def __init__(self, workspace: torch.Tensor, n: int, piece: int, slots: int, per_token: int) -> None:
        self.slots, self.piece, self.pieces = slots, piece, triton.cdiv(n, piece)
        self.max_items = min(slots, piece * per_token) + triton.cdiv(piece * per_token, PREFILL.chunk)
        sizes = [n * per_token, n * per_token, 8 * self.pieces * self.max_items]
        sizes += [self.pieces * slots] * 3 + [self.pieces]
        words = workspace.view(torch.int32)[: sum(sizes)].split(sizes)
        self.ranks, self.order, work, self.counts, self.starts, self.items, self.totals = words
        self.work = work.view(self.pieces, self.max_items, 8)


def _key(q, kv, block_ids, output, lse):  # type: ignore[no-untyped-def]
    """All that a decode's launches over one plan depend on, but addresses."""
    strides = q.stride(), block_ids.stride(), output.stride(), lse.stride()
    scaled = kv.k_scale is None, kv.v_scale is None
    return q.shape, block_ids.shape, strides, scaled, _pages.keys(kv), _pages.values(kv)


def _repeat(kept: Kept, q, kv, block_ids, output, lse, workspace) -> bool:  # type: ignore[no-untyped-def]
    """Launches as the last decode over this plan did, if only addresses differ."""
    if kept.workspace is not workspace or kept.key != _key(q, kv, block_ids, output, lse):
        return False
    scales = [scale if scale is None else scale.data_ptr() for scale in (kv.k_scale, kv.v_scale)]
    ends = output.data_ptr(), lse.data_ptr()
    attend, *merge = kept.launches
    if attend.changing == 4:  # by tiles
        address = kv.buf.data_ptr()
        if address % 16 or not attend(q.data_ptr(), address, block_ids.data_ptr(), _pages.pairs(kv)):
            return False
        return merge[0](*ends)
    if not attend(q.data_ptr(), kv.buf.data_ptr(), *scales, block_ids.data_ptr(), *ends):
        return False
    return not merge or merge[0](*ends)
