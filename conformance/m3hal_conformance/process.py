"""What a call leaves of the process that it runs in, and that it does not matter where in it the call comes from."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from m3hal_conformance.bounds import bits
from m3hal_conformance.buckets import trimmed
from m3hal_conformance.checks import _same, check
from m3hal_conformance.harness import Named, Outcome
from m3hal_conformance.metamorphic import _take
from m3hal_conformance.trees import tensors
from m3hal_conformance.trial import CheckFailed, Trial

#: results that a caller holds at once
_HELD = 20
#: launches in a row, as many of them as these seconds of the processor allow
_THOUSANDS, _SECONDS = 5000, 2.0
#: CPU threads that nobody sets by chance
_THREADS = 3
#: a kernel that seeds torch takes another
_SEED = 0x6D336861


@check
def global_state(trial: Trial) -> None:
    """Binding and calling leave torch's global state as it was, whatever it was.

    Asked twice, in the usual state and in another: what a kernel sets to the usual value is seen in the other one.
    """
    given = trial.given(trial.inputs)
    for is_usual in (True, False):
        with _restored(trial.device, is_usual):
            before = _state(trial.device)
            here = replace(trial, bound=trial.bound_again(), threads=torch.get_num_threads())
            _require_same(before, _state(trial.device), "binding it")
            carved = here.harness.carve(given, 0)
            before = _state(trial.device)
            here.harness.run(carved)
            _require_same(before, _state(trial.device), "a call with out=")
            here.harness.call_allocating(given)
            _require_same(before, _state(trial.device), "a call without out=")


def _state(device: torch.device) -> dict[str, Any]:
    """What torch keeps per process or thread, and the generators of random numbers beside its own."""
    numbers = numpy.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    found = {
        "torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": (numbers["state"]["key"].tobytes(), numbers["state"]["pos"]),
        "the number of CPU threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the precision of float32 matrix products": torch.get_float32_matmul_precision(),
        "whether denormal numbers are flushed": _flushes(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "whether inference mode is on": torch.is_inference_mode_enabled(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "whether autocast is on": torch.is_autocast_enabled(device.type),
    }
    if device.type == "cuda":
        found["the device's random numbers"] = torch.cuda.get_rng_state(device).numpy().tobytes()
        found["the current device"] = torch.cuda.current_device()
        found["the current stream"] = torch.cuda.current_stream().cuda_stream
    return found


def _flushes() -> bool:
    """torch sets it and doesn't tell it: whether a denormal number times one is zero."""
    return float(torch.full((1,), 1e-40, dtype=torch.float32) * 1.0) == 0


def _require_same(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    changed = [name for name, value in before.items() if value != after[name]]
    if changed:
        told = [f"{n} ({before[n]} before, {after[n]} after)" if _is_short(before[n]) else n for n in changed]
        raise CheckFailed(f"{what} changes {', '.join(told)}, which is the engine's")


def _is_short(value: Any) -> bool:
    return not isinstance(value, (bytes, tuple))


@contextmanager
def _restored(on: torch.device, is_usual: bool) -> Iterator[None]:
    """Inside the block torch's global state is as usual, or nothing of it is; afterwards it is what it was."""
    dtype, precision, flushes = torch.get_default_dtype(), torch.get_float32_matmul_precision(), _flushes()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    device = torch.get_default_device()
    threads, devices = torch.get_num_threads(), [torch.cuda.current_device()] if on.type == "cuda" else []
    python, arrays = random.getstate(), numpy.random.get_state(legacy=False)
    with torch.random.fork_rng(devices), torch.set_grad_enabled(is_usual):
        try:
            torch.manual_seed(_SEED)
            if not is_usual:
                torch.set_num_threads(_THREADS)
                torch.set_float32_matmul_precision("medium" if precision == "high" else "high")
                torch.set_flush_denormal(not flushes)
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            torch.set_float32_matmul_precision(precision)
            torch.set_flush_denormal(flushes)
            torch.use_deterministic_algorithms(is_deterministic)
            if torch.get_default_device() != device:
                torch.set_default_device(device)


@check
def bound_in_bfloat16(trial: Trial) -> None:
    """Bound and its weights packed while torch's default dtype is bfloat16, as vLLM loads models, it gives the same."""
    before = torch.get_default_dtype()
    given = trial.given(trial.inputs)
    torch.set_default_dtype(torch.bfloat16)
    try:
        here = replace(trial, bound=trial.bound_again())
        carved = here.harness.carve(given, 0)
        arguments = None if here.bound.plan_batch else here.harness.arguments(carved)
    finally:
        torch.set_default_dtype(before)
    returned = here.harness.launch(carved, arguments or here.harness.arguments(carved))
    found = trimmed(trial.operator, here.harness.outcome(carved, given, returned), trial.inputs).outputs
    _same(trial.first.outputs, found, "bound while the default dtype is bfloat16, it gives other bits")


@check
def inference_mode(trial: Trial) -> None:
    """Under ``torch.inference_mode()``, on tensors made there, it gives the same bits: engines run models so."""
    wanted, inputs = trial.first.outputs, trial.inputs
    with torch.inference_mode():
        _same(wanted, trial.call(inputs).outputs, "under torch.inference_mode() the result differs")
        given = trial.given(inputs)
        allocated, _ = trial.harness.call_allocating(given)
        found = trimmed(trial.operator, Outcome(allocated), inputs).outputs
        _same(wanted, found, "under torch.inference_mode(), without out=, the result differs")


@check
def other_thread(trial: Trial) -> None:
    """Called from another thread than the first one, it gives the same bits: engines overlap batches so."""
    wanted, inputs = trial.first.outputs, trial.inputs
    found: list[Named | BaseException] = []

    def call() -> None:
        try:
            found.append(trial.call(inputs).outputs)
        except BaseException as error:  # it would end with the thread
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, BaseException):
        raise CheckFailed(f"called from another thread, it raises {type(result).__name__}: {result}") from result
    _same(wanted, result, "called from another thread, it gives other bits")


@check
def results_kept(trial: Trial) -> None:
    """Results that were made without ``out=`` are the caller's for good: many of them are held at once.

    The later half comes from other numbers, so that a result whose memory is handed out again is seen to change.
    """
    if not trial.first.unwritten:  # it has no outputs
        return
    held = []
    for number in range(_HELD):
        given = trial.given(trial.inputs if number < _HELD // 2 else trial.other)
        _, returned = trial.harness.call_allocating(given)
        held += [(number, path, tensor, bits(tensor).clone()) for path, tensor in tensors(returned, "result")]
    owners: dict[int, int] = {}
    for number, path, tensor, before in held:
        if tensor.numel() == 0:
            continue
        first = owners.setdefault(tensor.data_ptr(), number)
        if first != number or not torch.equal(bits(tensor), before):
            raise CheckFailed(
                f"without out= the {path} of call {first + 1} lies in memory that a later one of {_HELD} calls writes "
                "again, while the caller holds it"
            )


@check
def unwritten_inputs(trial: Trial) -> None:
    """torch counts no write to an input that the operator only reads, not even of the bits that it had.

    Another stream or thread may read the input meanwhile. Writes that do not go through torch are not counted.
    """
    carved = trial.carved(trial.inputs)
    arguments = trial.harness.arguments(carved)
    found = dict(tensors(carved.inputs))
    mutated = {id(tensor) for path, tensor in found.items() if path.split(".")[0] in trial.operator.mutates}
    before = {path: tensor._version for path, tensor in found.items() if id(tensor) not in mutated}
    trial.harness.launch(carved, arguments)
    written = [path for path, version in before.items() if found[path]._version != version]
    if written:
        raise CheckFailed(f"{', '.join(written)} is written during the call, but the operator only reads it")


@check
def other_writers(trial: Trial) -> None:
    """What others write to other pages during a call stays: a transfer of pages from elsewhere runs beside it.

    The other writer comes between any two operations that the call has torch run; kernels that torch does not know
    are not interrupted.
    """
    carved = trial.carved(trial.inputs)
    arguments = trial.harness.arguments(carved)
    found = [tensor for name in trial.operator.mutates for _, tensor in tensors(carved.inputs[name])]
    before = [bits(tensor).clone() for tensor in found]
    trial.harness.launch(carved, arguments)
    others = []
    for tensor, old in zip(found, before, strict=True):
        untouched = (bits(tensor) == old).flatten(1).all(1).nonzero().flatten().tolist() if tensor.ndim > 1 else []
        others += [bits(tensor)[page] for page in untouched[:1] + untouched[-1:]]
    if not others:
        return
    with _Writer(others) as writer:
        trial.harness.launch(carved, arguments)
    if writer.is_lost:
        raise CheckFailed("it writes pages that no slot names as it read them: what came there meanwhile is lost")


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes some memory anew after each operation, and looks whether what it wrote last is still there."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others, self.code, self.is_lost = others, 0, False
        self._write()

    def _write(self) -> None:
        self.code = self.code % 100 + 1
        for other in self.others:
            other.fill_(self.code)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.is_lost = self.is_lost or any(bool((other != self.code).any()) for other in self.others)
        self._write()
        return result


@check
def thousands_of_calls(trial: Trial) -> None:
    """Each of thousands of launches on two tokens gives the bits of the first, and writes its output again."""
    here = replace(trial, bound=trial.bound_again())  # calls are counted from the first one
    carved = here.carved(_take(trial, trial.inputs, torch.arange(2)))
    arguments = here.harness.arguments(carved)
    here.harness.launch(carved, arguments)
    out = [bits(tensor) for _, tensor in tensors(carved.out)]
    wanted = [tensor.clone() for tensor in out]
    spoilt = [tensor.bitwise_not() for tensor in wanted]
    end = time.process_time() + _SECONDS
    for number in range(2, _THOUSANDS + 1):
        for tensor, other in zip(out, spoilt, strict=True):
            tensor.copy_(other)
        here.harness.launch(carved, arguments)
        if not all(torch.equal(tensor, right) for tensor, right in zip(out, wanted, strict=True)):
            raise CheckFailed(f"launch {number:,} in a row gives other bits than the first")
        if time.process_time() > end:
            trial.notes.append(f"{number:,} launches in a row took {_SECONDS:g} s; {_THOUSANDS:,} were to be asked")
            return
