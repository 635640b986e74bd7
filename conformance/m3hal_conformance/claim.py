"""A claim: what a conformance run found, as a file that others can check.

It says which implementations ran (``impl_id`` and the hash of every file), on what device, driver and torch, which
cases with which seed, and for each case the worst error over its bound. Its digest covers everything else in it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from m3hal import ops
from m3hal.dispatch import Impl
from m3hal.dispatch.devices import detect
from m3hal.dispatch.identity import module_file, roots
from m3hal.dispatch.levels import digest
from m3hal_conformance.case import Case, case_set_hash
from m3hal_conformance.results import Result, counts
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases, select

CLAIM_VERSION = 1

#: What a partial backend may claim: every core operator of the tier passes, on the whole set of its cases.
TIERS: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "rms_norm", "rope_partial", "kv_write", "kv_read", "kv_copy_blocks", "block_scores", "topk_blocks",
        "sparse_attention", "paged_attention", "qk_norm_rope_insert", "select_blocks",
    ),
    "experts": ("swiglu_oai", "route_topk", "moe_experts"),
    "full": ops.NAMES,
}  # fmt: skip


def make_claim(
    runner: Runner, cases: Sequence[Case], results: Sequence[Result], coverage: Mapping[str, Any]
) -> dict[str, Any]:
    """The claim of a finished run."""
    by_id = {case.id: case for case in cases}
    implementations: dict[str, Any] = {}
    for result in results:
        if result.impl_id:
            implementations.setdefault(result.operator, {}).setdefault(result.impl_id, by_id[result.case])
    serving = runner.published_operators() if len(cases) == len(all_cases()) else []
    body: dict[str, Any] = {
        "claim_version": CLAIM_VERSION,
        "backend": runner.backend,
        "distribution": _distribution(runner, implementations),
        "device": runner.device,
        "environment": {**environment(runner.device), **runner.libraries()},
        "suite": {
            "version": _version("m3hal-conformance"),
            "case_set": case_set_hash(cases),
            "cases": len(cases),
            "whole": len(cases) == len(all_cases()),
            "whole_operators": _whole(cases),
            "sizes": str(runner.sizes),
        },
        "seed": runner.seed,
        "executor": "in-process",
        "threads": runner.threads,
        "require": list(runner.require),
        "largest": largest(results),
        "implementations": {
            operator: {identity: _described(runner, case) for identity, case in found.items()}
            for operator, found in implementations.items()
        },
        "counts": dict(counts(results)),
        "published_shape": serving,
        "tiers": tiers(results, serving),
        "coverage": dict(coverage),
        "results": [_row(result) for result in results],
    }
    return {**body, "digest": digest(body)}


def _whole(cases: Sequence[Case]) -> list[str]:
    """The operators of which every case is there: a backend's level rests on these alone."""
    asked = {case.id for case in cases}
    names = dict.fromkeys(case.operator for case in cases)
    return [name for name in names if all(case.id in asked for case in select(operators=(name,)))]


def largest(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """operator -> tokens, requests, pages, context and experts of its largest cases that ran."""
    found: dict[str, dict[str, int]] = {}
    for result in results:
        mine = found.setdefault(result.operator, {}) if result.sizes else {}
        mine.update({name: max(size, mine.get(name, 0)) for name, size in result.sizes.items()})
    return found


def tiers(results: Sequence[Result], serving: Iterable[str]) -> dict[str, bool]:
    """Which tiers the results carry: nothing failed or waived, each core operator passed, all cases were run.

    serving: the operators that the backend serves at MiniMax-M3's own sizes; a tier needs all its core operators there.
    """
    served = set(serving)
    ran = {result.case for result in results}
    found = {}
    for tier, names in TIERS.items():
        mine = [result for result in results if result.operator in names]
        passed = {result.operator for result in mine if result.status == "pass"}
        core = {name for name in names if ops.load(name).kind == "core"}
        complete = all(case.id in ran for case in select(operators=names))
        found[tier] = complete and core <= passed & served and all(r.status in ("pass", "unsupported") for r in mine)
    return found


def environment(device: str) -> dict[str, str]:
    """Software and hardware that a number depends on."""
    label = next((found.label for found in detect() if found.device == device), "")
    return {
        "m3hal": _version("m3hal"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device_label": label,
        "driver": _driver(device),
    }


def _row(result: Result) -> dict[str, Any]:
    return {
        "case": result.case,
        "status": result.status,
        "ratio": None if result.worst is None else _json_number(result.worst),
        "checks": [check.name for check in result.checks],
        "failed": {check.name: check.sentence for check in result.failed},
        "reason": result.reason,
        "notes": list(result.notes),
        "impl_id": result.impl_id,
        "seconds": round(result.seconds, 3),
    }


def _json_number(value: float) -> float:
    """Infinity, which JSON lacks, as 1e308."""
    return min(float(f"{value:.4g}"), 1e308)


def _described(runner: Runner, case: Case) -> dict[str, Any]:
    """An implementation as the claim shows it: where it is, what it declares, the hash of each of its files."""
    offer = runner.offer(case.operator, case.site, case.layout)
    impl = offer.impl
    base: dict[str, Any] = {"case": case.id, "backend": offer.bound.backend, "traits": dict(offer.bound.traits)}
    if impl is None:
        return {**base, "path": "a composition of the backend's core operators"}
    declared = {name: getattr(impl, name) for name in ("memory", "alignment", "views", "zero_tokens")}
    declared["buckets"] = {name: list(sizes) for name, sizes in impl.buckets.items()}
    declared["layouts"] = list(impl.layouts)
    return {**base, "path": impl.path, "declares": declared, "files": files_of(impl)}


def files_of(impl: Impl) -> dict[str, str]:
    """File -> sha256 of its bytes, for the factory's module and the files that the manifest lists."""
    module = impl.path.partition(":")[0]
    first = module_file(module)
    paths = [first] if first else []
    root = next((root for root in roots(module.partition(".")[0]) if root.is_dir()), None)
    for pattern in impl.files if root else ():
        assert root is not None
        paths += sorted(path for path in root.glob(pattern) if path.is_file())
    names = {path: str(path.relative_to(root)) if root and path.is_relative_to(root) else path.name for path in paths}
    return {names[path]: hashlib.sha256(path.read_bytes()).hexdigest() for path in dict.fromkeys(paths)}


def _distribution(runner: Runner, implementations: Mapping[str, Any]) -> str:
    for found in implementations.values():
        for case in found.values():
            chosen = runner.plan(case.operator, case.site, case.layout).choice(case.operator, case.site.kind).chosen
            if chosen:
                return f"{chosen.distribution} {chosen.version}".strip()
    return ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"


#: kind of device -> the command that prints its driver's version
_DRIVERS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "hip": ("cat", "/sys/module/amdgpu/version"),
    "hpu": ("hl-smi", "-Q", "driver_version", "-f", "csv,noheader"),
}


def _driver(device: str) -> str:
    """The first line that the command prints; nothing for a device without a driver, or without the command."""
    query = _DRIVERS.get(device.partition(":")[0])
    if query is None:
        return ""
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return ""
