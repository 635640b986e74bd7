"""Relations between the ranks of a case."""

from __future__ import annotations

import torch
from torch import Tensor

from m3hal.ops._group import Alone
from m3hal_conformance.checks import _same, check
from m3hal_conformance.compare import Score
from m3hal_conformance.ranks import PerRank, rank_count
from m3hal_conformance.trial import Trial


@check
def ranks_agree(trial: Trial) -> None:
    """Every rank has the same bits: else a model's ranks drift apart, and choose different experts and tokens."""
    count = rank_count(trial.inputs)
    shares = {name: tensor.chunk(count) for name, tensor in trial.first.outputs.items()}
    for rank in range(1, count):
        first, other = ({name: parts[r] for name, parts in shares.items()} for r in (0, rank))
        _same(first, other, f"rank 0 and rank {rank} differ")


@check
def exchanged_ranks(trial: Trial) -> list[Score]:
    """Tokens that come from other ranks get the same rows there: what a token gets does not depend on where it is."""
    count = rank_count(trial.inputs)
    names = ("x", "weights", "ids")
    inputs = {
        name: PerRank(reversed(value)) if name in names and isinstance(value, PerRank) else value
        for name, value in trial.inputs.items()
    }
    ends = torch.tensor([0, *(len(x) for x in trial.inputs["x"])]).cumsum(0).tolist()
    rows: list[Tensor] = [torch.arange(ends[rank], ends[rank + 1]) for rank in reversed(range(count))]
    return trial.require(trial.call(inputs).outputs, "with the ranks' tokens exchanged", torch.cat(rows))


@check
def group_of_one(trial: Trial) -> None:
    """A group of one rank is one rank alone: the bits are those of a call without a group."""
    alone = trial.call({**trial.inputs, "group": Alone()}).outputs
    _same(trial.first.outputs, alone, "with a group of one rank the result differs from one without a group")
