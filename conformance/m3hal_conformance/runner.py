"""Runs cases against a backend: one plan per operator and site, everything else is a result."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.cli._supervised import note
from m3hal.dispatch import Bound, Impl, M3halError, Manifest, Plan, Policy, plan
from m3hal.layouts import is_private
from m3hal.ops import SeqMeta
from m3hal.shape import MINIMAX_M3, ModelShape, Site
from m3hal_conformance.buckets import misfit, sizes
from m3hal_conformance.case import MAX_TOKENS, Case, make_site, shape_of
from m3hal_conformance.checks import CHECKS
from m3hal_conformance.files import unlisted_modules
from m3hal_conformance.harness import torch_threads
from m3hal_conformance.oracle import UncalibratedError
from m3hal_conformance.page_map import PageMap
from m3hal_conformance.placing import check as check_placing
from m3hal_conformance.placing import torch_device
from m3hal_conformance.results import CheckResult, Result
from m3hal_conformance.sizes import CPU, DEVICE, Sizes, sizes_of
from m3hal_conformance.trees import tensors
from m3hal_conformance.trial import CheckFailed, Trial, Unsupported

for _module in ("metamorphic", "engine", "repeats", "alone", "meeting"):  # importing them registers their checks
    importlib.import_module(f"m3hal_conformance.{_module}")
_HERE = Path(__file__).parent
#: of a composition: its parts hand each other tensors that the functional definitions make
_COMPOSED = Impl("", memory="self")


class Faulty(Unsupported):
    """Why a case can't be asked although the backend says that it serves it. check: ``manifest`` or ``bind``."""

    def __init__(self, check: str, sentence: str) -> None:
        super().__init__(check, sentence)
        self.check, self.sentence = check, sentence

    def __str__(self) -> str:
        return f"{self.check}: {self.sentence}"


@dataclass(frozen=True)
class Offer:
    """What a backend has for an operator at a site. impl: what it declares; None for a composition of core ones.

    page_map: that of its caches, where it is private.
    """

    bound: Bound
    impl: Impl | None
    page_map: PageMap | None = None


@dataclass
class Runner:
    """Meets a backend through plans of one operator at a time, exactly as an engine would.

    backend: name, or names with commas. device: as in ``m3hal devices``. threads: torch's CPU threads while the
    implementation runs. Oracles and comparisons take one: their tensors are small, and where other work shares the
    cores, handing each operation to several threads costs more than it saves. require: traits, as in a policy; an
    implementation that does not declare one is not asked, so that a backend's slower variants are.
    """

    backend: str
    device: str
    seed: int = 0
    threads: int = 1
    require: tuple[str, ...] = ()
    #: impl_ids that some case found right only thanks to a declared freedom
    needed_freedom: set[str] = field(default_factory=set, repr=False)
    _plans: dict[tuple[str, Site, tuple[str, ...]], Plan] = field(default_factory=dict, repr=False)
    _offers: dict[tuple[str, Site, str], Offer | Unsupported] = field(default_factory=dict, repr=False)

    @cached_property
    def torch_device(self) -> torch.device:
        return torch_device(self.device)

    def run(self, cases: Iterable[Case], progress: Callable[[Case, Result], None] | None = None) -> list[Result]:
        """A result for every case, in order."""
        results = []
        for case in cases:
            note(case.id)
            result = self.run_case(case)
            results.append(result)
            if progress:
                progress(case, result)
        return results

    def run_case(self, case: Case) -> Result:
        """One case: every check is made, also after one failed."""
        with torch_threads(1):
            return self._run_case(case)

    def _run_case(self, case: Case) -> Result:
        start = time.perf_counter()

        def result(status: Any, checks: tuple[CheckResult, ...] = (), **what: Any) -> Result:
            seconds = time.perf_counter() - start
            return Result(case.id, case.operator, case.format, status, checks, seconds=seconds, bugs=case.bugs, **what)

        try:
            self._asks(case)
            offer = self.offer(case.operator, case.site, case.layout)
            trial = Trial(case, offer.bound, self.torch_device, offer.impl or _COMPOSED, self.seed)
            trial.threads, trial.page_map = self.threads, offer.page_map
            trial.bind_another = partial(self._bind_another, case)
            self._fits(trial)
            checks = tuple(self._check(trial, name) for name in case.checks)
        except Faulty as error:
            return result("fail", (CheckResult(error.check, False, None, error.sentence),))
        except (Unsupported, UncalibratedError) as error:
            return result("unsupported", reason=str(error))
        if trial.needed_freedom:
            self.needed_freedom.add(offer.bound.impl_id)
        status = "pass" if all(check.passed for check in checks) else "fail"
        measured = sizes(trial.operator, trial.inputs)
        return result(status, checks, impl_id=offer.bound.impl_id, notes=tuple(trial.notes), sizes=measured)

    @cached_property
    def sizes(self) -> Sizes:
        """What the device is large enough for."""
        return sizes_of(self.device)

    def _asks(self, case: Case) -> None:
        """Raises Unsupported when the case needs a larger device."""
        if case.sizes not in (CPU.name, self.sizes.name):
            raise Unsupported(f"asked on accelerators alone, whose sizes are {DEVICE}; here they are {self.sizes}")

    def offer(self, operator: str, site: Site, layout: str) -> Offer:
        """What the backend has for this operator at this site; raises Unsupported with its reason when nothing.

        Raises Faulty when the backend's manifest or factory is to blame.
        """
        key = (operator, site, layout)
        if key not in self._offers:
            try:
                self._offers[key] = self._bind(operator, site, layout)
            except Unsupported as error:
                self._offers[key] = type(error)(*error.args)  # a new one: it holds no frames of the vendor's
        found = self._offers[key]
        if isinstance(found, Unsupported):
            raise found.with_traceback(None)
        return found

    def plan(self, operator: str, site: Site, layout: str = "hnd") -> Plan:
        """The plan that conformance binds from. Beside hnd, private page maps are allocated, as any engine can."""
        return self._plan(operator, site, (layout, *(self._private_maps if layout == "hnd" else ())))

    @cached_property
    def _manifests(self) -> tuple[Manifest, ...]:
        """Those of the backends that are asked."""
        made = self._plan(ops.NAMES[0], make_site("moe", "float32"), ("hnd",))
        names = self.backend.split(",")
        return tuple(found.manifest for found in made.backends if found.manifest and found.name in names)

    @cached_property
    def _private_maps(self) -> tuple[str, ...]:
        """Page maps that only the backend knows, by its manifest."""
        several = [impls for manifest in self._manifests for impls in manifest.operators.values()]
        impls = [impl for found in several if isinstance(found, tuple) for impl in found if isinstance(impl, Impl)]
        kinds = dict.fromkeys(kind for impl in impls if isinstance(impl.layouts, tuple) for kind in impl.layouts)
        return tuple(kind for kind in kinds if isinstance(kind, str) and is_private(kind))

    def check_placing(self) -> None:
        """Raises M3halError where the backend can't be asked at all, or tensors can't be put on the device."""
        made = self._plan(ops.NAMES[0], make_site("moe", "float32"), ("hnd",))
        manifests = [found.manifest for found in made.backends if found.manifest and found.is_usable]
        several = [impls for manifest in manifests for impls in manifest.operators.values()]
        impls = [impl for found in several if isinstance(found, tuple) for impl in found if isinstance(impl, Impl)]
        check_placing(self.device, dict.fromkeys(str(impl.path).partition(":")[0] for impl in impls))

    def libraries(self) -> dict[str, str]:
        """The installed versions of the libraries that the manifest names."""
        found = {}
        for name in dict.fromkeys(name for manifest in self._manifests for name in manifest.libraries):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "not installed"
        return found

    def _plan(self, operator: str, site: Site, layouts: tuple[str, ...]) -> Plan:
        key = (operator, site, layouts)
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def _planned(self, operator: str, site: Site, layouts: tuple[str, ...]) -> Plan:
        return self._planned_shape(operator, shape_of(site), layouts)

    def _planned_shape(self, operator: str, shape: ModelShape, layouts: tuple[str, ...]) -> Plan:
        policy = Policy.resolve({"backend": self.backend, "require": list(self.require)}, environ={})
        return plan(
            shape,
            self.device,
            policy,
            engine={},
            cache_layouts=layouts,
            operators=(operator,),
            partial=True,
            present=True if self.backend == "reference" else None,
        )

    def _bind(self, operator: str, site: Site, layout: str) -> Offer:
        made = self.plan(operator, site, layout)
        choice = made.choice(operator, site.kind)
        faults = [
            f"{' '.join(filter(None, (verdict.backend, verdict.impl)))}: {verdict.reason}"
            for verdict in made.faults
            if verdict.operator == operator
        ]
        if faults:  # also where another entry serves the site: the one at fault would silently never run
            raise Faulty("manifest", "; ".join(faults))
        if not choice.is_served:
            reasons = [str(verdict.reason) for verdict in choice.verdicts if not verdict.accepted]
            raise Unsupported("; ".join(dict.fromkeys(reasons)) or self._absent(made, operator))
        unlisted = unlisted_modules(choice.chosen.impl) if choice.chosen else ()
        if unlisted:
            raise Faulty(
                "manifest",
                f"it runs {', '.join(unlisted)}, which its files do not list: its impl_id would outlive a change there",
            )
        try:
            bound = replace(made, _bound={}).bind(operator, site.kind)  # the factory is called each time
        except M3halError as error:  # what a factory raises or returns, as a sentence
            raise Faulty("bind", " ".join(str(error).split())) from error
        kind = made.layouts.get(site.kind, "") if ops.load(operator).group == "cache" else ""
        page_map = self._page_map(kind, bound, site) if is_private(kind) else None
        return Offer(bound, choice.chosen.impl if choice.chosen else None, page_map)

    def _page_map(self, kind: str, bound: Bound, site: Site) -> PageMap:
        """How caches get into private pages, and out of them; raises Faulty when nothing takes them out."""
        writer = bound if bound.operator == "kv_write" else self.offer("kv_write", site, kind).bound
        if writer.unpack is None:
            raise Faulty("bind", f"its page map {kind} is private: the Kernel of its kv_write needs an unpack")
        return PageMap(kind, writer, self.torch_device)

    def _absent(self, made: Plan, operator: str) -> str:
        """Why no implementation was there to be refused."""
        manifests = [found.manifest for found in made.backends if found.manifest and found.is_usable]
        told = [getattr(manifest, "withheld", {}).get(operator) for manifest in manifests]
        return "; ".join(filter(None, told)) or f"{self.backend} does not implement {operator}"

    def published_operators(self) -> list[str]:
        """Core operators that the backend serves at every site of MiniMax-M3 itself, in bf16, at some width."""
        return [name for name in ops.CORE if any(self._serves(name, width) for width in (1, 2, 4, 8))]

    def _serves(self, operator: str, width: int) -> bool:
        shape = ModelShape.from_config(
            MINIMAX_M3,
            dtype="bfloat16",
            page_size=128,
            max_tokens=8192,
            max_seqs=256,
            max_context=1 << 17,
            tensor_parallel=width,
        )
        made = self._planned_shape(operator, shape, ("hnd", *self._private_maps))
        sites = {site.kind for site in shape.sites()} & set(ops.load(operator).sites)
        return all(made.choice(operator, site).is_served for site in sites)

    def nameless(self) -> list[Result]:
        """A failure for each entry of the manifest whose name is no operator's, nor a near miss of one."""
        made = self.plan(ops.NAMES[0], make_site("moe", "float32"))
        strays = [verdict for verdict in made.faults if verdict.operator not in ops.NAMES]
        return [
            Result(f"{v.operator}/manifest", v.operator, "", "fail", (CheckResult("manifest", False, None, v.reason),))
            for v in strays
        ]

    def _bind_another(self, case: Case) -> None:
        """A second layer of the model, whose every constant differs, is bound beside the first."""
        site = case.site
        other = replace(
            site,
            eps=10 * site.eps,
            weight_offset=1.0 - site.weight_offset,
            scale=0.5 * site.scale,
            causal=not site.causal,
            alpha=0.5 * site.alpha,
            beta=site.beta + 1,
            limit=0.5 * site.limit,
            routed_scale=site.routed_scale + 1,
        )
        with suppress(Unsupported, M3halError):
            self._bind(case.operator, other, case.layout)

    def _fits(self, trial: Trial) -> None:
        """Raises Unsupported when the inputs are outside what the implementation declares."""
        impl, inputs = trial.impl, trial.inputs
        found = sizes(trial.operator, inputs)
        if not impl.zero_tokens and found.get("tokens", 1) == 0:
            raise Unsupported("it declares that it takes no batch of zero tokens")
        reason = misfit(trial.operator, inputs, impl.buckets)
        if reason:
            raise Unsupported(reason)
        assert found.get("tokens", 0) <= MAX_TOKENS, f"{trial.case.id} is larger than its site says"
        for path, tensor in tensors({name: v for name, v in inputs.items() if not isinstance(v, SeqMeta)}):
            if impl.views == "contiguous" and not tensor.is_contiguous():
                raise Unsupported(f"{path} is strided; it takes contiguous tensors")
            if impl.views == "rows" and tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise Unsupported(f"{path} has a strided last axis; it takes dense rows")
            offset = int(tensor.storage_offset()) * tensor.element_size()
            if impl.alignment > tensor.element_size() and _misaligned(tensor, offset, impl.alignment):
                raise Unsupported(
                    f"{path} starts or steps off a multiple of {impl.alignment} bytes, which it declares to need"
                )

    def _check(self, trial: Trial, name: str) -> CheckResult:
        try:
            scores = CHECKS[name](trial)
        except CheckFailed as error:
            ratios = [score.ratio for score in error.scores]
            return CheckResult(name, False, max(ratios) if ratios else None, str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and what pytest skips by
            if isinstance(error, (Unsupported, UncalibratedError, AssertionError)) and _is_ours(error):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            return CheckResult(name, False, None, f"the call raised {type(error).__name__}: {error} ({place})")
        ratios = [score.ratio for score in scores or ()]
        return CheckResult(name, True, max(ratios) if ratios else None)


def _is_ours(error: BaseException) -> bool:
    """Whether the suite itself raised it: a kernel that raises the suite's own Unsupported is not excused."""
    frames = traceback.extract_tb(error.__traceback__)
    return all(Path(frame.filename).parent == _HERE or frame.filename == functools.__file__ for frame in frames)


def default_threads(backend: str) -> int:
    """One for the reference, whose operations are as small as the oracles'; torch's own for what may race."""
    return 1 if backend == "reference" else torch.get_num_threads()


def _misaligned(tensor: Tensor, offset: int, alignment: int) -> bool:
    steps = [
        stride * tensor.element_size() for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    return offset % alignment != 0 or any(step % alignment for step in steps[:-1])
