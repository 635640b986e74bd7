"""Watching calls where a model runs: they are recorded as cases, or compared with the definition.

Off by default, and then nothing stands before a vendor's callable. A watched operator has a bound callable of its own
for every layer; :mod:`m3hal_conformance.watch` makes them.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from m3hal.dispatch.errors import UnsupportedError

if TYPE_CHECKING:
    from m3hal.dispatch.bind import Bound

Mode = Literal["off", "record", "shadow"]
OnMismatch = Literal["warn", "raise"]
MODES: tuple[Mode, ...] = get_args(Mode)
ON_MISMATCH: tuple[OnMismatch, ...] = get_args(OnMismatch)

_SUITE = "m3hal_conformance.watch"
_DEFAULT_RATES = {"off": 0.0, "record": 1.0, "shadow": 0.01}
_DEFAULT_BYTES = {"off": 0, "record": 1 << 30, "shadow": 0}


@dataclass(frozen=True)
class Watch:
    """What to watch, and how much of it.

    capture_dir: where captures and reports go. sample_rate: share of each layer's calls that is watched, in (0, 1];
        None: every call is recorded, one in 100 is compared.
    capture_bytes: what the files in the folder may take together; None: 1 GiB in mode ``record``; in mode ``shadow``
        nothing, so that no user's data stays unless asked for.
    on_mismatch: what a call outside its bound is in mode ``shadow``: a warning, or an error that ends the engine.
    """

    mode: Mode = "off"
    capture_dir: str = "m3hal-captures"
    sample_rate: float | None = None
    capture_bytes: int | None = None
    on_mismatch: OnMismatch = "warn"

    @property
    def is_on(self) -> bool:
        return self.mode != "off"

    @property
    def rate(self) -> float:
        """The share of calls that is watched."""
        return _DEFAULT_RATES[self.mode] if self.sample_rate is None else self.sample_rate

    @property
    def max_bytes(self) -> int:
        """What captures may take."""
        return _DEFAULT_BYTES[self.mode] if self.capture_bytes is None else self.capture_bytes

    def to_json(self) -> dict[str, Any]:
        """The configuration's keys that ask for this; none when it is off."""
        found = {name: getattr(self, name) for name in KEYS} if self.is_on else {}
        return {name: value for name, value in found.items() if value is not None}


#: the configuration's keys, each a field
KEYS = tuple(Watch.__dataclass_fields__)


def check(watch: Watch) -> None:
    """Raises UnsupportedError when calls are to be watched and nothing here can."""
    if watch.is_on and importlib.util.find_spec(_SUITE.partition(".")[0]) is None:
        raise UnsupportedError(
            f"mode {watch.mode!r} needs the conformance suite, which is not installed; "
            "pip install 'm3hal[conformance]', or leave 'mode' out."
        )


def watched(bound: Bound, watch: Watch, layer: str) -> Bound:
    """The operator of one layer with a callable that watches; what it can't watch stays as it is, and says so."""
    made: Bound = importlib.import_module(_SUITE).watched(bound, watch, layer)
    return made
