"""The written checkpoint's config, index and record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from m3hal.checkpoint.convert.plan import Shard, weight_map
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.shard import ShardReport

RECORD = "m3hal_conversion.json"

#: modules of the model that are not FP8, as compressed-tensors patterns of the engine's module names
_NOT_QUANTISED = (
    "re:.*lm_head",
    "re:.*self_attn.*",
    "re:.*block_sparse_moe\\.gate$",
    "re:.*shared_experts.*",
    "re:.*\\.mlp\\.(gate|up|down|gate_up)_proj$",
    "re:.*vision_tower.*",
    "re:.*multi_modal_projector.*",
    "re:.*patch_merge_mlp.*",
)


def quantization_config(profile: Profile) -> dict[str, Any]:
    """compressed-tensors FP8: one scale per output channel, activations quantised per token as they come.

    The target is "Linear" by that name: vLLM looks routed experts up as if each were its linear layers.
    """
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    flavor = {} if profile.flavor is None else {"fp8_dtype_flavor": profile.flavor}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        **flavor,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": list(_NOT_QUANTISED),
    }


def converted_config(config: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """The source's config with the new quantization_config in the old one's places, everything else as it was."""
    found = {key: converted_config(value, profile) if key == "text_config" else value for key, value in config.items()}
    if "quantization_config" in config:
        found["quantization_config"] = quantization_config(profile)
    return found


def index(shards: tuple[Shard, ...]) -> dict[str, Any]:
    """``model.safetensors.index.json``."""
    names, total = weight_map(shards)
    return {"metadata": {"total_size": total}, "weight_map": names}


def record(identity: Mapping[str, Any], reports: Iterable[ShardReport]) -> dict[str, Any]:
    """What was converted from what, without times or places, so that converting again gives the same bytes."""
    reports = sorted(reports, key=lambda report: report.name)
    exponents: Counter[int] = Counter()
    for report in reports:
        exponents.update(report.scale_exponents)
    return {
        "made_by": f"m3hal {identity['version']}, convert mxfp4-to-fp8",
        "profile": identity["profile"],
        "source_header_sha256": identity["source shards"],
        "routed_expert_matrices": sum(report.routed for report in reports),
        "shared_expert_matrices": sum(report.shared for report in reports),
        "tensors_copied": sum(report.copied for report in reports),
        "rows_by_scale_exponent": {str(exponent): exponents[exponent] for exponent in sorted(exponents)},
    }
