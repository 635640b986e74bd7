"""Structured inputs for the attention operators: errors of addressing, masking and merging must show in the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import KVLayout, PagedCache, page_map
from m3hal.layouts.stored import stored
from m3hal.ops import SeqMeta, load
from m3hal.shape import MINIMAX_M3, ModelShape, Site

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "rotary_dim": 16, "scale": 32**-0.5}
_SMALL |= {"num_index_heads": 2, "index_dim": 32, "block_size": 16, "top_k_blocks": 4}
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}


def sparse_site(dtype: torch.dtype, **values: object) -> Site:
    """A small sparse-attention site; keyword arguments replace its attributes."""
    shape = ModelShape.from_config(
        MINIMAX_M3, dtype=_name(dtype), page_size=16, max_tokens=64, max_seqs=8, max_context=512
    )
    site = next(site for site in shape.sites() if site.kind == "sparse_attention")
    return replace(site, **(_SMALL | values))


@dataclass
class Batch:
    """A paged batch: every request's (query tokens, sequence length), caches filled, everything unowned NaN."""

    site: Site
    lengths: Sequence[tuple[int, int]]
    dtype: torch.dtype
    layout: str = "hnd"
    strided: bool = False
    extra_tokens: int = 0  # rows of q past the last request
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        site = self.site
        q_lens = torch.tensor([q for q, _ in self.lengths], dtype=torch.int32)
        self.tokens = int(q_lens.sum()) + self.extra_tokens
        pages_of = [-(-s // site.page_size) for _, s in self.lengths]
        self.pages = sum(pages_of) + 3
        order = torch.randperm(self.pages, generator=self._random).int()
        table = torch.full((len(self.lengths), max(pages_of, default=0) + 1), 2**30, dtype=torch.int32)
        start = 0
        for request, count in enumerate(pages_of):
            table[request, :count] = order[start : start + count]
            start += count
        cu_q = torch.cat([torch.zeros(1, dtype=torch.int32), q_lens.cumsum(0).int()])
        seq_lens = torch.tensor([s for _, s in self.lengths], dtype=torch.int32)
        max_k = max((s for _, s in self.lengths), default=0)
        self.meta = SeqMeta(
            cu_q.to(DEVICE), seq_lens.to(DEVICE), table.to(DEVICE), max((q for q, _ in self.lengths), default=0), max_k
        )
        self.table = table

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random).to(self.dtype).to(DEVICE)

    def queries(self, heads: int, dim: int) -> torch.Tensor:
        """A strided view [T, heads, dim], as a slice of a projection's row is."""
        return self.randn(self.tokens, 2, heads, dim)[:, 1]

    def cache(
        self, heads: int, dim: int, has_values: bool, strided: bool | None = None, format: str = ""
    ) -> PagedCache:
        """Keys random, values random plus the number of their block; NaN wherever no token was written.

        format: the activations' dtype unless given; such a cache has global scales that are no power of two.
        """
        site = self.site
        format = format or _name(self.dtype)
        layout = KVLayout(page_map(format, self.layout), format, site.page_size, heads, dim, has_values)
        outer = 2 if (self.strided if strided is None else strided) else 1
        buffer = torch.empty(self.pages, outer, *layout.page_shape(), dtype=layout.dtype)
        buffer.view(torch.uint8).fill_(0xFF)  # a NaN in every format, and in every scale
        scaled = has_values and format in ("fp8_e4m3", "nvfp4")
        scales = [torch.tensor(scale, device=DEVICE) for scale in (0.37, 1.9)] if scaled else []
        cache = PagedCache(buffer[:, outer - 1], layout, *(scale.cpu() for scale in scales))
        for request, (_, seq_len) in enumerate(self.lengths):
            position = torch.arange(seq_len)
            slots = self.table[request, position // site.page_size] * site.page_size + position % site.page_size
            k = torch.randn(seq_len, heads, dim, generator=self._random).to(self.dtype)
            v = torch.randn(seq_len, heads, dim, generator=self._random) + position[:, None, None] // site.block_size
            load("kv_write").reference(cache, k, v.to(self.dtype) if has_values else None, slots)
        return PagedCache(buffer.to(DEVICE)[:, outer - 1], layout, *scales)

    def block_ids(self, groups: int) -> torch.Tensor:
        """Random selections [T, groups, k]: ascending, the query's own block in, -1 in the tail."""
        k = self.site.top_k_blocks
        ids = torch.full((self.tokens, groups, k), -1, dtype=torch.int32)
        for token, position in enumerate(self.positions()):
            newest = position // self.site.block_size
            for group in range(groups if position >= 0 else 0):
                others = torch.randperm(newest, generator=self._random)[: k - 1]
                chosen = torch.cat([others, torch.tensor([newest])]).sort().values
                ids[token, group, : len(chosen)] = chosen.int()
        return ids.to(DEVICE)

    def positions(self) -> list[int]:
        """Of every query token; -1 for the tokens of padded requests and past the last request."""
        found = [s - q + i if s else -1 for q, s in self.lengths for i in range(q)]
        return found + [-1] * self.extra_tokens

    def erase_unselected(self, cache: PagedCache, ids: torch.Tensor) -> None:
        """NaN in each (block, head) that no token of the request selected."""
        site, start = self.site, 0
        for request, (q_len, seq_len) in enumerate(self.lengths):
            for group in range(ids.shape[1]):
                chosen = set(ids[start : start + q_len, group].flatten().tolist())
                for position in range(seq_len):
                    if position // site.block_size not in chosen:
                        page, slot = self.table[request, position // site.page_size], position % site.page_size
                        for part in (stored(cache, "k"), stored(cache, "v")):
                            _spoil(part.codes[page, group, slot])
                            if part.scales is not None:
                                _spoil(part.scales[page, group, slot // 4, slot % 4])
            start += q_len


def _spoil(vector: torch.Tensor) -> None:
    vector.fill_(float("nan")) if vector.is_floating_point() else vector.fill_(0xFF)


def double(cache: PagedCache) -> PagedCache:
    """The same cache in fp64, for the exact oracle; one of stored codes as it is."""
    if cache.layout.format not in PLAIN_FORMATS:
        return cache
    return PagedCache(cache.buf.double(), cache.layout)


def workspace(kernel: object) -> torch.Tensor:
    """Scratch of the declared size, poisoned."""
    return torch.full((kernel.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)


def plan(kernel: object, meta: SeqMeta) -> object:
    """The batch plan over poisoned storage of the declared size."""
    return kernel.plan_batch(meta, torch.full((kernel.plan_bytes,), 0x7F, dtype=torch.uint8, device=DEVICE))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output whose untouched elements show."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def worst_row(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest relative L2 error over the last dimension; a row of zeros must be zeros."""
    error = (actual.double() - exact).norm(dim=-1)
    size = exact.norm(dim=-1)
    ratio = torch.where(size == 0, torch.where(error == 0, 0.0, float("inf")), error / size)
    return float(ratio.nan_to_num(float("inf"), float("inf")).max()) if ratio.numel() else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
