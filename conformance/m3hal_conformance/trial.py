"""One case met by one implementation: inputs, oracles and calls, each made once and shared by the checks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import Bound, Impl, Kernel
from m3hal.ops import SeqMeta
from m3hal.shape import Site
from m3hal_conformance import oracle
from m3hal_conformance.buckets import padded, trimmed
from m3hal_conformance.case import Case, Inputs
from m3hal_conformance.compare import Bounds, Score, compare
from m3hal_conformance.harness import Carved, Harness, Named, Outcome
from m3hal_conformance.tolerance import CAP, C, bounds_for
from m3hal_conformance.trees import map_tensors

if TYPE_CHECKING:
    from m3hal_conformance.page_map import PageMap


class Unsupported(Exception):
    """Why a case is not asked of a backend, as a reason."""


class CheckFailed(Exception):
    """What an implementation got wrong, as a sentence. scores: comparisons that were made, worst included."""

    def __init__(self, sentence: str, scores: list[Score] | None = None) -> None:
        super().__init__(sentence)
        self.scores = scores or []


@dataclass
class Trial:
    """A case, the bound implementation, and what it declares about itself (None for a composition)."""

    case: Case
    bound: Bound
    device: torch.device
    impl: Impl = field(default_factory=lambda: Impl(""))
    seed: int = 0
    threads: int = 1
    page_map: PageMap | None = None
    #: binds the same operator at another site, with other constants; what it returns is dropped
    bind_another: Callable[[], object] = lambda: None
    #: set when an output was right only thanks to a declared freedom
    needed_freedom: bool = False
    #: what was measured and is no fault
    notes: list[str] = field(default_factory=list)

    @cached_property
    def operator(self) -> ops.Operator:
        return ops.load(self.case.operator)

    @cached_property
    def inputs(self) -> Inputs:
        made = self.case.inputs(self.seed)
        beyond = _beyond(self.case.site, made)
        if beyond:
            raise AssertionError(f"the case {self.case.id} is wrong: {beyond}")
        return made

    @cached_property
    def other(self) -> Inputs:
        """Other numbers of the same structure."""
        return self.case.inputs(self.seed + 1)

    @cached_property
    def harness(self) -> Harness:
        unpacked = self.page_map.unpacked if self.page_map else None
        return Harness(self.operator, self.bound, self.device, self.case.lazy, self.threads, unpacked)

    def call(self, inputs: Mapping[str, Any], which: int = 0) -> Outcome:
        """One guarded call, its shapes padded to the implementation's buckets and the padding taken off again."""
        return trimmed(self.operator, self.harness.call(self.given(inputs), which), inputs)

    def given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as this implementation gets them.

        Padded to its buckets; caches in its private pages, if it has such; metadata dense unless it takes views.
        """
        made = padded(self.operator, inputs, self.impl.buckets)
        if self.page_map:
            made = self.page_map.packed(made, self.case.lazy)
        if self.impl.views == "strided":
            return made
        return {
            name: map_tensors(v, Tensor.contiguous) if isinstance(v, ops.SeqMeta) else v for name, v in made.items()
        }

    @cached_property
    def first(self) -> Outcome:
        """The main call; other poison than :attr:`second`."""
        return self.call(self.inputs, 0)

    @cached_property
    def second(self) -> Outcome:
        return self.call(self.inputs, 1)

    @cached_property
    def exact(self) -> Named:
        return exact_of(self.case, self.seed, self.inputs)

    @cached_property
    def traits(self) -> Mapping[str, str]:
        """The declared freedoms that this case leaves room for."""
        return oracle.concerning(self.operator, self.case.site, self.inputs, self.bound.traits)

    @cached_property
    def declared(self) -> Named | None:
        return oracle.declared(self.operator, self.case.site, self.inputs, self.traits)

    def judge(self, actual: Named, rows: Any = None) -> list[Score]:
        """Scores of outputs, all of them or some token rows, against the oracle that the traits permit.

        Exact within the bound for no freedoms is always right. Otherwise a declared freedom must meet the reference
        that takes it, tightly, and the exact oracle, loosely.
        """
        exact = picked(self.exact, rows)
        tight = self._compare(actual, exact, {}, "exact")
        profile = oracle.emulated_traits(self.operator, self.traits) | oracle.tolerated_traits(
            self.operator, self.traits
        )
        if not profile or all(score.passed for score in tight):
            return tight
        self.needed_freedom = True
        loose = self._compare(actual, exact, self.traits, "exact")
        if self.declared is None:
            return loose
        near = self._compare(actual, picked(self.declared, rows), self.traits, "declared")
        if self.operator.name in oracle.BITWISE:  # other bits by declaration: the definition that takes it judges
            return near
        return [*near, *(score for score in loose if not score.passed and score.metric != "bits")]

    def _compare(self, actual: Named, wanted: Named, traits: Mapping[str, str], name: str) -> list[Score]:
        bounds = bounds_for(self.operator, self.case.format, self.case.input_class, traits, name)
        scores = compare(self.operator, self.case.site, actual, wanted, bounds)
        if self.case.is_captured and not all(score.passed for score in scores):
            own = self._own_bounds(bounds, traits, name)
            return compare(self.operator, self.case.site, actual, wanted, own)
        return scores

    def _own_bounds(self, bounds: Bounds, traits: Mapping[str, str], name: str) -> Bounds:
        """Numbers harsher than any that was calibrated: what a legitimate evaluation of this very call costs counts."""
        from m3hal_conformance.calibrate import own_errors  # imports the suite, whose cases are made of trials

        errors = own_errors(self.case, self.seed, traits, name)

        def bound(output: str, metric: str) -> float:
            own = C[metric, self.case.format] * errors.get(output, 0.0)
            return max(bounds(output, metric), min(own, CAP[metric]) if traits else own)

        return bound

    def require(self, actual: Named, what: str, rows: Any = None) -> list[Score]:
        """The scores, when all are within their bounds. Raises CheckFailed with the worst otherwise."""
        scores = self.judge(actual, rows)
        failed = [score for score in scores if not score.passed]
        if failed:
            worst = max(failed, key=lambda score: score.ratio)
            raise CheckFailed(f"{what}: {worst}", scores)
        return scores

    def bound_again(self) -> Bound:
        """The same operator at the same site, by another call of its factory; a composition has none and stays."""
        if not self.impl.path:
            return self.bound
        made = pkgutil.resolve_name(self.impl.path)(self.bound.site)
        kernel = made if isinstance(made, Kernel) else Kernel(made)
        return replace(self.bound, **{field.name: getattr(kernel, field.name) for field in fields(Kernel)})

    def call_afresh(self, inputs: Mapping[str, Any]) -> Outcome:
        """One call of a newly bound callable, in memory where no call of this trial found an input before.

        It can know nothing of these inputs, whatever an implementation keeps, and by whichever address.
        """
        given = self.given(inputs)
        carved = self.harness.carve_elsewhere(given)
        here = replace(self, bound=self.bound_again()).harness
        return trimmed(self.operator, here.outcome(carved, given, here.run(carved)), inputs)

    def carved(self, inputs: Mapping[str, Any]) -> Carved:
        """The inputs in slabs, for checks that run more than once on the same memory."""
        return self.harness.carve(self.given(inputs), 0)


def picked(values: Named, rows: Any) -> Named:
    """The given token rows (first axis) of every tensor."""
    return values if rows is None else {name: tensor[rows] for name, tensor in values.items()}


_EXACT: dict[tuple[str, int], Named] = {}


def exact_of(case: Case, seed: int, inputs: Inputs) -> Named:
    """The exact oracle of a case, kept: every implementation, right or wrong, meets the same one."""
    if (case.id, seed) not in _EXACT:
        _EXACT[case.id, seed] = oracle.exact(ops.load(case.operator), case.site, inputs)
    return _EXACT[case.id, seed]


def _beyond(site: Site, inputs: Inputs) -> str:
    """What a case gives although its site says that there is never so much; kernels may rely on that."""
    for name, given in inputs.items():
        if isinstance(given, SeqMeta) and len(given.seq_lens) > site.max_seqs:
            return f"{name} has {len(given.seq_lens)} requests and max_seqs is {site.max_seqs}"
    return ""
