"""What an engine asks of every operator, on one case of each: see :mod:`m3hal_conformance.engine`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from m3hal_conformance.case import Case

#: operator -> a case of it with a batch as steps bring it
_TYPICAL: Mapping[str, str] = {
    "rms_norm": "tokens_7",
    "add_rms_norm": "tokens_7",
    "linear": "square",
    "quantize": "to_mxfp8",
    "dequantize": "from_mxfp8",
    "rope_partial": "page_boundary",
    "kv_write": "page_boundaries",
    "kv_read": "page_boundaries",
    "kv_copy_blocks": "some_pages",
    "block_scores": "mixed",
    "topk_blocks": "around_k",
    "merge_topk": "ranks_4_normal",
    "sparse_attention": "decode",
    "paged_attention": "decode",
    "route_topk": "tokens_65",
    "swiglu_oai": "expert_tp8",
    "moe_experts": "few_resident",
    "qk_norm_rope_insert": "page_boundaries",
    "select_blocks": "chunks",
}
#: question -> its checks
_ASKED: Mapping[str, tuple[str, ...]] = {
    "compiled": ("compiled",),
    "allocation": ("allocation",),
    "captured": ("no_host_sync", "graph_replay"),
}
#: what runs between steps and is never captured
_BETWEEN_STEPS = ("kv_read", "kv_copy_blocks")


def engine_cases(cases: Iterable[Case]) -> list[Case]:
    """The questions, in each format of the typical case, in its first layout."""
    return [
        replace(
            case,
            id=f"{case.operator}/{question}/{case.format}",
            checks=checks,
            bugs=(),
            golden=None,
            quick=case.format == "bfloat16" and question != "captured",
        )
        for case in cases
        if case.layout == "hnd" and case.id.split("/")[1] == _TYPICAL.get(case.operator)
        for question, checks in _ASKED.items()
        if not (question == "captured" and case.operator in _BETWEEN_STEPS)
    ]
