"""Makes a plan: backends meet the device, implementations meet the sites, groups choose a layout together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from m3hal import ops
from m3hal.dispatch import admission, coverage, devices, layout, pin
from m3hal.dispatch.discovery import Found, discover
from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.levels import proved, with_stale
from m3hal.dispatch.plans import Choice, Plan
from m3hal.dispatch.policy import Policy
from m3hal.dispatch.screen import Candidate, Demands, candidates, screen, screen_backend
from m3hal.dispatch.verdict import STAGES, Verdict
from m3hal.shape import WITHIN, ModelShape, Site

#: What stock vLLM keeps for itself: its parallel layers shard, load and quantise their own weights, and ranks meet in
#: them.
VLLM_HOLDS: Mapping[str, str] = dict.fromkeys(
    ("linear", "embedding", "lm_head", "all_reduce", "allreduce_add_rms_norm", "mega_moe"), "vllm"
)

#: An operator's implementations at a site, in the order in which the policy wants them, with their verdicts.
Row = list[tuple[Candidate, Verdict]]
Key = tuple[str, str]  # operator, site


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
        levels: impl_id -> verification level; None: from the claims that the backends ship.
        present: whether this machine has the device; None: look.

    Raises M3halError: ConfigurationError when a name is unknown; UnsupportedError when the backends that the policy
    names can't run here; else when they leave an operator uncovered, or a pin or the engine's fingerprint is not met.
    """
    device = devices.check(device)
    policy = (Policy.resolve() if policy is None else policy).on(device)
    pinned = pin.load(policy) if policy.pinned else None
    asked = policy if pinned is None else replace(pinned.policy, fingerprint=policy.fingerprint)
    wanted = admission.operators_named(operators)
    job = _Job(
        shape=shape,
        device=device,
        policy=asked,
        present=devices.is_present(device) if present is None else present,
        engine=engine if operators is None else {name: holder for name, holder in engine.items() if name in wanted},
        cache_layouts=tuple(cache_layouts),
        wanted=wanted,
        levels=levels,
        pins=pinned.impl_ids if pinned else None,
    )
    made = job.plan()
    # A pin that isn't met is told by what differs, before what is missing for it.
    if pinned and not pinned.is_in_tree:
        pin.check(made, pinned)
    elif not partial and not made.in_tree:
        made = coverage.settle(made)
    if pinned and pinned.is_in_tree:
        pin.check(made, pinned)
    if policy.fingerprint and policy.fingerprint != made.fingerprint:
        raise M3halError(
            f"this process plans {made.fingerprint} but the engine's front end planned {policy.fingerprint}: "
            "m3hal, its backends or M3HAL_* differ between them; make the installations equal."
        )
    return made


@dataclass(frozen=True)
class _Job:
    """One planning, with its arguments at hand."""

    shape: ModelShape
    device: str
    policy: Policy
    present: bool
    engine: Mapping[str, str]
    cache_layouts: tuple[str, ...]
    wanted: Mapping[str, ops.Operator]
    levels: Mapping[str, str] | None
    pins: Mapping[Key, str] | None

    def plan(self) -> Plan:
        admission.check_policy(self.policy, self.engine, self.levels or {})
        found = discover(lambda name, distribution: admission.refusal(self.policy, name, distribution))
        backends = tuple(screen_backend(backend, self.device, self.present) for backend in found)
        admission.check_backends(self.policy, backends, self.device)
        made = Plan(self.shape, self.device, self.policy, self.present, tuple(self._held()), {}, {}, backends)
        if self.policy.in_tree:
            told = self.policy.told("backend")
            return replace(made, in_tree=True, reason=f"the policy asks for it: backend {told}")
        pool, faults = self._pool(backends)
        judged = [*faults, *_rejected(backends)]
        rows: dict[Key, Row] = {(op.name, at.kind): self._screen(op, at, pool[op.name]) for op, at in self._places()}
        layouts, reasons = self._layouts(rows)
        rows = {key: _with_layout(key, row, layouts) for key, row in rows.items()}
        made_of: dict[Key, Choice] = {}
        for key, row in rows.items():  # what a fused operator covers comes before it
            is_core = ops.load(key[0]).kind == "core"
            made_of[key] = self._core(*key, row, judged) if is_core else self._fused(*key, row, made_of, judged)
        choices = (*made_of.values(), *self._held())
        return replace(made, choices=choices, layouts=layouts, layout_reasons=reasons, faults=tuple(faults))

    def _places(self) -> list[tuple[ops.Operator, Site]]:
        """Where the operators that m3hal serves run; none that covers an operator of the engine's is among them."""
        own = [op for name, op in self.wanted.items() if self.engine.keys().isdisjoint((name, *ops.covered(name)))]
        sites = self.shape.sites()
        kinds = {site.kind: {site.kind, *WITHIN.get(site.kind, ())} for site in sites}
        return [(op, site) for op in own for site in sites if not kinds[site.kind].isdisjoint(op.sites)]

    def _held(self) -> list[Choice]:
        return [Choice(name, "", engine=holder, reason=f"{holder} holds it") for name, holder in self.engine.items()]

    def _pool(self, backends: Iterable[Found]) -> tuple[dict[str, list[Candidate]], list[Verdict]]:
        """Every well-formed implementation by operator, the highest priority first."""
        pool: dict[str, list[Candidate]] = {name: [] for name in self.wanted}
        faults: list[Verdict] = []
        usable = sorted(filter(lambda found: found.is_usable, backends), key=_by_priority)
        levels = proved(usable, self.device) if self.levels is None else self.levels
        for found in usable:
            good, bad = candidates(found, self.wanted, levels)
            faults += bad
            for candidate in with_stale(found, good, self.device) if self.levels is None else good:
                pool[candidate.operator].append(candidate)
        return pool, faults

    def _screen(self, operator: ops.Operator, site: Site, pool: list[Candidate]) -> Row:
        order = self.policy.order_for(operator.name)
        ranked = [candidate for name in order for candidate in pool if candidate.is_from(name)] if order else pool
        accelerated = devices.kind(self.device) != "cpu"
        # What nobody named must have run on hardware to serve an accelerator.
        least = self.policy.min_level or ("hardware" if accelerated and not order else None)
        # A pinned plan names every implementation, whatever its policy was.
        by_name = bool(order) or self.pins is not None
        demands = Demands(self.policy.require, least, by_name, accelerated, self.device)
        return [(c, self._pinned(c, site) or screen(c, operator, site, demands)) for c in ranked]

    def _pinned(self, candidate: Candidate, site: Site) -> Verdict | None:
        """The rejection of what a pinned plan doesn't name."""
        if self.pins is None or self.pins.get((candidate.operator, site.kind)) == candidate.impl_id:
            return None
        return candidate.verdict("policy", False, "the pinned plan names another implementation", site.kind)

    def _layouts(self, rows: Mapping[Key, Row]) -> tuple[dict[str, str], dict[str, str]]:
        """One cache layout per site, chosen by the operators that share the cache's bytes."""
        layouts: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for site in self.shape.sites():
            group = [
                (ops.load(name), [candidate for candidate, verdict in row if verdict.accepted])
                for (name, kind), row in rows.items()
                if kind == site.kind and ops.load(name).group == "cache"
            ]
            if group:
                allowed = layout.holding(site.kv_format, self.cache_layouts)
                layouts[site.kind], reasons[site.kind] = layout.choose(group, allowed)
        return layouts, reasons

    def _core(self, operator: str, site: str, row: Row, told: Sequence[Verdict]) -> Choice:
        chosen, verdicts = _first(row)
        reason = self._why(operator, chosen, verdicts, told) if chosen else "no implementation was accepted"
        return Choice(operator, site, chosen=chosen, reason=reason, verdicts=verdicts)

    def _why(self, operator: str, chosen: Candidate, verdicts: Iterable[Verdict], told: Sequence[Verdict]) -> str:
        """Who asked for the chosen one, or what became of those that would have come first.

        told: of entries in manifests, and of whole backends.
        """
        if self.pins is not None:
            return "pinned"
        if operator in self.policy.overrides:
            return f"operators.{operator} {self.policy.told(f'operators.{operator}')}"
        before: dict[str, Verdict] = {}  # of a backend's implementations the one that came furthest
        for verdict in takewhile(lambda verdict: not verdict.accepted, verdicts):
            other = before.setdefault(verdict.backend, verdict)
            if STAGES.index(verdict.stage) >= STAGES.index(other.stage):
                before[verdict.backend] = verdict
        passed_over = [f"{backend}: {verdict.reason}" for backend, verdict in before.items()]
        named = takewhile(lambda name: not chosen.is_from(name), self.policy.order)
        out = {v.backend: v.reason for v in told if not v.operator}
        out |= {v.backend: f"its manifest is at fault: {v.reason}" for v in told if v.operator == operator}
        passed_over += [
            f"{name}: {out[name.name]}" if name.name in out else f"{name} has none"
            for name in named
            if name.name not in before
        ]
        return "; ".join(passed_over) or ("first choice" if self.policy.order else "highest priority")

    def _fused(
        self, operator: str, site: str, row: Row, made_of: Mapping[Key, Choice], told: Sequence[Verdict]
    ) -> Choice:
        """The vendor's fused form, unless the policy overrides a part of it; else a composition of the plan's parts.

        An override of the fused operator itself is the more specific and wins.
        """
        covers = ops.load(operator).covers
        overridden = [part for part in ops.covered(operator) if part in self.policy.overrides]
        if overridden and operator not in self.policy.overrides:
            reason = f"the policy overrides {' and '.join(overridden)}, which it covers"
            row = [(c, c.verdict("policy", False, reason, site) if v.accepted else v) for c, v in row]
        chosen, verdicts = _first(row)
        if chosen:
            reason = self._why(operator, chosen, verdicts, told)
            return Choice(operator, site, chosen=chosen, reason=reason, verdicts=verdicts)
        parts = {part: made_of.get((part, site)) for part in covers}
        lacking = [name for name, part in parts.items() if part is None or not part.is_served]
        if lacking:
            reason = f"no fused form was accepted, and nothing serves {', '.join(lacking)}"
            return Choice(operator, site, reason=reason, verdicts=verdicts)
        stray = self._stray(operator, [c for part in parts.values() for c in _running(part, made_of)])
        if stray:
            return Choice(operator, site, reason=stray, verdicts=verdicts)
        why = f"the policy overrides {' and '.join(overridden)}" if overridden else "no fused form was accepted"
        return Choice(operator, site, composed=covers, reason=why if row else "no fused form", verdicts=verdicts)

    def _stray(self, operator: str, parts: Iterable[Candidate]) -> str | None:
        """An override of a fused operator permits a composition only of the backends that it names."""
        order = self.policy.overrides.get(operator, ())
        asked = ",".join(map(str, order))
        for part in parts if order else ():
            if not any(part.is_from(name) for name in order):
                return (
                    f"{asked!r} has no fused form, and a composition would run {part.operator} of {part.backend!r}; "
                    f"override {part.operator} with {asked!r} as well"
                )
        return None


def _running(choice: Choice | None, made_of: Mapping[Key, Choice]) -> list[Candidate]:
    """What runs where a choice serves: the chosen implementation, or those that a composition is made of."""
    if choice is None or choice.chosen:
        return [choice.chosen] if choice and choice.chosen else []
    return [c for part in choice.composed for c in _running(made_of.get((part, choice.site)), made_of)]


def _rejected(backends: Iterable[Found]) -> list[Verdict]:
    """Of backends that the policy lets in and something else keeps out."""
    return [v for v in (found.verdict for found in backends) if v and not v.accepted and v.stage != "policy"]


def _by_priority(found: Found) -> tuple[int, str]:
    assert found.manifest is not None
    return -found.manifest.priority, found.name


def _with_layout(key: Key, row: Row, layouts: Mapping[str, str]) -> Row:
    """Rejects the implementations that lack the layout which their cache group chose."""
    operator, site = key
    if ops.load(operator).group != "cache":
        return row
    chosen = layouts[site]
    return [
        (c, c.verdict("layout", False, f"the cache of {site} is {chosen}; it takes {', '.join(c.impl.layouts)}", site))
        if v.accepted and chosen not in c.impl.layouts
        else (c, v)
        for c, v in row
    ]


def _first(row: Row) -> tuple[Candidate | None, tuple[Verdict, ...]]:
    """The first accepted implementation, and what became of all of them."""
    chosen: Candidate | None = None
    verdicts = []
    for candidate, verdict in row:
        if verdict.accepted and chosen is not None:
            reason = f"it would serve, but {chosen.backend} comes first"
            verdict = candidate.verdict("chosen", True, reason, verdict.site)
        elif verdict.accepted:
            chosen = candidate
        verdicts.append(verdict)
    return chosen, tuple(verdicts)
