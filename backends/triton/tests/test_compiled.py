"""torch.compile takes the operators that compiled code meets whole, once for all numbers of tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

from m3hal.vllm.opaque import TRACED

HERE = Path(__file__).parent


def test_traced_operators_are_one_graph():
    """Allocation and one kernel, without a break; another number of tokens needs no second graph."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "traced_kernels.py")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr[-2000:]
    rows = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {row["operator"] for row in rows} == set(TRACED)
    for row in rows:
        assert row["graphs"] == 1, row
        assert sum("triton_kernel_wrapper" in call.lower() or "TritonKernel" in call for call in row["calls"]) == 1, row
