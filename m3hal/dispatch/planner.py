"""Makes a plan: backends meet the device, implementations meet the sites, groups choose a layout together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from m3hal import ops
from m3hal.dispatch import devices, layout
from m3hal.dispatch.discovery import REFERENCE, Found, discover
from m3hal.dispatch.errors import M3halError, did_you_mean
from m3hal.dispatch.plans import Choice, Plan
from m3hal.dispatch.policy import BackendName, Policy
from m3hal.dispatch.screen import Candidate, Demands, candidates, screen, screen_backend
from m3hal.dispatch.verdict import Verdict
from m3hal.shape import ModelShape, Site

#: What stock vLLM keeps for itself: its parallel layers shard, load and quantise their own weights.
VLLM_HOLDS: Mapping[str, str] = {"linear": "vllm", "embedding": "vllm", "lm_head": "vllm", "all_reduce": "vllm"}

#: pip extras of the core, for the error about a backend that is not installed
_EXTRAS = ("nvidia", "amd", "gaudi", "triton")

Screened = dict[tuple[str, str], list[tuple[Candidate, Verdict]]]


def plan(
    shape: ModelShape,
    device: str,
    policy: Policy | None = None,
    *,
    engine: Mapping[str, str] = VLLM_HOLDS,
    cache_layouts: Sequence[str] = ("hnd",),
    operators: Iterable[str] | None = None,
    partial: bool = False,
    levels: Mapping[str, str] | None = None,
    present: bool | None = None,
) -> Plan:
    """Chooses an implementation for each operator at each site of a model.

    Args:
        device: e.g. ``"cpu"``, ``"cuda:sm_90"``; it need not be in this machine.
        policy: None resolves one from the file and the environment.
        engine: operators that the engine holds -> the engine's name.
        cache_layouts: what the engine can allocate, preferred first.
        operators: plan only these, and what the fused ones among them cover; None: all.
        partial: leave operators unserved, with their verdicts, instead of raising. For conformance.
        levels: impl_id -> verification level, from claims.
        present: whether this machine has the device; None: look.

    Raises M3halError when a name is unknown, when a backend that the policy names is unusable or leaves an operator
    uncovered, and when a pinned plan or the engine's fingerprint is not met.
    """
    policy = Policy.resolve() if policy is None else policy
    device = devices.check(device)
    present = devices.is_present(device) if present is None else present
    wanted = _operators(operators)
    _check_policy(policy, wanted, engine)
    backends = tuple(screen_backend(found, device, present) for found in discover(_refusal(policy)))
    _check_names(policy, backends, device)
    job = _Job(shape, device, policy, present, engine, tuple(cache_layouts), wanted, backends, partial, levels or {})
    made = _in_tree(job, "the policy asks for vLLM's in-tree model") if policy.in_tree else job.plan()
    if policy.fingerprint and policy.fingerprint != made.fingerprint:
        raise M3halError(
            f"this process plans {made.fingerprint} but the engine's front end planned {policy.fingerprint}: "
            "m3hal, its backends or M3HAL_* differ between them; make the installations equal."
        )
    return made


@dataclass
class _Job:
    """One planning, with its arguments at hand."""

    shape: ModelShape
    device: str
    policy: Policy
    present: bool
    engine: Mapping[str, str]
    cache_layouts: tuple[str, ...]
    wanted: Mapping[str, ops.Operator]
    backends: tuple[Found, ...]
    partial: bool
    levels: Mapping[str, str]

    def plan(self) -> Plan:
        pool, faults = self._pool()
        sites = [(op, site) for op in self._own() for site in self.shape.sites() if site.kind in op.sites]
        screened: Screened = {(op.name, site.kind): self._screen(op, site, pool[op.name]) for op, site in sites}
        layouts, reasons = self._layouts(screened)
        core = {
            key: self._core(ops.load(key[0]), key[1], row, layouts)
            for key, row in screened.items()
            if ops.load(key[0]).kind == "core"
        }
        fused = {
            key: self._fused(ops.load(key[0]), key[1], row, layouts, core)
            for key, row in screened.items()
            if ops.load(key[0]).kind == "fused"
        }
        choices = (*core.values(), *fused.values(), *self._held())
        made = self._made(choices, layouts, reasons, tuple(faults))
        missing = [choice for choice in choices if not choice.is_served and ops.load(choice.operator).kind == "core"]
        missing += [c for c in choices if not c.is_served and c.operator in self.policy.overrides and c not in missing]
        return made if self.partial or not missing else self._uncovered(made, missing)

    def _own(self) -> list[ops.Operator]:
        """The operators that m3hal serves."""
        return [operator for name, operator in self.wanted.items() if name not in self.engine]

    def _held(self) -> list[Choice]:
        return [Choice(name, "", engine=holder, reason=f"{holder} holds it") for name, holder in self.engine.items()]

    def _pool(self) -> tuple[dict[str, list[Candidate]], list[Verdict]]:
        pool: dict[str, list[Candidate]] = {name: [] for name in self.wanted}
        faults: list[Verdict] = []
        for found in self.backends:
            if found.is_usable:
                good, bad = candidates(found, self.wanted, self.levels)
                faults += bad
                for candidate in good:
                    pool[candidate.operator].append(candidate)
        return pool, faults

    def _screen(self, operator: ops.Operator, site: Site, pool: list[Candidate]) -> list[tuple[Candidate, Verdict]]:
        """The implementations in the order in which the policy wants them, each with its verdict."""
        order = self.policy.order_for(operator.name)
        ranked = _by_name(pool, order) if order else self._by_priority(pool)
        demands = Demands(self.policy.require, self._least(order), self.levels)
        return [(candidate, screen(candidate, operator, site, demands)) for candidate in ranked]

    def _least(self, order: Sequence[BackendName]) -> str | None:
        """Auto on an accelerator takes only what ran on hardware, unless the policy says otherwise."""
        if self.policy.min_level or order or not self._is_accelerator:
            return self.policy.min_level
        return "hardware"

    @property
    def _is_accelerator(self) -> bool:
        return devices.kind(self.device) != "cpu"

    def _by_priority(self, pool: list[Candidate]) -> list[Candidate]:
        priority = {(f.name, f.distribution): f.manifest.priority for f in self.backends if f.manifest}
        usable = [c for c in pool if not (self._is_accelerator and c.backend == REFERENCE)]
        return sorted(usable, key=lambda c: (-priority[c.backend, c.distribution], c.backend))

    def _layouts(self, screened: Screened) -> tuple[dict[str, str], dict[str, str]]:
        layouts: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for site in self.shape.sites():
            rows = [
                (ops.load(name), [candidate for candidate, verdict in row if verdict.accepted])
                for (name, kind), row in screened.items()
                if kind == site.kind and ops.load(name).group == "cache"
            ]
            if rows:
                layouts[site.kind], reasons[site.kind] = layout.choose(rows, self.cache_layouts)
        return layouts, reasons

    def _core(
        self, operator: ops.Operator, site: str, row: list[tuple[Candidate, Verdict]], layouts: Mapping[str, str]
    ) -> Choice:
        chosen, verdicts = _first(operator, site, row, layouts)
        reason = self._why(operator.name, chosen) if chosen else "no implementation was accepted"
        return Choice(operator.name, site, chosen=chosen, reason=reason, verdicts=tuple(verdicts))

    def _why(self, operator: str, chosen: Candidate) -> str:
        if operator in self.policy.overrides:
            return f"operators.{operator} = {self.policy.origins_of(f'operators.{operator}')}"
        if self.policy.order:
            return f"backend = {self.policy.origins_of('backend')}"
        return "auto: the first that was accepted, by priority"

    def _fused(
        self,
        operator: ops.Operator,
        site: str,
        row: list[tuple[Candidate, Verdict]],
        layouts: Mapping[str, str],
        core: Mapping[tuple[str, str], Choice],
    ) -> Choice:
        """The vendor's fused form, unless the policy overrides a part of it; else a composition of the plan's parts."""
        overridden = [part for part in operator.covers if part in self.policy.overrides]
        if overridden and operator.name not in self.policy.overrides:
            reason = f"the policy overrides {' and '.join(overridden)}, which it covers"
            row = [(c, c.verdict("policy", False, reason, site) if v.accepted else v) for c, v in row]
        chosen, verdicts = _first(operator, site, row, layouts)
        if chosen:
            reason = f"fused; {self._why(operator.name, chosen)}"
            return Choice(operator.name, site, chosen=chosen, reason=reason, verdicts=tuple(verdicts))
        parts = [core.get((part, site)) for part in operator.covers]
        lacking = [name for name, part in zip(operator.covers, parts, strict=True) if part is None or not part.chosen]
        stray = self._stray(operator.name, [part.chosen for part in parts if part and part.chosen])
        if lacking or stray:
            reason = stray or f"no fused form, and no composition without {', '.join(lacking)}"
            return Choice(operator.name, site, reason=reason, verdicts=tuple(verdicts))
        reason = (
            f"composed: the policy overrides {' and '.join(overridden)}" if overridden else "composed: no fused form"
        )
        return Choice(operator.name, site, composed=operator.covers, reason=reason, verdicts=tuple(verdicts))

    def _stray(self, operator: str, parts: Iterable[Candidate]) -> str | None:
        """An override of a fused operator permits a composition only of the backends that it names."""
        order = self.policy.overrides.get(operator, ())
        for part in parts if order else ():
            if not any(part.is_from(name) for name in order):
                asked = ",".join(map(str, order))
                return (
                    f"{asked!r} has no fused form here and a composition would run {part.backend}'s {part.operator}; "
                    f"override {part.operator} with {asked!r} as well"
                )
        return None

    def _uncovered(self, made: Plan, missing: list[Choice]) -> Plan:
        """Auto leaves the in-tree model in place; what was asked for explicitly is an error with every reason."""
        explicit = [choice for choice in missing if self.policy.order_for(choice.operator)]
        reasons = [line for choice in missing for line in _reasons(choice, made)]
        if not explicit and not self.policy.overrides:
            served = f"{missing[0].operator} at {missing[0].site}"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return replace(
                made,
                in_tree=True,
                reason=f"no accepted implementation of {served}{more} on {self.device}: {reasons[0]}",
            )
        asked = ",".join(map(str, self.policy.order_for((explicit or missing)[0].operator))) or "auto"
        verdicts = [verdict for choice in missing for verdict in choice.verdicts]
        remedy = (
            ""
            if REFERENCE in asked or asked == "auto"
            else f"\nTo let the reference serve these, ask for '{asked},reference'."
        )
        raise M3halError(
            f"backend {asked!r} leaves {len(missing)} of the operators on {self.device} without an implementation:\n  "
            + "\n  ".join(reasons)
            + remedy,
            verdicts,
        )

    def _made(
        self,
        choices: Sequence[Choice],
        layouts: Mapping[str, str],
        reasons: Mapping[str, str],
        faults: tuple[Verdict, ...],
    ) -> Plan:
        return Plan(
            self.shape,
            self.device,
            self.policy,
            self.present,
            tuple(choices),
            layouts,
            reasons,
            self.backends,
            faults,
        )


def _in_tree(job: _Job, reason: str) -> Plan:
    return replace(job._made(job._held(), {}, {}, ()), in_tree=True, reason=reason)


def _first(
    operator: ops.Operator, site: str, row: list[tuple[Candidate, Verdict]], layouts: Mapping[str, str]
) -> tuple[Candidate | None, list[Verdict]]:
    """The first accepted implementation that has the site's layout, and what became of the others."""
    chosen: Candidate | None = None
    verdicts = []
    for candidate, verdict in row:
        if verdict.accepted and operator.group == "cache" and layouts[site] not in candidate.impl.layouts:
            has = ", ".join(candidate.impl.layouts)
            verdict = candidate.verdict("layout", False, f"the site's layout is {layouts[site]}; it takes {has}", site)
        if verdict.accepted and chosen is not None:
            verdict = candidate.verdict("chosen", True, f"it would serve, but {chosen.backend} comes first", site)
        elif verdict.accepted:
            chosen = candidate
        verdicts.append(verdict)
    return chosen, verdicts


def _by_name(pool: list[Candidate], order: Sequence[BackendName]) -> list[Candidate]:
    return [candidate for name in order for candidate in pool if candidate.is_from(name)]


def _reasons(choice: Choice, made: Plan) -> list[str]:
    where = f"{choice.operator} at {choice.site}"
    if choice.verdicts:
        return [f"{where}: {verdict}" for verdict in choice.verdicts]
    faults = [verdict for verdict in made.faults if verdict.operator == choice.operator]
    if faults:
        return [f"{where}: {verdict}" for verdict in faults]
    rejected = [f.verdict for f in made.backends if f.verdict and not f.is_usable and f.verdict.stage != "policy"]
    if made.policy.order_for(choice.operator) or not rejected:
        return [f"{where}: {choice.reason if choice.reason.startswith(chr(39)) else 'not implemented'}"]
    return [f"{where}: {verdict}" for verdict in rejected]


def _operators(names: Iterable[str] | None) -> dict[str, ops.Operator]:
    """The definitions to plan for, core ones first; fused ones bring what they cover."""
    asked = list(ops.NAMES if names is None else names)
    for name in asked:
        if name not in ops.NAMES:
            raise M3halError(f"{name!r} is no operator.{did_you_mean(name, ops.NAMES)}")
    every = set(asked) | {part for name in asked for part in ops.load(name).covers}
    return {name: ops.load(name) for name in ops.NAMES if name in every}


def _check_policy(policy: Policy, wanted: Mapping[str, ops.Operator], engine: Mapping[str, str]) -> None:
    for operator in policy.overrides:
        if operator in engine:
            raise M3halError(
                f"the policy overrides {operator}, but the engine {engine[operator]} holds it; remove operators.{operator}."
            )
    vocabulary = {trait.name: trait.values for name in ops.NAMES for trait in ops.load(name).traits}
    for name, value in policy.require:
        if name not in vocabulary:
            raise M3halError(f"the policy requires {name!r}, which is no trait.{did_you_mean(name, vocabulary)}")
        if value not in vocabulary[name]:
            raise M3halError(f"the policy requires {name}={value}; its values are {', '.join(vocabulary[name])}.")


def _refusal(policy: Policy):  # type: ignore[no-untyped-def]
    """Which backends the policy keeps out, by name alone."""

    def refuse(name: str, distribution: str) -> str | None:
        for denied in policy.deny:
            if denied.matches(name, distribution):
                return f"deny = {policy.origins_of('deny')}"
        if policy.in_tree:
            return f"backend = {policy.origins_of('backend')}"
        named = policy.named()
        if any(wanted.matches(name, distribution) for wanted in named):
            return None
        if not policy.order:
            # Under auto, a distribution that the policy passes over for a rival of the same name stays out.
            rivals = [wanted for wanted in named if wanted.name == name]
            return f"the policy names {rivals[0]}" if rivals else None
        return f"backend = {policy.origins_of('backend')}"

    return refuse


def _check_names(policy: Policy, backends: Sequence[Found], device: str) -> None:
    """Every backend that the policy names must be installed, and be usable on the device."""
    installed = [found.name for found in backends]
    for name in (*policy.named(), *policy.deny):
        found = [backend for backend in backends if name.matches(backend.name, backend.distribution)]
        if not found:
            hint = (
                f" pip install 'm3hal[{name.name}]' installs it."
                if name.name in _EXTRAS
                else did_you_mean(name.name, [*installed, "auto", "vllm"])
            )
            raise M3halError(f"no backend {str(name)!r} is installed.{hint}")
        rejected = [f.verdict for f in found if f.verdict and not f.is_usable]
        if name not in policy.deny and len(rejected) == len(found):
            reasons = "; ".join(f"{v.reason} ({v.stage}, {v.distribution})" for v in rejected)
            raise M3halError(f"backend {str(name)!r} is not usable on {device}: {reasons}.", rejected)
