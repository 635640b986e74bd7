"""Made-up checkpoints: M3's own names and shapes, the same bytes each time, the same numbers in each layout."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from m3hal.checkpoint import tiny
from m3hal.checkpoint.convert import GAUDI2, HOPPER, Profile, convert
from m3hal.checkpoint.synthetic import Synthetic, _expert_entries, main, write
from tests.checkpoint.conftest import SMALL, digest


def test_the_published_model() -> None:
    """60 layers, 128 experts: the counts and shapes of amd/MiniMax-M3-MXFP4's experts, and their 411 GiB as FP8."""
    model = Synthetic(layers=60, dense=3, experts=128)
    entries = {name: (dtype, shape) for name, dtype, shape in _expert_entries(model, "quark")}
    routed = [name for name in entries if re.search(r"\.experts\.\d+\.w[123]\.weight$", name)]
    assert len(routed) == 57 * 128 * 3
    expert = "language_model.model.layers.3.block_sparse_moe.experts.127."
    assert entries[expert + "w1.weight"] == ("U8", (3072, 3072))
    assert entries[expert + "w1.weight_scale"] == ("U8", (3072, 192))
    assert entries[expert + "w2.weight"] == ("U8", (6144, 1536))
    assert entries[expert + "w2.weight_scale"] == ("U8", (6144, 96))
    assert not any(".layers.2." in name for name in entries)
    fp8 = sum(rows * columns for name, (rows, columns) in model.expert_matrices() if "shared" not in name)
    assert fp8 / 2**30 == pytest.approx(384.75)


def test_names_are_those_of_the_tiny_checkpoint() -> None:
    """The text model's names are the published ones, as the tiny checkpoint has them too, written independently."""
    c = tiny.TEXT_CONFIG
    model = Synthetic(
        layers=c["num_hidden_layers"],
        dense=1,
        experts=c["num_local_experts"],
        hidden=c["hidden_size"],
        inter=c["intermediate_size"],
        dense_inter=c["dense_intermediate_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        vocab=c["vocab_size"],
    )
    made = {name: shape for name, _, shape in [*model.dense_tensors(), *_expert_entries(model, "bf16")]}
    want = {name: tuple(tensor.shape) for name, tensor in tiny.tensors().items()}
    text = {name for name in want if name.startswith("language_model.")}
    assert {name: made[name] for name in text} == {name: want[name] for name in text}
    assert text == {name for name in made if name.startswith("language_model.")}


def test_same_bytes_every_time(source: Path, tmp_path: Path) -> None:
    """And others with another seed."""
    assert digest(write(tmp_path / "again", SMALL)) == digest(source)
    other = digest(write(tmp_path / "other", replace(SMALL, seed=1)))
    assert all(other[name] != sum_ for name, sum_ in digest(source).items() if name.endswith(".safetensors"))


@pytest.mark.parametrize("profile", [GAUDI2, HOPPER], ids=lambda profile: profile.name)
def test_the_fp8_layouts_are_the_converters(source: Path, tmp_path: Path, profile: Profile) -> None:
    """And nothing of the MXFP4 checkpoint in between is left."""
    made = write(tmp_path / "made" / "fp8", SMALL, layout=f"fp8-{profile.name}")
    assert digest(made) == digest(convert(source, tmp_path / "fp8", profile).target)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["fp8"]


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    """With the known ones."""
    with pytest.raises(ValueError, match="quark, bf16, fp8-gaudi2, fp8-hopper"):
        write(tmp_path / "x", SMALL, layout="gguf")


@pytest.mark.parametrize(
    "size", [["--layers", "0"], ["--layers", "1", "--dense", "2"], ["--dense", "-1"], ["--experts", "0"]]
)
def test_a_size_that_can_not_be(tmp_path: Path, size: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Said in a sentence, with the exit code for a request that means nothing; nothing is written."""
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "made"), "--small", *size])
    assert ended.value.code == 2
    assert "or more" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    """A folder that holds shards is refused: readers of all shards would find both models."""
    write(tmp_path / "made", SMALL)
    with pytest.raises(ValueError, match="would be mixed"):
        write(tmp_path / "made", SMALL)
