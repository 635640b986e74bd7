"""The checks, by name. Each takes a trial and raises CheckFailed, or returns the comparisons that it made.

The first group is asked of every case and needs no oracle but ``oracle`` itself; relations that only some operators
have are in :mod:`m3hal_conformance.metamorphic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3hal_conformance.bounds import _spacing, bits
from m3hal_conformance.buckets import trimmed
from m3hal_conformance.case import Inputs
from m3hal_conformance.compare import Score
from m3hal_conformance.harness import Carved, Named, Outcome
from m3hal_conformance.trees import map_tensors, tensors
from m3hal_conformance.trial import CheckFailed, Trial

Check = Callable[[Trial], "list[Score] | None"]
CHECKS: dict[str, Check] = {}

#: what every case asks
UNIVERSAL = ("oracle", "guards", "inputs", "written", "convention", "rerun", "allocates", "overwritten", "two_sites")


def check(function: Check) -> Check:
    """Registers a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


@check
def oracle(trial: Trial) -> list[Score]:
    """The outputs are within their bounds of the oracle, and of numbers computed elsewhere where the case has them."""
    scores = trial.require(trial.first.outputs, "against the oracle")
    if trial.case.golden:
        for name, wanted in trial.case.golden(trial.inputs).items():
            actual = trial.first.outputs[name].double()
            if not torch.allclose(actual, wanted.double(), rtol=_golden_rtol(trial), atol=0, equal_nan=True):
                raise CheckFailed(f"{name} is {actual.tolist()}; the published numbers are {wanted.tolist()}", scores)
    return scores


def _golden_rtol(trial: Trial) -> float:
    """Published numbers have five digits."""
    return 2e-5 if trial.case.format == "float32" else 1e-2


@check
def guards(trial: Trial) -> None:
    """No byte outside inputs, outputs and workspace is written."""
    _none([*trial.first.touched, *trial.second.touched], "was written")


@check
def inputs(trial: Trial) -> None:
    """Inputs that the operator does not mutate stay as they are, bit for bit."""
    _none([*trial.first.changed, *trial.second.changed], "changed, but the operator only reads it")


@check
def written(trial: Trial) -> None:
    """Every element of the outputs is written: poison, of two kinds in turn, survives nowhere."""
    for name, one in trial.first.unwritten.items():
        both = one & trial.second.unwritten[name]
        if both.any():
            place = tuple(both.nonzero()[0].tolist())
            raise CheckFailed(f"{name} was left unwritten in {int(both.sum())} elements, first {place}")


@check
def convention(trial: Trial) -> None:
    """With ``out=`` the call returns what it was given."""
    _none(trial.first.convention, "")


@check
def rerun(trial: Trial) -> None:
    """Calls give the same bits, whatever outputs and workspace held before: no noise, no use of poison."""
    _same(trial.first.outputs, trial.second.outputs, "a second call, on memory that held something else, differs")


@check
def unbiased(trial: Trial) -> None:
    """bf16 results are rounded to nearest: over many rows they are as often above the exact ones as below.

    Dropping the lower half of an fp32 result costs less than one last place, but pulls every number towards zero, by
    half a last place on average. In each row only elements of at least its own root mean square count; between rows
    the spread says how far from zero their mean may lie by chance.
    """
    for name, actual in trial.first.outputs.items():
        exact = trial.exact[name].double() if name in trial.exact else actual.double()
        if actual.dtype != torch.bfloat16 or actual.shape != exact.shape or actual.ndim < 2:
            continue
        large = exact.abs() >= exact.square().mean(-1, keepdim=True).sqrt()
        counted = large & (exact != 0) & torch.isfinite(exact) & torch.isfinite(actual)
        off = torch.where(counted, (actual.double() - exact) * exact.sign() / _spacing(exact.abs(), actual.dtype), 0.0)
        rows = counted.any(-1)
        means = off.sum(-1)[rows] / counted.sum(-1)[rows]
        if len(means) < 8:
            continue
        bias, chance = float(means.mean()), 4 * float(means.std()) / len(means) ** 0.5
        if abs(bias) > 0.15 + chance:
            towards = "towards" if bias < 0 else "away from"
            raise CheckFailed(f"{name} lies {abs(bias):.2f} last places {towards} zero on average; round to nearest")


@check
def allocates(trial: Trial) -> None:
    """Without ``out=`` the call returns the same numbers in tensors of the shape, dtype and strides of the fake.

    What it returned is the caller's: a later call does not write it.
    """
    given = trial.given(trial.inputs)
    actual, returned = trial.harness.call_allocating(given)
    wanted = trial.harness.expected(given)
    found = [(t.dtype, tuple(t.shape), t.stride() if t.numel() else ()) for _, t in tensors(returned)]
    asked = [(t.dtype, tuple(t.shape), t.stride() if t.numel() else ()) for _, t in tensors(wanted)]
    if found != asked:
        raise CheckFailed(
            f"without out= it returns (dtype, shape, strides) {found}; the definition's fake says {asked}"
        )
    trimmed_actual = trimmed(trial.operator, Outcome(actual), trial.inputs).outputs
    _same(trial.first.outputs, trimmed_actual, "without out= the result differs")
    mine = [(tensor, bits(tensor).clone()) for _, tensor in tensors(returned)]
    if mine:
        trial.harness.call_allocating(trial.given(trial.other))
    if any(not torch.equal(bits(tensor), before) for tensor, before in mine):
        raise CheckFailed("without out= it returns memory that its next call writes again")


@check
def overwritten(trial: Trial) -> None:
    """New numbers in the same memory give new results: nothing is kept between calls, neither state nor pointers.

    They are written as kernels and loaders do, past torch's count of versions.
    """
    other = trial.other
    if not _alike(trial.inputs, other):
        return
    first, given, new = trial.first.outputs, trial.given(trial.inputs), trial.given(other)
    carved = trial.harness.carve(given, 0)
    before = _outputs(trial, carved, given, trial.inputs)  # no other call until it is overwritten
    _same(first, before, "on memory that other inputs may have had, a call differs from the first")
    for (_, target), (_, source) in zip(tensors(carved.inputs), tensors(new), strict=True):
        if target.numel():
            bits(target.data).copy_(bits(source))
    after = _outputs(trial, carved, new, other)
    fresh = trial.call_afresh(other).outputs
    _same(fresh, after, "after its inputs were overwritten in place, a call differs from a fresh one")
    again = trial.call(trial.inputs).outputs
    _same(first, again, "after a call on other inputs, the first call's result does not come back")


def _outputs(trial: Trial, carved: Carved, given: Inputs, inputs: Inputs) -> Named:
    """What a call gives for inputs that are in their slabs. given: them, as the implementation gets them."""
    returned = trial.harness.run(carved)
    return trimmed(trial.operator, trial.harness.outcome(carved, given, returned), inputs).outputs


@check
def two_sites(trial: Trial) -> None:
    """After the operator was bound at another site with other constants, this site's callable gives the same bits."""
    before = trial.first.outputs
    trial.bind_another()
    _same(before, trial.call(trial.inputs).outputs, "after another site was bound, this one's result differs")


def _alike(one: Any, other: Any) -> bool:
    shape: list[list[Any]] = [[], []]
    for found, value in zip(shape, (one, other), strict=True):
        map_tensors(value, lambda t, found=found: found.append((t.shape, t.stride(), t.dtype)) or t)  # type: ignore[misc]
    return shape[0] == shape[1]


def _same(one: Named, other: Named, what: str) -> None:
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            raise CheckFailed(f"{what}: {name} has shape {tuple(other[name].shape)}, not {tuple(tensor.shape)}")
        differs = bits(tensor) != bits(other[name])
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            raise CheckFailed(
                f"{what}: {name} in {int(differs.sum())} elements, first {place}: "
                f"{tensor[place].item()!r}, then {other[name][place].item()!r}"
            )


def _none(faults: list[str], verb: str) -> None:
    if faults:
        raise CheckFailed(f"{', '.join(dict.fromkeys(faults))} {verb}".strip())
