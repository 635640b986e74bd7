"""Calls recorded where a model runs become cases that any backend can be asked."""

from dataclasses import replace

import pytest
import torch
from m3hal_broken_zoo import MUTANTS
from m3hal_broken_zoo.matrix import installed
from m3hal_conformance.capture import load, save
from m3hal_conformance.compaction import take
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal.cli import main


def captured(name, folder):
    """A call of a case's inputs as a file."""
    case = select(ids=[name])[0]
    taken = take(case.site, case.inputs())
    return save(folder, "call", case.operator, taken.site, taken.inputs, layer="model.layers.3")


@pytest.mark.parametrize(
    "name",
    [
        "sparse_attention/ragged",
        "paged_attention/ragged",
        "qk_norm_rope_insert/page_boundaries",
        "select_blocks/around_2048",
        "moe_experts/few_resident",
        "route_topk/bias_decides",
        "kv_copy_blocks/swap_within_one_cache",
        "swiglu_oai/published_numbers",
        "sparse_attention/fp8_e4m3_decode",
        "kv_write/nvfp4_page_boundaries",
        "moe_experts/nvfp4_experts",
    ],
)
def test_a_captured_call_is_a_case(name, tmp_path, capsys):
    """The file loads without running code, only its owner may read it, and the reference passes it."""
    file = captured(name, tmp_path / "captures")
    assert file.stat().st_mode & 0o077 == 0
    assert load(file).site.kind == select(ids=[name])[0].site.kind
    assert main(["replay", str(file)]) == 0
    assert capsys.readouterr().out.startswith("pass")


def test_a_replayed_call_finds_the_mutant(tmp_path, capsys):
    """A wrong backend fails the captured call, with exit code 1."""
    file = captured("sparse_attention/ragged", tmp_path)
    mutant = next(m for m in MUTANTS if m.name == "lse_base_two")
    with installed(mutant):
        assert main(["replay", str(file), "--backend", mutant.backend]) == 1
    assert "lse" in capsys.readouterr().out


def test_names_are_numbered(tmp_path):
    """A second call of the same name gets the next number."""
    files = [captured("swiglu_oai/published_numbers", tmp_path) for _ in range(2)]
    assert [file.name for file in files] == ["call-000.pt", "call-001.pt"]


def test_what_is_no_capture_is_refused(tmp_path, capsys):
    """A missing file, bytes, a tensor and another version: a sentence each, exit code 2, no advice of torch."""
    path = tmp_path / "x.pt"
    assert main(["replay", str(path)]) == 2
    assert "can't be read: No such file" in capsys.readouterr().err
    path.write_bytes(b"no")
    assert main(["replay", str(path)]) == 2
    told = capsys.readouterr().err
    assert "is no capture; mode 'record' writes them" in told
    assert "weights_only" not in told
    torch.save(torch.ones(2), path)
    assert main(["replay", str(path)]) == 2
    torch.save(dict.fromkeys(("version", "operator", "site", "inputs"), 7), path)
    assert main(["replay", str(path)]) == 2
    assert "a capture of version 7; this suite reads 1" in capsys.readouterr().err


def test_replay_says_whom_it_asked_and_how_to_ask_again(tmp_path, capsys, monkeypatch):
    """Backend, device, ratio and the command; the environment names the backend, as for conform."""
    file = str(captured("rms_norm/tokens_7", tmp_path))
    assert main(["replay", file, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "reference on cpu, worst error / bound 0" in out
    assert f"again: m3hal replay {file} --backend reference --device cpu" in out
    assert main(["replay", file, "--backend", "auto"]) == 2
    assert "'auto' names none" in capsys.readouterr().err
    monkeypatch.setenv("M3HAL_BACKEND", "refrence")
    assert main(["replay", file]) == 2
    assert "Did you mean 'reference'" in capsys.readouterr().err


def test_replay_on_a_device_that_is_not_here(tmp_path, capsys):
    """Exit code 3."""
    file = str(captured("rms_norm/tokens_7", tmp_path))
    assert main(["replay", file, "--device", "cuda:sm_10"]) == 3
    assert "this machine has no cuda:sm_10" in capsys.readouterr().err


def test_harsh_numbers_are_no_fault(tmp_path):
    """Sums that cancel to a thousandth, which no calibrated class has, pass; a fault in them does not."""
    case = select(ids=["moe_experts/few_resident/float32"])[0]
    inputs = case.inputs()
    x = inputs["x"]
    x[:, 1::2] = -x[:, ::2] * 1.001
    for experts in (inputs["experts"].w13, inputs["experts"].w2):
        experts[..., 1::2] = experts[..., ::2]
    harsh = load(save(tmp_path, "harsh", case.operator, case.site, inputs))
    reference = Runner("reference", "cpu")
    assert reference.run_case(replace(harsh, is_captured=False)).status == "fail"
    assert reference.run_case(harsh).status == "pass"
    mutant = next(m for m in MUTANTS if m.backend == "zoo-moe-experts-short-hidden")
    with installed(mutant) as runner:
        assert runner.run_case(harsh).status == "fail"
