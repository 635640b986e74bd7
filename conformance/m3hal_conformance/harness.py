"""Calls an implementation between guard bands and brings back everything that can be said about the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from m3hal.dispatch import Bound
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertWeights, Operator, SeqMeta
from m3hal.ops.sparse_decoder_layer import LayerWeights
from m3hal_conformance.bounds import bits
from m3hal_conformance.guard import Slab, fetch
from m3hal_conformance.ranks import PerRank, by_rank, of_rank, rank_count, run_ranks
from m3hal_conformance.trees import map_tensors, tensors

#: names of the outputs of operators that have several
OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "add_rms_norm": ("out", "residual_out"),
    "route_topk": ("weights", "ids"),
    "qk_norm_rope_insert": ("q", "index_q"),
    "qkv_norm_rope_insert": ("q", "index_q"),
    "sparse_decoder_layer": ("out", "residual_out"),
    "allreduce_add_rms_norm": ("out", "residual_out"),
    "draft_block_sample": ("tokens", "logits", "confidence"),
    "kv_read": ("k", "v"),
    "sparse_attention": ("out", "lse"),
    "paged_attention": ("out", "lse"),
}

Named = dict[str, Tensor]


@dataclass
class Outcome:
    """One call. outputs: by name, on the CPU, and the arguments that the operator mutates, as ``kv.buf``.

    touched: bands that were written. changed: inputs that were written. unwritten: name -> elements still poison.
    convention: what the call did against the calling convention, as sentences.
    """

    outputs: Named
    touched: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unwritten: dict[str, Tensor] = field(default_factory=dict)
    convention: list[str] = field(default_factory=list)


@dataclass
class Carved:
    """Inputs and outputs in their slabs on the device, ready to be run more than once."""

    inputs: dict[str, Any]
    out: Any
    slabs: dict[int, Slab]
    workspace: Slab | None
    storage: Slab | None


class Harness:
    """Runs one bound operator. device: where tensors go; lazy: inputs that are not carved; threads: of torch's CPU.

    unpacked: of a private page map, the buffer of the same tokens in hnd pages.
    """

    def __init__(
        self,
        operator: Operator,
        bound: Bound,
        device: torch.device,
        lazy: tuple[str, ...] = (),
        threads: int = 1,
        unpacked: Callable[[PagedCache], Tensor] | None = None,
    ) -> None:
        self.operator, self.bound, self.device, self.lazy, self.threads = operator, bound, device, lazy, threads
        self._unpacked = unpacked
        self._statics = operator.static_values(bound.site)
        #: where tensors of inputs began, in any call so far
        self._met: set[int] = set()

    def call(self, inputs: Mapping[str, Any], which: int = 0) -> Outcome:
        """One call with ``out=``, everything carved from slabs with poison ``which``."""
        carved = self.carve(inputs, which)
        returned = self.run(carved)
        return self.outcome(carved, inputs, returned)

    def call_allocating(self, inputs: Mapping[str, Any]) -> tuple[Named, Any]:
        """One call without ``out=``: its outputs by name, and as they were returned.

        Its inputs lie in no slabs: a kernel that is right only between guard bands is found out.
        """
        carved = self.carve(inputs, 0, is_guarded=False)
        carved.out = None
        returned = self.run(carved)
        return named(self.operator, returned, self._mutated(carved), self._unpacked), returned

    def expected(self, inputs: Mapping[str, Any]) -> Any:
        """Empty outputs as the definition's fake makes them; None for an operator that only mutates."""
        made = [self.operator.fake(*own.values(), **self._statics) for own in by_rank(inputs)]
        return made[0] if len(made) == 1 else PerRank(made)

    def carve(self, inputs: Mapping[str, Any], which: int, *, is_guarded: bool = True, further: int = 0) -> Carved:
        slabs: dict[int, Slab] = {}

        def keep(slab: Slab) -> Tensor:
            slabs[id(slab.view)] = slab
            return slab.view

        def hold(tensor: Tensor) -> Tensor:
            if not is_guarded:
                plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
                bits(plain).copy_(bits(tensor))
                return plain
            offset = int(tensor.storage_offset())
            return keep(Slab(tensor.shape, tensor.stride(), tensor.dtype, self.device, which, offset, tensor, further))

        def empty(tensor: Tensor) -> Tensor:
            return keep(Slab(tensor.shape, tensor.stride(), tensor.dtype, self.device, which))

        lazy = {name: on_device(inputs[name], inputs, self.device) for name in self.lazy}
        guarded = map_tensors({name: value for name, value in inputs.items() if name not in self.lazy}, hold)
        out = map_tensors(self.expected(inputs), empty)
        given = {name: lazy[name] if name in lazy else guarded[name] for name in inputs}
        self._met |= _addresses(guarded)
        return Carved(
            given,
            out,
            slabs,
            self._bytes(self.bound.workspace_bytes, which, rank_count(inputs)),
            self._bytes(self.bound.plan_bytes, which, rank_count(inputs)),
        )

    def carve_elsewhere(self, inputs: Mapping[str, Any]) -> Carved:
        """As :meth:`carve`, with no input where one began in any call so far: allocators hand out again what was freed.

        Nothing is held meanwhile, as experts may fill half of a device.
        """
        further = 0
        while True:
            before = set(self._met)
            carved = self.carve(inputs, 0, further=further)
            if before.isdisjoint(_addresses({n: v for n, v in carved.inputs.items() if n not in self.lazy})):
                return carved
            del carved
            further += 1

    def run(self, carved: Carved) -> Any:
        """Plans the batch, packs the weights, runs."""
        returned = self.launch(carved, self.arguments(carved))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return returned

    def arguments(self, carved: Carved) -> dict[str, Any]:
        """What ``run`` gets, by name: a batch plan in place of the metadata, packed in place of plain weights."""
        storage = carved.storage.view if carved.storage else None

        def given(value: Any, at: int = 0) -> Any:
            if isinstance(value, PerRank):
                return PerRank(given(own, rank) for rank, own in enumerate(value))
            if isinstance(value, SeqMeta) and self.bound.plan_batch:
                return self.bound.plan_batch(value, _share(storage, self.bound.plan_bytes, at))
            if isinstance(value, (ExpertWeights, LayerWeights)) and self.bound.prepare_weights:
                return self.bound.prepare_weights(value)
            return value

        return {name: given(value) for name, value in carved.inputs.items()}

    def launch(self, carved: Carved, arguments: Mapping[str, Any]) -> Any:
        """``run`` itself, with its ``out`` and workspace; on all ranks at once where there are several."""
        workspace = carved.workspace.view if carved.workspace is not None else None

        def call(own: Mapping[str, Any], rank: int, out: Any) -> Any:
            options: dict[str, Any] = {} if out is None else {"out": out}
            if workspace is not None:
                options["workspace"] = _share(workspace, self.bound.workspace_bytes, rank)
            return self.bound.run(*own.values(), **options)

        size = rank_count(arguments)
        with torch_threads(self.threads):
            if size == 1:
                return call(arguments, 0, carved.out)
            outs = carved.out or [None] * size
            return PerRank(run_ranks(size, lambda g: call(of_rank(arguments, g), g.rank, outs[g.rank])))

    def outcome(self, carved: Carved, inputs: Mapping[str, Any], returned: Any) -> Outcome:
        if self.device.type != "cpu":
            fetch([*carved.slabs.values(), *filter(None, (carved.workspace, carved.storage))])
        seen = {key: slab.seen for key, slab in carved.slabs.items()}
        out, mutated = carved.out, self._mutated(carved)
        if self._unpacked is None:
            out, mutated = map_tensors((out, mutated), lambda tensor: seen.get(id(tensor), tensor))
        found = Outcome(named(self.operator, out, mutated, self._unpacked))
        before, after = dict(tensors(dict(inputs))), dict(tensors(carved.inputs))
        results = [dict(_output_names(self.operator, out)) for out in _of_ranks(carved.out)]
        for path, tensor in [*after.items(), *(pair for own in results for pair in own.items())]:
            if id(tensor) in carved.slabs and not carved.slabs[id(tensor)].intact():
                found.touched.append(f"memory around {path}")
        for name, slab in (("the workspace", carved.workspace), ("the plan's storage", carved.storage)):
            if slab is not None and not slab.intact():
                found.touched.append(f"memory around {name}")
        aliased = {id(t) for path, t in after.items() if path.split(".")[0] in self.operator.mutates}
        for path, tensor in after.items():
            if id(tensor) in aliased or path.split(".")[0] in self.lazy:
                continue
            now = seen.get(id(tensor), tensor)
            if not torch.equal(bits(now), bits(before[path].to(now.device))):
                found.changed.append(path)
        poison = [{path: carved.slabs[id(tensor)].unwritten().cpu() for path, tensor in own.items()} for own in results]
        found.unwritten = {path: _below([own[path] for own in poison]) for path in results[0]}
        if results[0] and not _same_storage(returned, carved.out):
            found.convention.append("with out= it must return out; it returned something else")
        return found

    def _mutated(self, carved: Carved) -> dict[str, Any]:
        return {name: carved.inputs[name] for name in self.operator.mutates if carved.inputs.get(name) is not None}

    def _bytes(self, size: int, which: int, ranks: int) -> Slab | None:
        whole = size if ranks == 1 else _step(size) * ranks
        return Slab((whole,), (1,), torch.uint8, self.device, which) if size else None


def _addresses(inputs: Mapping[str, Any]) -> set[int]:
    """Where each tensor begins; empty ones lie nowhere."""
    return {tensor.data_ptr() for _, tensor in tensors(dict(inputs)) if tensor.numel()}


def _step(size: int) -> int:
    """From one rank's bytes to the next one's, as far apart as device allocators align to."""
    return -(-size // 256) * 256


def _share(memory: Tensor | None, size: int, rank: int) -> Tensor | None:
    """One rank's bytes of memory that holds those of all."""
    return None if memory is None else memory[rank * _step(size) :][:size]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside the block torch's CPU operations use ``count`` threads."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def named(
    operator: Operator,
    out: Any,
    mutated: Mapping[str, Any],
    unpacked: Callable[[PagedCache], Tensor] | None = None,
) -> Named:
    """Outputs and mutated arguments by name, copied to the CPU; caches of private page maps unpacked.

    The outputs of several ranks stand one below the other, in one tensor.
    """
    ranks = [dict(_output_names(operator, own)) for own in _of_ranks(out)]
    found = {name: _below([own[name].detach().to("cpu", copy=True) for own in ranks]) for name in ranks[0]}
    for name, value in mutated.items():
        if unpacked and isinstance(value, PagedCache):
            found[f"{name}.buf"] = unpacked(value)
            continue
        for path, tensor in tensors(value, name):
            if path.endswith("buf"):
                found[path] = _copied(tensor)
    return found


def pages_in_use(inputs: Mapping[str, Any]) -> Tensor:
    """int64: the pages that slots or block tables among the inputs name; the others of a cache may hold anything."""
    named_by = [value.block_table for value in inputs.values() if isinstance(value, SeqMeta)]
    caches = [value for value in inputs.values() if isinstance(value, PagedCache)]
    named_by += [
        inputs["slots"][inputs["slots"] >= 0] // cache.layout.page_size for cache in caches if "slots" in inputs
    ]
    return torch.unique(torch.cat([pages.flatten().long() for pages in named_by]))  # type: ignore[no-any-return]


def on_device(value: Any, inputs: Mapping[str, Any], device: torch.device) -> Any:
    """A lazy input. A cache is itself on the CPU; elsewhere one of its size of which only the pages in use were
    copied: the host's has gigabytes that nobody has touched, and that cost nothing while nobody does."""
    if not isinstance(value, PagedCache):
        return map_tensors(value, lambda tensor: tensor.to(device))
    cache = value
    if cache.buf.device == device:
        return cache
    pages = pages_in_use(inputs)
    buf = torch.empty(cache.buf.shape, dtype=cache.buf.dtype, device=device)
    bits(buf)[pages.to(device)] = bits(cache.buf)[pages].to(device)
    return replace(cache, buf=buf)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _of_ranks(out: Any) -> Sequence[Any]:
    return out if isinstance(out, PerRank) else (out,)


def _below(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _output_names(operator: Operator, out: Any) -> list[tuple[str, Tensor]]:
    if out is None:
        return []
    if isinstance(out, tuple):
        names = OUTPUTS.get(operator.name, tuple(f"out{i}" for i in range(len(out))))
        return [(name, tensor) for name, tensor in zip(names, out, strict=True) if tensor is not None]
    if is_dataclass(out) and not isinstance(out, type):
        return [
            (f"out.{f.name}", getattr(out, f.name)) for f in fields(out) if isinstance(getattr(out, f.name), Tensor)
        ]
    return [("out", out)]


def _same_storage(returned: Any, out: Any) -> bool:
    one, other = [t for _, t in tensors(returned)], [t for _, t in tensors(out)]
    return len(one) == len(other) and all(a.data_ptr() == b.data_ptr() for a, b in zip(one, other, strict=True))


def widened(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs in fp64, plain caches and their layouts included: what the exact oracle computes on."""
    from m3hal.formats import PLAIN_FORMATS

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    def walk(value: Any) -> Any:
        if isinstance(value, PerRank):
            return PerRank(map(walk, value))
        if isinstance(value, PagedCache):
            if value.layout.format not in PLAIN_FORMATS:  # its bytes mean what they mean
                return map_tensors(value, torch.clone)
            return PagedCache(widen(value.buf), replace(value.layout, format="float64"))
        return map_tensors(value, widen)

    return {name: walk(value) for name, value in inputs.items()}


def cloned(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose tensors keep their strides and share no memory with the given ones."""
    return dict(map_tensors(dict(inputs), lambda t: t.detach().clone(memory_format=torch.preserve_format)))
