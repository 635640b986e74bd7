"""From production to a case: calls recorded where a model runs, replayed as cases, or compared as they happen.

    bound = record(plan.bind("sparse_attention", "sparse_attention"), "captures")   # a file for each of the first calls
    m3hal replay captures/sparse_attention-000.pt --backend acme

A capture holds the call's inputs as they are: activations, keys and values of whoever's request it was.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import Bound
from m3hal.dispatch.errors import M3halError
from m3hal.formats import QSpec, QTensor
from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import ExpertWeights, QKNorms, SeqMeta
from m3hal.shape import Site
from m3hal_conformance import oracle
from m3hal_conformance.case import Case, Rng
from m3hal_conformance.compare import Score
from m3hal_conformance.harness import Named, named
from m3hal_conformance.runner import Runner
from m3hal_conformance.tolerance import calibration
from m3hal_conformance.trees import map_tensors
from m3hal_conformance.trial import Trial

CAPTURE_VERSION = 1
_CLASSES = {c.__name__: c for c in (PagedCache, KVLayout, SeqMeta, ExpertWeights, QKNorms, QTensor, QSpec)}
#: asked of a replayed call; its memory can't be overwritten with other numbers, there are none
REPLAYED = ("oracle", "guards", "inputs", "written", "convention", "rerun", "allocates")


def record(bound: Bound, folder: str | Path, *, calls: int = 8) -> Bound:
    """The same bound operator, whose first ``calls`` calls leave a file each; off unless asked for.

    An operator that plans its batch or packs its weights gets those in place of what a case needs, and can't be
    recorded from its ``run`` alone: raises M3halError.
    """
    if bound.plan_batch or bound.prepare_weights:
        raise M3halError(
            f"{bound.backend}'s {bound.operator} plans or packs its inputs; record the reference in its place."
        )
    warnings.warn(f"calls of {bound.operator} are recorded in {folder}: the files hold user data", stacklevel=2)
    Path(folder).mkdir(parents=True, exist_ok=True)
    operator, left = ops.load(bound.operator), iter(range(calls))

    def run(*inputs: Any, **options: Any) -> Any:
        number = next(left, None)
        if number is not None:
            held = dict(zip(operator.inputs, inputs, strict=True))
            save(Path(folder) / f"{operator.name}-{number:03}.pt", bound.operator, bound.site, held)
        return bound.run(*inputs, **options)

    return replace(bound, run=run)


def shadow(bound: Bound, report: Callable[[str], None], *, every: int = 100) -> Bound:
    """The same bound operator; one call in ``every`` is compared with the definition; ``report`` hears of faults."""
    count = iter(range(1 << 62))

    def run(*inputs: Any, **options: Any) -> Any:
        sampled = next(count) % every == 0
        before = map_tensors(inputs, lambda tensor: tensor.detach().cpu().clone()) if sampled else ()
        returned = bound.run(*inputs, **options)
        if sampled:
            held = dict(zip(ops.load(bound.operator).inputs, before, strict=True))
            after = dict(zip(held, inputs, strict=True))
            for score in _judge(bound, held, after, returned):
                if not score.passed:
                    report(f"{bound.operator} of {bound.backend}: {score}")
        return returned

    return replace(bound, run=run)


def _judge(bound: Bound, held: Mapping[str, Any], after: Mapping[str, Any], returned: Any) -> list[Score]:
    operator = ops.load(bound.operator)
    actual: Named = named(operator, returned, {n: after[n] for n in operator.mutates if after[n] is not None})
    trial = Trial(case_of(bound.operator, bound.site, held), bound, torch.device("cpu"))
    trial.__dict__["exact"] = oracle.exact(operator, bound.site, held)  # every call has the same name, so none is kept
    return trial.judge(actual)


def save(path: Path, operator: str, site: Site, inputs: Mapping[str, Any]) -> None:
    """Writes one call: plain data and tensors, which load without running code."""
    plain = {name: _plain(value) for name, value in inputs.items()}
    torch.save({"version": CAPTURE_VERSION, "operator": operator, "site": asdict(site), "inputs": plain}, path)


def load(path: str | Path) -> Case:
    """A captured call as a case. Raises M3halError for what is no capture."""
    try:
        found = torch.load(path, weights_only=True)
        if found["version"] != CAPTURE_VERSION:
            raise ValueError(f"its version is {found['version']}")
        inputs = {name: _revived(value) for name, value in found["inputs"].items()}
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
        return case_of(found["operator"], Site(**found["site"]), inputs, f"{Path(path).stem}-{content}")
    except Exception as error:
        raise M3halError(f"{path} can't be read as a capture: {error}.") from error


def case_of(operator: str, site: Site, inputs: Mapping[str, Any], name: str = "captured") -> Case:
    """The case that a call is; judged by the widest bound of its operator and format."""
    caches = [value for value in inputs.values() if isinstance(value, PagedCache)]
    layout = caches[0].layout.kind if caches else "hnd"
    return Case(
        id=f"{operator}/{name}/{site.dtype}",
        operator=operator,
        site=site,
        make=partial(_again, inputs),
        checks=REPLAYED,
        input_class=_widest(operator, site.dtype),
        layout=layout,
    )


def replay(path: str | Path, backend: str, device: str) -> Any:
    """A capture, asked of a backend."""
    return Runner(backend, device).run_case(load(path))


def _again(inputs: Mapping[str, Any], rng: Rng, site: Site) -> dict[str, Any]:
    return dict(map_tensors(dict(inputs), lambda t: t.detach().cpu().clone(memory_format=torch.preserve_format)))


def _widest(operator: str, format: str) -> str:
    """Captured numbers have no class; that with the largest calibrated error is the fairest."""
    found = [
        (entry["exact"], key.split("/")[3])
        for key, entry in calibration().items()
        if "+" not in key and key.split("/")[0] == operator and key.split("/")[2] == format
    ]
    return max(found, default=(0.0, "plain"))[1]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone(memory_format=torch.preserve_format)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"class": type(value).__name__, "parts": parts}
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, dict):
        return _CLASSES[value["class"]](**{name: _revived(part) for name, part in value["parts"].items()})
    return value
