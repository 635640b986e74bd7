"""Host code of a sparse decode: which kernel serves a batch of few query tokens a request, and in how many parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from m3hal.layouts import PagedCache
from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton._decode import compute_dtype, native
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
from m3hal_triton._plan import Kept
from m3hal_triton._softmax import merge_splits
from m3hal_triton._sparse_by_warps import ROWS, attend_by_warps
from m3hal_triton._sparse_by_warps_fp8 import attend_fp8_by_warps
from m3hal_triton._sparse_decode import attend
from m3hal_triton._sparse_tiles import DIM, KEYS, LANES, LIVE, WARPS, attend_tiles

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


@dataclass(frozen=True)
class Tuning:
    """Launch parameters. programs: that a decode is split into at most, a multiple of the multiprocessors."""

    programs: int = 2
    keys: int = 64
    warps: int = 4
    stages: int = 3


#: found on an H200, by cache format: of a decode in one part, of one that is split, and of verify
TUNING = {
    "bfloat16": (Tuning(), Tuning(), Tuning()),
    "fp8_e4m3": (Tuning(keys=128), Tuning(keys=128, stages=2), Tuning(keys=128)),
    "nvfp4": (Tuning(keys=128), Tuning(keys=128), Tuning(keys=128, stages=2)),
}
#: of one query token a request where each warp loads its own operands
BY_WARPS = {"fp8_e4m3": Tuning(keys=128), "nvfp4": Tuning(keys=128)}
#: IEEE products of fp32 hold their operands in registers
NARROW = Tuning(keys=16, warps=8, stages=2)

_attend, _attend_tiles, _merge_splits = Launcher(attend), Launcher(attend_tiles), Launcher(merge_splits)
_attend_by_warps = {"fp8_e4m3": Launcher(attend_fp8_by_warps), "nvfp4": Launcher(attend_by_warps)}


class Decode:
    """``run(q, kv, block_ids, batch, output, lse, workspace)``; lse is any tensor where the site returns none."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._group = site.num_q_heads // site.num_kv_heads
        rows = MAX_ROWS if site.head_dim <= 128 else MAX_ROWS // 2
        self._query_tile = min(MAX_QUERY_TILE, power_of_two_below(rows // self._group))
        most = common_power_of_two(site.block_size, site.page_size)
        tuned = (NARROW,) * 3 if site.dtype == "float32" else TUNING[site.kv_format]
        self._tuning = tuple(replace(tuning, keys=min(tuning.keys, most)) for tuning in tuned)
        self._scale = site.scale * LOG2_E
        self._settings: dict[tuple[object, ...], Settings] = {}
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self.workspace_bytes = self._partial_bytes()

    def _partial_bytes(self) -> int:
        """Bytes of the partial results: a batch is split only while its splits are at most MAX_SPLIT_PROGRAMS."""
        rows = MAX_SPLIT_PROGRAMS * MAX_QUERY_TILE * self._group
        return 4 * min(rows, self._site.max_tokens * self._site.num_q_heads * MAX_SPLITS) * (self._site.head_dim + 2)

    def again(self, q, kv, block_ids, batch, output, lse, workspace) -> bool:  # type: ignore[no-untyped-def]
        """Launches what the last call over this plan did, if it is the same but for addresses."""
        kept = batch.calls.get(self)
        return kept is not None and _repeat(kept, q, kv, block_ids, output, lse, workspace)

    def run(self, q, kv, block_ids, batch, output, lse, workspace) -> None:  # type: ignore[no-untyped-def]
        """At most a few query tokens a request."""
        site, meta = self._site, batch.meta
        requests, tokens = meta.seq_lens.shape[0], q.shape[0]
        tile = min(power_of_two_above(max(meta.max_q, 1)), self._query_tile)
        chunks = -(-max(meta.max_q, 1) // tile)
        tiles = tokens if tile == 1 else requests * chunks
        if tile == 1 and self.by_warps(kv):
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
        self, tile: int, splits: int, tuning: Tuning, ids: int, device: torch.device, early: bool
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
        if site.scale <= 0:  # the largest score is looked for before it is scaled
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
        launches = made.again(0, 1, 2, 8), self._merge(splits, False, words, batch, output, lse, True, divided=False)
        again = self in batch.calls  # else the next launch is another: the plan is complete then
        batch.keep(self, workspace, _key(q, kv, block_ids, output, lse) if again else None, launches)

    def by_warps(self, kv: PagedCache) -> bool:
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

    def _merge(  # type: ignore[no-untyped-def]
        self, splits, loose, words, batch, output, lse, early, divided=True
    ) -> Again | None:
        site, heads = self._site, self._site.num_q_heads
        key = "merge", splits, loose, early, divided
        if key not in self._settings:
            constants = {"DIM": site.head_dim, "SPLITS": splits, "LSE": site.return_lse, "EARLY": early}
            constants |= {"LOOSE": loose, "DIVIDED": divided}
            self._settings[key] = Settings(constants, num_warps=1, **after(early))
        parts = Tail(words, output.shape[0] * heads * splits * site.head_dim)
        numbers = (heads, output.stride(), *lse.stride()[:2])
        grid = (output.shape[0], heads, 1)
        tensors = words, parts, batch.request, output, lse
        return _merge_splits(grid, tensors, numbers, self._settings[key]).again(3, 4)


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
