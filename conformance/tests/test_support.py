"""The support matrix: what a claim proves shows, what it doesn't shows as that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from m3hal_conformance.suite import select
from m3hal_conformance.support import STATES, Support, format_of, support
from m3hal_conformance.support_page import page, terminal

from m3hal import ops
from m3hal.cli import main
from m3hal.dispatch.discovery import Found, discover
from m3hal.dispatch.levels import digest
from m3hal.dispatch.screen import candidates

OPERATOR = "swiglu_oai"


@pytest.fixture(scope="module")
def reference() -> Found:
    return next(found for found in discover() if found.name == "reference")


@pytest.fixture(scope="module")
def claim(reference: Found) -> dict[str, Any]:
    """One operator, every case passed, by the installed files."""
    good, _ = candidates(reference, {OPERATOR: ops.load(OPERATOR)}, {})
    (identity,) = {candidate.impl_id for candidate in good}
    rows = [{"case": case.id, "status": "pass", "impl_id": identity} for case in select(operators=[OPERATOR])]
    return {
        "backend": "reference",
        "device": "acme:x1",
        "executor": "in-process",
        "environment": {"torch": "9.9", "triton": "8.8", "driver": "7", "device_label": "Acme X1"},
        "suite": {"whole_operators": [OPERATOR]},
        "implementations": {},
        "results": rows,
    }


def states(reference: Found, *claims: dict[str, Any]) -> dict[str, str]:
    """Device -> state of the operator."""
    cells = support([reference], claims).cells
    return {cell.device: cell.state for cell in cells if cell.operator == OPERATOR}


def _with(claim: dict[str, Any], row: dict[str, Any], every: bool = True) -> dict[str, Any]:
    rows = [{**old, **row} if every or number == 0 else old for number, old in enumerate(claim["results"])]
    return {**claim, "results": rows}


@pytest.mark.parametrize(
    ("edit", "state"),
    [
        (lambda c: c, "run"),
        (lambda c: _with(c, {"impl_id": "0" * 16}), "stale"),
        (lambda c: _with(c, {"impl_id": "0" * 16}, every=False), "stale"),
        (lambda c: _with(c, {"status": "fail"}, every=False), "fails"),
        (lambda c: _with(c, {"status": "waived"}, every=False), "partial"),
        (lambda c: {**c, "results": c["results"][1:]}, "partial"),
        (lambda c: {**c, "suite": {}}, "partial"),
        (lambda c: _with(c, {"status": "unsupported", "impl_id": ""}), "declared"),
        (lambda c: {**c, "executor": "interpreter"}, None),
        (lambda c: {**c, "backend": "acme"}, None),
    ],
)
def test_a_cell_says_how_far_the_claim_reaches(reference: Found, claim: Any, edit: Any, state: str | None) -> None:
    """Current and whole, changed files, failures, missing cases, another backend's: each has its word."""
    assert states(reference, edit(claim)).get("acme:x1") == state


def test_a_contract_is_no_run(reference: Found, claim: dict[str, Any]) -> None:
    """It holds on every device of the backend, never makes one known by itself, and a run there outweighs it."""
    contract = {**claim, "executor": "double", "device": "acme:x9"}
    partial = {**claim, "results": claim["results"][:1]}
    assert states(reference, contract) == {}
    assert states(reference, contract, partial) == {"acme:x1": "contract"}
    assert states(reference, contract, claim) == {"acme:x1": "run"}


def test_failures_are_told_first(reference: Found, claim: dict[str, Any]) -> None:
    """No other claim outweighs a failure of the installed files."""
    assert states(reference, claim, _with(claim, {"status": "fail"}, every=False)) == {"acme:x1": "fails"}


def test_a_variant_is_told_by_what_was_required(claim: dict[str, Any]) -> None:
    """It is no row of the ordinary choice: neither may its failure or its run be read as that of what serves."""
    (triton,) = (found for found in discover() if found.name == "triton")
    good, _ = candidates(triton, {"linear": ops.load("linear")}, {})
    ids = {candidate.impl.traits.get("batch_invariant", "no"): candidate.impl_id for candidate in reversed(good)
           if not candidate.impl.devices or "cuda:sm_90" in candidate.impl.devices}  # fmt: skip
    cases = select(operators=["linear"])

    def made(require: list[str], identity: str, status: str) -> dict[str, Any]:
        rows = [{"case": case.id, "status": status, "impl_id": identity} for case in cases]
        whole = {"suite": {"whole_operators": ["linear"]}, "backend": "triton", "device": "cuda:sm_90"}
        return {**claim, **whole, "require": require, "results": rows}

    def told(cells: Any) -> dict[tuple[str, ...], str]:
        return {cell.require: cell.state for cell in cells if (cell.device, cell.operator) == ("cuda:sm_90", "linear")}

    ordinary, variant = made([], ids["no"], "pass"), made(["batch_invariant"], ids["yes"], "fail")
    found = support([triton], [ordinary, variant])
    assert told(found.cells) == {(): "run", ("batch_invariant",): "fails"}
    assert "1 run, " in terminal(found)
    assert "1 variant fails" in terminal(found)
    assert "| linear (batch_invariant) | fails |" in page(found)
    assert told(support([triton], [variant]).cells) == {(): "declared", ("batch_invariant",): "fails"}


def test_a_trait_that_an_operator_does_not_have_makes_no_variant(reference: Found, claim: dict[str, Any]) -> None:
    """Nothing was asked of it by requiring one: what ran is the ordinary choice."""
    cells = support([reference], [{**claim, "require": ["batch_invariant"]}]).cells
    assert [cell.require for cell in cells if cell.operator == OPERATOR] == [()]


def test_composed_operators_are_told_by_their_plan(reference: Found) -> None:
    """A composition has no files of its own: it is current as long as its plan gives the same identity."""
    from m3hal_conformance.runner import Runner

    case = select(operators=["select_blocks"], quick=True)[0]
    made = Runner("reference", "cpu").plan(case.operator, case.site, case.layout)
    identity = made.impl_id(made.choice(case.operator, case.site.kind))
    described = {"case": case.id, "path": "a composition of the backend's core operators"}
    body = {
        "backend": "reference",
        "device": "cpu",
        "executor": "in-process",
        "environment": {},
        "suite": {},
        "implementations": {"select_blocks": {identity: described, "0" * 16: described}},
    }
    for ran, state in ((identity, "partial"), ("0" * 16, "stale")):
        rows = [{"case": case.id, "status": "pass", "impl_id": ran}]
        cells = support([reference], [{**body, "results": rows}]).cells
        assert {c.state for c in cells if c.operator == "select_blocks"} == {state}


def test_the_command(claim: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Installed backends' claims and a named file's, as JSON and as tables; what is no claim is refused."""
    whole = {"claim_version": 1, "seed": 0, "counts": {}, "tiers": {}, "digest": ""}
    rows = [{**row, "failed": {}, "ratio": 0.5} for row in claim["results"]]
    suite = {**claim["suite"], "case_set": "", "whole": False}
    body = {**whole, **claim, "suite": suite, "results": rows}
    file = tmp_path / "claim.json"
    file.write_text(json.dumps(body))
    assert main(["claim", "matrix", str(file)]) == 2
    assert "was edited" in capsys.readouterr().err
    file.write_text(json.dumps({**body, "digest": digest(body)}))
    assert main(["claim", "matrix", str(file), "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    mine = [cell for cell in cells if cell["device"] == "acme:x1" and cell["operator"] == OPERATOR]
    assert mine == [{"backend": "reference", "device": "acme:x1", "operator": OPERATOR, "format": "any",
                     "state": "run", "passed": len(rows), "require": []}]  # fmt: skip
    assert main(["claim", "matrix"]) == 0
    told = capsys.readouterr().out
    assert "contract: contract-tested on a double of the vendor's library" in told
    assert "vLLM" not in told.splitlines()[0]
    file.write_text("{}")
    assert main(["claim", "matrix", str(file)]) == 2


def test_parts_of_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    """By device and operator, its software with it; what is neither is refused with what there is."""
    assert main(["claim", "matrix", "--device", "cuda:sm_90", "--op", "linear", "--op", "rms_norm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {cell["device"] for cell in told["cells"]} == {"cuda:sm_90"}
    assert {cell["operator"] for cell in told["cells"]} == {"linear", "rms_norm"}
    assert {row["device"] for row in told["software"]} <= {"cuda:sm_90"}
    assert main(["claim", "matrix", "--device", "cuda:sm_9"]) == 2
    assert "they are about " in capsys.readouterr().err
    assert main(["claim", "matrix", "--op", "rms_nrm"]) == 2
    assert "Did you mean 'rms_norm'?" in capsys.readouterr().err


def test_backends_without_claims_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The reference's lie in the repository: without them its row is not silently missing, with them it is there."""
    assert main(["claim", "matrix", "--op", "linear"]) == 0
    assert "Not in these tables: reference, of which no claim" in capsys.readouterr().out
    folder = Path(__file__).parents[2] / "docs" / "claims"
    assert main(["claim", "matrix", str(folder), "--op", "linear", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "reference" not in told["without_claims"]
    assert "reference" in {cell["backend"] for cell in told["cells"]}


@pytest.mark.parametrize(
    ("action", "told"), [("matrix", "--device"), ("verify", "a folder of them"), ("compare", "two")]
)
def test_each_action_has_its_help(action: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What it takes, and not what the others do."""
    with pytest.raises(SystemExit) as ended:
        main(["claim", action, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert told in printed
    assert ("--op" in printed) == (action == "matrix")


def test_the_format_of_a_case() -> None:
    """Of the caches that an operator reads and writes; index keys count where they alone are stored."""
    by_id = {case.id: format_of(case) for case in select()}
    assert set(by_id.values()) == {"any", "float32", "bfloat16", "fp8_e4m3", "nvfp4", "mxfp4"}
    assert {format for name, format in by_id.items() if name.startswith("rms_norm/")} == {"any"}


def test_the_page_tells_software_and_models(reference: Found, claim: dict[str, Any]) -> None:
    """torch, Triton, device and state stand in the page and in the terminal; a stale engine run is no model."""
    made = support([reference], [claim])
    engine = {"vllm": "0.32.0", "torch": "2", "device": "acme:x1", "backend": "reference", "kv": "nvfp4",
              "index": "mxfp4", "state": "run"}  # fmt: skip
    for text in (page(made), terminal(made)):
        assert all(word in text for word in ("Acme X1", "9.9", "8.8", "1 run"))
    assert "no model" in page(made)
    assert "no model" not in terminal(made), "whole models are the page's to know"
    ran = Support(made.cells, made.software, (engine,))
    assert "| 0.32.0 | 2 | acme:x1 | reference | nvfp4 | mxfp4 | run |" in page(ran)
    assert "no model |" not in page(ran).replace("single operators were run, no model.", "")
    assert "no model |" in page(Support(made.cells, made.software, ({**engine, "state": "stale: it changed"},)))
    assert all(f"| {state} |" in page(made) for state in STATES)
