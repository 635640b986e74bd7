"""What an engine asks of every operator, on a case or two of each.

See :mod:`m3hal_conformance.engine` and :mod:`m3hal_conformance.process`.
"""

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
    "qkv_norm_rope_insert": "page_boundaries",
    "sparse_decoder_layer": "decode",
    "select_blocks": "chunks",
    "allreduce_add_rms_norm": "alone",
    "mega_moe": "alone",
    "draft_block_sample": "sampled",
}
#: operator -> another case of it, small
_ANOTHER: Mapping[str, str] = {
    "rms_norm": "odd_rows",
    "add_rms_norm": "strided",
    "linear": "strided",
    "quantize": "to_fp8_e4m3",
    "dequantize": "from_mxfp4",
    "rope_partial": "tokens_equal_heads",
    "kv_write": "tokens_equal_heads",
    "kv_read": "index_keys",
    "kv_copy_blocks": "index_pages",
    "block_scores": "tokens_equal_heads",
    "topk_blocks": "tokens_equal_heads",
    "merge_topk": "ranks_2_normal",
    "sparse_attention": "ragged",
    "paged_attention": "ragged",
    "route_topk": "ties",
    "swiglu_oai": "three_axes",
    "moe_experts": "identity",
    "qk_norm_rope_insert": "tokens_equal_heads",
    "qkv_norm_rope_insert": "tokens_equal_heads",
    "sparse_decoder_layer": "no_shared_expert",
    "select_blocks": "tokens_equal_heads",
    "allreduce_add_rms_norm": "ranks_2",
    "mega_moe": "uneven_routed",
    "draft_block_sample": "rank_16",
}
#: question -> its checks
_ASKED: Mapping[str, tuple[str, ...]] = {
    "compiled": ("compiled",),
    "allocation": ("allocation",),
    "captured": ("no_host_sync", "graph_replay"),
}
_QUICK = ("compiled", "allocation")
#: the same, asked again on another case
_ASKED_AGAIN: Mapping[str, tuple[str, ...]] = {
    "process": (
        "global_state",
        "results_kept",
        "inference_mode",
        "other_thread",
        "bound_in_bfloat16",
        "unwritten_inputs",
        "other_writers",
    ),
    "called_often_5000": ("thousands_of_calls",),
}
#: further cases of operators that are captured: what only some sites have is read in the graph, too
_CAPTURED_TOO: Mapping[str, tuple[str, ...]] = {
    "moe_experts": ("shared_hot", "lora_adapters", "lora_beside_shared"),
    "route_topk": ("forced_some",),
}
#: what runs between steps and is never captured
_BETWEEN_STEPS = ("kv_read", "kv_copy_blocks")
#: what takes so little time that thousands of calls are asked
_CHEAP = ("rms_norm", "rope_partial", "topk_blocks", "merge_topk", "route_topk", "swiglu_oai")


def engine_cases(cases: Iterable[Case]) -> list[Case]:
    """The questions, in each format of the typical case, in its first layout; some again on another case, in one."""
    found = [case for case in cases if case.layout == "hnd"]
    last = {case.operator: case.format for case in found}
    made = []
    for case in found:
        name, is_last = case.id.split("/")[1], case.format == last[case.operator]
        often = ("called_often_5000",) if is_last and case.operator in _CHEAP else ()
        if name == _TYPICAL.get(case.operator):
            asked = [q for q in _ASKED if not (q == "captured" and case.operator in _BETWEEN_STEPS)]
            made += [_asked(case, question, question in _QUICK and case.format == "bfloat16") for question in asked]
            made.append(_asked(case, "process", is_last))
            made += [_asked(case, question) for question in often]
        if name in _CAPTURED_TOO.get(case.operator, ()):
            made.append(_asked(case, "captured", name=f"captured_{name}"))
        if name == _ANOTHER.get(case.operator) and is_last:
            made += [_asked(case, question, name=f"{question}_again") for question in ("process", *often)]
    return made


def _asked(case: Case, question: str, quick: bool = False, *, name: str = "") -> Case:
    return replace(
        case,
        id=f"{case.operator}/{name or question}/{case.format}",
        checks={**_ASKED, **_ASKED_AGAIN}[question],
        bugs=(),
        golden=None,
        quick=quick,
    )
