"""m3hal: every MiniMax-M3 operator defined once, served by whichever vendor proves it.

The names below are imported when first used, so that ``import m3hal`` costs about a millisecond and no torch.
"""

from __future__ import annotations

import importlib

#: What type checkers take for true. Not from `typing`, whose import costs more than everything else here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from m3hal.dispatch import API_VERSION as API_VERSION
    from m3hal.dispatch import Bound as Bound
    from m3hal.dispatch import Impl as Impl
    from m3hal.dispatch import Kernel as Kernel
    from m3hal.dispatch import M3halError as M3halError
    from m3hal.dispatch import Manifest as Manifest
    from m3hal.dispatch import Plan as Plan
    from m3hal.dispatch import Policy as Policy
    from m3hal.dispatch import Rung as Rung
    from m3hal.dispatch import Symbol as Symbol
    from m3hal.dispatch import Verdict as Verdict
    from m3hal.dispatch import at_least as at_least
    from m3hal.dispatch import at_most as at_most
    from m3hal.dispatch import multiple_of as multiple_of
    from m3hal.dispatch import one_of as one_of
    from m3hal.dispatch import plan as plan
    from m3hal.dispatch import register as register
    from m3hal.dispatch import unregister as unregister
    from m3hal.layouts import KVLayout as KVLayout
    from m3hal.layouts import PagedCache as PagedCache
    from m3hal.ops import ExpertWeights as ExpertWeights
    from m3hal.ops import QKNorms as QKNorms
    from m3hal.ops import SeqMeta as SeqMeta
    from m3hal.shape import MINIMAX_M3 as MINIMAX_M3
    from m3hal.shape import ModelShape as ModelShape
    from m3hal.shape import Site as Site

__version__ = "0.1.0"

_HOMES = {
    # A manifest's names come from the module that is nothing but them, so that importing a manifest stays cheap.
    **dict.fromkeys(
        (
            "API_VERSION",
            "Impl",
            "Kernel",
            "Limit",
            "Manifest",
            "Rung",
            "Symbol",
            "at_least",
            "at_most",
            "multiple_of",
            "one_of",
        ),
        "m3hal.dispatch.manifest",
    ),
    **dict.fromkeys(
        ("Bound", "M3halError", "Plan", "Policy", "Verdict", "plan", "register", "unregister"), "m3hal.dispatch"
    ),
    **dict.fromkeys(("ExpertWeights", "QKNorms", "SeqMeta"), "m3hal.ops"),
    **dict.fromkeys(("KVLayout", "PagedCache"), "m3hal.layouts"),
    **dict.fromkeys(("MINIMAX_M3", "ModelShape", "Site"), "m3hal.shape"),
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
