"""Groups: ranks of ``torch.distributed``, and one rank alone."""

import subprocess
import sys
from pathlib import Path

import torch

from m3hal.ops._group import Alone, ranks

TWO_PROCESSES = """
import sys
import torch
from m3hal.ops import ExpertWeights, ProcessGroup
from m3hal.ops.add_rms_norm import add_rms_norm
from m3hal.ops.allreduce_add_rms_norm import allreduce_add_rms_norm
from m3hal.ops.mega_moe import mega_moe
from m3hal.ops.moe_experts import moe_experts

torch.manual_seed(0)
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

x, residual, weight = torch.randn(2, 4, 8).double(), torch.randn(4, 8).double(), torch.randn(8).double()
norm = {"eps": 1e-6, "weight_offset": 1.0}
found = allreduce_add_rms_norm(x[rank], residual, weight, group, **norm)
wanted = add_rms_norm(x[0] + x[1], residual, weight, **norm)
assert all(torch.equal(one, other) for one, other in zip(found, wanted))

w13, w2, activation = torch.randn(4, 12, 8), torch.randn(4, 8, 6), {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
x, weights, ids = torch.randn(5, 8), torch.rand(5, 2), torch.randint(-1, 4, (5, 2), dtype=torch.int32)
local, mine = slice(2 * rank, 2 * rank + 2), (slice(0, 4), slice(4, 5))[rank]
experts = ExpertWeights(w13[local], w2[local])
found = mega_moe(x[mine], weights[mine], ids[mine], experts, group, num_local_experts=2, **activation)
wanted = moe_experts(x, weights, ids, ExpertWeights(w13, w2), **activation)
torch.testing.assert_close(found, wanted[mine])
torch.distributed.destroy_process_group()
"""


def test_processes_meet_in_torch_distributed(tmp_path: Path) -> None:
    """Two processes get the sum and every rank's tensor, and the operators of several ranks what one device gets."""
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
