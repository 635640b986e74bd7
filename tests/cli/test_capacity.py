"""m3hal capacity: the published sequence counts, and what each assumption does to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from m3hal.checkpoint.tiny import TEXT_CONFIG
from m3hal.cli import main
from m3hal.shape import MINIMAX_M3

SPARSE = dict(MINIMAX_M3["sparse_attention_config"])
FLASH = "--model MiniMax-M3.1-Flash --gpu B300x4 --kv nvfp4 --parallel dep4 --context 256K"
M3 = "--model MiniMaxAI/MiniMax-M3-MXFP8 --gpu B300x4 --kv fp8 --parallel dep4 --context 256K"


def ask(command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    """The command's JSON; its exit code is checked."""
    assert main(["capacity", "--json", *command.split()]) == code
    return json.loads(capsys.readouterr().out)


def total(answer: dict, *caches: str) -> int:
    """Sequences on all GPUs when the named caches are counted."""
    return next(row["total"] for row in answer["sequences"] if row["caches"] == list(caches))


def test_the_published_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """76 sequences of M3.1-Flash and 28 of M3 with FP8 caches, counting the main cache alone as they do."""
    flash, m3 = ask(FLASH, capsys), ask(M3, capsys)
    assert flash["bytes_per_token"] == {"main": 34_560, "index": 4_104}
    assert m3["bytes_per_token"] == {"main": 61_440, "index": 7_296}
    assert (total(flash, "main"), total(m3, "main")) == (76, 28)
    assert (total(flash, "main", "index"), total(m3, "main", "index")) == (68, 24)
    assert flash["assumptions"][0] == "a GPU has 288.0 GB (as published), of which 90% is used (--utilization)"


def test_the_counts_hold_for_a_range_of_budgets_and_not_beyond(capsys: pytest.CaptureFixture[str]) -> None:
    """Both come out for 247.9 to 257 GB of weights and caches: the assumptions are not fitted to a hair."""
    for usable, expected in ((247.8, (72, 28)), (248.0, (76, 28)), (256.9, (76, 28)), (257.1, (80, 28))):
        assumed = f" --memory {usable} --utilization 1 --reserve 0"
        assert (total(ask(FLASH + assumed, capsys), "main"), total(ask(M3 + assumed, capsys), "main")) == expected


def test_weights_are_those_of_the_published_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """The matrices of one rank alone add up to the published 250.1 GB within 0.2 percent."""
    answer = ask("--model MiniMax-M3.1-Flash --weights nvfp4 --gpu B300 --parallel tp1", capsys, code=1)
    routed = answer["per_gpu"]["weights"]["routed"]
    assert routed == 57 * 128 * 3 * 6144 * 3072 * 9 // 16
    assert answer["per_gpu"]["weights"]["total"] == pytest.approx(250.1e9, rel=1e-9)
    unexplained = next(line for line in answer["assumptions"] if "differs from these matrices" in line)
    assert "by 0.3 GB" in unexplained


@pytest.mark.parametrize(
    ("parallel", "main_bytes", "weights"), [("tp4", 8_640, 64.0), ("tep4", 8_640, 64.0), ("dep4", 34_560, 75.8)]
)
def test_what_each_kind_of_parallelism_divides(
    parallel: str, main_bytes: int, weights: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """tp and tep divide the heads and the dense weights, dep neither; index keys are whole everywhere."""
    answer = ask(f"--model MiniMax-M3.1-Flash --gpu B300x4 --kv nvfp4 --context 256K --parallel {parallel}", capsys)
    assert answer["bytes_per_token"] == {"main": main_bytes, "index": 4_104}
    assert answer["per_gpu"]["weights"]["total"] / 1e9 == pytest.approx(weights, abs=0.1)
    shared = 1 if parallel == "dep4" else 4
    for row in answer["sequences"]:
        assert row["total"] == row["per_gpu"] * 4 // shared


def test_a_drafter_counts_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Apart from the others, and in the total."""
    answer = ask(FLASH + " --drafter 6x8x128:fp8", capsys)
    assert answer["bytes_per_token"]["drafter"] == 12_288
    assert total(answer, "main", "index", "drafter") < total(answer, "main", "index")
    assert total(answer, "main") == 76


def test_begun_pages_count_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """129 tokens take two pages of 128."""
    answer = ask("--model MiniMax-M3.1-Flash --gpu B300x4 --parallel dep4 --kv nvfp4 --context 129", capsys)
    assert answer["bytes_per_sequence"]["main"] == 256 * 34_560


def test_a_checkpoint_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By folder or file; a quantised one asks how."""
    config = {"text_config": dict(TEXT_CONFIG)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = ask(f"--model {tmp_path} --gpu H200 --kv bf16 --index fp8", capsys)
    assert answer["bytes_per_token"] == {"main": 4 * 2 * 256 * 2, "index": 3 * 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "x"}}))
    error = ask(f"--model {tmp_path}/config.json --gpu H200", capsys, code=2)["error"]
    assert "is quantised; say how with --weights bf16|mxfp8|mxfp4|nvfp4|fp8" in error
    assert ask(f"--model {tmp_path} --gpu H200 --weights mxfp4", capsys)["per_gpu"]["weights"]["routed"] > 0


def test_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 weights on one H200: no sequence, exit code 1, and no negative number."""
    answer = ask("--gpu H200 --context 1M", capsys, code=1)
    assert answer["per_gpu"]["caches"] == 0
    assert [row["total"] for row in answer["sequences"]] == [0, 0]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--gpu B30", "B30 is no GPU m3hal knows; pass --memory GB. Did you mean 'B300'?"),
        ("--gpu B300x4 --parallel pp4", "--parallel pp4 must be tp, tep or dep and a number of GPUs, e.g. dep4."),
        ("--gpu B300x4 --parallel dep3", "4 GPUs can't be divided into groups of 3 for dep3."),
        ("--gpu B300x4 --kv nvfp5", "--kv nvfp5 is no cache format. Did you mean 'nvfp4'?"),
        ("--gpu B300x4 --kv FP8", "--kv FP8 is no cache format. Did you mean 'fp8'?"),
        ("--gpu B300x4 --kv mxfp4", "no cache holds mxfp4 values"),
        ("--gpu B300x4 --context long", "--context long must be a number of tokens"),
        ("--gpu B300x4 --utilization 90", "--utilization 90.0 must be above 0 and at most 1."),
        ("--gpu B300x4 --memory nan", "--memory nan must be a number of gigabytes"),
        ("--gpu B300x4 --memory inf", "--memory inf must be a number of gigabytes"),
        ("--gpu B300x4 --memory=-5", "--memory -5 must be a number of gigabytes"),
        ("--gpu B300x4 --reserve nan", "--reserve nan must be a number of gigabytes"),
        ("--gpu B300x4 --reserve=-1e9", "--reserve -1e+09 must be a number of gigabytes"),
        ("--gpu B300x4 --kv float64", "--kv float64 is no cache format. Did you mean 'bfloat16'?"),
        ("--gpu B300x4 --drafter 0x8x128:fp8", "must have 1 to 1000 layers, heads and a dimension"),
        ("--gpu B300x4 --drafter 999999999999x8x128:fp8", "must have 1 to 1000 layers"),
        ("--gpu B300x4 --drafter big", "--drafter big must read LAYERSxHEADSxDIM:FORMAT"),
        ("--gpu B300x4 --drafter 6x8x24:nvfp4", "nvfp4 shares a scale among 16 neighbours; 24 don't fill groups"),
        ("--gpu B300x4 --model MiniMax-M4", "neither a published name nor a configuration. Did you mean 'MiniMax-M3'?"),
        ("--gpu B300x3 --parallel tp3", "64 attention heads can't be split over 3 ranks"),
    ],
)
def test_slips_are_sentences(command: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and what to write instead."""
    assert sentence in ask(command, capsys, code=2)["error"]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ({"num_hidden_layers": 0}, "num_layers must be 1 or more, not 0"),
        ({"num_hidden_layers": 1 << 40}, "lists 60 layers, and num_hidden_layers is 1099511627776"),
        ({"num_hidden_layers": [1]}, "m.json on tp1"),
        ({"hidden_size": float("inf")}, "m.json on tp1"),
        ({"rope_theta": {}}, "m.json on tp1"),
        ({"sparse_attention_config": SPARSE | {"sparse_block_size": 0}}, "block_size must be 1 or more, not 0"),
    ],
)
def test_a_configuration_of_odd_values_is_a_sentence(
    edit: dict, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever stands where a size should: exit code 2."""
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**MINIMAX_M3, **edit}))
    assert sentence in ask(f"--gpu H200 --model {path} --weights bf16", capsys, code=2)["error"]


def test_the_table_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Budget, bytes per token, counts and every assumption."""
    assert main(["capacity", *FLASH.split()]) == 0
    text = capsys.readouterr().out
    for part in ("-75.8 GB", "routed 58.1 GB", "main, nvfp4", "34,560", "main + index", "Assumed:", "no drafter"):
        assert part in text


def test_no_torch_is_needed() -> None:
    """Planning a machine takes no tensor library."""
    command = ["capacity", *FLASH.split()]
    code = f"import sys; from m3hal.cli import main; main({command!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_model_lies_over_all_gpus_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """dep over several, tp1 on one; the assumption is told, and gone once the user decides."""
    command = "--model MiniMax-M3-MXFP8 --kv fp8 --gpu B300x4"
    chosen, told = ask(command, capsys), ask(command + " --parallel dep4", capsys)
    assert chosen.pop("assumptions") == [
        *told.pop("assumptions"),
        "the model lies over the GPUs as dep4 (--parallel)",
    ]
    assert chosen == told
    assert ask("--gpu H200", capsys, code=1)["parallel"] == "tp1"
