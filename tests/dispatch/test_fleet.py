"""One configuration file for machines with different devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m3hal.dispatch import ConfigurationError, Policy, pin, plan
from m3hal.shape import ModelShape

FLEET = """
backend = "auto"
deny = ["x"]

[devices."cuda:sm_90"]
backend = "triton,reference"

[devices."cuda:*"]
backend = "nvidia,reference"
min_level = "contract"

[devices."hip:gfx95*"]
backend = "amd,reference"

[devices."hip:gfx95*".operators]
rms_norm = "reference"
"""


@pytest.fixture
def fleet(tmp_path: Path) -> dict[str, str]:
    """An environment that names the file above."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    return {"M3HAL_CONFIG": str(tmp_path / "fleet.toml")}


@pytest.mark.parametrize(
    ("device", "backend", "min_level"),
    [
        ("cuda:sm_90", "triton,reference", "contract"),
        ("cuda:sm_100", "nvidia,reference", "contract"),
        ("hip:gfx950", "amd,reference", None),
        ("hpu:gaudi2", "auto", None),
        ("cpu", "auto", None),
    ],
)
def test_the_most_specific_table_wins(fleet: dict[str, str], device: str, backend: str, min_level: str | None) -> None:
    """A device's own table, then patterns, then what stands outside of tables; key by key."""
    policy = Policy.resolve(environ=fleet).on(device)
    assert (policy.backend, policy.min_level) == (backend, min_level)
    assert [str(name) for name in policy.deny] == ["x"]
    assert list(policy.overrides) == (["rms_norm"] if device == "hip:gfx950" else [])


def test_without_a_device_the_default_stands(fleet: dict[str, str]) -> None:
    """Until a device is known, no table does; a policy that was settled stays as it is."""
    policy = Policy.resolve(environ=fleet)
    assert policy.backend == "auto"
    settled = policy.on("cuda:sm_90")
    assert settled.on("hip:gfx950") is settled


def test_provenance_names_the_table(fleet: dict[str, str]) -> None:
    """Where a value came from, and what it hides."""
    told = Policy.resolve(environ=fleet).on("cuda:sm_90").told("backend")
    file = f"the file {fleet['M3HAL_CONFIG']} (M3HAL_CONFIG)"
    assert told.startswith(f"'triton,reference' (from devices.'cuda:sm_90' of {file}, over 'nvidia,reference' from ")
    assert f"over 'auto' from {file}" in told


def test_carriers_keep_their_order(fleet: dict[str, str]) -> None:
    """A table of the file gives way to what the engine says without one, and wins over the environment."""
    assert Policy.resolve(engine={"backend": "reference"}, environ=fleet).on("cuda:sm_90").backend == "reference"
    assert Policy.resolve(environ={**fleet, "M3HAL_MIN_LEVEL": "hardware"}).on("cuda:sm_90").min_level == "contract"
    engine = {"devices": {"cuda:sm_90": {"backend": "acme"}}}
    assert Policy.resolve(engine=engine, environ=fleet).on("cuda:sm_90").backend == "acme"


def test_a_plan_takes_the_table_of_its_device(shape: ModelShape) -> None:
    """Planning for a device is enough, and its fingerprint is that of the same policy without tables."""
    tables = {"backend": "reference", "devices": {"cpu": {"operators": {"rms_norm": "reference"}}}}
    made = plan(shape, "cpu", Policy.resolve(tables, environ={}))
    flat = plan(shape, "cpu", Policy.resolve({"backend": "reference", **tables["devices"]["cpu"]}, environ={}))  # type: ignore[index]
    assert made.fingerprint == flat.fingerprint
    assert "operators.rms_norm" in made.choice("rms_norm", "moe").reason
    assert "sources" not in json.dumps(made.to_json())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"cuda:sm90": {}}, "'cuda:sm90' in 'devices' from the API is no device. Did you mean 'cuda:sm_90'"),
        ({"cuda": {}}, "Did you mean 'cuda:sm_90'"),
        ({"rocm:gfx950": {}}, "Did you mean 'hip:gfx950'"),
        ({"cudda:sm_90": {}}, "Did you mean 'cuda:sm_90'"),
        ({"gaudi2": {}}, "Did you mean 'hpu:gaudi2'"),
        ({"default": {}}, "is no device"),
        ({"cuda:sm9*": {}}, "'cuda:sm9\\*' in 'devices' from the API is no device. Did you mean 'cuda:sm_90'"),
        ({"hip:*:*": {}}, "Did you mean 'hip:gfx950'"),
        ({"CPU": {}}, "Did you mean 'cpu'"),
        ({"cpu": {"bakend": "acme"}}, "'bakend' from devices.'cpu' of the API is no key.* Did you mean 'backend'"),
        ({"hip:gfx950": {"min_level": "hardwear"}}, "Did you mean 'hardware'"),
        ({"cpu": {"devices": {}}}, "put its tables one level up"),
        ({"cpu": "acme"}, "must be a table of keys"),
        ("cpu", "must map devices to tables"),
    ],
)
def test_slips_are_refused_on_every_machine(tables: Any, message: str) -> None:
    """Also in the table of a device that is not here."""
    with pytest.raises(ConfigurationError, match=message):
        Policy.resolve({"devices": tables}, environ={})


@pytest.mark.parametrize(
    "pattern", ["cuda:*", "cuda:sm_1*", "cuda:sm_?0", "cuda:s*", "hpu:gaudi[23]", "*", "*:sm_90", "xpu:*"]
)
def test_patterns_that_a_device_may_match(pattern: str) -> None:
    """Wildcards anywhere in an architecture whose beginning is right."""
    Policy.resolve({"devices": {pattern: {}}}, environ={})


def test_of_two_patterns_as_long_the_first_wins() -> None:
    """The file decides, and what it hides is told."""
    tables = {"cuda:sm_9?": {"backend": "acme"}, "cuda:sm_?0": {"backend": "reference"}}
    policy = Policy.resolve({"devices": tables}, environ={}).on("cuda:sm_90")
    assert policy.backend == "acme"
    assert "over 'reference' from devices.'cuda:sm_?0'" in policy.told("backend")


def test_a_table_may_pin_what_others_leave_open(shape: ModelShape, tmp_path: Path) -> None:
    """A plan in a device's table hides the wider keys of its file, and is none where a narrower table says so."""
    pinned = plan(shape, "cpu", Policy.resolve({"backend": "reference"}, environ={}))
    path = str(tmp_path / "plan.json")
    pin.export(pinned, path)
    tables = {"backend": "auto", "min_level": "hardware", "mode": "shadow", "devices": {"cpu": {"plan": path}}}
    policy = Policy.resolve(tables, environ={}).on("cpu")
    assert plan(shape, "cpu", policy).fingerprint == pinned.fingerprint
    assert policy.watch.mode == "shadow"
    assert Policy.resolve(tables, environ={}).on("hip:gfx950").min_level == "hardware"
    narrow = {"plan": path, "devices": {"cpu": {"plan": "", "backend": "reference"}}}
    assert not Policy.resolve(narrow, environ={}).on("cpu").pinned
    both = {"plan": path, "devices": {"cpu": {"backend": "reference"}}}
    with pytest.raises(ConfigurationError, match=r"'plan' pins every choice; remove 'backend' from devices\.'cpu'"):
        plan(shape, "cpu", Policy.resolve(both, environ={}))


def test_a_third_partys_device_may_have_a_table() -> None:
    """A kind that m3hal does not know is no slip unless it looks like one."""
    policy = Policy.resolve({"devices": {"acme:x1": {"backend": "acme"}}}, environ={})
    assert policy.on("acme:x1").backend == "acme"
    assert policy.on("cpu").backend == "auto"
