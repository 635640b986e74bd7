"""The reference backend: every definition, bound as it stands.

It lists the core operators only. A fused operator under the reference is a composition of the plan's core entries, and
where all of those are the reference's, the fused definition itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from m3hal import ops
from m3hal.dispatch.manifest import Impl, Limit, Manifest, at_least, one_of
from m3hal.formats import FORMATS
from m3hal.layouts import CACHE_FORMATS, PAGE_MAPS
from m3hal.shape import Site


def bind_definition(operator: ops.Operator, site: Site) -> Callable[..., Any]:
    """The definition with a site's static values, in the calling convention of implementations."""
    return with_out(partial(operator.reference, **operator.static_values(site)))


def with_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a functional callable the convention's ``out=``: written and returned when given."""

    def run(*inputs: Any, out: Any = None) -> Any:
        result = function(*inputs)
        if out is None:
            return result
        write(out, result)
        return out

    return run


def write(out: Any, result: Any) -> None:
    """Copies a result into ``out``: tensors, and tuples and dataclasses of tensors."""
    if isinstance(result, tuple):
        for target, value in zip(out, result, strict=True):
            write(target, value)
    elif is_dataclass(result):
        for field in fields(result):
            write(getattr(out, field.name), getattr(result, field.name))
    elif hasattr(out, "copy_"):
        out.copy_(result)


def __getattr__(name: str) -> Callable[[Site], Callable[..., Any]]:
    """``m3hal.reference:rms_norm`` is the factory of that operator."""
    if name not in ops.CORE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(bind_definition, ops.load(name))


#: what the definitions consist of
_FILES = (
    "ops/*.py", "layouts/*.py", "formats/*.py", "_lazy.py", "_published.py", "shape.py", "dispatch/manifest.py",
)  # fmt: skip


def _operators() -> Mapping[str, tuple[Impl, ...]]:
    return {
        name: (
            Impl(
                f"{__name__}:{name}",
                limits=_limits(name),
                layouts=PAGE_MAPS if ops.load(name).group == "cache" else (),
                memory="self",
                files=_FILES,
            ),
        )
        for name in ops.CORE
    }


def _limits(operator: str) -> tuple[Limit, ...]:
    """The formats it takes; and what engines may ask beyond the usual, all of it."""
    formats = _FORMATS.get(operator, {})
    more = [attribute for attribute in ops.load(operator).optional if attribute not in formats]
    known = (one_of(attribute, *names) for attribute, names in formats.items())
    return (*known, *(at_least(attribute, 0) for attribute in more))


_CACHES = tuple(CACHE_FORMATS)
_CACHE = {"kv_format": _CACHES, "index_format": ("", *_CACHES)}  # "": a site without an index cache
#: operator -> attribute of the site -> what its definition can store, compute from, or write
_FORMATS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("kv_write", "kv_read", "kv_copy_blocks"), _CACHE),
    "sparse_attention": {"kv_format": _CACHES},
    "paged_attention": {"kv_format": _CACHES},
    "block_scores": {"index_format": _CACHES},
    "quantize": {"activation_format": tuple(FORMATS)},
    "linear": {"projection_format": ("", *FORMATS)},
    "moe_experts": {"weight_format": tuple(FORMATS), "shared_format": ("", *FORMATS)},
}

MANIFEST = Manifest(
    name="reference",
    vendor="m3hal",
    api=">=1,<2",
    priority=0,
    devices=("*",),
    operators=_operators(),
)
