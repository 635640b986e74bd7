"""Poisoned guard bands: a kernel that reads or writes where it should not, or forgets to write, is found out.

Every tensor that a kernel meets is carved from a slab of its own that is filled with poison, NaN for floating types and
absurd numbers for integers. The gaps of a strided view are poison like the bands before and after it. Afterwards the
bands must be intact, arguments that are not declared mutable unchanged, and every output element written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.bounds import bits
from m3hal_conformance.trees import map_tensors, tensors

#: elements of poison before and after the carved tensor's own extent, and bytes of them at least: a workspace is bytes,
#: and what outgrows it need not write its very first one too many
BAND, BAND_BYTES = 256, 4096

#: bit patterns by dtype, two each: an 8-bit output may legitimately hold one of them, but not each in turn
_POISON: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (-1, 0x7FF5A5A5A5A5A5A5),  # every one a NaN
    torch.float32: (-1, 0x7FA5A5A5),
    torch.bfloat16: (-1, 0x7FA5),
    torch.float16: (-1, 0x7DA5),
    torch.float8_e4m3fn: (0xFF, 0x7F),
    torch.float8_e5m2: (0xFF, 0x7D),
    torch.float8_e8m0fnu: (0xFF, 0xFE),
    torch.int64: (0x5A5A5A5A5A5A5A5A, 0x3C3C3C3C3C3C3C3C),
    torch.int32: (0x5A5A5A5A, 0x3C3C3C3C),
    torch.int16: (0x5A5A, 0x3C3C),
    torch.int8: (0x5A, 0x3C),
    torch.uint8: (0xFF, 0x7F),
    torch.bool: (1, 0),
}


class Slab:
    """One tensor in a poisoned slab.

    view: the tensor, with the given shape and strides. which: 0 or 1, the poison. offset: of the tensor in its own
    storage; the view's address is off a multiple of 16 elements by as much, so that a view that starts off an even
    address still does.
    """

    def __init__(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        which: int = 0,
        offset: int = 0,
    ) -> None:
        if any(step < 0 for step in stride):
            raise ValueError("torch has no negative strides")
        self._poison = _POISON[dtype][which]
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        band = max(BAND, BAND_BYTES // dtype.itemsize)
        self._band = band + offset % 16
        self._slab = torch.empty(self._band + extent + band, dtype=dtype, device=device)
        bits(self._slab).fill_(self._poison)
        self._place = (tuple(shape), tuple(stride), self._band)
        self.view = self._slab.as_strided(*self._place)

    @classmethod
    def like(cls, tensor: Tensor, which: int = 0) -> Slab:
        """An empty (poisoned) slab for a tensor of this shape, these strides and this dtype."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, which, int(tensor.storage_offset()))

    @classmethod
    def holding(cls, tensor: Tensor, which: int = 0) -> Slab:
        """A slab that holds a copy of the tensor, strides included (an expanded axis stays expanded)."""
        slab = cls.like(tensor, which)
        target, source = slab.view, tensor
        for axis, step in enumerate(tensor.stride()):
            if step == 0 and tensor.shape[axis] > 1:  # expanded: one element of memory
                target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
        bits(target).copy_(bits(source))
        return slab

    def intact(self) -> bool:
        """Whether everything outside the view is still poison."""
        if self.view.is_contiguous():  # nothing but the two bands lies outside
            codes, end = bits(self._slab), self._band + self.view.numel()
            return bool((codes[: self._band] == self._poison).all() and (codes[end:] == self._poison).all())
        inside = torch.zeros(self._slab.shape, dtype=torch.bool, device=self._slab.device)
        inside.as_strided(*self._place).fill_(True)
        return bool((bits(self._slab) == self._poison)[~inside].all())

    def unwritten(self) -> Tensor:
        """bool, of the view's shape: elements that are still poison."""
        return bits(self.view) == self._poison


def run_guarded(
    run: Callable[..., Any],
    inputs: dict[str, Any],
    outputs: Any = None,
    *,
    mutates: Sequence[str] = (),
    workspace_bytes: int = 0,
) -> Any:
    """Runs an implementation between guard bands and returns its outputs.

    run: called as ``run(*inputs, out=..., workspace=...)``; ``out`` only when there are outputs, ``workspace`` only
        when ``workspace_bytes`` > 0.
    inputs: by parameter name, in order. outputs: tensors of the right shape, dtype and strides, such as the
        definition's fake returns; None for an operator that only mutates. mutates: the inputs it may write.

    Runs twice, with different poison, so that a stored value can't be mistaken for it. The inputs passed in are never
    written: what the operator mutated is returned instead, as ``(outputs, {name: mutated input})``, when there is any.

    Raises:
        AssertionError: a band was written, an input changed, or an output element was left unwritten.
    """
    first = _run_once(run, inputs, outputs, mutates, workspace_bytes, 0)
    second = _run_once(run, inputs, outputs, mutates, workspace_bytes, 1)
    misdeeds = first.misdeeds | second.misdeeds
    for name, missed in first.unwritten.items():
        if name in second.unwritten and (both := missed & second.unwritten[name]).any():
            place = tuple(both.nonzero()[0].tolist())
            misdeeds.add(f"{name} was left unwritten in {int(both.sum())} elements, first {place}")
    if misdeeds:
        raise AssertionError("; ".join(sorted(misdeeds)))
    return (first.outputs, first.mutated) if mutates else first.outputs


@dataclass(frozen=True)
class _Outcome:
    outputs: Any
    mutated: dict[str, Any]
    misdeeds: set[str]
    unwritten: dict[str, Tensor]


def _run_once(
    run: Callable[..., Any],
    inputs: dict[str, Any],
    outputs: Any,
    mutates: Sequence[str],
    workspace_bytes: int,
    which: int,
) -> _Outcome:
    slabs: dict[int, Slab] = {}

    def keep(slab: Slab) -> Tensor:
        slabs[id(slab.view)] = slab
        return slab.view

    guarded = map_tensors(inputs, lambda tensor: keep(Slab.holding(tensor, which)))
    out = map_tensors(outputs, lambda tensor: keep(Slab.like(tensor, which)))
    options: dict[str, Any] = {} if outputs is None else {"out": out}
    if workspace_bytes:
        options["workspace"] = keep(Slab((workspace_bytes,), (1,), torch.uint8, _device(inputs), which))
    run(*guarded.values(), **options)

    misdeeds: set[str] = set()
    met = [*tensors(guarded), *tensors(out, "out"), *tensors(options.get("workspace"), "workspace")]
    misdeeds.update(f"memory around {path} was written" for path, tensor in met if not slabs[id(tensor)].intact())
    misdeeds.update(
        f"{path} was written, which the operator does not mutate" for path in changed(inputs, guarded, mutates)
    )
    unwritten = {path: slabs[id(tensor)].unwritten() for path, tensor in tensors(out, "out")}
    return _Outcome(out, {name: guarded[name] for name in mutates}, misdeeds, unwritten)


def changed(before: Any, after: Any, mutates: Sequence[str] = ()) -> list[str]:
    """Paths of the tensors whose bits differ, but for those under a name in ``mutates``."""
    now = dict(tensors(after))
    return [
        path
        for path, tensor in tensors(before)
        if path.split(".")[0] not in mutates and not torch.equal(bits(tensor), bits(now[path]))
    ]


def _device(inputs: Any) -> torch.device:
    return next((tensor.device for _, tensor in tensors(inputs)), torch.device("cpu"))
