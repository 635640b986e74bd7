"""Cases of a device's sizes: all experts of the model resident, and contexts of 64K tokens.

A CPU is not asked them. Inputs are cheap to make: eight experts are drawn and the others are their rows in another
order. So are oracles: tokens share a dozen experts, and few tokens have long contexts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import QTensor
from m3hal.ops import ExpertWeights
from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Make, MakeIn, Rng, dtype_of
from m3hal_conformance.sizes import DEVICE
from m3hal_conformance.suite._build import LIGHT, ask, in_wide_row
from m3hal_conformance.suite._paged import Lengths
from m3hal_conformance.suite.attention import _every_block, _few, _inputs
from m3hal_conformance.suite.indexer import _needles
from m3hal_conformance.suite.quantised import _stored

H, DRAWN = 6144, 8
ONCE = ("oracle", "written", "guards")
#: one request of the whole context, one a page boundary short of it, a chunk, a short and a padded one
LONG: Lengths = [(1, DEVICE.context), (2, DEVICE.context - 127), (17, 40_000), (1, 129), (1, 0)]


@cache
def _some_experts(format: str, inner: int) -> tuple[Tensor | QTensor, Tensor | QTensor]:
    """w13 and w2 of the drawn experts, kept for the cases that share them."""
    generator = torch.Generator().manual_seed(11)
    drawn = []
    for rows, width in ((2 * inner, H), (H, inner)):
        weight = torch.empty(DRAWN, rows, width, dtype=torch.bfloat16).normal_(generator=generator).mul_(width**-0.5)
        drawn.append(weight if format == "bfloat16" else _stored(weight.float(), format))
    return drawn[0], drawn[1]


def _spread(weight: Tensor | QTensor, count: int) -> Tensor | QTensor:
    """``count`` experts: every further eight are the drawn ones with their rows rolled by a prime."""
    if isinstance(weight, QTensor):
        data, scale, whole = (None if t is None else _spread(t, count) for t in _tensors(weight))
        assert isinstance(data, Tensor)
        return replace(weight, data=data, scale=scale, global_scale=whole)  # type: ignore[arg-type]
    rounds = [weight.roll(11 * r, 1) if weight.shape[1] > 1 else weight for r in range(-(-count // DRAWN))]
    return torch.cat(rounds)[:count]


def _tensors(q: QTensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return q.data, q.scale, q.global_scale


def _routing(rng: Rng, tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Every token has expert 1, the last expert, and others of the ten that are used besides, in any order."""
    others = rng.permutation(experts - 3)[:10] + 2
    turn = torch.arange(tokens)[:, None] + 3 * torch.arange(k - 2)
    ids = torch.cat([torch.tensor([[1, experts - 1]]).expand(tokens, 2), others[turn % 10]], 1)
    order = torch.stack([rng.permutation(k) for _ in range(tokens)])
    return rng.uniform(0.25, 1.0, tokens, k), ids.gather(1, order).int()


def _experts(tokens: int, format: str, inner: int) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        count = site.num_local_experts
        weights, ids = _routing(rng, tokens, count, site.top_k_experts)
        drawn = _some_experts(site.dtype if format == "" else format, inner)
        w13, w2 = (_spread(weight, count) for weight in drawn)
        experts = ExpertWeights(w13, w2)
        return {"x": rng.normal(tokens, H).to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}

    return make


def _crowd(counts: tuple[int, ...], format: str, apart: int = 0) -> Make:
    """Each expert has one slot of its own, and the first so many tokens: tiles of many tokens, full and nearly so.

    apart: numbers between a token's last and the next one's first.
    """

    def make(rng: Rng, site: Site) -> Inputs:
        tokens, k = max(counts), len(counts)
        ids = torch.where(torch.arange(tokens)[:, None] < torch.tensor(counts), torch.arange(k), -1)
        order = torch.stack([rng.permutation(k) for _ in range(tokens)])
        hidden, inner = site.hidden_size, site.intermediate_size
        w13, w2 = rng.normal(k, 2 * inner, hidden) * hidden**-0.5, rng.normal(k, hidden, inner) * inner**-0.5
        first, second = (_stored(w, format) if format else w.to(dtype_of(site)) for w in (w13, w2))
        x, weights = rng.normal(tokens, hidden).to(dtype_of(site)), rng.uniform(0.25, 1.0, tokens, k)
        x = in_wide_row(x, 0, apart) if apart else x
        return {"x": x, "weights": weights, "ids": ids.gather(1, order).int(), "experts": ExpertWeights(first, second)}

    return make


def _moe() -> list[Case]:
    cases: list[Case] = []
    # rows 1032 numbers apart: copies of 16 bytes would do, but of 32 not
    for format, apart in (("", 0), ("", 8), ("fp8_e4m3", 0), ("mxfp8", 0)):
        few: dict[str, Any] = {"weight_format": format} if format else {}
        cases += ask(
            "moe_experts",
            f"{format or 'plain'}_many_tokens{'_apart' if apart else ''}",
            _crowd((330, 281, 256, 70), format, apart),
            kind="moe",
            hidden_size=1024,
            intermediate_size=512,
            num_local_experts=4,
            dtypes=("bfloat16",),
            checks=ONCE,
            input_class="real",
            sizes=DEVICE.name,
            **few,
        )
    for format in ("", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"):
        stored: dict[str, Any] = {"weight_format": format} if format else {}
        for tokens in (1, 40) if format else (1, 40, 300):
            cases += ask(
                "moe_experts",
                f"{format or 'plain'}_all_experts_{tokens}",
                _experts(tokens, format, 384),
                kind="moe",
                tensor_parallel=8,
                dtypes=("bfloat16",),
                checks=ONCE,
                input_class="real",
                bugs=("F31",),
                sizes=DEVICE.name,
                **stored,
            )
    ep8: dict[str, Any] = {"num_local_experts": 16, "sizes": DEVICE.name, "checks": ONCE, "dtypes": ("bfloat16",)}
    cases += ask("moe_experts", "ep8_experts", _experts(33, "", 3072), kind="moe", input_class="real", **ep8)
    return cases


def _contexts() -> list[Case]:
    cases: list[Case] = []
    for format, layout in (("", "hnd"), ("fp8_e4m3", "hnd"), ("nvfp4", "msa_slot")):
        stored = {"kv_format": format, "index_format": format} if format else {}
        asked: dict[str, Any] = {
            "sizes": DEVICE.name, "dtypes": ("bfloat16",), "checks": LIGHT, "layouts": (layout,),
            "max_context": DEVICE.context, **stored,
        }  # fmt: skip

        def at(make: MakeIn, layout: str = layout) -> Make:
            return lambda rng, site: make(rng, site, layout)

        name = f"{format}_device_context".removeprefix("_")
        sparse: dict[str, Any] = {"kind": "sparse_attention", "tensor_parallel": 4, **asked}
        blocks: dict[str, Any] = {"input_class": "blocks", "return_lse": True}
        needles: dict[str, Any] = {"input_class": "needles", "bugs": ("F15",)}
        cases += ask("block_scores", name, at(_needles(LONG)), **sparse, **needles)
        cases += ask("select_blocks", name, at(_needles(LONG)), **sparse, **needles)
        cases += ask("sparse_attention", name, at(_inputs(LONG, _every_block)), **sparse, **blocks)
        cases += ask("sparse_attention", f"{name}_few", at(_inputs(LONG, _few)), **sparse, **blocks)
        dense = {**sparse, "kind": "dense_attention", "tensor_parallel": 8}
        cases += ask("paged_attention", name, at(_inputs(LONG, None)), **dense, **blocks)
    return cases


CASES = [*_moe(), *_contexts()]
