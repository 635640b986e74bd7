"""Ranks as threads: they meet, they give the same bits, and none waits for one that is gone."""

import time
from typing import Any

import pytest
import torch
from m3hal_conformance import ranks
from m3hal_conformance.buckets import padded, sizes, trimmed
from m3hal_conformance.harness import Outcome
from m3hal_conformance.ranks import PerRank, of_rank, rank_count, run_ranks

from m3hal import ops
from m3hal.ops._group import Group


def test_every_rank_gets_the_sum_and_all_parts() -> None:
    """Three ranks meet twice; each gets the same results and its own input stays as it was."""

    def call(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((2, 3), float(group.rank + 1))
        total = group.all_reduce(x)
        x *= 2  # what others were given is a copy
        return total, group.all_gather(x)

    for total, parts in run_ranks(3, call):
        assert torch.equal(total, torch.full((2, 3), 6.0))
        assert parts[:, 0, 0].tolist() == [2.0, 4.0, 6.0]


def test_sums_run_in_the_order_of_the_ranks() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32 in that order and 1 in another: the result does not depend on who comes first."""
    numbers = (1e8, 1.0, -1e8)
    for _ in range(20):
        assert [float(r) for r in run_ranks(3, lambda g: g.all_reduce(torch.tensor([numbers[g.rank]])))] == [0.0] * 3


def test_a_rank_that_raises_releases_the_others() -> None:
    """The caller gets the error of the rank at fault, not of those that waited for it."""

    def call(group: Group) -> torch.Tensor:
        if group.rank == 2:
            raise KeyError("weights")
        return group.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="weights"):
        run_ranks(3, call)


def test_a_rank_that_returns_early_releases_the_others() -> None:
    """Who waits for a rank that has returned is told so."""

    def call(group: Group) -> Any:
        return None if group.rank == 0 else group.all_reduce(torch.ones(1))

    with pytest.raises(ranks.Deserted, match=r"waits in all_reduce for ranks \[0\]"):
        run_ranks(2, call)


def test_ranks_must_ask_for_the_same() -> None:
    """Different collectives, or shapes, are named."""

    def call(group: Group) -> Any:
        x = torch.ones(group.rank + 1)
        return group.all_reduce(x) if group.rank else group.all_gather(x)

    with pytest.raises(RuntimeError, match=r"rank 0: all_gather .* \[1\]; rank 1: all_reduce .* \[2\]"):
        run_ranks(2, call)


def test_ranks_take_turns() -> None:
    """Between two meetings one rank runs at a time: nothing that a call does meets another rank's doing."""
    running: list[int] = []

    def call(group: Group) -> list[int]:
        seen = []
        for _ in range(3):
            running.append(group.rank)
            time.sleep(0.002)
            seen += [running[-1], len(running)]
            running.pop()
            group.all_reduce(torch.zeros(1))
        return seen

    assert run_ranks(3, call) == [[rank, 1] * 3 for rank in range(3)]


def test_arguments_of_ranks() -> None:
    """A PerRank argument gives each rank its own; any other is everyone's; the group is the rank's."""
    inputs = {"x": PerRank((1, 2)), "weight": 3, "group": None}
    assert rank_count(inputs) == 2
    assert rank_count({"x": 1}) == 1
    found = run_ranks(2, lambda group: of_rank(inputs, group))
    assert [(f["x"], f["weight"], f["group"].rank) for f in found] == [(1, 3, 0), (2, 3, 1)]
    assert of_rank({"x": 1, "group": None}, None) == {"x": 1, "group": None}
    with pytest.raises(ValueError, match="same ranks"):
        rank_count({"x": PerRank((1, 2)), "y": PerRank((1, 2, 3))})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_ranks_record_gradients_as_their_caller_does(mode: Any) -> None:
    """torch keeps that by thread."""
    with mode():
        wanted = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        found = run_ranks(2, lambda group: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
    assert found == [wanted] * 2


def test_ranks_are_padded_to_one_bucket_each() -> None:
    """Ranks with different numbers of tokens all get the bucket's, and lose the padding again."""
    operator = ops.load("allreduce_add_rms_norm")
    x = PerRank((torch.ones(3, 4), 2 * torch.ones(5, 4)))
    inputs = {"x": x, "residual": torch.zeros(5, 4), "weight": torch.ones(4), "group": None}
    assert sizes(operator, inputs) == {"tokens": 5}
    given = padded(operator, inputs, {"tokens": (4, 8)})
    assert [tuple(own.shape) for own in given["x"]] == [(8, 4), (8, 4)]
    assert given["weight"] is inputs["weight"]
    outcome = Outcome({"out": torch.cat(list(given["x"]))}, unwritten={"out": torch.zeros(16, 4, dtype=torch.bool)})
    found = trimmed(operator, outcome, {"x": x, "group": None})
    assert torch.equal(found.outputs["out"], torch.cat(list(x)))
    assert found.unwritten["out"].shape == (8, 4)
