"""One schema, four carriers, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m3hal.dispatch.errors import ConfigurationError
from m3hal.dispatch.names import BackendName
from m3hal.dispatch.policy import Policy
from m3hal.dispatch.watch import Watch


def resolve(api: Any = None, engine: Any = None, **environ: str) -> Policy:
    return Policy.resolve(api, engine, environ)


def test_default_is_auto() -> None:
    """Nothing asked for: auto, and it says that this is the default."""
    policy = resolve()
    assert (policy.backend, policy.order, policy.in_tree) == ("auto", (), False)
    assert policy.origins["backend"].is_default


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("acme", (BackendName("acme"),)),
        ("acme, reference", (BackendName("acme"), BackendName("reference"))),
        (["acme", "reference"], (BackendName("acme"), BackendName("reference"))),
        ("acme,acme", (BackendName("acme"),)),
        ("acme-dist:acme", (BackendName("acme", "acme-dist"),)),
        ("auto", ()),
        ("vllm", ()),
    ],
)
def test_backend_syntax(value: Any, order: tuple[BackendName, ...]) -> None:
    """A name, names with commas or as a list, a distribution's name, and the two reserved words."""
    policy = resolve({"backend": value})
    assert policy.order == order
    assert policy.in_tree is (value == "vllm")


def test_distribution_names_compare_as_pip_does() -> None:
    """Acme_Dist and acme-dist are one distribution."""
    assert BackendName("acme", "Acme_Dist").matches("acme", "acme-dist")
    assert not BackendName("acme", "other").matches("acme", "acme-dist")


def test_first_carrier_wins_key_by_key(tmp_path: Path) -> None:
    """API, engine, file, environment; overrides merge operator by operator."""
    file = tmp_path / "m3hal.json"
    file.write_text(json.dumps({"backend": "c", "deny": ["x"], "operators": {"rms_norm": "c", "linear": "c"}}))
    policy = resolve(
        {"backend": "a"},
        {"backend": "b", "operators": {"rms_norm": "b"}},
        M3HAL_CONFIG=str(file),
        M3HAL_BACKEND="d",
        M3HAL_OPERATORS='{"kv_write": "d", "rms_norm": "d"}',
        M3HAL_MIN_LEVEL="emulated",
    )
    assert policy.backend == "a"
    assert {operator: str(order[0]) for operator, order in policy.overrides.items()} == {
        "rms_norm": "b",
        "linear": "c",
        "kv_write": "d",
    }
    assert policy.deny == (BackendName("x"),)
    assert policy.min_level == "emulated"
    assert [value for _, value in policy.origins["backend"].over] == ["b", "c", "d"]
    assert policy.origins["min_level"].carrier == "M3HAL_MIN_LEVEL"


@pytest.mark.parametrize(
    ("api", "environ", "message"),
    [
        ({"backends": "acme"}, {}, "'backends' from the API is no key.* Did you mean 'backend'"),
        ({"operators": {"rmsnorm": "acme"}}, {}, "'rmsnorm'.*Did you mean 'rms_norm'"),
        ({"operators": "acme"}, {}, "must map operators to backends"),
        ({"operators": {"rms_norm": "auto"}}, {}, "must name backends"),
        ({"operators": {"rms_norm": "vllm"}}, {}, "must name backends"),
        ({"min_level": "hardwear"}, {}, "Did you mean 'hardware'"),
        ({"backend": 3}, {}, "must be a string or a list of strings"),
        ({"backend": ""}, {}, "names no backend"),
        ({"backend": "auto,reference"}, {}, "'auto' stands alone"),
        ({"backend": "acme,vllm"}, {}, "'vllm' stands alone"),
        ({"plan": 3}, {}, "must be a string"),
        ({"m3hal": {"backend": "acme"}}, {}, "put its keys one level up"),
        ({}, {"M3HAL_BACKENDS": "acme"}, "M3HAL_BACKENDS means nothing.* Did you mean 'M3HAL_BACKEND'"),
        ({}, {"M3HAL_OPERATORS": "rms_norm:acme"}, "must read 'operator=backend"),
        ({}, {"M3HAL_OPERATORS": "{"}, "can't be read as JSON"),
        ({}, {"M3HAL_OPERATORS": "rms_norm=acme;rms_norm=reference"}, "names an operator twice"),
        ({}, {"M3HAL_CONFIG": "/nowhere.toml"}, "can't be read as TOML"),
    ],
)
def test_slips_are_errors_that_name_carrier_and_remedy(api: Any, environ: dict[str, str], message: str) -> None:
    """Nothing unknown is ignored."""
    with pytest.raises(ConfigurationError, match=message):
        Policy.resolve(api, environ=environ)


def test_file_that_holds_no_object(tmp_path: Path) -> None:
    """A list is no configuration."""
    file = tmp_path / "m3hal.json"
    file.write_text("[]")
    with pytest.raises(ConfigurationError, match="must hold an object"):
        resolve(M3HAL_CONFIG=str(file))


def test_unset_values_are_unset() -> None:
    """None in a carrier, and an empty variable, leave the next carrier its say."""
    assert resolve({"backend": None}, M3HAL_BACKEND="acme", M3HAL_DENY="").backend == "acme"


def test_overrides_need_a_plan() -> None:
    """With vLLM's own model no operator is planned, so an override that would be ignored is refused."""
    with pytest.raises(ConfigurationError, match=r"'vllm' \(from M3HAL_BACKEND\).*'rms_norm'.*leave one of them out"):
        resolve({"operators": {"rms_norm": "acme"}}, M3HAL_BACKEND="vllm")


def test_require_means_yes_unless_it_says_otherwise() -> None:
    """``batch_invariant`` and ``p_dtype=float32``."""
    policy = resolve(M3HAL_REQUIRE="batch_invariant, p_dtype=float32")
    assert policy.require == (("batch_invariant", "yes"), ("p_dtype", "float32"))


def test_export_reads_back_to_the_same_policy() -> None:
    """What enters the fingerprint and an exported plan is the schema itself."""
    policy = resolve(
        {
            "backend": "d:acme,reference",
            "operators": {"rms_norm": "a,b"},
            "require": ["p_dtype=float32"],
            "min_level": "compiled",
            "deny": ["x"],
        }
    )
    assert resolve(policy.to_json()) == policy
    assert json.loads(json.dumps(policy.to_json())) == policy.to_json()


def test_calls_are_watched_by_every_carrier(tmp_path: Path) -> None:
    """mode and its keys come from the API, the engine, a file and the environment alike; off by default."""
    assert not resolve().watch.is_on
    assert resolve(M3HAL_MODE="shadow").watch == Watch("shadow")
    assert resolve(engine={"mode": "record", "sample_rate": 0.5}).watch == Watch("record", sample_rate=0.5)
    file = tmp_path / "m3hal.json"
    file.write_text(json.dumps({"mode": "shadow", "capture_dir": "here", "on_mismatch": "raise"}))
    policy = resolve({"mode": "record"}, M3HAL_CONFIG=str(file), M3HAL_SAMPLE_RATE="0.25", M3HAL_CAPTURE_BYTES="2 MiB")
    assert policy.watch == Watch("record", "here", 0.25, 2 << 20, "raise")
    assert policy.origins["mode"].over == ((f"the file {file} (M3HAL_CONFIG)", "shadow"),)


def test_defaults_of_the_modes() -> None:
    """Every call is recorded, up to 1 GiB; one in a hundred is compared, and none of a user's data is kept."""
    record, shadow = Watch("record"), Watch("shadow")
    assert (record.rate, record.max_bytes) == (1.0, 1 << 30)
    assert (shadow.rate, shadow.max_bytes) == (0.01, 0)


def test_watching_is_no_part_of_the_plan() -> None:
    """It chooses nothing, so two plans that differ in it alone are one plan; what asks for it again is told apart."""
    on = resolve({"backend": "reference", "mode": "shadow", "sample_rate": 0.1})
    assert on.to_json() == resolve({"backend": "reference"}).to_json()
    assert resolve(on.watch.to_json()).watch == on.watch
    assert Watch("off", "elsewhere").to_json() == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mode", "shdow", "'mode' from the API must be one of off, record, shadow.*Did you mean 'shadow'"),
        ("on_mismatch", "die", "must be one of warn, raise"),
        ("sample_rate", 0, "more than 0 and at most 1; got 0"),
        ("sample_rate", "all", "more than 0 and at most 1"),
        ("sample_rate", 1.5, "more than 0 and at most 1"),
        ("sample_rate", True, "more than 0 and at most 1"),
        ("sample_rate", float("nan"), "more than 0 and at most 1"),
        ("capture_bytes", "1 GB", "must be a number of bytes"),
        ("capture_bytes", -1, "must be a number of bytes"),
        ("capture_dir", 3, "must be a string"),
    ],
)
def test_bad_values_of_watching_are_refused(key: str, value: Any, message: str) -> None:
    """Each with what it may be."""
    with pytest.raises(ConfigurationError, match=message):
        resolve({key: value})
