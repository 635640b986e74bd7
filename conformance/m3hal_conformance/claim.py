"""A claim: what a conformance run found, as a file that others can check.

It says which implementations ran (``impl_id`` and the hash of every file), on what device, driver and torch, which
cases with which seed, and for each case the worst error over its bound. Its digest covers everything else in it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m3hal import ops
from m3hal.dispatch import Impl
from m3hal.dispatch.devices import detect
from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.levels import digest
from m3hal_conformance.case import Case, case_set_hash
from m3hal_conformance.results import Result, counts
from m3hal_conformance.runner import Runner, Unsupported
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
    body: dict[str, Any] = {
        "claim_version": CLAIM_VERSION,
        "backend": runner.backend,
        "distribution": _distribution(runner, implementations),
        "device": runner.device,
        "environment": environment(runner.device),
        "suite": {
            "version": _version("m3hal-conformance"),
            "case_set": case_set_hash(cases),
            "cases": len(cases),
            "whole": len(cases) == len(all_cases()),
        },
        "seed": runner.seed,
        "executor": "in-process",
        "implementations": {
            operator: {identity: _described(runner, case) for identity, case in found.items()}
            for operator, found in implementations.items()
        },
        "counts": dict(counts(results)),
        "tiers": tiers(results),
        "coverage": dict(coverage),
        "results": [_row(result) for result in results],
    }
    return {**body, "digest": digest(body)}


def tiers(results: Sequence[Result]) -> dict[str, bool]:
    """Which tiers the results carry: nothing failed or waived, each core operator passed, all cases were run."""
    ran = {result.case for result in results}
    found = {}
    for tier, names in TIERS.items():
        mine = [result for result in results if result.operator in names]
        passed = {result.operator for result in mine if result.status == "pass"}
        core = {name for name in names if ops.load(name).kind == "core"}
        complete = all(case.id in ran for case in select(operators=names))
        found[tier] = complete and core <= passed and all(r.status in ("pass", "unsupported") for r in mine)
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


@dataclass(frozen=True)
class Finding:
    """What verification found about one part of a claim. state: ok, broken (tampered or stale), unknown."""

    state: str
    sentence: str


def verify(claim: Mapping[str, Any]) -> list[Finding]:
    """Re-checks a claim against its own digest, the installed suite and the installed backend; runs no kernel."""
    if claim.get("claim_version") != CLAIM_VERSION:
        return [
            Finding("broken", f"it has claim version {claim.get('claim_version')!r}; this suite reads {CLAIM_VERSION}")
        ]
    found = []
    same = digest(claim) == claim.get("digest")
    found.append(
        Finding("ok", "its digest covers what it says")
        if same
        else Finding("broken", "it was edited: its digest does not match")
    )
    found.append(_verify_cases(claim))
    found.append(_verify_statuses(claim))
    found += _verify_implementations(claim)
    return found


def _verify_cases(claim: Mapping[str, Any]) -> Finding:
    known = {case.id: case for case in all_cases()}
    asked = [known[row["case"]] for row in claim["results"] if row["case"] in known]
    if len(asked) < len(claim["results"]) or case_set_hash(asked) != claim["suite"]["case_set"]:
        return Finding("broken", f"stale: it ran case set {claim['suite']['case_set']}; these cases have changed since")
    if claim["suite"]["whole"] and len(asked) != len(known):
        return Finding("broken", f"stale: it ran {len(asked)} cases; the suite now has {len(known)}")
    return Finding("ok", f"its {len(asked)} cases are those of the installed suite")


def _verify_statuses(claim: Mapping[str, Any]) -> Finding:
    results = [_result_of(row) for row in claim["results"]]
    for row in claim["results"]:
        if row["status"] == "pass" and (row["failed"] or (row["ratio"] or 0) > 1):
            return Finding("broken", f"{row['case']} is said to pass but a check of it failed")
    if dict(counts(results)) != claim["counts"] or tiers(results) != claim["tiers"]:
        return Finding("broken", "its counts or tiers do not follow from its results")
    return Finding("ok", "its counts and tiers follow from its results")


def _verify_implementations(claim: Mapping[str, Any]) -> Iterable[Finding]:
    runner = Runner(claim["backend"], claim["device"])
    cases = {case.id: case for case in all_cases()}
    for operator, found in claim["implementations"].items():
        for identity, described in found.items():
            case = cases.get(described["case"])
            try:
                if case is None:
                    raise Unsupported("the case that it was bound for is gone")
                now = runner.identity(case)
            except (Unsupported, M3halError) as error:
                yield Finding("unknown", f"{operator} {identity}: {str(error).splitlines()[0]}")
                continue
            if now == identity:
                yield Finding("ok", f"{operator} {identity}: the installed files are those that ran")
            else:
                yield Finding("broken", f"stale: {operator} ran as {identity}; installed is {now}")


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs between two claims, as lines: implementations, environment, cases, errors that grew."""
    lines = [
        f"{key}: {one['environment'].get(key)} -> {other['environment'].get(key)}"
        for key in sorted({*one["environment"], *other["environment"]})
        if one["environment"].get(key) != other["environment"].get(key)
    ]
    for operator in sorted({*one["implementations"], *other["implementations"]}):
        before, after = (sorted(c["implementations"].get(operator, {})) for c in (one, other))
        if before != after:
            lines.append(f"{operator}: {', '.join(before) or 'absent'} -> {', '.join(after) or 'absent'}")
    rows = {row["case"]: row for row in one["results"]}
    for row in other["results"]:
        old = rows.pop(row["case"], None)
        if old is None:
            lines.append(f"{row['case']}: new, {row['status']}")
        elif old["status"] != row["status"]:
            lines.append(f"{row['case']}: {old['status']} -> {row['status']}")
        elif (row["ratio"] or 0) > 1.25 * (old["ratio"] or 0) + 0.01:
            lines.append(
                f"{row['case']}: its error over its bound grew from {old['ratio'] or 0:.3f} to {row['ratio']:.3f}"
            )
    return [*lines, *(f"{case}: no longer run" for case in rows)]


def read(path: str | Path) -> dict[str, Any]:
    """A claim from its file. Raises M3halError with a sentence when it is none."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise M3halError(f"{path} can't be read as a claim: {error}.") from error
    if not isinstance(found, dict) or "claim_version" not in found:
        raise M3halError(f"{path} is no claim; `m3hal conform --json {path}` writes one.")
    return found


def _row(result: Result) -> dict[str, Any]:
    return {
        "case": result.case,
        "status": result.status,
        "ratio": None if result.worst is None else _json_number(result.worst),
        "checks": [check.name for check in result.checks],
        "failed": {check.name: check.sentence for check in result.failed},
        "reason": result.reason,
        "impl_id": result.impl_id,
        "seconds": round(result.seconds, 3),
    }


def _json_number(value: float) -> float:
    """Infinity, which JSON lacks, as 1e308."""
    return min(float(f"{value:.4g}"), 1e308)


def _result_of(row: Mapping[str, Any]) -> Result:
    return Result(row["case"], row["case"].partition("/")[0], "", row["status"])


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
    spec = importlib.util.find_spec(module)
    package = importlib.util.find_spec(module.partition(".")[0])
    paths = [Path(spec.origin)] if spec and spec.origin else []
    root = Path(package.origin).parent if package and package.origin else None
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


def _driver(device: str) -> str:
    if not device.startswith("cuda"):
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""
