"""The kernels compile for GPUs that are not here, to the machine code that was meant.

A kernel is listed by one line of CASES in machine_cases.py: a call that launches it at the model's shapes. One line of
KERNELS there says what it multiplies with; a kernel that is not among them is only asked for what all are: nothing
spilled, no fp64.

machine_code.json records what was found, under a hash of all that decides the code. The test asserts on that record,
compiles what is new or changed, and a sample of the rest, other ones each time, which must be as recorded. After a
change of kernels: ``python backends/triton/tests/machine_code.py --record``, and commit the file with them. When more
has changed than four minutes compile, the test says so and ends. `make test-all` compiles everything.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from machine_cases import KERNELS, SPILLS, UNITS
from machine_code import RECORD, TARGETS, TOO_MANY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is no GPU; here they run")

HERE = Path(__file__).parent
#: kernels compiled in every run though they are as recorded, and at most so many that are not: about 1 s of a core each
SAMPLE, MOST = 12, 120


def printed(*options: str, timeout: int = 240) -> list[dict]:
    """What machine_code.py prints, in a process of its own: here the kernels are interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(HERE / "machine_code.py"), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if ended.returncode == TOO_MANY:
        pytest.fail(f"{ended.stderr.strip()}; run python {RECORD.parent.name}/machine_code.py --record and commit it")
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def check(entries: list[dict]) -> None:
    """No spills, no fp64, the intended matrix instruction, and what was compiled again is as it was recorded."""
    lied = [entry for entry in entries if "recorded" in entry]
    assert not lied, f"the record does not say what {len(lied)} kernels compile to: {lied[:3]}"
    assert {entry["target"] for entry in entries} == set(TARGETS)
    for target in TARGETS:
        absent = KERNELS.keys() - {entry["kernel"] for entry in entries if entry["target"] == target}
        if target.startswith("gfx"):  # operands of a warp lie as NVIDIA's matrix unit takes them
            absent -= {name for name in absent if name.endswith("_by_warps")}
        if target != "sm_90":  # the groups of warps are Hopper's, and so are tiles that are asked for and awaited
            absent -= {name for name in absent if name.startswith("products") or name.endswith("_tiles")}
        if target == "sm_90":  # its unit takes no blocks
            absent -= {name for name in absent if name.endswith("_scaled")}
        assert not absent, f"no case launches {', '.join(sorted(absent))}"
    for entry in entries:
        problem = fault(entry)
        assert problem is None, f"{entry['kernel']} of {entry['case']} on {entry['target']} {problem}: {entry}"


def fault(entry: dict) -> str | None:
    """What a kernel's machine code has or lacks, as the end of a sentence; None when it is as meant."""
    target, kernel, case, found = entry["target"], entry["kernel"], entry["case"], entry["instructions"]
    if entry["spilled"] > SPILLS.get((kernel, case), {}).get(target, 0):
        return f"spills {entry['spilled']}"
    if any(name.startswith(("DM", "DF", "DA", "DS")) or name.endswith("_f64") for name in found):
        return "computes in fp64"
    if kernel == "_heads" and "fp4" not in case and entry["shared"]:
        return "exchanges layouts through shared memory, which the parts of a head need not"
    wanted = UNITS[KERNELS[kernel]].get(target, ()) if kernel in KERNELS and "fp32" not in case else ()
    if wanted and not any(name.startswith(wanted) for name in found):
        return f"has none of {', '.join(wanted)}"
    return None


@pytest.mark.skipif(
    triton.__version__ not in RECORD.read_text(), reason=f"the record is not of triton {triton.__version__}"
)
def test_machine_code():
    """Every kernel at the model's real shapes on every target, by the record where it is not stale."""
    seed = os.environ.get("MACHINE_CODE_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"MACHINE_CODE_SEED={seed} samples the same kernels again")
    check(printed("--sample", str(SAMPLE), "--seed", seed, "--most", str(MOST)))


@pytest.mark.slow
def test_machine_code_of_everything():
    """The same, compiled here and now."""
    entries = printed("--all", timeout=3600)
    assert all(entry["compiled"] for entry in entries)
    check(entries)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"spilled": 8}, "spills 8"),
        ({"instructions": {"HMMA": 8}}, "none of HGMMA"),
        ({"instructions": {"HGMMA": 8, "DFMA": 1}}, "fp64"),
        ({"kernel": "_heads", "case": "insert bf16", "shared": 16}, "exchanges layouts"),
        ({"target": "sm_100", "kernel": "up_scaled", "instructions": {"UTCQMMA": 8}}, "none of kind::mxf8f6f4"),
        ({"target": "gfx950", "kernel": "up_scaled", "instructions": {"v_mfma_f32_32x32x16_bf16": 8}}, "v_mfma_scale"),
        ({}, None),
    ],
)
def test_a_fault_is_told(change, told):
    """What the machine code may not be is found in an entry of the record that is otherwise as it should be."""
    entry = {"target": "sm_90", "kernel": "score_many", "case": "select prefill bf16", "spilled": 0, "shared": 0}
    problem = fault(entry | {"instructions": {"HGMMA": 32}} | change)
    assert problem is None if told is None else told in problem


def test_a_record_that_lies_is_told():
    """What was compiled again and is not as it was recorded fails, whatever it is."""
    with pytest.raises(AssertionError, match="the record does not say"):
        check([{"target": "sm_90", "spilled": 0, "recorded": {"spilled": 8}}])
