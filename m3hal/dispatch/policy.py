"""What the user asked for: backend order, per-operator overrides, strictness.

One schema, four carriers. For every key the first carrier that sets it wins: the API, the engine (vLLM's
``--additional-config '{"m3hal": {...}}'``), the file that ``M3HAL_CONFIG`` names, ``M3HAL_*`` environment variables;
then the default. ``operators`` merges by operator. A carrier may have tables by device, see
:mod:`m3hal.dispatch.fleet`.

    key          example                        environment variable
    backend      "auto", "acme", "a,b", "vllm"  M3HAL_BACKEND=acme,reference
    operators    {"rms_norm": "acme"}           M3HAL_OPERATORS='rms_norm=acme;moe_experts=acme,reference'
    require      ["batch_invariant"]            M3HAL_REQUIRE=batch_invariant,p_dtype=float32
    min_level    "hardware"                     M3HAL_MIN_LEVEL=emulated
    deny         ["acme"]                       M3HAL_DENY=acme
    plan         "plan.json"                    M3HAL_PLAN=plan.json
    export_plan  "plan.json"                    M3HAL_EXPORT_PLAN=plan.json
    fingerprint  written by the engine          M3HAL_FINGERPRINT
    mode         "record", "shadow"             M3HAL_MODE=shadow
    capture_dir  "m3hal-captures"               M3HAL_CAPTURE_DIR=/var/m3hal
    sample_rate  0.01                           M3HAL_SAMPLE_RATE=0.01
    capture_bytes "1 GiB"                       M3HAL_CAPTURE_BYTES=1073741824
    on_mismatch  "warn", "raise"                M3HAL_ON_MISMATCH=raise

A backend is named ``acme``, or ``acme-dist:acme`` when two distributions claim the name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m3hal.dispatch import carriers, fleet
from m3hal.dispatch.carriers import DEFAULT, Carrier, Origin
from m3hal.dispatch.errors import ConfigurationError
from m3hal.dispatch.names import BackendName, Order
from m3hal.dispatch.watch import Watch


@dataclass(frozen=True)
class Policy:
    """A resolved configuration; make one with :meth:`resolve`.

    order: backends, first first; empty is ``auto``. in_tree: ``backend: "vllm"`` was asked for. overrides: operator ->
    backends. require: (trait, value). min_level: None is the default, "hardware" on accelerators under ``auto``.
    pinned: path of an exported plan. exported: where the engine's front end writes its plan. fingerprint: the plan that
    it made. watch: whether calls are recorded or compared; it chooses no implementation and is no part of a plan.
    origins: key -> where its value came from. sources: the carriers, while their tables by device wait for one.
    """

    order: Order = ()
    in_tree: bool = False
    overrides: Mapping[str, Order] = field(default_factory=dict)
    require: tuple[tuple[str, str], ...] = ()
    min_level: str | None = None
    deny: tuple[BackendName, ...] = ()
    pinned: str | None = None
    exported: str | None = None
    fingerprint: str | None = None
    watch: Watch = field(default_factory=Watch)
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    sources: tuple[Carrier, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def resolve(
        cls,
        api: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        carrier: str = "the API",
    ) -> Policy:
        """Merges the carriers; ``carrier`` is what messages call the first one. :meth:`on` adds tables by device.

        Raises ConfigurationError for an unknown key, a value of the wrong type, or an unreadable file.
        """
        environ = os.environ if environ is None else environ
        sources = (
            (carrier, dict(api or {})),
            ("the engine's additional_config['m3hal']", dict(engine or {})),
            *carriers.from_file(environ),
            *carriers.from_environment(environ),
        )
        fleet.check(sources)
        return cls._merged(fleet.for_device(sources, None), sources if fleet.has_tables(sources) else ())

    def on(self, device: str) -> Policy:
        """What is asked for on a device: with the tables that stand for it, which come first in their carrier."""
        return self._merged(fleet.for_device(self.sources, device)) if self.sources else self

    @classmethod
    def _merged(cls, sources: Sequence[Carrier], waiting: tuple[Carrier, ...] = ()) -> Policy:
        origins: dict[str, Origin] = {}
        for source, values in sources:
            for key, value in carriers.flattened(values, source).items():
                first = origins.get(key)
                if first is None:
                    origins[key] = Origin(value, source)
                elif first.value != value:
                    origins[key] = Origin(first.value, first.carrier, (*first.over, (source, value)))
        origins.setdefault("backend", Origin("auto", DEFAULT))
        policy = cls(**carriers.fields_of(origins), origins=origins, sources=waiting)
        if policy.in_tree and policy.overrides:
            operator = min(policy.overrides)
            raise ConfigurationError(
                f"backend is {policy.told('backend')}, which leaves vLLM's own model in place, but {operator!r} of "
                f"'operators' is {policy.told(f'operators.{operator}')}; leave one of them out."
            )
        return policy

    @property
    def backend(self) -> str:
        """The order as users write it."""
        return "vllm" if self.in_tree else ",".join(map(str, self.order)) or "auto"

    def order_for(self, operator: str) -> Order:
        """The backends asked for this operator; empty is ``auto``."""
        return self.overrides.get(operator, self.order)

    def told(self, key: str) -> str:
        """A key's value and where it came from, for reasons."""
        return str(self.origins[key]) if key in self.origins else f"{self.to_json().get(key)!r} (from the API)"

    def named(self) -> tuple[BackendName, ...]:
        """Every backend that the policy names, each once."""
        return tuple(dict.fromkeys([*self.order, *(name for order in self.overrides.values() for name in order)]))

    def to_json(self) -> dict[str, Any]:
        """What decides the plan, in the schema's own keys; it enters the plan's fingerprint."""
        asked: dict[str, Any] = {"backend": self.backend}
        if self.overrides:
            asked["operators"] = {op: ",".join(map(str, order)) for op, order in sorted(self.overrides.items())}
        if self.require:
            asked["require"] = sorted("=".join(pair) for pair in self.require)
        if self.min_level:
            asked["min_level"] = self.min_level
        if self.deny:
            asked["deny"] = sorted(map(str, self.deny))
        return asked
