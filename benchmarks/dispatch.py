"""What dispatch costs: a bound call against a plain one, `import m3hal` against bare Python, a plan after discovery.

    python benchmarks/dispatch.py            prints, and writes dispatch.json beside this file
    python benchmarks/dispatch.py --check    also exits with 1 when a limit is exceeded

Costs are ratios or differences taken in one process or one series, so that another machine's numbers compare. Each is
the median of several repeats: the minimum would hide what a caller meets, the mean what a neighbour does.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import m3hal
from m3hal.dispatch import Impl, Manifest, Policy, discovery, plan, register, unregister

CALLS = 1_000_000
REPEATS = 7
#: The limits that issue and tests hold; a run records them beside what it measured.
LIMITS = {"bound_call_ratio": 1.5, "import_ms": 30.0, "plan_ms": 50.0}
RESULT = Path(__file__).with_suffix(".json")


def bound_call_ratio(calls: int = CALLS, repeats: int = REPEATS) -> dict[str, float]:
    """``bound.run(x, weight)`` over a call of the same no-op through a local name, each ``calls`` times."""
    module = types.ModuleType("benchmark_noop")

    def noop(x: Any, weight: Any, out: Any = None) -> None:
        return None

    module.rms_norm = lambda site: noop  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    operators = {"rms_norm": (Impl(f"{module.__name__}:rms_norm"),)}
    register(Manifest("noop", "benchmark", ">=1,<2", ("cpu",), operators))
    try:
        policy = Policy.resolve({"backend": "noop"}, environ={})
        bound = plan(_shape(), "cpu", policy, operators=["rms_norm"]).bind("rms_norm", "moe")
    finally:
        unregister("noop")
    direct, through = [], []
    for _ in range(repeats):  # interleaved, so that a slower spell of the machine meets both
        direct.append(_call(noop, calls))
        through.append(_call_bound(bound, calls))
    plain, dispatched = statistics.median(direct), statistics.median(through)
    return {
        "bound_call_ratio": statistics.median(b / a for a, b in zip(direct, through, strict=True)),
        "plain_call_ns": plain / calls * 1e9,
        "bound_call_ns": dispatched / calls * 1e9,
    }


def _call(function: Callable[..., None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(1, 2)
    return time.perf_counter() - start


def _call_bound(bound: m3hal.Bound, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        bound.run(1, 2)
    return time.perf_counter() - start


def import_ms(repeats: int = REPEATS) -> dict[str, float]:
    """A fresh interpreter that imports m3hal, less one that imports nothing."""
    pairs = [(_interpreter("pass"), _interpreter("import m3hal")) for _ in range(repeats)]
    return {
        "import_ms": statistics.median(imported - bare for bare, imported in pairs) * 1e3,
        "bare_python_ms": statistics.median(bare for bare, _ in pairs) * 1e3,
    }


def _interpreter(script: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    return time.perf_counter() - start


def plan_ms(repeats: int = REPEATS) -> dict[str, float]:
    """MiniMax-M3, all sites, every installed backend; the first plan also reads and hashes files."""
    policy = Policy.resolve({}, environ={})
    start = time.perf_counter()
    discovery.discover()
    discovered = time.perf_counter()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        made = plan(_shape(), "cpu", policy)
        made.fingerprint  # noqa: B018, computed when first read
        times.append(time.perf_counter() - begin)
    return {
        "plan_ms": times[0] * 1e3,
        "next_plan_ms": statistics.median(times[1:]) * 1e3,
        "discovery_ms": (discovered - start) * 1e3,
    }


def _shape() -> m3hal.ModelShape:
    return m3hal.ModelShape.from_config(
        m3hal.MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=8192, max_seqs=256, max_context=524288
    )


def measure() -> dict[str, Any]:
    """Everything, with what it was measured on. Planning first: in this process nothing has planned yet."""
    costs = {**plan_ms(), **bound_call_ratio(), **import_ms()}
    return {
        "costs": {name: round(value, 3) for name, value in costs.items()},
        "limits": LIMITS,
        "calls": CALLS,
        "repeats": REPEATS,
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cpu": _cpu()},
        "m3hal": m3hal.__version__,
    }


def _cpu() -> str:
    from m3hal.dispatch import devices

    return next(device.label for device in devices.detect() if device.device == "cpu")


def main() -> int:
    """Prints, writes, and with --check judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is exceeded; writes nothing")
    arguments = parser.parse_args()
    result = measure()
    for name, value in result["costs"].items():
        limit = f"  (limit {LIMITS[name]})" if name in LIMITS else ""
        print(f"{name:<18} {value:>10.3f}{limit}")
    if arguments.check:
        return int(any(result["costs"][name] > limit for name, limit in LIMITS.items()))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
