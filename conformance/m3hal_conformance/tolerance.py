"""Bounds, derived: ``c`` times the worst error of a legitimate low-precision evaluation, per operator, output,
format and class of inputs. The measured errors are in ``calibration.json``, which
``python -m m3hal_conformance.calibrate`` makes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path

from m3hal.ops import Operator
from m3hal_conformance.compare import Bounds
from m3hal_conformance.oracle import UncalibratedError, emulated_traits, tolerated_traits

PATH = Path(__file__).with_name("calibration.json")

#: Times the worst legitimate error. In bf16 the rounding of the output dominates, and it is the same for everyone; in
#: fp32 the order of summation does, and kernels differ in it.
C: Mapping[tuple[str, str], float] = {
    ("row", "bfloat16"): 2.0,
    ("row", "float32"): 6.0,
    ("typical", "bfloat16"): 2.0,
    ("typical", "float32"): 2.0,
    ("ulp", "bfloat16"): 1.5,
    ("ulp", "float32"): 3.0,
    ("regret", "bfloat16"): 6.0,  # scores are fp32 in either
    ("regret", "float32"): 6.0,
    ("rounding", "bfloat16"): 3.0,
    ("rounding", "float32"): 3.0,
}
#: No bound is below these: the class itself grants one unit in the last place, fp32's own rounding is 6e-8, and what
#: is stored takes a dozen fp32 operations.
LEAST = {"ulp": 1.0, "row": 2.0**-23, "typical": 2.0**-23, "regret": 2.0**-23, "rounding": 16.0}
#: Classes of inputs whose outputs are fp32 in bf16 too: the order of summation dominates there.
_FP32_OUTPUT = ("router",)
#: Traits that round to bf16 on the way to a cache; two that round a number between bf16 neighbours differ by one unit.
_ON_THE_WAY = ("double_rounding", "norm_rope_round", "qkv_round")
BF16_UNIT = 2.0**16  # in fp32's
#: Traits by which a cache holds other numbers than exact ones; only the declared oracle can judge them.
_STORED_OTHERWISE = ("kv_scale_used", "nvfp4_quantizer", "mx_scale_rule", "double_rounding")
#: What declared traits may cost at most: against the definition that takes them, and against either where none is
#: emulated. e4m3 has 3 bits: 2.5 % on a flat softmax of 2,048.
CAP = {"row": 0.08, "typical": 0.02, "ulp": 16.0, "regret": 0.02, "rounding": 2 * BF16_UNIT}
#: The same against exact where the definition takes some of them: large logits are no longer the same softmax when
#: queries have 3 bits, so all that is asked here is that a result is nearer to the right one than zeros are.
LOOSE_CAP = {"row": 0.9, "typical": 0.9, "ulp": 2 * BF16_UNIT, "regret": 0.5, "rounding": 2 * BF16_UNIT}
#: A hardware's reciprocal is off in its last bit, and bf16 numbers often lie in the middle of two codes of one bit.
RECIPROCAL_CAP = 0.3
#: Score distance that a ranking on fewer bits may miss, relative to the row's largest |score|.
KEY_BITS = {"32": 0.0, "29": 2.0**-28, "16": 3.0 / 65534}


def bounds_for(operator: Operator, format: str, input_class: str, traits: Mapping[str, str], oracle: str) -> Bounds:
    """The bounds of one case against an oracle, ``"exact"`` or ``"declared"``."""
    emulated = emulated_traits(operator, traits)
    profile = {**emulated, **tolerated_traits(operator, traits)}
    bits = profile.pop("topk_key_bits", "32")

    def bound(output: str, metric: str) -> float:
        if operator.name in ("topk_blocks", "merge_topk"):
            return KEY_BITS[bits]
        key = key_of(operator.name, output, format, input_class, profile)
        if is_unbounded(metric, profile, oracle) or (metric == "typical" and key not in calibration()):
            return float("inf")
        if operator.name == "kv_write":
            return LEAST[metric]
        measured = _measured(operator.name, output, format, input_class, profile, oracle)
        summed = "float32" if input_class in _FP32_OUTPUT else format
        derived = max(C[metric, summed] * measured, LEAST[metric])
        if metric == "rounding" and set(profile) & set(_ON_THE_WAY):
            derived += BF16_UNIT
        derived = min(derived, cap(metric, emulated, oracle)) if profile else derived
        return derived + (KEY_BITS[bits] if metric == "regret" else 0.0)

    return bound


def key_of(operator: str, output: str, format: str, input_class: str, traits: Mapping[str, str]) -> str:
    """The name of an entry of the calibration."""
    suffix = "".join(f"+{name}={value}" for name, value in sorted(traits.items()))
    return f"{operator}/{output}/{format}/{input_class}{suffix}"


def is_unbounded(metric: str, traits: Mapping[str, str], oracle: str) -> bool:
    """Whether the numbers are others than exact ones by declaration: then only the declared oracle can judge.

    That is so in caches, and in sums of shares that cancel, of which an accumulator in bf16 keeps nothing.
    """
    if metric == "typical":  # asked where the worst row is bounded loosely, because codes may flip
        return traits.get("mma_accum") != "float22"
    if metric == "ulp" and traits.get("reduce_dtype") == "bfloat16_stepwise":
        return oracle == "exact"
    return metric == "rounding" and oracle == "exact" and not set(traits).isdisjoint(_STORED_OTHERWISE)


def cap(metric: str, emulated: Mapping[str, str], oracle: str) -> float:
    """What declared traits, some of them emulated, may cost at most."""
    if oracle == "exact" and emulated:
        return LOOSE_CAP[metric]
    return RECIPROCAL_CAP if metric == "row" and emulated.get("nvfp4_quantizer") == "reciprocal" else CAP[metric]


def _measured(
    operator: str, output: str, format: str, input_class: str, traits: Mapping[str, str], oracle: str
) -> float:
    """The error that was measured with these traits, or with parts of them, added up."""

    def error(some: Mapping[str, str]) -> float | None:
        entry = calibration().get(key_of(operator, output, format, input_class, some))
        return None if entry is None else float(entry[oracle])

    whole, none = error(traits), error({})

    def cost(rest: Mapping[str, str]) -> float | None:
        """Of the largest parts that were measured and together are the rest; None where some part never was."""
        if not rest:
            return 0.0
        for part in (part for size in range(len(rest), 0, -1) for part in combinations(rest, size)):
            found = error({name: rest[name] for name in part})
            more = None if found is None else cost({n: value for n, value in rest.items() if n not in part})
            if found is not None and more is not None:
                return max(0.0, found - (none or 0.0)) + more
        return None

    if whole is None and none is not None:
        extra = cost(traits)
        whole = None if extra is None else none + extra
    if whole is None:
        key, declared = key_of(operator, output, format, input_class, traits), ", ".join(map("=".join, traits.items()))
        raise UncalibratedError(
            f"the suite holds no bound for {key} ({declared or 'no traits'}); run m3hal_conformance.calibrate"
        )
    return whole


@cache
def calibration() -> Mapping[str, Mapping[str, float]]:
    """Entry -> worst error against the exact and the declared oracle."""
    if not PATH.exists():
        return {}
    found: Mapping[str, Mapping[str, float]] = json.loads(PATH.read_text())["entries"]
    return found
