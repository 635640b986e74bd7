"""Groups: ranks of ``torch.distributed``, and one rank alone."""

import subprocess
import sys
from pathlib import Path

import torch

from m3hal.ops._group import Alone, ranks

TWO_PROCESSES = """
import sys
import torch
from m3hal.ops._group import ProcessGroup

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = ProcessGroup()
x = torch.tensor([[1.0, 2.0, 3.0]]).bfloat16() * (rank + 1)
wide = torch.full((3, 4), float(rank))[:, ::2]
assert (group.rank, group.size) == (rank, 2)
assert group.all_reduce(x).tolist() == [[3.0, 6.0, 9.0]] and x[0, 0] == rank + 1
assert group.all_gather(x).tolist() == [[[1.0, 2.0, 3.0]], [[2.0, 4.0, 6.0]]]
assert group.all_gather(wide).tolist() == [[[0.0] * 2] * 3, [[1.0] * 2] * 3]
assert group.all_reduce(wide).tolist() == [[1.0] * 2] * 3
assert group.all_gather(torch.empty(0, 3)).shape == (2, 0, 3) and group.all_reduce(torch.empty(0, 3)).shape == (0, 3)
torch.distributed.destroy_process_group()
"""


def test_processes_meet_in_torch_distributed(tmp_path: Path) -> None:
    """Two processes get the sum and every rank's tensor, views and empty tensors included; inputs are not written."""
    command = [sys.executable, "-c", TWO_PROCESSES]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_one_rank_alone() -> None:
    """Without a group a tensor is its own sum and the only one gathered, in memory of its own."""
    x = torch.arange(6.0).view(2, 3)
    group = ranks(None)
    assert (group.rank, group.size) == (0, 1)
    for found in (group.all_reduce(x), group.all_gather(x)[0]):
        assert torch.equal(found, x)
        assert found.data_ptr() != x.data_ptr()
    assert ranks(Alone()) == Alone()
