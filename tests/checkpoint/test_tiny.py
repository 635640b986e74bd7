"""The tiny checkpoint is MiniMax-M3 in everything but size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m3hal import MINIMAX_M3, ModelShape
from m3hal.checkpoint import tiny

safetensors_torch = pytest.importorskip("safetensors.torch", reason="writing checkpoints needs m3hal[vllm]")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"), dtype="bfloat16")


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return dict(safetensors_torch.load_file(checkpoint / "model.safetensors"))


def test_transformers_loads_it_completely(checkpoint: Path) -> None:
    """transformers maps every published name to a weight and every weight to a name, with the shapes it expects."""
    pytest.importorskip("transformers", reason="the comparison needs transformers")
    from m3hal.checkpoint import oracle

    model = oracle.load(checkpoint, "bfloat16")
    text = model.config.text_config
    assert text.layer_types == ["full_attention"] + ["minimax_m3_sparse"] * 3
    assert text.mlp_layer_types == ["dense"] + ["sparse"] * 3
    assert (text.index_topk_blocks, text.index_block_size) == (2, 128)


def test_config_has_the_published_keys() -> None:
    """Everything that m3hal reads from the published config is there, and nothing has another meaning."""
    text = tiny.config()["text_config"]
    assert set(MINIMAX_M3) <= set(text)
    assert set(MINIMAX_M3["sparse_attention_config"]) <= set(text["sparse_attention_config"])
    for constant in ("rms_norm_eps", "rope_theta", "swiglu_alpha", "swiglu_limit", "routed_scaling_factor"):
        assert text[constant] == MINIMAX_M3[constant]


def test_contexts_exceed_what_msa_keeps() -> None:
    """The model has all four kinds of site, and room for contexts far beyond top-k blocks."""
    shape = ModelShape.from_config(
        tiny.config(), dtype="float32", page_size=128, max_tokens=64, max_seqs=4, max_context=2048
    )
    assert [site.kind for site in shape.sites()] == ["dense_attention", "sparse_attention", "dense_mlp", "moe"]
    assert shape.top_k_blocks * shape.block_size <= tiny.TEXT_CONFIG["max_position_embeddings"] // 8


def test_only_the_router_stays_fp32(weights: dict[str, torch.Tensor]) -> None:
    """As published: gate and correction bias are fp32 in a bf16 checkpoint."""
    exact = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert exact == {name for name in weights if "block_sparse_moe.gate" in name or "e_score_correction_bias" in name}


def test_same_seed_same_weights(weights: dict[str, torch.Tensor]) -> None:
    """A checkpoint can be made again; another seed gives another one; bf16 weights are fp32's, rounded."""
    again = tiny.tensors(dtype="bfloat16")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = tiny.tensors(dtype="bfloat16", seed=1)
    assert not any(torch.equal(other[name], again[name]) for name in weights)
    exact = tiny.tensors(dtype="float32")
    assert all(torch.equal(exact[name].to(weight.dtype), weight) for name, weight in weights.items())


def test_no_weight_is_neutral(weights: dict[str, torch.Tensor]) -> None:
    """Norm weights and biases are random, so that a lost offset or bias changes the output."""
    for name, weight in weights.items():
        assert weight.float().std() > 1e-3, name


def test_tokenizer_round_trips_any_text(checkpoint: Path) -> None:
    """Byte-level: what it never saw comes back too, and every id is below the vocabulary's size."""
    tokenizers = pytest.importorskip("tokenizers", reason="writing checkpoints needs m3hal[vllm]")
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == tiny.TEXT_CONFIG["vocab_size"]
    for text in (tiny.SAMPLE_TEXT, "naïve 東京 \U0001f600\n\ttabs", ""):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert all(id < tiny.TEXT_CONFIG["vocab_size"] for id in ids)


def test_command_line(tmp_path: Path) -> None:
    """`python -m m3hal.checkpoint.tiny DIR` prints where it wrote."""
    command = [sys.executable, "-m", "m3hal.checkpoint.tiny", str(tmp_path / "here"), "--dtype", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "here")
    assert json.loads((tmp_path / "here" / "config.json").read_text())["dtype"] == "bfloat16"
