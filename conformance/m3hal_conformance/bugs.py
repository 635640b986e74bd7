"""Public bugs of MiniMax-M3 and its relatives, and where this project keeps each from happening again.

where: ``case``: cases of this suite carry its id, and the broken zoo has it as a backend. ``format``: the same, for
quantised storage. ``dispatch``, ``loading``: tests of the interface layer and of the vLLM plugin, by name in
:data:`TESTS`. ``contract``: the interface has no room for it, for the reason in :data:`NO_ROOM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal["case", "format", "dispatch", "loading", "contract"]


@dataclass(frozen=True)
class Bug:
    """One public report. id: its number in this project."""

    id: str
    what: str
    where: Where
    link: str


_GH = "https://github.com/"
_ROWS: tuple[tuple[str, Where, str, str], ...] = (
    ("F01", "case", "an adapter drops the limit, alpha and beta", "sgl-project/sglang/pull/29182"),
    ("F02", "case", "missing activation constants become those of SiLU", "vllm-project/vllm/pull/48929"),
    ("F03", "case", "one path ignores the limit", "sgl-project/sglang/pull/39920"),
    ("F04", "case", "a constant is compiled in and the given one ignored", "vllm-project/vllm-ascend/pull/11916"),
    ("F05", "case", "gate and up rows are read in another order than stored", "ROCm/ATOM/pull/1410"),
    ("F06", "contract", "one name for two activations", "microsoft/onnxruntime/issues/28738"),
    ("F08", "case", "ids given as a strided view are read as contiguous", "NVIDIA/TensorRT-LLM/pull/17285"),
    ("F12", "case", "fewer blocks than k", "ROCm/aiter/pull/1567"),
    ("F13", "case", "-1 is followed as an address", "vllm-project/vllm/pull/54597"),
    ("F14", "case", "a row without any key is not a number", "vllm-project/vllm/pull/49054"),
    ("F15", "case", "a compiled-in capacity is smaller than the context", "sgl-project/sglang/pull/36560"),
    ("F16", "case", "equal scores are ranked differently", "sgl-project/sglang/pull/24654"),
    ("F17", "case", "a mask or a running maximum of zero beats negative scores", "sgl-project/sglang/pull/3705"),
    ("F18", "case", "a host bound is below a live length", "sgl-project/sglang/issues/31133"),
    ("F19", "case", "the last page is read past the end", "vllm-project/vllm-ascend/pull/13391"),
    ("F20", "case", "stale index keys win a block", "vllm-project/vllm/pull/33568"),
    ("F21", "case", "pages of others reach the output", "vllm-project/vllm/issues/55637"),
    ("F22", "case", "a cached prefix is counted among the queries", "ROCm/ATOM/pull/1551"),
    ("F23", "case", "a later chunk sees only itself", "hw-native-sys/pypto-lib/issues/592"),
    ("F24", "case", "the index cache is forgotten when a cache moves", "ROCm/ATOM/pull/2140"),
    ("F25", "case", "the page size is taken for the block size", "sgl-project/sglang-jax/pull/1376"),
    ("F27", "case", "the drafter's view of the cache has the target's bounds", "NVIDIA/TensorRT-LLM/pull/17656"),
    ("F28", "case", "NaN in a padded row takes other rows or ids with it", "vllm-project/vllm/pull/39391"),
    ("F29", "case", "-1 is the last expert, or the last slot", "vllm-project/vllm/pull/57036"),
    ("F30", "case", "a batch of no tokens", "lightseekorg/tokenspeed/pull/415"),
    ("F31", "case", "all tokens on one expert, or none on a rank", "NVIDIA/Megatron-LM/pull/3626"),
    ("F32", "case", "a batch of one token", "sgl-project/sglang/pull/29633"),
    ("F33", "case", "memory that nobody wrote is added up", "sgl-project/sglang/pull/40187"),
    ("F34", "case", "something is kept from one call to the next", "ROCm/ATOM/pull/1480"),
    ("F35", "case", "a shard of the context is empty", "ROCm/ATOM/pull/2269"),
    ("F36", "case", "the routed scale is applied twice", "vllm-project/vllm/pull/24119"),
    ("F37", "contract", "the shared expert is scaled", "sgl-project/sglang/pull/28237"),
    ("F38", "case", "weights come from biased scores", "ml-explore/mlx-swift-lm/pull/332"),
    ("F42", "contract", "an expert's bias is not weighted", "NVIDIA-NeMo/Automodel/pull/2591"),
    ("F43", "case", "global expert ids where local ones belong", "vllm-project/vllm-gaudi/pull/1796"),
    ("F45", "loading", "a rank reads every expert", "vllm-project/vllm/issues/48827"),
    ("F46", "loading", "the range of a rank's experts is swapped", "vllm-project/vllm/pull/28715"),
    ("F47", "contract", "a fused projection is copied whole into one shard", "vllm-project/vllm/pull/45794"),
    ("F49", "loading", "a layer's scheme is not found and the global one taken", "sgl-project/sglang/issues/31827"),
    ("F50", "loading", "scales of fused experts are skipped", "vllm-project/vllm/issues/49638"),
    ("F51", "contract", "another layout of the checkpoint", "Blaizzy/mlx-vlm/pull/1374"),
    ("F52", "format", "scale bytes are used as numbers", "jundot/omlx/pull/2159"),
    ("F55", "format", "nibbles in the other order", "kekzl/imp/pull/567"),
    ("F56", "case", "the sign of zero, and numbers at the edge of a format", "vllm-project/vllm/pull/45567"),
    ("F57", "format", "a global scale divides in one format and multiplies in another", "modular/modular/issues/6600"),
    ("F59", "case", "K is no multiple of the tile", "ROCm/ATOM/pull/1317"),
    ("F60", "case", "one page map is written and another read", "vllm-project/vllm/issues/50084"),
    ("F61", "format", "scales lose their order on the way", "vllm-project/vllm/issues/42118"),
    ("F62", "format", "an fp8 cache arrives as bytes", "ROCm/ATOM/pull/2122"),
    ("F63", "case", "an offset does not fit 32 bits", "vllm-project/vllm/pull/47671"),
    ("F64", "case", "a strided cache is taken for contiguous", "ROCm/aiter/pull/4531"),
    ("F65", "case", "slices of a fused projection are taken for contiguous", "NVIDIA/TensorRT-LLM/pull/17093"),
    ("F66", "contract", "the wrong device or stream", "flashinfer-ai/flashinfer/issues/452"),
    ("F67", "case", "heads per rank, and which kv head they read", "SemiAnalysisAI/InferenceX/pull/2671"),
    ("F68", "case", "a variant chosen by the number of tokens is wrong", "vllm-project/vllm/issues/51049"),
    ("F69", "case", "the result changes from run to run", "deepseek-ai/DeepGEMM/issues/392"),
    ("F70", "format", "a group size is compiled in", "ROCm/aiter/pull/3541"),
    ("F71", "case", "the norm of the wrong convention", "NVIDIA/Model-Optimizer/pull/1965"),
    ("F72", "case", "one is added twice", "ml-explore/mlx-lm/pull/1623"),
    ("F73", "case", "rounding in the wrong place", "vllm-project/vllm/pull/3653"),
    ("F74", "case", "which part of a head turns", "vllm-project/vllm/pull/30384"),
    ("F75", "case", "heads are normalised together", "vllm-project/vllm-metal/pull/788"),
    ("F76", "dispatch", "a plugin that fails to import takes everything down", "flagos-ai/vllm-plugin-FL/issues/195"),
    ("F77", "dispatch", "one missing operator loses all others", "flagos-ai/vllm-plugin-FL/issues/517"),
    ("F79", "dispatch", "an explicit choice is replaced", "verl-project/verl-omni/issues/516"),
    ("F80", "dispatch", "the reasons for a refusal are lost", "vllm-project/vllm/pull/57821"),
    ("F81", "dispatch", "the automatic choice fails later", "vllm-project/vllm/issues/53411"),
    ("F82", "dispatch", "a second registry", "vllm-project/vllm/pull/53153"),
    ("F83", "dispatch", "a library is registered twice", "vllm-project/vllm-ascend/issues/1239"),
    ("F84", "case", "the fake kernel disagrees with the real one", "vllm-project/vllm/issues/41645"),
    ("F85", "case", "an input is written that nobody declared", "flashinfer-ai/flashinfer/pull/4361"),
    ("F87", "dispatch", "a stale cache of entry points", "SickChill/sickchill/issues/6739"),
    ("F88", "dispatch", "an option is accepted and ignored", "vllm-project/recipes/pull/621"),
    ("F89", "dispatch", "nobody can tell what ran", "vllm-project/vllm/issues/40628"),
    ("F90", "dispatch", "a layout is agreed upon in silence", "SemiAnalysisAI/InferenceX/pull/2781"),
)  # fmt: skip

BUGS: dict[str, Bug] = {name: Bug(name, what, where, _GH + path) for name, where, what, path in _ROWS}

#: id -> the test in this project's repository that reproduces it
TESTS: dict[str, str] = {
    "F45": "tests/checkpoint/test_vllm_loading.py::test_a_rank_reads_its_own_experts_only",
    "F46": "tests/vllm/test_fp8_experts.py::test_two_ranks",
    "F49": "tests/checkpoint/test_vllm_loading.py::test_nothing_else_is_quantised",
    "F50": "tests/vllm/test_quantised_checkpoints.py::test_a_wrong_tensor_is_named",
    "F76": "tests/dispatch/test_hostile_distributions.py::test_failing_manifests_are_verdicts",
    "F77": "tests/dispatch/test_hostile_distributions.py::test_nonsense_in_a_manifest_costs_what_says_it",
    "F79": "tests/dispatch/test_distributions.py::test_named_backend_must_cover_everything",
    "F80": "tests/dispatch/test_planner.py::test_refusal_tells_every_backends_reason",
    "F81": "tests/dispatch/test_planner.py::test_limits_are_held_against_the_declared_maximum",
    "F82": "tests/vllm/test_operators_are_called.py::test_lying_operator_changes_the_tokens",
    "F83": "tests/vllm/test_configuration.py::test_registering_is_idempotent_and_never_raises",
    "F87": "tests/dispatch/test_distributions.py::test_stale_caches_and_homes_do_not_matter",
    "F88": "tests/dispatch/test_policy.py::test_slips_are_errors_that_name_carrier_and_remedy",
    "F89": "tests/vllm/test_serving.py::test_plan_is_logged_once_and_written_back",
    "F90": "tests/dispatch/test_planner.py::test_cache_group_shares_a_layout_that_one_operator_forces",
}

#: id -> why nothing here can go wrong that way
NO_ROOM: dict[str, str] = {
    "F06": "an operator's name is its definition: swiglu_oai takes every constant and is nothing else",
    "F37": "the shared expert is no operator: moe_experts gets weights with the routed scale in them, and nothing else",
    "F42": "experts have no biases; a backend whose library wants some passes zeros, which its cases then see",
    "F47": "projections are vLLM's: m3hal fuses none of a checkpoint's, and vLLM's loader decides what is quantised",
    "F51": "one layout of a checkpoint is read; a tensor that has no place, or is lacking, is an error that names it",
    "F66": "a plan is made for one device, and a bound callable is the vendor's own: m3hal launches nothing itself",
}
