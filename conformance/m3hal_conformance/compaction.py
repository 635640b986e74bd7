"""What a case needs of a call: the pages that it names, the rows of the RoPE table and the experts that it uses.

A call's arguments hold the whole KV cache, a table for the longest context and every expert of the layer. The case has
the same numbers under new page, row and expert ids. It loses what hangs on the old ids (an offset past 31 bits), and
bytes of pages that the call should not have touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import QTensor
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertLoRA, ExpertWeights, SeqMeta
from m3hal.shape import Site
from m3hal_conformance.trees import map_tensors

#: cache -> the input that says where in it a call reads or writes; else the block table of ``meta`` does
_SLOTS = {"kv": "slots", "cache": "slots", "index_cache": "index_slots"}
_PAIRS = {"src": 0, "dst": 1}
#: experts are kept in multiples of this, as kernels often want them
_EXPERTS = 8


@dataclass(frozen=True)
class Taken:
    """A call as a case holds it.

    inputs: on the CPU, in the definition's order. pages: cache -> the pages kept of it.
    """

    site: Site
    inputs: dict[str, Any]
    pages: Mapping[str, Tensor]

    def after(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Some caches of the call as they are now, in the case's pages."""
        return {name: _kept_pages(cache, self.pages[name]) for name, cache in live.items()}


def take(site: Site, inputs: Mapping[str, Any]) -> Taken:
    """Copies what a case needs of a call's inputs, by the definition's names."""
    taken, pages = dict(inputs), {}
    for name, cache in inputs.items():
        if isinstance(cache, PagedCache):
            pages[name], renamed = _pages_of(name, cache, taken)
            taken.update(renamed)
            taken[name] = _kept_pages(cache, pages[name])
    if isinstance(inputs.get("cos_sin"), Tensor):
        rows, taken["positions"] = torch.unique(inputs["positions"], return_inverse=True)
        taken["cos_sin"] = inputs["cos_sin"][rows]
    if isinstance(inputs.get("experts"), ExpertWeights):
        taken.update(_kept_experts(inputs["experts"], inputs["ids"], inputs.get("lora")))
        site = replace(site, num_local_experts=len(_codes(taken["experts"].w13)))
    return Taken(site, dict(map_tensors(taken, on_cpu)), pages)


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy that shares no memory; its axes keep their order in memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)


def _pages_of(name: str, cache: PagedCache, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The pages of a cache that a call names, and the inputs that name them, with new ids."""
    size = cache.layout.page_size
    if isinstance(inputs.get("meta"), SeqMeta):
        meta = inputs["meta"]
        used = torch.arange(meta.block_table.shape[1], device=meta.block_table.device) * size < meta.seq_lens[:, None]
        pages, renamed = _renamed(meta.block_table, used)
        plain = SeqMeta(meta.cu_q, meta.seq_lens, torch.where(used, renamed, 0), meta.max_q, meta.max_k)
        return pages, {"meta": plain}
    if name in _PAIRS:
        pairs = inputs["pairs"].clone()
        column = pairs[:, _PAIRS[name]].contiguous()
        pages, pairs[:, _PAIRS[name]] = _renamed(column, (pairs >= 0).all(1))
        return pages, {"pairs": pairs}
    slots = inputs[_SLOTS[name]]
    pages, renamed = _renamed(slots // size, slots >= 0)
    return pages, {_SLOTS[name]: torch.where(slots >= 0, renamed * size + slots % size, slots)}


def _renamed(ids: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The ids in use, ascending, and each one's place among them; ids that aren't in use keep their value.

    At least one is kept, as no kernel expects an empty cache.
    """
    kept = torch.unique(ids[used]).long()
    if not len(kept):
        return torch.zeros(1, dtype=torch.long, device=ids.device), ids
    return kept, torch.where(used, torch.searchsorted(kept, ids.long()).to(ids.dtype), ids)


def _kept_pages(cache: PagedCache, pages: Tensor) -> PagedCache:
    """Some pages of a cache; its axes keep their order in memory."""
    buf = cache.buf
    order = sorted(range(buf.ndim), key=lambda axis: buf.stride()[axis], reverse=True)
    kept = buf.permute(order).index_select(order.index(0), pages.to(buf.device))
    return replace(cache, buf=kept.permute([order.index(axis) for axis in range(buf.ndim)]))


def _kept_experts(experts: ExpertWeights, ids: Tensor, lora: ExpertLoRA | None) -> dict[str, Any]:
    """The experts that some token uses, and others up to a multiple of eight."""
    count = len(_codes(experts.w13))
    used = torch.zeros(count, dtype=torch.bool, device=ids.device)
    used[ids[ids >= 0].long()] = True
    wanted = min(count, max(1, -(-int(used.sum()) // _EXPERTS)) * _EXPERTS)
    spare = (~used).nonzero()[:, 0][: wanted - int(used.sum())]
    used[spare] = True
    kept = used.nonzero()[:, 0]
    if len(kept) == count:
        return {"experts": experts, "ids": ids}
    places = (used.cumsum(0) - 1).to(ids.dtype)
    renamed = torch.where(ids >= 0, places[ids.clamp(min=0).long()], ids)

    def keep(weight: Tensor | QTensor) -> Any:
        per_expert = lambda t: t[kept.to(t.device)] if t.ndim and len(t) == count else t  # noqa: E731
        return map_tensors(weight, per_expert)

    found = {"experts": replace(experts, w13=keep(experts.w13), w2=keep(experts.w2)), "ids": renamed}
    if lora is not None:
        own = {name: getattr(lora, name)[:, kept.to(lora.a13.device)] for name in ("a13", "b13", "a2", "b2")}
        found["lora"] = replace(lora, **own)
    return found


def _codes(weight: Tensor | QTensor) -> Tensor:
    return weight.data if isinstance(weight, QTensor) else weight
