"""Poisoned guard bands: a kernel that reads or writes where it should not, or forgets to write, is found out.

Every tensor that a kernel meets is carved from a slab of its own that is filled with poison, NaN for floating types and
absurd numbers for integers. The gaps of a strided view are poison like the bands before and after it. Afterwards the
bands must be intact, arguments that are not declared mutable unchanged, and every output element written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.bounds import bits
from m3hal_conformance.trees import map_tensors, tensors

#: elements of poison before and after the carved tensor's own extent, and bytes of them at least: a workspace is bytes,
#: and what outgrows it need not write its very first one too many
BAND, BAND_BYTES = 256, 4096
#: bytes of a slab up to which it crosses to the host and back together with others: each crossing waits for the device,
#: and where processes share it, for them; what is larger is compared where it lies
_SMALL = 1 << 22
#: to which the bytes of a slab are made up, so that one that follows another in memory has its dtype's alignment
_ROUND = 16

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
    address still does. source: what the view holds from the start, of its shape and dtype, on any device. further: by
    how many times the least band the view lies deeper in the slab, aligned as it was.

    What is asked of it is answered from the device's memory, or after :func:`fetch` from the copy that it made.
    """

    def __init__(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        which: int = 0,
        offset: int = 0,
        source: Tensor | None = None,
        further: int = 0,
    ) -> None:
        if any(step < 0 for step in stride):
            raise ValueError("torch has no negative strides")
        self._poison = _POISON[dtype][which]
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        band = max(BAND, BAND_BYTES // dtype.itemsize)
        self._band = band * (1 + further) + offset % 16
        size = self._band + extent + band
        size += -size % (_ROUND // dtype.itemsize)
        self.is_small = size * dtype.itemsize <= _SMALL
        self._fetched: Tensor | None = None
        first = torch.empty(size, dtype=dtype, device="cpu" if self.is_small else device)
        bits(first).fill_(self._poison)
        self._place = (tuple(shape), tuple(stride))
        if source is not None and source.numel():
            bits(self._within(first)).copy_(bits(source))
        self._slab = first.to(device, non_blocking=True)  # pageable memory has been read when it returns
        self.view = self._within(self._slab)

    def _within(self, slab: Tensor) -> Tensor:
        return slab.as_strided(*self._place, int(slab.storage_offset()) + self._band)

    @property
    def seen(self) -> Tensor:
        """The view, or its copy on the host."""
        return self.view if self._fetched is None else self._within(self._fetched)

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
        slab = self._slab if self._fetched is None else self._fetched
        if self.view.is_contiguous():  # nothing but the two bands lies outside
            codes, end = bits(slab), self._band + self.view.numel()
            return bool((codes[: self._band] == self._poison).all() and (codes[end:] == self._poison).all())
        inside = torch.zeros(slab.shape, dtype=torch.bool, device=slab.device)
        self._within(inside).fill_(True)
        return bool((bits(slab) == self._poison)[~inside].all())

    def unwritten(self) -> Tensor:
        """bool, of the view's shape: elements that are still poison."""
        return bits(self.seen) == self._poison


def fetch(slabs: Iterable[Slab]) -> None:
    """Copies the small ones to the host, as they are now, in one transfer."""
    asked = [slab for slab in slabs if slab.is_small]
    if not asked:
        return
    whole = torch.cat([slab._slab.view(torch.uint8) for slab in asked]).cpu()
    parts = torch.split(whole, [slab._slab.nbytes for slab in asked])
    for slab, part in zip(asked, parts, strict=True):
        slab._fetched = part.view(slab._slab.dtype)


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
