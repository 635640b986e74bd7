"""One schema, four carriers, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m3hal.dispatch.errors import ConfigurationError
from m3hal.dispatch.names import BackendName
from m3hal.dispatch.policy import Policy


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
