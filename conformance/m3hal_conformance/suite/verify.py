"""``sparse_attention`` as an engine's step calls it: without the log-sum-exp, two to four query tokens a request.

A drafter's tokens are verified so. Kernels have a path of their own for few tokens, and compile another one without the
log-sum-exp, which the other questions ask for.
"""

from __future__ import annotations

from typing import Any

from m3hal_conformance.case import Case, Make, MakeIn
from m3hal_conformance.suite._build import ask
from m3hal_conformance.suite._paged import Lengths
from m3hal_conformance.suite.attention import (
    RELATIONS,
    _edited,
    _equal_in_reach,
    _every_block,
    _few,
    _flat,
    _inputs,
    _large_logits,
    _needle,
    _newest_only,
    _nothing,
    _visible_nan,
    _with_future,
)

ONE: Lengths = [(4, 1500)]
TWO: Lengths = [(2, 131), (2, 2300)]
RAGGED: Lengths = [(3, 300), (1, 129)]
BF16 = ("bfloat16",)


def _in(make: MakeIn, layout: str) -> Make:
    return lambda rng, site: make(rng, site, layout)


def _cases() -> list[Case]:
    asked: dict[str, Any] = {"kind": "sparse_attention", "return_lse": False}

    def q(name: str, make: Any, input_class: str = "blocks", **options: Any) -> list[Case]:
        options = {"dtypes": BF16, "tensor_parallel": 2, "quick": name in ("one", "two"), **options}
        return ask("sparse_attention", f"verify_{name}", make, input_class=input_class, **asked, **options)

    cases = [
        *q("one", _inputs(ONE, _every_block), also=RELATIONS, dtypes=("float32", *BF16), bugs=("F19", "F21")),
        *q("two", _inputs(TWO, _few), also=RELATIONS, dtypes=("float32", *BF16), bugs=("F13",)),
        *q("all_heads", _inputs(TWO, _every_block), tensor_parallel=1, bugs=("F67",)),
        *q("one_kv_head", _inputs(RAGGED, _few), tensor_parallel=4, also=RELATIONS, bugs=("F67",)),
        *q("over_a_boundary", _inputs([(4, 130)], _every_block), bugs=("F19",), also=("stale",)),
        *q("nothing_before", _inputs([(4, 4)], _every_block), bugs=("F12",), also=("stale",)),
        *q("padded", _inputs([(2, 0), (2, 500)], _few), bugs=("F14",)),
        *q("empty_rows", _inputs(ONE, _nothing), bugs=("F14", "F13")),
        *q("newest_only", _inputs(TWO, _newest_only), bugs=("F13",)),
        *q("ids_past_the_end", _inputs([(4, 2600)], _with_future), bugs=("F13",), also=("stale",)),
        *q("flat", _edited(ONE, _every_block, _flat), "flat"),
        *q("ends", _edited(TWO, _every_block, _equal_in_reach), "flat", bugs=("F19",)),
        *q("needle", _edited(TWO, _every_block, _needle), "needle"),
        *q("large_logits", _edited(ONE, _few, _large_logits), "large"),
        *q("visible_nan", _edited([(2, 300), (2, 200)], _every_block, _visible_nan), bugs=("F28",)),
        *q("block_outer", _inputs(TWO, _few, outer=3), bugs=("F64",)),
        *q("of_eight", _inputs([(4, 700), (4, 129)], _few), bugs=("F13",)),
    ]
    for format, layout in (("fp8_e4m3", "hnd"), ("nvfp4", "msa_slot")):
        stored: dict[str, Any] = {"kv_format": format, "tensor_parallel": 4, "layouts": (layout,)}
        for name, lengths, ids in (
            ("one", ONE, _every_block),
            ("ragged", RAGGED, _few),
            ("padded", [(2, 0), (2, 500)], _few),
        ):
            also = RELATIONS if name == "ragged" else ()
            cases += q(f"{format}_{name}", _in(_inputs(lengths, ids), layout), also=also, **stored)
    return cases


CASES = _cases()
