"""Ranks that compute one operator together: what an operator may ask of them, and nothing else.

An operator that needs other ranks takes them as its argument ``group``; None is one rank alone. Every rank of a group
calls the same operators in the same order, with tensors of the same shape and dtype wherever they meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from m3hal._lazy import torch


class Group(Protocol):
    """Ranks 0 to size - 1; this process or thread is ``rank``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, accumulated in x's dtype, with the same bits on every rank. ``x`` is not written."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: every rank's x in the order of the ranks, bit for bit."""
        ...


@dataclass(frozen=True)
class Alone:
    """One rank: what ``group=None`` stands for."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None].clone()


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that are processes of ``torch.distributed``. group: its process group; None is the default one."""

    group: Any = None

    @property
    def rank(self) -> int:
        return int(torch.distributed.get_rank(self.group))

    @property
    def size(self) -> int:
        return int(torch.distributed.get_world_size(self.group))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        torch.distributed.all_gather(list(parts.unbind()), x.contiguous(), group=self.group)
        return parts


def ranks(group: Group | None) -> Group:
    """The group that an argument ``group`` means."""
    return Alone() if group is None else group
