"""The kernels compile for GPUs that are not here, to the machine code that was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is no GPU; here they run"),
]

HERE = Path(__file__).parent
#: matrix instructions by target, of small tiles and of ones that fill the newer unit; fp8 and nvfp4 meet in fp16
MATRIX = {
    "sm_90": ("HMMA", "HGMMA"),
    "sm_100": ("HMMA", "UTCHMMA"),
    "sm_103": ("HMMA", "UTCHMMA"),
    "gfx950": ("v_mfma_f32_16x16x32", "v_mfma_f32_32x32x16"),
}
MULTIPLY = {"attend", "attend_block", "attend_dense", "score_few", "score_few_by_warps", "score_many"}
#: kernels whose tile fills the newer unit
WIDE = {"attend_block", "score_many"}
#: what treats heads row by row: caches written, read and copied, norms and rotations
ROWS = {"_heads", "_vectors", "_pages", "_rows"}
#: what triton 3.9 spills on NVIDIA's targets, up to 400 bytes: launches tuned on an H200, for which 3.6 spills nothing
SPILLS = {
    ("attend", "sparse verify fp8"),
    ("attend", "sparse verify nvfp4"),
    ("score_many", "select prefill fp8"),
    ("score_many", "select prefill nvfp4"),
}


@pytest.mark.parametrize("target", MATRIX)
def test_machine_code(target):
    """No spills, no fp64, and the intended matrix instruction in each kernel at the model's real shapes."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(HERE / "machine_code.py"), target]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert printed.returncode == 0, printed.stderr[-2000:]
    entries = [json.loads(line) for line in printed.stdout.splitlines()]
    assert {entry["kernel"] for entry in entries} >= (MULTIPLY | ROWS)
    matrix = MATRIX[target]
    for entry in entries:
        what = f"{entry['kernel']} of {entry['case']} on {target}: {entry}"
        found = entry["instructions"]
        known = target.startswith("sm_") and (entry["kernel"], entry["case"]) in SPILLS
        assert entry["spilled"] <= (400 if known else 0), what
        assert not any(name.startswith("D") or name.endswith("_f64") for name in found), what
        if entry["kernel"] == "_heads" and "fp4" not in entry["case"]:
            assert entry["shared"] == 0, f"the parts of a head need no exchange of layouts: {what}"
        if entry["kernel"] in MULTIPLY and "fp32" not in entry["case"]:
            assert any(name.startswith(matrix) for name in found), what
            if entry["kernel"] in WIDE:
                assert any(name.startswith(matrix[1]) for name in found), what
