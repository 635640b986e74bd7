"""Measures the errors that bounds are derived from: ``python -m m3hal_conformance.calibrate``.

Every case of classes R, U1 and S is evaluated by :mod:`m3hal_conformance.legitimate`, small ones on several seeds, and
these also with each trait that an evaluation can take and with the traits that backends take together. Per operator,
output, format and class of inputs the worst error, in fp64 against the exact and the declared oracle, goes into
``calibration.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from m3hal import ops
from m3hal.ops import Operator
from m3hal_conformance import legitimate, legitimate_layer, legitimate_ranks
from m3hal_conformance import oracle as oracles
from m3hal_conformance.case import Case
from m3hal_conformance.compare import Score, compare
from m3hal_conformance.harness import Named, cloned, named
from m3hal_conformance.oracle import BITWISE, UncalibratedError
from m3hal_conformance.ranks import on_ranks, rank_count
from m3hal_conformance.sizes import CPU
from m3hal_conformance.suite import all_cases
from m3hal_conformance.tolerance import PATH, is_unbounded, key_of

SEEDS = (0, 1, 2)
EVALUATIONS: Mapping[str, Callable[..., Any]] = {
    **legitimate.EVALUATIONS,
    **legitimate_ranks.EVALUATIONS,
    "sparse_decoder_layer": legitimate_layer.sparse_decoder_layer,
}
_ATTENTION = ("sparse_attention", "paged_attention")
_SCORES = ("block_scores", "select_blocks")
_EXPERTS = ("moe_experts", "mega_moe")
_PRODUCTS = ("linear", *_EXPERTS)
_INSERTS = ("qk_norm_rope_insert", "qkv_norm_rope_insert")
_LAYER = "sparse_decoder_layer"
#: the traits that an evaluation can take, and the operators whose evaluation does
_EVALUATED = {
    "mma_accum": (*_PRODUCTS, *_SCORES, *_ATTENTION, "qkv_norm_rope_insert", "draft_block_sample", _LAYER),
    "p_dtype": (*_ATTENTION, _LAYER),
    "q_dtype": (*_ATTENTION, *_SCORES),
    "kv_dequant_round": (*_ATTENTION, *_SCORES),
    "activation_format": (*_PRODUCTS, "qkv_norm_rope_insert"),
    "add_norm_round": ("add_rms_norm", "allreduce_add_rms_norm"),
    "reduce_dtype": ("allreduce_add_rms_norm", "mega_moe"),
    "logits_round": ("draft_block_sample",),
    "qkv_round": ("qkv_norm_rope_insert",),
    "norm_rope_round": _INSERTS,
    "rope_table": ("rope_partial", *_INSERTS, _LAYER),
    "kv_scale_used": (*_INSERTS, _LAYER),
    "nvfp4_quantizer": _INSERTS,
    "mx_scale_rule": _INSERTS,
    "double_rounding": (*_INSERTS, _LAYER),
    "combine_dtype": (*_EXPERTS, _LAYER),
    "shared_activation_format": _EXPERTS,
}
_STORED = ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")
_E4M3 = {"p_dtype": "e4m3x448", "q_dtype": "e4m3"}
#: as vLLM's MegaMoE sends tokens
_MEGA_NVFP4 = {"activation_format": "nvfp4", "nvfp4_quantizer": "token_global", "reduce_dtype": "bfloat16"}
#: freedoms that backends take together; others together are bounded by the sum of what each costs
_TOGETHER: Mapping[tuple[str, ...], Sequence[Mapping[str, str]]] = {
    _ATTENTION: (
        {"p_dtype": "bfloat16", "q_dtype": "e4m3"},
        {"p_dtype": "bfloat16", "kv_dequant_round": "e4m3"},
        _E4M3,
        *({**_E4M3, "kv_dequant_round": rounding} for rounding in ("e4m3", "e4m3_shift3")),
    ),
    _SCORES: tuple({"q_dtype": "e4m3", "kv_dequant_round": rounding} for rounding in ("e4m3", "e4m3_shift3")),
    _PRODUCTS: (
        *(
            {"activation_format": format, "mx_scale_rule": rule}
            for format in ("mxfp8", "mxfp4")
            for rule in ("ceil", "floor", "even")
        ),
        *({"activation_format": "nvfp4", "nvfp4_quantizer": how} for how in ("reciprocal", "token_global")),
        {"activation_format": "fp8_e4m3", "mma_accum": "float22"},
    ),
    _EXPERTS: (
        {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16", "mma_accum": "float22"},
        *(
            {"activation_format": routed, "shared_activation_format": shared}
            for routed, shared in (*((f, f) for f in _STORED), ("nvfp4", "mxfp8"), ("mxfp4", "mxfp8"))
        ),
        *(
            {"activation_format": format, **more}
            for format in _STORED
            for more in (
                {"combine_dtype": "bfloat16"},
                {"double_rounding": "bfloat16"},
                {"combine_dtype": "bfloat16", "double_rounding": "bfloat16"},
            )
        ),
    ),
    ("allreduce_add_rms_norm",): tuple(
        {"reduce_dtype": how, "add_norm_round": "bfloat16"} for how in ("bfloat16", "bfloat16_stepwise")
    ),
    ("mega_moe",): (
        *({"activation_format": f, "reduce_dtype": "bfloat16"} for f in _STORED),
        *({**_MEGA_NVFP4, **more} for more in ({}, {"shared_activation_format": "mxfp8"})),
    ),
    ("qk_norm_rope_insert",): ({"norm_rope_round": "bfloat16", "rope_table": "bfloat16"},),
    ("qkv_norm_rope_insert",): ({"qkv_round": "bfloat16", "norm_rope_round": "bfloat16"},),
}


def profiles(operator: Operator) -> list[Mapping[str, str]]:
    """No traits, each freedom alone that the evaluation can take, and those that backends take together."""
    found: list[Mapping[str, str]] = [{}]
    for trait in operator.traits:
        if operator.name in _EVALUATED.get(trait.name, ()):
            found += [{trait.name: value} for value in trait.values[1:]]
    for names, together in _TOGETHER.items():
        found += together if operator.name in names else ()
    return found


def measure(case: Case, seed: int, traits: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    """(output, oracle, error) of the legitimate evaluation of one case."""
    operator = ops.load(case.operator)
    inputs, exact = _known(case, seed)
    found = _evaluate(operator, case, inputs, traits)
    near = oracles.declared(operator, case.site, inputs, traits) or exact
    for name, wanted in (("exact", exact), ("declared", near)):
        for score in _scores(operator, case, found, wanted):
            right = score.metric == "bits" and not score.error  # bits need no bound
            if not right and not is_unbounded(score.metric, traits, name):
                yield score.output, name, score.error


@lru_cache(maxsize=2)
def _known(case: Case, seed: int) -> tuple[Mapping[str, Any], Named]:
    """Inputs and exact oracle of a case, kept from one profile to the next."""
    inputs = case.inputs(seed)
    return inputs, oracles.exact(ops.load(case.operator), case.site, inputs)


def own_errors(case: Case, seed: int, traits: Mapping[str, str], oracle: str) -> dict[str, float]:
    """What a legitimate evaluation of one case costs against an oracle, by output; of a trait only what it can take."""
    if ops.load(case.operator).name in BITWISE:
        return {}
    taken = {name: value for name, value in traits.items() if case.operator in _EVALUATED.get(name, ())}
    found = [(output, error) for output, name, error in measure(case, seed, taken) if name == oracle]
    return {output: error for output, error in found if error < float("inf")}


def _evaluate(operator: Operator, case: Case, inputs: Mapping[str, Any], traits: Mapping[str, str]) -> Named:
    given = cloned(inputs) if not case.lazy else dict(inputs)
    if operator.name == "select_blocks":  # with a group every rank gives the same
        scored = [value for name, value in given.items() if name != "group"]
        scores = EVALUATIONS["block_scores"](case.site, traits, *scored)
        return {"out": scores.repeat(rank_count(given), 1, 1)}
    returned = on_ranks(partial(EVALUATIONS[operator.name], case.site, traits), given)
    return named(operator, returned, {name: given[name] for name in operator.mutates if given[name] is not None})


def _scores(operator: Operator, case: Case, found: Named, wanted: Named) -> list[Score]:
    """Errors as the suite measures them; a selection's is twice that of the scores it rests on, where it chooses."""
    if operator.name == "select_blocks":
        exact, chooses = wanted["out.scores"], wanted["out.visible"] > case.site.top_k_blocks
        finite = torch.isfinite(exact) & chooses[:, None, None]
        size = torch.where(finite, exact, 0.0).abs().amax(-1, keepdim=True).clamp(min=1e-30)
        off = torch.where(finite, (found["out"].double() - exact).abs() / size, 0.0)
        return [Score("out", "regret", 2 * float(off.max()) if off.numel() else 0.0, 0.0)]
    return compare(operator, case.site, found, wanted, lambda output, metric: float("inf"))


def _measured(case: Case, seed: int, traits: Mapping[str, str]) -> list[tuple[str, str, float]]:
    """What :func:`measure` gives; nothing where the case leaves no room for the traits.

    Traits are measured in the small cases, in one page map of each format: page maps move bytes only. What a unit cuts
    off grows with the length of its sums, so that is measured in real sizes too.
    """
    operator = ops.load(case.operator)
    is_long = case.input_class == "real" and traits.get("mma_accum") == "float22"
    if traits and (case.layout in ("nhd", "planar") or not (case.quick or is_long)):
        return []
    try:
        if dict(traits) != oracles.concerning(operator, case.site, _known(case, seed)[0], traits):
            return []
        found = list(measure(case, seed, traits))
    except (UncalibratedError, ValueError):  # the definition can't take the traits at this site
        if not traits:
            raise
        return []
    wrong = [output for output, _, error in found if error == float("inf")]
    if wrong and not traits:  # a narrow accumulator may overflow; a backend that declares one has to fail there
        raise AssertionError(f"{case.id}: the legitimate evaluation is infinitely wrong: {wrong}")
    return [(output, name, error) for output, name, error in found if error < float("inf")]


def calibrate(cases: tuple[Case, ...], seeds: tuple[int, ...] = SEEDS) -> dict[str, dict[str, float]]:
    """The entries of ``calibration.json``."""
    entries: dict[str, dict[str, float]] = {}
    for name in ops.NAMES:
        ops.load(name)
    for number, case in enumerate(cases):
        operator = ops.load(case.operator)
        if operator.name in BITWISE or "oracle" not in case.checks:  # the engine's cases repeat another's inputs
            continue
        print(f"\r{number + 1}/{len(cases)} {case.id:<60}", end="", file=sys.stderr)
        for traits in profiles(operator):
            if "shared_activation_format" in traits and not case.site.shared_intermediate_size:
                continue
            for seed in seeds if case.quick and not traits else seeds[:1]:
                for output, name, error in _measured(case, seed, traits):
                    entry = entries.setdefault(
                        key_of(operator.name, output, case.format, case.input_class, traits),
                        {"exact": 0.0, "declared": 0.0, "cases": 0},
                    )
                    entry[name] = max(entry[name], float(f"{error:.3g}"))
                    entry["cases"] += 0.5 if seed == seeds[0] else 0
    print(file=sys.stderr)
    return dict(sorted(entries.items()))


def main() -> None:
    """Writes the committed calibration, or compares with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed file instead of writing it")
    parser.add_argument("--op", action="append", default=[], help="only this operator; the other entries stay")
    options = parser.parse_args()
    cases = tuple(
        case for case in all_cases() if case.sizes == CPU.name and (not options.op or case.operator in options.op)
    )
    entries = calibrate(cases, SEEDS[:1] if options.check else SEEDS)
    if options.check:
        old = json.loads(PATH.read_text())["entries"]
        far = [key for key, entry in entries.items() if entry["exact"] > 1.05 * old.get(key, {"exact": 0})["exact"]]
        sys.exit(f"these entries are larger than committed: {', '.join(far)}" if far else 0)
    if options.op:
        kept = json.loads(PATH.read_text())["entries"]
        kept = {key: entry for key, entry in kept.items() if key.partition("/")[0] not in options.op}
        entries = dict(sorted({**kept, **entries}.items()))
    text = {"made_by": "python -m m3hal_conformance.calibrate", "seeds": list(SEEDS), "torch": torch.__version__}
    PATH.write_text(json.dumps({**text, "entries": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
