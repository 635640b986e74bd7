"""The frozen outcome of planning: which implementation serves each operator at each site, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from m3hal import ops
from m3hal.dispatch.discovery import REFERENCE, Found
from m3hal.dispatch.errors import ConfigurationError, M3halError, did_you_mean
from m3hal.dispatch.identity import digest, module_hash
from m3hal.dispatch.manifest import API_VERSION
from m3hal.dispatch.policy import Policy
from m3hal.dispatch.screen import Candidate
from m3hal.dispatch.verdict import Verdict
from m3hal.shape import ModelShape, Site

if TYPE_CHECKING:
    from m3hal.dispatch.bind import Bound


@dataclass(frozen=True)
class Choice:
    """What serves one operator at one site.

    Exactly one of these holds: ``engine`` names who holds the operator; ``chosen`` is a vendor's implementation;
    ``composed`` lists the core operators whose chosen entries make up a fused one; or nothing serves it.
    reason: why. verdicts: on every implementation that was considered, in the policy's order.
    """

    operator: str
    site: str
    engine: str = ""
    chosen: Candidate | None = None
    composed: tuple[str, ...] = ()
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def is_served(self) -> bool:
        return bool(self.engine or self.chosen or self.composed)

    @property
    def server(self) -> str:
        """Who serves it, in one or two words."""
        if self.engine:
            return f"engine: {self.engine}"
        if self.chosen:
            return self.chosen.backend
        return "composed" if self.composed else "nothing"


@dataclass(frozen=True)
class Plan:
    """For one device, model shape and policy, which implementation serves each operator.

    in_tree: vLLM's own model stays in place, for ``reason``; nothing can be bound. present: whether this machine has
    the device; if not, libraries are assumed and nothing was probed. layouts: site -> cache layout, with
    ``layout_reasons``. backends: every installed one with its verdict. faults: what manifests got wrong.
    """

    shape: ModelShape
    device: str
    policy: Policy
    present: bool
    choices: tuple[Choice, ...]
    layouts: Mapping[str, str]
    layout_reasons: Mapping[str, str]
    backends: tuple[Found, ...]
    faults: tuple[Verdict, ...] = ()
    in_tree: bool = False
    reason: str = ""
    _bound: dict[tuple[str, str, str | None], Bound] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def sites(self) -> Mapping[str, Site]:
        """The model's sites by kind."""
        return {site.kind: site for site in self.shape.sites()}

    def site(self, kind: str) -> Site:
        """The static values of a site. Raises M3halError for a site that this model lacks."""
        if kind not in self.sites:
            raise ConfigurationError(f"this model has no site {kind!r}.{did_you_mean(kind, self.sites)}")
        return self.sites[kind]

    def layout(self, operator: str, site: str | None = None) -> str:
        """The cache layout of an operator's site; with several sites that differ, name one."""
        rows = [row for row in self.rows(operator) if site in (None, row.site)]
        in_group = operator in ops.NAMES and ops.load(operator).group == "cache"
        found = {self.layouts[row.site] for row in rows} if in_group else set()
        if len(found) != 1:
            where = f" at site {site!r}" if site else ""
            raise M3halError(
                f"{operator}{where} has {'several cache layouts; name a site' if found else 'no cache layout'}."
            )
        return found.pop()

    def rows(self, operator: str) -> tuple[Choice, ...]:
        """The choices for one operator, by site. Raises M3halError for one that is unknown or vLLM's own."""
        found = tuple(choice for choice in self.choices if choice.operator == operator)
        if not found and self.in_tree and operator in ops.NAMES:
            raise M3halError(f"vLLM's own model serves {operator} and m3hal dispatches nothing, because {self.reason}.")
        if not found:
            known = {choice.operator for choice in self.choices}
            told = self._unplanned(operator) if operator in ops.NAMES else did_you_mean(operator, known)
            raise ConfigurationError(f"{operator!r} is not an operator of this plan.{told}")
        return found

    def _unplanned(self, operator: str) -> str:
        """Why an operator that there is has no row, as a sentence after another."""
        held = {choice.operator: choice.engine for choice in self.choices if choice.engine}
        taken = sorted(held.keys() & ops.covered(operator))
        if taken:
            holders = " and ".join(dict.fromkeys(held[name] for name in taken))
            return f" It covers {' and '.join(taken)}, which {holders} holds."
        sites = ops.load(operator).sites
        if set(sites).isdisjoint(self.sites):
            return f" It runs at {', '.join(sites)}, which this model has not; it has {', '.join(self.sites)}."
        return " The plan was made for other operators."

    def choice(self, operator: str, site: str) -> Choice:
        """What serves an operator at a site. Raises M3halError when it doesn't run there."""
        rows = {row.site: row for row in self.rows(operator)}
        if "" in rows:  # engine-held: one row for all sites
            return rows[""]
        self.site(site)
        if site not in rows:
            raise ConfigurationError(f"{operator} doesn't run at site {site!r}; it runs at {', '.join(rows)}.")
        return rows[site]

    def bind(self, operator: str, site: str, layer: str = "") -> Bound:
        """The callable that serves an operator at a site; the same object for every layer of that site.

        Where the policy watches calls there is one for every ``layer``, whose name says in reports where a call was.
        Imports vendor code, and may compile, once per site. Raises M3halError, naming backend and operator, when that
        fails: the plan was made on what the vendor declared, and nothing falls back.
        """
        from m3hal.dispatch.bind import bind

        if self.in_tree:
            raise M3halError(
                f"{operator} at {site} can't be bound: vLLM's in-tree model serves this plan, because {self.reason}."
            )
        key = (operator, site, layer if self.policy.watch.is_on else "")
        if key not in self._bound:
            self._bound[key] = bind(self, self.choice(operator, site), key[2])
        return self._bound[key]

    def bound_once(self, choice: Choice, make: Callable[[], Bound]) -> Bound:
        """What a factory made for a site, which all of its layers share, watched or not."""
        key = (choice.operator, choice.site, None)
        if key not in self._bound:
            self._bound[key] = make()
        return self._bound[key]

    @cached_property
    def fingerprint(self) -> str:
        """A hash over the implementations, the policy and the device; ranks compare it."""
        return digest(
            {
                "api": API_VERSION,
                "device": self.device,
                "policy": self.policy.to_json(),
                "in_tree": self.in_tree,
                "layouts": dict(self.layouts),
                "choices": [(c.operator, c.site, c.engine, self.impl_id(c), c.composed) for c in self.choices],
            }
        )

    def table(self, width: int | None = None) -> str:
        """The plan for people: one row per operator and server."""
        from m3hal.dispatch.report import plan_table

        return plan_table(self, width)

    def explain(self, operator: str | None = None, width: int | None = None) -> str:
        """Why the plan is what it is; with an operator, every verdict on its implementations."""
        from m3hal.dispatch.report import explain

        return explain(self, operator, width)

    def to_json(self) -> dict[str, Any]:
        """The whole plan as plain data; the file that ``"plan": "file.json"`` pins."""
        from m3hal.dispatch.report import plan_json

        return plan_json(self)

    def constituents(self, choice: Choice) -> Iterator[Choice]:
        """The core entries that a composed operator is made of."""
        return (self.choice(operator, choice.site) for operator in choice.composed)

    def impl_id(self, choice: Choice) -> str:
        """The identity of what serves a row; a composition's covers its parts and how they are put together."""
        if choice.composed:
            parts = {part.operator: self.impl_id(part) for part in self.constituents(choice)}
            modules = (f"m3hal.ops.{choice.operator}", "m3hal.dispatch.compose")
            glue = {module: module_hash(module) for module in modules}
            return digest({"operator": choice.operator, "parts": parts, "content": glue})
        return choice.chosen.impl_id if choice.chosen else ""

    def is_definition(self, choice: Choice) -> bool:
        """Whether the operator's own definition runs: the reference, or a composition of nothing else."""
        if choice.chosen:
            return choice.chosen.backend == REFERENCE
        return bool(choice.composed) and all(self.is_definition(part) for part in self.constituents(choice))
