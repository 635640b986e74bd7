"""What an engine asks of an implementation besides numbers: compiled code around it, graphs, memory as declared."""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import m3hal_conformance.process  # noqa: F401  registers its checks
from m3hal.ops import ExpertWeights
from m3hal.ops.sparse_decoder_layer import LayerWeights
from m3hal_conformance.buckets import _is_token_axis, trimmed
from m3hal_conformance.checks import _same, check
from m3hal_conformance.harness import Carved, Named
from m3hal_conformance.metamorphic import _take
from m3hal_conformance.trees import map_tensors, tensors
from m3hal_conformance.trial import CheckFailed, Trial, Unsupported

_CALLS = itertools.count()
#: bytes of a tensor that torch makes of a Python number, and that nobody need declare
_NUMBER = 16


@check
def compiled(trial: Trial) -> None:
    """A function that calls it compiles without a graph break, and gives the bits of the plain call.

    As in vLLM's layers: ``torch.compile`` looks inside the operators that compiled code meets, where they say that they
    are traceable; anything else is one opaque torch operator, whose outputs it knows from the definition's fake.
    """
    from m3hal.vllm.opaque import TRACED  # needs no vLLM

    plain = _arguments(trial, trial.inputs)
    wanted = _outputs(plain, _layer(plain.run))
    torch._dynamo.reset()
    try:
        if trial.bound.traceable and trial.operator.name in TRACED:
            _compile_traced(trial, wanted)
        else:
            call = _arguments(trial, trial.inputs)
            layer = torch.compile(_layer(_opaque(trial, call)), backend="aot_eager", fullgraph=True)
            _same(wanted, _outputs(call, layer), "behind an opaque operator, compiled code gets other bits")
    except CheckFailed:
        raise
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckFailed(
            f"torch.compile(fullgraph=True) fails: {first}; where it can't look inside, declare traceable=False"
        ) from error
    finally:
        torch._dynamo.reset()


def _compile_traced(trial: Trial, wanted: Named) -> None:
    """Compiled for one number of tokens it serves all: an engine compiles once, and checks no guards later."""
    call = _arguments(trial, trial.inputs)
    names = [name for name in trial.inputs if _is_token_axis(trial.operator, name)]
    for name in names:
        torch._dynamo.mark_dynamic(call.given[name], 0)
    layer = torch.compile(_layer(call.traced), backend="aot_eager", fullgraph=True)
    _same(wanted, _outputs(call, layer), "compiled, it gives other bits than the plain call")
    tokens = len(trial.inputs[names[0]])
    for count in (2, 40):
        other = _take(trial, trial.inputs, torch.arange(count) % tokens)
        plain = _arguments(trial, other)
        expected = _outputs(plain, _layer(plain.run))
        with torch.compiler.set_stance("fail_on_recompile"):
            found = _outputs(_arguments(trial, other), layer)
        _same(expected, found, f"compiled with {tokens} tokens and run with {count}, it gives other bits")


@dataclass
class _Call:
    """A call whose tensors are arguments, by path.

    written: those that it changes. run: flat outputs of the tensors. traced: the same, of operators that take and
    return tensors, with nothing around the implementation's callable.
    """

    given: dict[str, Tensor]
    written: tuple[str, ...]
    run: Callable[..., list[Tensor]]
    traced: Callable[..., list[Tensor]]
    inputs: Mapping[str, Any]


def _arguments(trial: Trial, inputs: Mapping[str, Any]) -> _Call:
    """The inputs carved anew. What the implementation planned or packed is found by itself, as by a layer's name."""
    harness = trial.harness
    carved = harness.carve(trial.given(inputs), 0)
    planned = harness.arguments(carved)
    free = {name: value for name, value in carved.inputs.items() if planned[name] is value}
    given = dict(tensors(free))
    options = {} if carved.workspace is None else {"workspace": carved.workspace.view}

    def run(*leaves: Tensor) -> list[Tensor]:
        values = {**planned, **_replaced(free, given, leaves)}
        return [tensor for _, tensor in tensors(trial.bound.run(*values.values(), **options))]

    def traced(*leaves: Tensor) -> list[Tensor]:
        returned = trial.bound.run(*leaves, **options)
        return list(returned) if isinstance(returned, tuple) else [returned]

    written = tuple(path for path in given if path.split(".")[0] in trial.operator.mutates and path.endswith("buf"))
    return _Call(given, written, run, traced, carved.inputs)


def _replaced(values: dict[str, Any], old: Mapping[str, Tensor], new: Sequence[Tensor]) -> dict[str, Any]:
    """The values with their tensors exchanged."""
    by_id = {id(tensor): leaf for tensor, leaf in zip(old.values(), new, strict=True)}
    return dict(map_tensors(values, lambda tensor: by_id[id(tensor)]))


def _layer(call: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """What surrounds a call in a model: views that rely on the outputs' strides."""

    def layer(*given: Tensor) -> list[Tensor]:
        return [tensor.contiguous().view(-1) for tensor in call(*given)]

    return layer


def _outputs(call: _Call, layer: Callable[..., list[Tensor]]) -> Named:
    """Outputs and the buffers that were written, on the CPU."""
    found = {f"output {number}": tensor for number, tensor in enumerate(layer(*call.given.values()))}
    found.update({path: call.given[path] for path in call.written})
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def _opaque(trial: Trial, call: _Call) -> Callable[..., list[Tensor]]:
    """The call as a torch operator of its own, registered as vLLM's layers register theirs."""
    from m3hal.vllm import opaque

    fakes = [tensor for _, tensor in tensors(trial.harness.expected(call.inputs))]
    names = {path: f"t{number}" for number, path in enumerate(call.given)}
    inputs = [
        f"Tensor{f'(a{n}!)' if path in call.written else ''} {name}" for n, (path, name) in enumerate(names.items())
    ]
    returns = "Tensor" if len(fakes) == 1 else f"({', '.join(['Tensor'] * len(fakes))})"

    def fake(*leaves: Tensor) -> Any:
        values = _replaced({n: call.inputs[n] for n in {p.split(".")[0] for p in call.given}}, call.given, leaves)
        made = [tensor for _, tensor in tensors(trial.harness.expected({**call.inputs, **values}))]
        return _as_schema(made)

    name = f"conformance_{next(_CALLS)}"
    opaque.define(f"{name}({', '.join(inputs)}) -> {returns}", lambda *leaves: _as_schema(call.run(*leaves)), fake)
    operator = getattr(torch.ops.m3hal, name)

    def run(*leaves: Tensor) -> list[Tensor]:
        returned = operator(*leaves)
        return [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)

    return run


def _as_schema(outputs: list[Tensor]) -> Any:
    return None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)


@check
def allocation(trial: Trial) -> None:
    """With ``out`` and workspace given, a call allocates nothing that it did not declare, and leaves nothing behind."""
    if trial.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"what a call allocates can't be measured on {trial.device.type}")
    carved = trial.carved(trial.inputs)
    arguments = trial.harness.arguments(carved)
    trial.harness.run(carved)  # compiles, and fills what is kept for good
    measure = _on_cuda if trial.device.type == "cuda" else _on_cpu
    peak, left = measure(lambda: trial.harness.launch(carved, arguments))
    if left > 0:  # or it waits for Python's collector, as older garbage may too
        gc.collect()
        _, left = measure(lambda: (trial.harness.launch(carved, arguments), gc.collect()))
    if left > 0:
        raise CheckFailed(f"each call leaves {left:,} bytes behind")
    if peak > 0 and trial.impl.memory == "caller":
        raise CheckFailed(
            f"it allocates {peak:,} bytes beside its outputs and the workspace of {trial.bound.workspace_bytes:,} that "
            "it declares; add them to workspace_bytes, or declare memory='self'"
        )
    if peak > 0:
        trial.notes.append(f"memory {trial.impl.memory!r}: a call allocates {peak:,} bytes beside its outputs")


def _on_cuda(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes at most in use during a call, and in use after it, beyond those before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def _on_cpu(call: Callable[[], object]) -> tuple[int, int]:
    """The same, of torch's CPU allocator, from its profiler's records."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print that it starts and stops
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        call()
    assert profile.kineto_results is not None
    records = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(records, key=lambda event: event.start_ns()):
        if abs(event.nbytes()) > _NUMBER:
            now += event.nbytes()
            peak = max(peak, now)
    return peak, now


@check
def no_host_sync(trial: Trial) -> None:
    """The call waits for no device value on the host."""
    _needs_graphs(trial)
    carved = trial.carved(trial.inputs)
    trial.harness.run(carved)  # compiles
    planned = trial.harness.arguments(carved)
    try:
        with _syncs_are_errors():
            trial.harness.launch(carved, planned)
    except Exception as error:
        raise CheckFailed(f"the call synchronises with the host: {error}") from error


@contextmanager
def _syncs_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@check
def graph_replay(trial: Trial) -> None:
    """Captured in a graph, replayed after its inputs were overwritten, it gives what a fresh call gives."""
    _needs_graphs(trial)
    other = {**trial.other, **_weights(trial)}
    carved = trial.carved(trial.inputs)
    trial.harness.run(carved)
    planned = trial.harness.arguments(carved)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            trial.harness.launch(carved, planned)
    except Exception as error:
        raise CheckFailed(f"the call can't be captured in a graph: {error}") from error
    given = trial.given(other)
    _overwrite(carved, given)
    if trial.bound.plan_batch:
        trial.harness.arguments(carved)  # the batch is planned anew, at the same addresses
    graph.replay()
    torch.cuda.synchronize()
    after = trimmed(trial.operator, trial.harness.outcome(carved, given, carved.out), other).outputs
    _same(trial.call_afresh(other).outputs, after, "the replayed graph differs from a fresh call on the new inputs")


def _weights(trial: Trial) -> dict[str, Any]:
    """The inputs that were packed before the capture, and stay."""
    packs, weights = trial.bound.prepare_weights is not None, (ExpertWeights, LayerWeights)
    return {name: value for name, value in trial.inputs.items() if packs and isinstance(value, weights)}


def _overwrite(carved: Carved, given: Mapping[str, Any]) -> None:
    """New numbers at the same addresses."""
    for (_, target), (_, source) in zip(tensors(carved.inputs), tensors(dict(given)), strict=True):
        target.copy_(source)


def _needs_graphs(trial: Trial) -> None:
    if trial.device.type != "cuda":  # torch's name for HIP devices too
        raise Unsupported(f"a {trial.device.type} captures no graphs; asked on CUDA and HIP devices")
