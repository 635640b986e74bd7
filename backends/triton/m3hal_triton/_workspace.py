"""A kernel's scratch memory, in named parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Room:
    """Parts of a workspace: name -> (offset, bytes), each from a multiple of 256 on."""

    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    total: int = 0

    def add(self, name: str, size: int) -> None:
        self.parts[name] = (self.total, size)
        self.total += -(-size // 256) * 256


@dataclass(frozen=True)
class Memory:
    """A workspace and its parts."""

    room: Room
    workspace: torch.Tensor

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        offset, size = self.room.parts[name]
        if offset + size > len(self.workspace):
            raise ValueError(f"the workspace has {len(self.workspace)} bytes; this call needs {self.room.total}")
        return self.workspace[offset : offset + size].view(dtype).view(*shape)

    def find(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
        """None for a part that is not there."""
        return self.take(name, dtype, *shape) if name in self.room.parts else None
