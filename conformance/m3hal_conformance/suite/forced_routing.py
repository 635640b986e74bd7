"""``route_topk`` with forced ids: what a trainer replays comes back as it was, and weighs what the sigmoid says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.case import Case, Inputs, Make, Rng, Site
from m3hal_conformance.suite._build import LIGHT, ask, every_other
from m3hal_conformance.suite.experts import INF, NAN, ONE, _logits

ROWS = ("row_alone", "permuted_rows")


def _ids(rng: Rng, tokens: int, k: int, experts: int = 128) -> Tensor:
    """Distinct experts in any order, the last ones among them."""
    ids = torch.stack([torch.cat([rng.permutation(experts - 1)[: k - 1], torch.tensor([experts - 1])])[
        rng.permutation(k)] for _ in range(tokens)] or [torch.empty(k)])[:tokens]  # fmt: skip
    return ids.int()


def _forced(tokens: int, bias: float = 2.0, experts: int = 128) -> Make:
    """Every row, whatever bias and scores say: the bias alone would choose others."""

    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _logits(tokens, 2.0, bias, experts)(rng, site)
        return {**inputs, "forced_ids": _ids(rng, tokens, site.top_k_experts, experts)}

    return make


def _some(rng: Rng, site: Site) -> Inputs:
    """Every third row is not forced, the first one among them."""
    inputs = _forced(17, 0.1)(rng, site)
    inputs["forced_ids"][::3] = -1
    return inputs


def _nobody(rng: Rng, site: Site) -> Inputs:
    return {**_logits(17)(rng, site), "forced_ids": torch.full((17, site.top_k_experts), -1, dtype=torch.int32)}


def _none(rng: Rng, site: Site) -> Inputs:
    """A batch without replay at a site that has it."""
    return {**_logits(7)(rng, site), "forced_ids": None}


def _holes(rng: Rng, site: Site) -> Inputs:
    """-1 stands in any place of a forced row, the first one too; the last expert's logit is the largest."""
    inputs = _forced(9)(rng, site)
    inputs["logits"][:, -1] = 6
    for row in range(8):
        inputs["forced_ids"][row, row % 4] = -1
    inputs["forced_ids"][5, 2:] = -1
    inputs["forced_ids"][6] = torch.tensor([-1, -1, -1, 7], dtype=torch.int32)
    return inputs


def _repeated(rng: Rng, site: Site) -> Inputs:
    """An id that stands in two places, or in all."""
    inputs = _forced(9)(rng, site)
    inputs["forced_ids"][::2, 3] = inputs["forced_ids"][::2, 0]
    inputs["forced_ids"][4] = 17
    return inputs


def _broken(rng: Rng, site: Site) -> Inputs:
    """Forced ids whose logits are NaN or infinite; and rows of NaN whose ids are forced, as those of padding are."""
    inputs = _forced(9)(rng, site)
    logits, ids = inputs["logits"], inputs["forced_ids"].long()
    logits[1, ids[1, 0]], logits[2, ids[2, 3]], logits[3, ids[3, 1]] = NAN, INF, -INF
    logits[4], logits[5] = NAN, -INF
    logits[6, ids[6, 1:]] = NAN
    inputs["bias"][::3] = NAN
    return inputs


def _first_expert(rng: Rng, site: Site) -> Inputs:
    """Expert 0 is an expert: alone beside holes, in all places, beside others."""
    inputs = _forced(7)(rng, site)
    inputs["forced_ids"][:4] = -1
    inputs["forced_ids"][0, 0] = inputs["forced_ids"][1, 2] = inputs["forced_ids"][4:6] = 0
    inputs["forced_ids"][2, 1:] = 0
    return inputs


def _vanishing(rng: Rng, site: Site) -> Inputs:
    """Forced experts whose scores are down to 1e-13: no epsilon may enter their sum."""
    inputs = _forced(9)(rng, site)
    ids = inputs["forced_ids"].long()
    return {**inputs, "logits": inputs["logits"].scatter(1, ids, rng.uniform(-30, -20, *ids.shape))}


def _strided(rng: Rng, site: Site) -> Inputs:
    inputs = _forced(9)(rng, site)
    wide = torch.full((9, 12), 77, dtype=torch.int32)
    wide[:, 1:9:2] = inputs["forced_ids"]
    return {**inputs, "logits": every_other(inputs["logits"], 0), "forced_ids": wide[:, 1:9:2]}


def _sliced(rng: Rng, site: Site) -> Inputs:
    """Forced ids as a slice of wider rows, as where the ids of all layers lie together."""
    inputs = _forced(9)(rng, site)
    wide = torch.full((9, 16), 77, dtype=torch.int32)
    wide[:, 4:8] = inputs["forced_ids"]
    return {**inputs, "forced_ids": wide[:, 4:8]}


def _cases() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        asked: dict[str, Any] = {"kind": "moe", "dtypes": ONE, "forced_routing": True, **options}
        return ask("route_topk", f"forced_{name}", make, **asked)

    return [
        *q("all", _forced(17), also=ROWS, bugs=("F38",), quick=True),
        *q("some", _some, also=ROWS, quick=True),
        *q("nobody", _nobody, also=("unforced",), quick=True),
        *q("none", _none, quick=True),
        *q("holes", _holes, also=ROWS, bugs=("F29",), quick=True),
        *q("repeated", _repeated, also=ROWS, quick=True),
        *q("broken_rows", _broken, also=ROWS, bugs=("F28",), quick=True),
        *q("first_expert", _first_expert, also=ROWS, quick=True, bugs=("F29",)),
        *q("vanishing", _vanishing, also=ROWS),
        *q("not_renormalized", _forced(9), renormalize=False, routed_scale=1.5, also=ROWS, bugs=("F33",),
           quick=True),
        *q("scale_1", _forced(9), routed_scale=1.0, bugs=("F36",)),
        *q("top_8", _forced(9), top_k_experts=8),
        *q("top_1", _forced(9), top_k_experts=1, bugs=("F33",)),
        *q("experts_256", _forced(9, experts=256), num_experts=256, checks=LIGHT),
        *q("tokens_1100", _forced(1100), checks=LIGHT, bugs=("F68",)),
        *q("strided", _strided, bugs=("F65",), quick=True),
        *q("sliced", _sliced, bugs=("F65",)),
        *q("one_token", _forced(1), bugs=("F32",)),
        *q("no_token", _forced(0), bugs=("F30",)),
    ]  # fmt: skip


CASES = _cases()
