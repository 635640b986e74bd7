"""What a kernel copies before the kernel ahead has ended may not be written yet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("stream_order.py")


@pytest.fixture(scope="module")
def entries():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {entry["kernel"]: entry for entry in lines} | {entry["case"]: entry for entry in lines if "case" in entry}


@pytest.mark.parametrize("kernel", ["score_tiles", "attend_tiles"])
def test_no_tile_is_copied_before_the_wait(entries, kernel):
    """A later layer's first blocks may be another request's last ones, which this batch is writing."""
    entry = entries[kernel]
    assert entry["known"]
    assert 0 < entry["waits"] < entry["copies"]


@pytest.mark.parametrize("kernel", ["_rows", "_activate_tile", "up", "insert bf16", "insert one nvfp4"])
def test_what_is_read_and_launched_after_the_wait(entries, kernel):
    """The next kernel may take what was there before this one had begun for complete, as the experts' w2 takes ids."""
    entry = entries[kernel]
    assert 0 < entry["waits"] < min(entry["loads"], entry["next"])


def test_w2_reads_ids_before_its_wait(entries):
    """Its rows are known by then, so that weights are asked for as soon as hidden activations are there."""
    assert 0 < entries["down"]["loads"] < entries["down"]["waits"]
