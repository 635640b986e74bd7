"""Whether a manifest says things that can be: the lies that are found without importing vendor code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import Any

from m3hal import ops
from m3hal.dispatch import versions
from m3hal.dispatch.errors import did_you_mean
from m3hal.dispatch.manifest import Impl, Limit, Manifest, Rung, Symbol
from m3hal.formats import FORMATS
from m3hal.layouts import PAGE_MAPS, is_private
from m3hal.shape import SITE_ATTRIBUTES

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
#: What is written in the manifest: a class of one's own could answer differently each time, or raise.
_MAPPINGS = (dict, MappingProxyType)
#: Values whose repr is the same in every process, as impl_id needs.
_PLAIN = (str, int, float, NoneType)
#: attributes whose values have names
_KNOWN = {
    "dtype": ("float32", "bfloat16", "float16"),
    **dict.fromkeys(("kv_format", "index_format", "weight_format", "activation_format"), ("", *FORMATS)),
    **dict.fromkeys(("shared_format", "projection_format"), ("", *FORMATS)),
}
_PHASES = ("prefill", "decode", "verify")


def problem_of(manifest: Any) -> str | None:
    """What makes the whole manifest unusable, as a sentence without its full stop; None when it is fine.

    A fault of one implementation costs only that implementation: see :func:`problem_of_impl`.
    """
    if type(manifest) is not Manifest:
        return f"it is a {type(manifest).__name__}, not a m3hal.Manifest"
    missing = [field.name for field in fields(Manifest) if field.name not in vars(manifest)]
    if missing:
        return f"it has no {missing[0]}; it was not made by m3hal.Manifest(...)"
    if not isinstance(manifest.name, str) or not _NAME.fullmatch(manifest.name):
        return f"its name {manifest.name!r} must be lower-case letters, digits, '-' and '_'"
    if not isinstance(manifest.vendor, str):
        return f"its vendor is a {type(manifest.vendor).__name__}; it must be a name"
    if not isinstance(manifest.operators, _MAPPINGS):
        return "its operators must map an operator's name to a tuple of Impl"
    if not _is_texts(manifest.devices) or not manifest.devices:
        return "its devices must be a tuple of patterns such as ('cuda:sm_90',)"
    if not isinstance(manifest.priority, int):
        return f"its priority {manifest.priority!r} must be a whole number"
    if manifest.probe is not None and not _is_path(manifest.probe):
        return f"its probe {manifest.probe!r} must read 'module:function'"
    if not isinstance(manifest.libraries, _MAPPINGS) or not all(
        isinstance(name, str) and name for name in manifest.libraries
    ):
        return "its libraries must map a distribution's name to a version range"
    if not isinstance(manifest.withheld, _MAPPINGS) or not all(
        isinstance(text, str) for pair in manifest.withheld.items() for text in pair
    ):
        return "its withheld must map an operator's name to the reason why it is not offered"
    for where, text in (("api", manifest.api), *((f"libraries[{k!r}]", v) for k, v in manifest.libraries.items())):
        if not isinstance(text, str):
            return f"its {where} is {text!r}; it must be a version range, e.g. '>=1,<2'"
        try:
            versions.satisfies("0", text)
        except ValueError as error:
            return f"its {where} is no version range: {error}"
    return None


def unknown_operators(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(operator, problem) for the names that are no operators; the rest of the manifest stays usable."""
    for name in (*manifest.operators, *manifest.withheld):
        if name not in ops.NAMES:
            yield str(name), f"{name!r} is no operator of this m3hal.{did_you_mean(str(name), ops.NAMES)}"


def problem_of_impl(impl: Any, operator: ops.Operator) -> str | None:
    """What makes one implementation unusable; None when it is fine."""
    if type(impl) is not Impl:
        return f"it is a {type(impl).__name__}, not a m3hal.Impl"
    if not isinstance(impl.name, str):
        return f"its name {impl.name!r} must be a string"
    if not isinstance(impl.limits, tuple) or not isinstance(impl.rungs, tuple):
        return "its limits and rungs must be tuples; a tuple of one is written (limit,)"
    if not _is_path(impl.path):
        return f"its path {impl.path!r} must read 'module:factory'"
    if impl.predicate is not None and not _is_path(impl.predicate):
        return f"its predicate {impl.predicate!r} must read 'module:function'"
    if impl.memory not in ("caller", "self", "graph"):
        return f"its memory mode {impl.memory!r} must be 'caller', 'self' or 'graph'"
    if not _is_texts(impl.files) or not _is_texts(impl.layouts):
        return "its files and layouts must be tuples of strings"
    unknown = next((kind for kind in impl.layouts if kind not in PAGE_MAPS and not is_private(kind)), None)
    if unknown is not None:
        hint = did_you_mean(unknown, PAGE_MAPS)
        return f"its layout {unknown!r} is no page map.{hint} One of the vendor's own is written 'vendor:name'"
    if not _is_texts(impl.devices):
        return "its devices must be a tuple of patterns such as ('cuda:sm_90',)"
    if not isinstance(impl.calls, tuple) or not all(isinstance(symbol, Symbol) for symbol in impl.calls):
        return "its calls must be a tuple of m3hal.Symbol; a tuple of one is written (symbol,)"
    if operator.group == "cache" and not impl.layouts:
        return "it works on a KV cache and must declare the layouts it reads and writes, e.g. layouts=('hnd',)"
    for name, flag in (("traceable", impl.traceable), ("zero_tokens", impl.zero_tokens)):
        if not isinstance(flag, bool):
            return f"its {name} is a {type(flag).__name__}; it must be True or False"
    if impl.views not in ("strided", "rows", "contiguous"):
        return f"its views {impl.views!r} must be 'strided', 'rows' or 'contiguous'"
    if not isinstance(impl.alignment, int) or impl.alignment < 1:
        return f"its alignment {impl.alignment!r} must be a number of bytes, 1 or more"
    for name, sizes in impl.buckets.items() if isinstance(impl.buckets, _MAPPINGS) else [("", ())]:
        if name not in ("tokens", "requests", "pages", "context") or not _is_sizes(sizes):
            return f"its buckets {impl.buckets!r} must map tokens, requests, pages or context to a tuple of sizes"
    return _problem_of_limits(impl) or _problem_of_traits(impl, operator) or _problem_of_rungs(impl)


def _problem_of_limits(impl: Impl) -> str | None:
    for limit in impl.limits:
        if not isinstance(limit, Limit):
            return f"its limit {limit!r} must be made with one_of, at_least, at_most or multiple_of"
        if limit.attribute not in SITE_ATTRIBUTES:
            hint = did_you_mean(str(limit.attribute), SITE_ATTRIBUTES)
            return f"it limits {limit.attribute!r}, which is no attribute of a Site.{hint}"
        if not isinstance(limit.values, tuple) or not all(isinstance(value, _PLAIN) for value in limit.values):
            return f"its limit on {limit.attribute} takes {limit.values!r}; the values must be texts and numbers"
        known = _KNOWN.get(limit.attribute, ())
        unknown = next((value for value in limit.values if known and value not in known), None)
        if unknown is not None:
            hint = did_you_mean(str(unknown), known)
            return f"its limit on {limit.attribute} takes {unknown!r}, which no {limit.attribute} is.{hint}"
    return None


def _problem_of_traits(impl: Impl, operator: ops.Operator) -> str | None:
    if not isinstance(impl.traits, _MAPPINGS):
        return "its traits must map a trait's name to a value"
    vocabulary = {trait.name: trait.values for trait in operator.traits}
    for name, value in impl.traits.items():
        if name not in vocabulary:
            return f"{operator.name} has no trait {name!r}.{did_you_mean(str(name), vocabulary)}"
        if value not in vocabulary[name]:
            return f"its trait {name} is {value!r}; the vocabulary is {', '.join(vocabulary[name])}"
    return None


def _problem_of_rungs(impl: Impl) -> str | None:
    for rung in impl.rungs:
        if not isinstance(rung, Rung):
            return f"its rung {rung!r} is not a m3hal.Rung"
        bounds = (rung.min_tokens, 0 if rung.max_tokens is None else rung.max_tokens)
        if not _is_texts(rung.phases) or not all(isinstance(bound, int) for bound in bounds):
            return f"its rung {rung!r} must have a tuple of phases and whole numbers of tokens"
        unknown = [phase for phase in rung.phases if phase not in _PHASES]
        if unknown:
            return f"its rung {rung.name!r} names the phase {unknown[0]!r}; phases are {', '.join(_PHASES)}"
        if rung.max_tokens is not None and rung.max_tokens < rung.min_tokens:
            return f"its rung {rung.name!r} ends at {rung.max_tokens} tokens, before it starts at {rung.min_tokens}"
    return None


def gap_in_ladder(rungs: tuple[Rung, ...], max_tokens: int) -> str | None:
    """Why a ladder doesn't cover 0..max_tokens in every phase exactly once; None when it does, or has no rungs."""
    for phase in _PHASES if rungs else ():
        expected = 0
        for rung in sorted((r for r in rungs if phase in r.phases), key=lambda r: r.min_tokens):
            if rung.min_tokens > expected:
                return f"its ladder has no {phase} rung for {expected} to {rung.min_tokens - 1} tokens"
            if rung.min_tokens < expected:
                return f"its ladder has two {phase} rungs for {rung.min_tokens} tokens"
            expected = max_tokens + 1 if rung.max_tokens is None else rung.max_tokens + 1
        if expected <= max_tokens:
            return f"its ladder has no {phase} rung for {expected} to {max_tokens} tokens"
    return None


def _is_path(text: Any) -> bool:
    return isinstance(text, str) and _PATH.fullmatch(text) is not None


def _is_texts(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)


def _is_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and bool(values) and all(isinstance(value, int) for value in values)
