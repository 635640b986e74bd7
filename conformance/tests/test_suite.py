"""The suite itself: its cases are well-formed, reproducible, within their sites, and their bounds can fail."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from m3hal_conformance.buckets import sizes
from m3hal_conformance.bugs import BUGS, NO_ROOM, TESTS
from m3hal_conformance.case import MAX_CONTEXT, MAX_SEQS, MAX_TOKENS, case_set_hash
from m3hal_conformance.checks import CHECKS
from m3hal_conformance.claim import TIERS
from m3hal_conformance.composed import PARTS, check_layer
from m3hal_conformance.oracle import BITWISE
from m3hal_conformance.results import Result
from m3hal_conformance.runner import Runner
from m3hal_conformance.sizes import CPU, DEVICE, sizes_of
from m3hal_conformance.suite import all_cases, select
from m3hal_conformance.tolerance import C, calibration
from m3hal_conformance.trees import tensors

from m3hal import ops

CASES = all_cases()
ROOT = Path(__file__).parents[2]


def test_every_operator_has_cases():
    """Each operator is asked about its small, its empty and its strided batches."""
    for name in ops.NAMES:
        mine = select(operators=[name])
        assert any(case.quick for case in mine), name
        assert any("F30" in case.bugs for case in mine), f"{name} has no case without tokens"
        assert len(mine) >= 8, name


def test_ids_and_checks_exist():
    """Ids are unique, of the form operator/name/format, and every named check and bug exists."""
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.id.split("/")[0] == case.operator
        assert case.id.count("/") == 2
        assert set(case.checks) <= set(CHECKS)
        assert set(case.bugs) <= set(BUGS)


def test_every_bug_has_its_place():
    """Each public bug of an operator or a format is a case, each other one a test, or there is a reason why neither."""
    reproduced = {bug for case in CASES for bug in case.bugs}
    kinds: dict[str, set[str]] = {}
    for bug in BUGS.values():
        assert bug.link.startswith("https://"), bug.id
        kinds.setdefault(bug.where, set()).add(bug.id)
    assert kinds["case"] | kinds["format"] <= reproduced
    assert kinds["dispatch"] | kinds["loading"] == set(TESTS)
    assert kinds["contract"] == set(NO_ROOM)


@pytest.mark.skipif(not (ROOT / "tests" / "dispatch").is_dir(), reason="the interface layer's tests are not installed")
@pytest.mark.parametrize("bug", sorted(TESTS))
def test_tests_of_bugs_exist(bug):
    """The test that a bug names is there."""
    path, _, name = TESTS[bug].partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_real_sizes_are_asked():
    """The real hidden size, heads, page and k are among the cases; nothing exceeds its site."""
    assert any(case.site.num_q_heads == 64 for case in select(operators=["sparse_attention"]))
    assert {c.site.page_size for c in CASES if c.operator == "sparse_attention"} == {16, 32, 64, 128, 256, 512}
    for case in (case for case in CASES if case.operator == "moe_experts" and case.sizes == CPU.name):
        assert case.site.num_local_experts <= CPU.experts or case.site.hidden_size < 1024, case.id
    for case in select(quick=True)[::7]:
        found = sizes(ops.load(case.operator), case.inputs())
        assert found.get("tokens", 0) <= MAX_TOKENS
        assert found.get("requests", 0) <= MAX_SEQS
        assert found.get("context", 0) <= MAX_CONTEXT
        if case.operator == "topk_blocks":
            assert case.inputs()["scores"].shape[-1] * case.site.block_size <= case.site.max_context, case.id


def test_devices_are_asked_about_the_whole_model():
    """All 128 experts and 64K contexts, in the real hidden size; a CPU is asked none of it, and says why."""
    large = [case for case in CASES if case.sizes == DEVICE.name]
    assert {case.operator for case in large} >= {"moe_experts", "block_scores", "sparse_attention", "paged_attention"}
    experts = [case.site for case in large if case.operator == "moe_experts"]
    assert {site.hidden_size for site in experts if site.num_local_experts > 4} == {6144}  # and a crowd of few
    assert max(site.num_local_experts for site in experts) == DEVICE.experts == 128
    assert max(case.site.max_context for case in large) == DEVICE.context == 65536
    assert [sizes_of(d).name for d in ("cpu", "cuda:sm_90", "hip:gfx950", "hpu:gaudi2")] == ["cpu", *["device"] * 3]
    result = Runner("reference", "cpu").run_case(large[0])
    assert (result.status, "accelerators" in result.reason) == ("unsupported", True)


def test_a_devices_sizes_work():
    """A case of a device's sizes, asked on a CPU that is taken for a device."""
    runner = Runner("reference", "cpu")
    runner.__dict__["sizes"] = DEVICE
    (case,) = select(ids=["block_scores/device_context"])
    result = runner.run_case(replace(case, checks=("oracle",)))
    assert result.status == "pass", result.reason or result.sentence
    assert sizes(ops.load(case.operator), case.inputs())["context"] == DEVICE.context


@pytest.mark.parametrize(
    "case", select(ids=["sparse_attention/decode", "moe_experts/few_resident"]), ids=lambda c: c.id
)
def test_inputs_follow_from_the_id(case):
    """The same id and seed give the same bits; another seed gives other numbers of the same shapes."""
    one, two, other = (dict(tensors(case.inputs(seed))) for seed in (0, 0, 1))
    assert all(torch.equal(one[k].view(torch.uint8), two[k].view(torch.uint8)) for k in one if one[k].is_contiguous())
    assert {k: t.shape for k, t in one.items()} == {k: t.shape for k, t in other.items()}
    assert any(not torch.equal(one[k], other[k]) for k in one)


def test_inputs_follow_from_the_id_in_another_process():
    """Another process, with another hash seed, draws the same numbers."""
    code = (
        "from m3hal_conformance.suite import select\n"
        "print(select(ids=['linear/k_96'])[0].inputs()['x'].double().sum().item())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": str(n)}, capture_output=True, text=True, check=True
        )
        for n in (1, 2)
    ]
    assert runs[0].stdout == runs[1].stdout != ""


def test_case_set_hash_follows_the_cases():
    """A changed check changes the hash of the case set."""
    changed = (replace(CASES[0], checks=("oracle",)), *CASES[1:])
    assert case_set_hash(CASES) != case_set_hash(changed)


def test_every_bound_is_calibrated():
    """Each operator that is not bitwise has an entry in each format and class of inputs that its cases use."""
    found = {tuple(key.split("+")[0].split("/")[i] for i in (0, 2, 3)) for key in calibration() if "+" not in key}
    for case in CASES:
        plain = case.site.kv_format in ("", *C_FORMATS) and case.site.weight_format in ("", *C_FORMATS)
        asked = "oracle" in case.checks and case.operator not in BITWISE and plain
        if asked:
            assert (case.operator, case.format, case.input_class) in found, case.id


C_FORMATS = tuple({format for _, format in C})


def test_bounds_are_tight():
    """No bound for plain formats lets one percent through, in fp32 not even 1e-3."""
    for key, entry in calibration().items():
        _, output, format, _ = key.split("+")[0].split("/")
        if "+" in key or output.endswith("buf"):
            continue
        if format == "bfloat16" and entry["exact"] < 0.2:  # a row error, not an ulp
            whole = key.startswith("sparse_decoder_layer/out/")  # ten roundings of operands, one after the other
            assert C["row", format] * entry["exact"] < (2e-2 if whole else 1e-2), key
        elif format == "float32" and entry["exact"] < 0.2:
            assert C["row", format] * entry["exact"] < 1e-3, key


def test_quick_cases_of_the_reference_pass():
    """The reference passes a slice of the suite; `m3hal conform` asks it the rest."""
    operators = ("rms_norm", "swiglu_oai", "route_topk", "sparse_attention", "qk_norm_rope_insert")
    results = Runner("reference", "cpu").run(select(operators=operators, quick=True)[::3])
    assert [result.sentence for result in results if result.status == "fail"] == []


def test_tiers_are_of_operators():
    """A tier names operators, and the composed layer uses real ones."""
    assert set().union(*TIERS.values()) == set(ops.NAMES)
    assert set(PARTS) <= set(ops.NAMES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_composed_layer_of_the_reference(dtype):
    """The reference's operators, composed, are within the layer's bound."""
    result = check_layer(Runner("reference", "cpu"), dtype)
    assert result.status == "pass", result.sentence
    assert isinstance(result, Result)
