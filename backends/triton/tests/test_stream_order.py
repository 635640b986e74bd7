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
    return {entry["kernel"]: entry for entry in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("kernel", ["score_tiles", "attend_tiles"])
def test_no_tile_is_copied_before_the_wait(entries, kernel):
    """A later layer's first blocks may be another request's last ones, which this batch is writing."""
    entry = entries[kernel]
    assert entry["known"]
    assert 0 < entry["waits"] < entry["copies"]
