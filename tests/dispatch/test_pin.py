"""Pinned plans, beside what an engine requires by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from m3hal.dispatch import ConfigurationError, Policy, pin, plan
from m3hal.shape import ModelShape

INVARIANT = (("batch_invariant", "yes"),)


def test_a_pin_does_not_take_an_engines_requirement_away(shape: ModelShape, tmp_path: Path) -> None:
    """A plan that was made without it can't serve an engine that asks for it, although no key does."""
    path = str(tmp_path / "plan.json")
    pin.export(plan(shape, "cpu", Policy.resolve({"backend": "reference"}, environ={})), path)
    asked = Policy.resolve({"plan": path}, environ={})
    assert plan(shape, "cpu", asked).choice("rms_norm", "moe").server == "reference"
    with pytest.raises(ConfigurationError, match=r"requires batch_invariant=yes, and the pinned .* without; export"):
        plan(shape, "cpu", replace(asked, require=INVARIANT))


def test_a_pin_that_has_the_requirement_serves(shape: ModelShape, tmp_path: Path) -> None:
    """The plan says what it was made with."""
    path = str(tmp_path / "plan.json")
    asked = replace(Policy.resolve({"backend": "reference"}, environ={}), require=INVARIANT)
    pin.export(plan(shape, "cpu", asked, partial=True), path)
    assert pin.load(replace(Policy.resolve({"plan": path}, environ={}), require=INVARIANT)).policy.require == INVARIANT
