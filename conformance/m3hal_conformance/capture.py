"""Captures: calls that were recorded where a model ran, as files, and as cases that any backend can be asked.

    m3hal replay m3hal-captures/sparse_attention-model.layers.3-000.pt --backend acme

A capture holds the call's inputs as they were: activations, keys and values of whoever's request it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3hal.dispatch.errors import ConfigurationError
from m3hal.formats import QSpec, QTensor
from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import ExpertLoRA, ExpertWeights, QKNorms, SeqMeta
from m3hal.shape import Site
from m3hal_conformance.case import Case, Rng
from m3hal_conformance.compaction import on_cpu
from m3hal_conformance.results import Result
from m3hal_conformance.runner import Runner
from m3hal_conformance.tolerance import calibration
from m3hal_conformance.trees import map_tensors, tensors

CAPTURE_VERSION = 1
_CLASSES = {c.__name__: c for c in (PagedCache, KVLayout, SeqMeta, ExpertLoRA, ExpertWeights, QKNorms, QTensor, QSpec)}
#: asked of a replayed call; its memory can't be overwritten with other numbers, there are none
REPLAYED = ("oracle", "guards", "inputs", "written", "convention", "rerun", "allocates")


@dataclass(frozen=True)
class Captured(Case):
    """A call as a case. Its numbers may be harsher than any that the suite knows: see :meth:`Trial.judge`."""

    @property
    def format(self) -> str:
        return _format(self.operator, self.site.dtype)


def save(folder: str | Path, name: str, operator: str, site: Site, inputs: Mapping[str, Any], **origin: str) -> Path:
    """Writes one call as ``folder/name-NNN.pt``, which its owner alone may read, and returns the path.

    Plain data and tensors, which load without running code. origin: where the call was, such as layer and backend.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    plain = {key: _plain(value) for key, value in inputs.items()}
    data = {"version": CAPTURE_VERSION, "operator": operator, "site": asdict(site), "inputs": plain, "origin": origin}
    path = _reserved(folder, name)
    torch.save(data, path)
    return path


#: the number after the last that this process took
_NEXT: dict[tuple[Path, str], int] = {}


def _reserved(folder: Path, name: str) -> Path:
    """The first number that is free, taken; several ranks may write into one folder."""
    for number in count(_NEXT.get((folder, name), 0)):
        path = folder / f"{name}-{number:03}.pt"
        _NEXT[folder, name] = number + 1
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return path
        except FileExistsError:
            continue
    raise AssertionError


def size_of(inputs: Mapping[str, Any]) -> int:
    """Bytes that a call's tensors take in a file."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(dict(inputs)))


def load(path: str | Path) -> Captured:
    """A captured call as a case. Raises ConfigurationError for what is no capture, or one of another version."""
    try:
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror or error}.") from error
    try:
        found = torch.load(path, weights_only=True)
    except Exception as error:  # torch's own message advises to load it as code
        raise ConfigurationError(f"{path} is no capture; mode 'record' writes them, see docs/captures.md.") from error
    if not isinstance(found, dict) or not {"version", "operator", "site", "inputs"} <= set(found):
        raise ConfigurationError(f"{path} is no capture; mode 'record' writes them, see docs/captures.md.")
    if found["version"] != CAPTURE_VERSION:
        told = f"{path} is a capture of version {found['version']!r}; this suite reads {CAPTURE_VERSION}"
        raise ConfigurationError(f"{told}. Record the call again.")
    try:
        inputs = {name: _revived(value) for name, value in found["inputs"].items()}
        return case_of(found["operator"], Site(**found["site"]), inputs, f"{Path(path).stem}-{content}")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{path} is a capture of a call that this suite doesn't know: {told}.") from error


def case_of(operator: str, site: Site, inputs: Mapping[str, Any], name: str = "captured") -> Captured:
    """The case that a call is."""
    caches = [value for value in inputs.values() if isinstance(value, PagedCache)]
    layout = caches[0].layout.kind if caches else "hnd"
    return Captured(
        id=f"{operator}/{name}/{site.dtype}",
        operator=operator,
        site=site,
        make=partial(_again, inputs),
        checks=REPLAYED,
        input_class=_usual(operator, site.dtype),
        layout=layout,
        is_captured=True,
    )


def replay(path: str | Path, backend: str, device: str) -> Result:
    """A capture, asked of a backend. Raises what planning does when it can't be used there."""
    case, runner = load(path), Runner(backend, device)
    runner.plan(case.operator, case.site, case.layout)
    runner.check_placing()
    return runner.run_case(case)


def _again(inputs: Mapping[str, Any], rng: Rng, site: Site) -> dict[str, Any]:
    return dict(map_tensors(dict(inputs), on_cpu))


@cache
def _usual(operator: str, dtype: str) -> str:
    """Captured numbers have no class; they get that of most cases, and :class:`Trial` the rest."""
    entries = [(key.split("/"), entry["cases"]) for key, entry in calibration().items() if "+" not in key]
    found = [(cases, key[3]) for key, cases in entries if key[0] == operator and key[2] == _format(operator, dtype)]
    return max(found, default=(0.0, "plain"))[1]


@cache
def _format(operator: str, dtype: str) -> str:
    """Of the calibration: the dtype, unless the operator computes in fp32 whatever the dtype is."""
    known = {key.split("/")[2] for key in calibration() if key.split("/")[0] == operator}
    return dtype if dtype in known or not known else "float32"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return on_cpu(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"class": type(value).__name__, "parts": parts}
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, dict):
        return _CLASSES[value["class"]](**{name: _revived(part) for name, part in value["parts"].items()})
    return value
