"""The configuration's schema, and the file and the environment that carry it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3hal._files import parsed
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal.dispatch.names import LEVELS, RESERVED, BackendName, Order
from m3hal.dispatch.watch import KEYS as WATCH_KEYS
from m3hal.dispatch.watch import MODES, ON_MISMATCH, Watch
from m3hal.ops import NAMES

#: A carrier's name, as reasons tell it, and its keys.
Carrier = tuple[str, dict[str, Any]]

#: Keys that decide no plan, so that they may stand beside "plan".
BESIDE_A_PIN = ("plan", "export_plan", "fingerprint", *WATCH_KEYS)

#: The carrier of what nobody set.
DEFAULT = "the default"


@dataclass(frozen=True)
class Origin:
    """Where a value came from; ``over`` are the carriers whose value it hides."""

    value: Any
    carrier: str
    over: tuple[tuple[str, Any], ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether nobody set it."""
        return self.carrier == DEFAULT

    def __str__(self) -> str:
        hidden = "".join(f", over {value!r} from {carrier}" for carrier, value in self.over)
        return f"{self.value!r} ({'' if self.is_default else 'from '}{self.carrier}{hidden})"


def flattened(values: Mapping[str, Any], carrier: str) -> dict[str, Any]:
    """``operators`` becomes one key per operator, so that each keeps its own origin; unknown keys are refused."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "m3hal":
            raise ConfigurationError(
                f"{carrier} has the key 'm3hal' inside m3hal's own configuration; put its keys one level up."
            )
        if key == "operators":
            if not isinstance(value, Mapping):
                raise ConfigurationError(f"'operators' from {carrier} must map operators to backends; got {value!r}.")
            for operator, order in value.items():
                if operator not in NAMES:
                    raise ConfigurationError(
                        f"{operator!r} in 'operators' from {carrier} is no operator.{did_you_mean(operator, NAMES)}"
                    )
                flat[f"operators.{operator}"] = order
        elif key == "backend" or key in _KEYS:
            if value is not None:
                flat[key] = value
        else:
            known = ["backend", "operators", "devices", *_KEYS]
            raise ConfigurationError(
                f"{key!r} from {carrier} is no key of m3hal's configuration.{did_you_mean(str(key), known)}"
            )
    return flat


def from_file(environ: Mapping[str, str]) -> list[Carrier]:
    """What ``M3HAL_CONFIG`` names; nothing when it is unset."""
    path = environ.get("M3HAL_CONFIG")
    if not path:
        return []
    carrier = f"the file {path} (M3HAL_CONFIG)"
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            import tomllib

            values = tomllib.loads(text)
        else:
            values = parsed(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{carrier} can't be read as {'TOML' if path.endswith('.toml') else 'JSON'}: {error}."
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(f'{carrier} must hold an object whose keys are m3hal\'s, e.g. {{"backend": "auto"}}.')
    return [(carrier, values)]


def from_environment(environ: Mapping[str, str]) -> list[Carrier]:
    """Each variable is a carrier of its own, so that its name shows as the origin."""
    known = {f"M3HAL_{key.upper()}": key for key in ("backend", "operators", *_KEYS)}
    carriers: list[Carrier] = []
    for variable in sorted(name for name in environ if name.startswith("M3HAL_") and name != "M3HAL_CONFIG"):
        if variable not in known:
            hint = did_you_mean(variable, [*known, "M3HAL_CONFIG"])
            raise ConfigurationError(f"the environment variable {variable} means nothing to m3hal.{hint}")
        if environ[variable]:
            key, text = known[variable], environ[variable]
            carriers.append((variable, {key: _operators(text, variable) if key == "operators" else text}))
    return carriers


def _operators(text: str, variable: str) -> Mapping[str, Any]:
    """``rms_norm=acme;moe_experts=acme,reference``, or a JSON object."""
    if text.lstrip().startswith("{"):
        try:
            values = parsed(text)
        except ValueError as error:
            raise ConfigurationError(f"{variable} can't be read as JSON: {error}.") from error
        return dict(values)
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ConfigurationError(f"{variable} must read 'operator=backend;operator=backend'; got {text!r}.")
    named = [operator.strip() for operator, _, _ in pairs]
    if len(set(named)) < len(named):
        raise ConfigurationError(f"{variable} names an operator twice; got {text!r}.")
    return {operator.strip(): order.strip() for operator, _, order in pairs}


def fields_of(origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The Policy fields that the flattened values mean."""
    fields: dict[str, Any] = {"overrides": {}}
    watching: dict[str, Any] = {}
    for key, origin in origins.items():
        where = f"{key!r} from {origin.carrier}"
        if key.startswith("operators."):
            order = _order(origin.value, where)
            if not order or order[0].name == "vllm":
                raise ConfigurationError(
                    f"{where} must name backends, e.g. 'acme' or 'acme,reference'; got {origin.value!r}."
                )
            fields["overrides"][key.removeprefix("operators.")] = order
        elif key == "backend":
            order = _order(origin.value, where)
            fields["in_tree"] = bool(order) and order[0].name == "vllm"
            fields["order"] = () if fields["in_tree"] else order
        else:
            name, read = _KEYS[key]
            (watching if key in WATCH_KEYS else fields)[name] = read(origin.value, where)
    return {**fields, "watch": Watch(**watching)}


def _names(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings, or one string with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ConfigurationError(f"{where} must be a string or a list of strings; got {value!r}.")
    return tuple(dict.fromkeys(stripped for part in parts if (stripped := part.strip())))


def _backend_name(text: str) -> BackendName:
    distribution, colon, name = text.rpartition(":")
    return BackendName(name.strip(), distribution.strip() if colon else "")


def _order(value: Any, where: str) -> Order:
    """Empty for ``auto``. ``auto`` and ``vllm`` stand alone: a list permits exactly the fallbacks it names."""
    names = _names(value, where)
    if not names:
        raise ConfigurationError(f"{where} names no backend; write 'auto', a name, or names with commas.")
    reserved = [name for name in names if name in RESERVED]
    if reserved and len(names) > 1:
        raise ConfigurationError(f"{where} mixes {reserved[0]!r} with backend names; {reserved[0]!r} stands alone.")
    return () if names == ("auto",) else tuple(map(_backend_name, names))


def _deny(value: Any, where: str) -> tuple[BackendName, ...]:
    return tuple(map(_backend_name, _names(value, where)))


def _require(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    """``batch_invariant`` means ``batch_invariant=yes``. Names are checked against the operators when planning."""
    pairs = (text.partition("=") for text in _names(value, where))
    return tuple((name.strip(), wanted.strip() or "yes") for name, _, wanted in pairs)


def _one_of(words: Sequence[str]) -> Callable[[Any, str], str]:
    def read(value: Any, where: str) -> str:
        if value not in words:
            raise ConfigurationError(
                f"{where} must be one of {', '.join(words)}; got {value!r}.{did_you_mean(str(value), words)}"
            )
        return str(value)

    return read


def _share(value: Any, where: str) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1 or isinstance(value, bool):
        raise ConfigurationError(f"{where} must be a share of calls, more than 0 and at most 1; got {value!r}.")
    return share


def _bytes(value: Any, where: str) -> int:
    """``1073741824``, ``"1 GiB"``."""
    found = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB)", str(value).strip())
    if found is None or isinstance(value, bool):
        raise ConfigurationError(f"{where} must be a number of bytes, e.g. 1073741824 or '1 GiB'; got {value!r}.")
    return int(found[1]) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2]]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{where} must be a string; got {value!r}.")
    return value


#: key -> (field of Policy, reader)
_KEYS: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    "require": ("require", _require),
    "min_level": ("min_level", _one_of(LEVELS)),
    "deny": ("deny", _deny),
    "plan": ("pinned", _text),
    "export_plan": ("exported", _text),
    "fingerprint": ("fingerprint", _text),
    "mode": ("mode", _one_of(MODES)),
    "capture_dir": ("capture_dir", _text),
    "sample_rate": ("sample_rate", _share),
    "capture_bytes": ("capture_bytes", _bytes),
    "on_mismatch": ("on_mismatch", _one_of(ON_MISMATCH)),
}
