"""What several ranks give, against what one of them gives alone."""

from __future__ import annotations

from m3hal_conformance.checks import _same, check
from m3hal_conformance.ranks import rank_count
from m3hal_conformance.trial import Trial


@check
def one_rank(trial: Trial) -> None:
    """Without a group, one rank gives the bits that each rank of the group gives."""
    ranks = rank_count(trial.inputs)
    alone = trial.call({**trial.inputs, "group": None}).outputs
    for rank in range(ranks):
        mine = {name: whole.chunk(ranks)[rank] for name, whole in trial.first.outputs.items()}
        _same(alone, mine, f"rank {rank} of {ranks} gives other bits than one rank alone")
