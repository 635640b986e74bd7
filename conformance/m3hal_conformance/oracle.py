"""What the outputs should be: ``exact`` (the definition in fp64) and ``declared`` (with the traits that are emulated).

An oracle is a dictionary of tensors. Besides the outputs it holds what the comparison needs, under dotted names:
``out.unit`` is the magnitude whose last place counts (class U1), ``ids.scores`` the exact scores that a selection is
judged by (class S), and ``kv@k...`` what a quantised cache may hold (:mod:`m3hal_conformance.storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertWeights, Operator, Trait
from m3hal.shape import Site
from m3hal_conformance.decoder import Part
from m3hal_conformance.harness import Named, cloned, named, widened
from m3hal_conformance.ranks import PerRank, by_rank, on_ranks, rank_count
from m3hal_conformance.storage import vectors

Run = Callable[..., Any]
Traits = Mapping[str, str]
#: operators whose outputs follow from their inputs bit for bit, rounding included
BITWISE = ("quantize", "dequantize", "kv_write", "kv_read", "kv_copy_blocks", "topk_blocks", "merge_topk")
#: traits that speak of a storage format, and the formats: elsewhere they free nobody from anything
_OF_STORAGE: Mapping[str, tuple[str, ...]] = {
    "kv_dequant_round": ("nvfp4", "mxfp4"),
    "kv_scale_used": ("fp8_e4m3", "fp8_e4m3_240"),
    "nvfp4_quantizer": ("nvfp4",),
    "double_rounding": ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "nvfp4", "mxfp4"),
    "mx_scale_rule": ("mxfp8", "mxfp4"),
}
_IN_THEIR_OWN_DTYPE = ("norm_rope_round", "qkv_round")  # the definition emulates these by what it computes in


class UncalibratedError(Exception):
    """The suite can't judge a declared trait at a case; the case is unsupported, never passed."""


def exact(operator: Operator, site: Site, inputs: Mapping[str, Any]) -> Named:
    """The definition with nothing rounded but what the operator stores."""
    return _evaluate(operator, site, inputs, {}, wide=True)


def declared(operator: Operator, site: Site, inputs: Mapping[str, Any], traits: Mapping[str, str]) -> Named | None:
    """The definition with the given traits emulated; None when none of them is."""
    emulated = emulated_traits(operator, traits)
    if not emulated:
        return None
    try:
        return _evaluate(operator, site, inputs, emulated, wide=not set(emulated) & set(_IN_THEIR_OWN_DTYPE))
    except ValueError as error:  # such as a width that does not fill the groups of a declared activation format
        told = ", ".join(map("=".join, emulated.items()))
        raise UncalibratedError(f"the definition can't take {told} here: {error}") from error


def concerning(operator: Operator, site: Site, inputs: Mapping[str, Any], traits: Mapping[str, str]) -> dict[str, str]:
    """The declared traits without those that speak of a storage format which neither site nor inputs have."""
    activations = traits.get("activation_format", site.activation_format)
    formats = {cache.layout.format for cache in inputs.values() if isinstance(cache, PagedCache)}
    if operator.name in (
        "quantize",
        "linear",
        "moe_experts",
        "mega_moe",
        "qkv_norm_rope_insert",
        "sparse_decoder_layer",
    ):
        formats.add(site.activation_format if operator.name == "quantize" else activations)
    if site.shared_intermediate_size:
        formats.add(traits.get("shared_activation_format", ""))
    return {
        name: value
        for name, value in traits.items()
        if (name not in _OF_STORAGE or not formats.isdisjoint(_OF_STORAGE[name]))
        and (name != "shared_activation_format" or site.shared_intermediate_size)
    }


def emulated_traits(operator: Operator, traits: Mapping[str, str]) -> dict[str, str]:
    """Those of an implementation's traits that the reference takes and that are not the exact value."""
    return {t.name: traits[t.name] for t in operator.traits if t.emulated and _is_taken(t, traits)}


def tolerated_traits(operator: Operator, traits: Mapping[str, str]) -> dict[str, str]:
    """Those that only widen the tolerance; ``batch_invariant`` is a promise and widens nothing."""
    return {
        t.name: traits[t.name]
        for t in operator.traits
        if not t.emulated and t.name != "batch_invariant" and _is_taken(t, traits)
    }


def _is_taken(trait: Trait, traits: Mapping[str, str]) -> bool:
    return traits.get(trait.name, trait.values[0]) != trait.values[0]


def _evaluate(
    operator: Operator, site: Site, inputs: Mapping[str, Any], traits: Mapping[str, str], *, wide: bool
) -> Named:
    wide = wide and operator.name not in BITWISE
    given = _widened(_short_table(operator, inputs)) if wide else cloned(inputs)
    statics = dict(operator.static_values(site))
    if traits:
        statics["traits"] = traits
    run = partial(operator.reference, **statics)
    extra = _BEFORE.get(operator.name, _nothing_before)(given, inputs, run, traits)
    returned = on_ranks(run, given)
    mutated = {name: given[name] for name in operator.mutates if given.get(name) is not None}
    found = named(operator, returned, mutated) | extra
    return found | _EXTRA.get(operator.name, _nothing)(site, given, found, traits)


def _widened(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs in fp64, but for experts: the definition widens those that it needs, one at a time."""
    wide = widened({name: value for name, value in inputs.items() if not _is_experts(value)})
    return {name: wide.get(name, value) for name, value in inputs.items()}


def _is_experts(value: Any) -> bool:
    return isinstance(value[0] if isinstance(value, PerRank) else value, ExpertWeights)


def _short_table(operator: Operator, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A RoPE table of a million rows, cut to the rows that are read, before it is widened."""
    table = inputs.get("cos_sin")
    if not isinstance(table, Tensor) or table.numel() < 1 << 22:
        return inputs
    positions = inputs["positions"]
    return {**inputs, "positions": torch.arange(len(positions)), "cos_sin": table[positions]}


def _nothing(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    return {}


def _pairs(x: Tensor, rotary_dim: int) -> Tensor:
    """The length of the pair that each rotated element belongs to; zero where nothing rotates."""
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    length = torch.hypot(first, second)
    return torch.cat([length, length, torch.zeros_like(x[..., rotary_dim:])], dim=-1)


def _rope(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    return {"out.unit": _pairs(found["out"], site.rotary_dim)}


def _insert(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    units = {f"{name}.unit": _pairs(found[name], site.rotary_dim) for name in ("q", "index_q") if name in found}
    for name in ("kv", "index_cache"):
        cache = inputs[name]
        if cache is not None and cache.layout.format in PLAIN_FORMATS:
            unit = torch.zeros_like(cache.buf, memory_format=torch.contiguous_format)
            unit[..., : cache.layout.dim] = _pairs(found[f"{name}.buf"][..., : cache.layout.dim], site.rotary_dim)
            units[f"{name}.buf.unit"] = unit.nan_to_num(nan=0.0)
    return units


def _size(x: Tensor) -> Tensor:
    """The root mean square of each vector, for each of its elements: what a sum of products is exact to."""
    return x.square().mean(-1, keepdim=True).sqrt().expand_as(x)


def _insert_stored(given: Mapping[str, Any], inputs: Mapping[str, Any], run: Run, traits: Traits) -> Named:
    """What quantised caches may hold: the keys by what they were before they were stored, the values bit for bit.

    Of the projection's keys and values both by what they were, in last places of their vectors' size.
    """
    projected = "weight" in given or "layer" in given
    caches = {"kv": ("slots", "kv"), "index_cache": ("index_slots", "index_cache")}
    held = [name for name in caches if isinstance(given[name], PagedCache)]
    quantised = [name for name in held if given[name].layout.format not in PLAIN_FORMATS]
    if not quantised:
        return {}
    wide = {name: given[name] and _plain(given[name]) for name in caches}
    run(*{**given, **wide}.values())
    stored = cloned(inputs)  # not widened: values are rounded in fp32, as the definition says
    if not projected:
        run(*stored.values())
    found: Named = {}
    for name in quantised:
        slots = given[caches[name][0]]
        exact = _at(wide[name].k, slots)
        unit = _size(exact) if projected else _pairs(exact, run.keywords["rotary_dim"])  # type: ignore[attr-defined]
        found |= vectors(given[name], "k", slots, exact, unit, traits).named(f"{name}@k")
        if given[name].layout.has_values:
            exact = _at(wide[name].v, slots)
            unit = _size(exact) if projected else exact.abs()
            found |= vectors(given[name], "v", slots, exact, unit, traits).named(f"{name}@v")
            if not projected and traits.get("nvfp4_quantizer", "division") == "division":
                found[f"{name}@v.known"] = stored[name].buf.contiguous().view(torch.uint8).flatten()
    return found


def _write_stored(given: Mapping[str, Any], inputs: Mapping[str, Any], run: Run, traits: Traits) -> Named:
    """What a quantiser that multiplies by reciprocals may store: hardware's reciprocals differ in their last bit."""
    cache = given["cache"]
    if traits.get("nvfp4_quantizer", "division") == "division":
        return {}
    found: Named = {}
    parts: tuple[tuple[Part, Any], ...] = (("k", given["k"]), ("v", given["v"]))
    for part, numbers in parts:
        if numbers is not None:
            through = numbers.bfloat16() if traits.get("double_rounding") == "bfloat16" else numbers
            exact = through.double()
            found |= vectors(cache, part, given["slots"], exact, exact.abs(), traits).named(f"cache@{part}")
    return found


def _plain(cache: PagedCache) -> PagedCache:
    """An empty fp64 cache of the same pages."""
    layout = replace(cache.layout, kind="hnd", format="float64")
    return PagedCache(torch.zeros(len(cache.buf), *layout.page_shape(), dtype=torch.float64), layout)


def _at(view: Tensor, slots: Tensor) -> Tensor:
    """[T, H, D] at the slots; rows of negative slots are undefined."""
    page, offset = slots.clamp(min=0) // view.shape[2], slots.clamp(min=0) % view.shape[2]
    return view[page, :, offset]


def _nothing_before(given: Mapping[str, Any], inputs: Mapping[str, Any], run: Run, traits: Traits) -> Named:
    return {}


#: evaluated beside the definition, before it changes its arguments
_BEFORE = {
    "qk_norm_rope_insert": _insert_stored,
    "qkv_norm_rope_insert": _insert_stored,
    "sparse_decoder_layer": _insert_stored,
    "kv_write": _write_stored,
}


def _swiglu(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    """exp's relative error grows with its argument, so the unit does: |out| * (1 + |alpha g| (1 - sigmoid))."""
    gate, _ = inputs["gate_up"].chunk(2, dim=-1)
    argument = site.alpha * gate.clamp(max=site.limit)
    unit = found["out"].abs() * (1 + argument.abs() * torch.sigmoid(-argument))
    return {"out.unit": unit.nan_to_num(nan=0.0, posinf=0.0)}


def _route(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    score = torch.sigmoid(inputs["logits"])
    judged = {"ids.scores": score + inputs["bias"], "weights.scores": score}
    forced = inputs.get("forced_ids")
    return judged if forced is None else {**judged, "ids.forced": forced}


def _select(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    scored = {name: value for name, value in traits.items() if name in ("q_dtype", "kv_dequant_round")}
    scores = ops.load("block_scores").reference(
        inputs["index_q"], inputs["index_cache"], inputs["meta"], block_size=site.block_size, traits=scored
    )
    visible = inputs["meta"].positions(len(inputs["index_q"])) // site.block_size + 1
    ranks = rank_count(inputs)  # every rank gives the same
    return {"out.scores": scores.repeat(ranks, 1, 1), "out.visible": visible.repeat(ranks)}


def _ranked(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    if "ids" in inputs:
        return {}
    return {"out.scores": inputs["scores"].double(), "out.visible": inputs["visible_blocks"].long()}


def _all_reduced(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    """In fp32 a sum of shares is exact to a last place of their sizes; bf16 hides in which order they are summed."""
    if site.dtype != "float32":
        return {}
    ranks = by_rank(inputs)
    size = torch.stack([own["x"].abs() for own in ranks]).sum(0) + ranks[0]["residual"].abs()
    inverse = torch.rsqrt(found["residual_out"].square().mean(-1, keepdim=True) + site.eps)
    every = torch.cat([size] * len(ranks))
    unit = every * inverse * (site.weight_offset + ranks[0]["weight"]).abs()
    return {f"{name}.unit": t.nan_to_num(nan=0.0, posinf=0.0) for name, t in (("residual_out", every), ("out", unit))}


def _drafted(site: Site, inputs: Mapping[str, Any], found: Named, traits: Traits) -> Named:
    """What a token's successor depends on, so that each is judged by the token that an implementation chose before."""
    head = inputs["head"]
    rounding = ("float32", "bias_bfloat16", "bfloat16").index(traits.get("logits_round", "float32"))
    needed = {
        **{name: inputs[name] for name in ("base_logits", "hidden", "previous", "noise")},
        **{name: getattr(head, name) for name in ("w1", "w2", "d2t", "confidence")},
        "rounding": torch.tensor(rounding),
    }
    return {f"tokens@{name}": value for name, value in needed.items() if value is not None}


_EXTRA = {
    "allreduce_add_rms_norm": _all_reduced,
    "draft_block_sample": _drafted,
    "rope_partial": _rope,
    "qk_norm_rope_insert": _insert,
    "swiglu_oai": _swiglu,
    "route_topk": _route,
    "select_blocks": _select,
    "topk_blocks": _ranked,
}
