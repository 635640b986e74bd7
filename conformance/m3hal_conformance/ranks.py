"""Ranks as threads of this process: one callable per rank, with a group between them, on any device.

They take turns: one runs until it waits for the others, so that what is not safe in threads, such as Triton's
interpreter, is safe here. Sums run in the order of the ranks, so a result has the same bits each time. A rank that
raises, or returns while others wait for it, releases them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from m3hal.ops._group import Group

T = TypeVar("T")


class PerRank(tuple[Any, ...]):
    """An argument that differs between ranks: element r is that of rank r. Any other value is every rank's."""


class Deserted(RuntimeError):
    """Another rank raised or returned while this one waited for it."""


def run_ranks(size: int, call: Callable[[Group], T]) -> list[T]:
    """``call(group)`` on each of ``size`` ranks; what they returned, in the order of the ranks.

    Whether gradients are recorded is as it is here: torch knows that by thread. Raises what the lowest rank raised that
    was not merely deserted by another.
    """
    meeting = _Meeting(size)
    returned: dict[int, T] = {}
    raised: dict[int, BaseException] = {}
    is_inference, records = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def rank(index: int) -> None:
        with meeting.turn:
            try:
                with torch.inference_mode(is_inference), torch.set_grad_enabled(records):
                    returned[index] = call(_Rank(index, meeting))
            except BaseException as error:
                raised[index] = error
            finally:
                meeting.left.add(index)
                meeting.turn.notify_all()

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        first = min(raised, key=lambda index: (isinstance(raised[index], Deserted), index))
        raise raised[first]
    return [returned[index] for index in range(size)]


def rank_count(inputs: Mapping[str, Any]) -> int:
    """How many ranks the inputs of a case are for; 1 where no argument differs between ranks.

    Raises ValueError when arguments disagree.
    """
    found = {len(value) for value in inputs.values() if isinstance(value, PerRank)}
    if len(found) > 1:
        raise ValueError(f"arguments are given for {sorted(found)} ranks; give each for the same ranks")
    return found.pop() if found else 1


def of_rank(inputs: Mapping[str, Any], group: Group | None) -> dict[str, Any]:
    """One rank's inputs, with its group where the operator takes one."""
    own = _own(inputs, 0 if group is None else group.rank)
    return own | ({"group": group} if "group" in own else {})


def by_rank(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs of each rank, without a group."""
    return [_own(inputs, rank) for rank in range(rank_count(inputs))]


def gathered(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inputs of a case from those of each rank; what is the same object everywhere stays every rank's."""
    return {
        name: value if all(own[name] is value for own in ranks) else PerRank(own[name] for own in ranks)
        for name, value in ranks[0].items()
    }


def on_ranks(function: Callable[..., T], inputs: Mapping[str, Any]) -> T | PerRank:
    """``function(*inputs)``: called once, or on each rank of a case for several, with what each returned."""
    size = rank_count(inputs)
    if size == 1:
        return function(*inputs.values())
    return PerRank(run_ranks(size, lambda group: function(*of_rank(inputs, group).values())))


def _own(inputs: Mapping[str, Any], rank: int) -> dict[str, Any]:
    return {name: value[rank] if isinstance(value, PerRank) else value for name, value in inputs.items()}


@dataclass(frozen=True)
class _Rank:
    """A group as one of its threads sees it."""

    rank: int
    meeting: _Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self.meeting.exchange(self.rank, "all_reduce", x)
        total = first.to(x.device, copy=True)
        for part in others:
            total += part.to(x.device)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([part.to(x.device) for part in self.meeting.exchange(self.rank, "all_gather", x)])


@dataclass
class _Meeting:
    """Where the ranks of a group leave copies of their tensors for one another, round after round.

    turn: held by the rank that runs; it lets go of it while it waits.
    """

    size: int
    turn: threading.Condition = field(default_factory=threading.Condition)
    rounds: dict[int, dict[int, tuple[str, Tensor]]] = field(default_factory=dict)
    next_round: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def exchange(self, rank: int, what: str, x: Tensor) -> list[Tensor]:
        """Every rank's tensor of this round, in the order of the ranks."""
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        if x.device.type != "cpu":
            torch.accelerator.synchronize(x.device)
        number = self.next_round.get(rank, 0)
        self.next_round[rank] = number + 1
        posted = self.rounds.setdefault(number, {})
        posted[rank] = (what, copy)
        self.turn.notify_all()
        self.turn.wait_for(lambda: len(posted) == self.size or self.left - posted.keys())
        if len(posted) < self.size:
            gone = sorted(self.left - posted.keys())
            raise Deserted(f"rank {rank} waits in {what} for ranks {gone}, which have returned or raised")
        self.rounds.pop(number - 1, None)  # whoever is here has read it, and so has everyone else posted
        return self._alike(posted)

    @staticmethod
    def _alike(posted: Mapping[int, tuple[str, Tensor]]) -> list[Tensor]:
        asked = {index: (what, tuple(x.shape), x.dtype) for index, (what, x) in sorted(posted.items())}
        if len(set(asked.values())) > 1:
            told = "; ".join(f"rank {i}: {what} of {dtype} {list(shape)}" for i, (what, shape, dtype) in asked.items())
            raise RuntimeError(f"ranks must call the same collective on the same shape; they called {told}")
        return [posted[index][1] for index in sorted(posted)]
