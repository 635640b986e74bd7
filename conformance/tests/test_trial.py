"""A case is itself held to what its site says, and a fresh call knows nothing of the calls before it."""

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from m3hal_conformance import guard
from m3hal_conformance.case import Case, Inputs
from m3hal_conformance.checks import CHECKS
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases, select
from m3hal_conformance.trial import CheckFailed, Trial, _beyond, exact_of
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import Impl, Manifest, register, unregister
from m3hal.reference import bind_definition
from m3hal.shape import Site

CPU = torch.device("cpu")


def _case(name: str) -> Case:
    return next(case for case in all_cases() if case.id.startswith(f"sparse_attention/{name}/"))


def test_a_case_with_more_requests_than_its_site_has_is_wrong() -> None:
    """Kernels size their plans by ``max_seqs``, and what overruns them says nothing."""
    case = _case("decode")
    assert _beyond(case.site, case.inputs(0)) == ""
    assert "requests and max_seqs is 1" in _beyond(replace(case.site, max_seqs=1), case.inputs(0))


class _Recycling:
    """torch, whose ``empty`` hands out the memory that was freed first, wherever some fits."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Tensor, weakref.ref[Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        fits = (at for at, (block, handed) in enumerate(self.blocks)
                if handed() is None and (block.dtype, len(block)) == (dtype, size))  # fmt: skip
        at = next(fits, None)
        block = torch.empty(size, dtype=dtype, device=device) if at is None else self.blocks.pop(at)[0]
        handed = block.detach()
        self.blocks.append((block, weakref.ref(handed)))
        return handed


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Trial]]:
    """A trial of a rms_norm that keeps the weight it met first at an address, per callable or for the whole process."""

    def make(for_the_process: bool) -> Trial:
        everywhere: dict[Any, Tensor] = {}

        def factory(site: Site) -> Callable[..., Any]:
            right, kept = bind_definition(ops.load("rms_norm"), site), everywhere if for_the_process else {}

            def run(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Any:
                return right(x, kept.setdefault((weight.data_ptr(), weight.shape), weight.clone()), out=out)

            return run

        monkeypatch.setitem(sys.modules, "m3hal_keeping", SimpleNamespace(factory=factory, __spec__=None))
        impl = Impl("m3hal_keeping:factory", memory="self")
        register(Manifest("keeping", "m3hal tests", ">=1,<2", ("cpu",), {"rms_norm": (impl,)}))
        case = select(ids=["rms_norm/tokens_7/bfloat16"])[0]
        monkeypatch.setattr(guard, "torch", _Recycling())
        return Trial(case, Runner("keeping", "cpu").offer("rms_norm", case.site, "hnd").bound, CPU, impl)

    yield make
    unregister("keeping")


def _met_before(trial: Trial, inputs: Inputs) -> None:
    """The callable meets these inputs at many addresses, which are free again then."""
    held = [trial.carved(inputs) for _ in range(20)]
    for carved in held:
        trial.harness.run(carved)


@pytest.mark.parametrize("for_the_process", [False, True])
@pytest.mark.parametrize("first_met", ["none", "inputs", "other"])
def test_what_an_implementation_keeps_by_address_is_seen_in_memory_that_it_knows(keeping, for_the_process, first_met):
    """``overwritten`` fails whichever numbers earlier calls left at addresses that the allocator hands out again."""
    trial = keeping(for_the_process)
    assert trial.first.outputs  # as in a run, where other checks come before
    if first_met != "none":
        _met_before(trial, getattr(trial, first_met))
    with pytest.raises(CheckFailed, match=r"after its inputs were overwritten|memory that other inputs may have had"):
        CHECKS["overwritten"](trial)


def test_a_call_afresh_meets_neither_the_callable_nor_the_memory_of_earlier_calls(keeping):
    """It gives what the numbers say, where a plain call gives what was kept."""
    trial = keeping(for_the_process=True)
    _met_before(trial, trial.inputs)
    stale, right = trial.call(trial.other).outputs["out"], trial.call_afresh(trial.other).outputs["out"]
    assert not torch.equal(stale, right)
    wanted = exact_of(trial.case, trial.seed + 1, trial.other)["out"]
    assert torch.allclose(right.double(), wanted, rtol=1e-2)
