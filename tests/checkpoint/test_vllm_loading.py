"""Stock vLLM's loaders on the converter's output, and ``--quantization m3hal_fp8`` on its input: the same bytes."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from m3hal.checkpoint.convert import GAUDI2, HOPPER, InexactError, convert
from m3hal.checkpoint.synthetic import Synthetic, write
from tests.checkpoint.conftest import SMALL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make setup` installs it"
)
LAYER = "language_model.model.layers.1.block_sparse_moe."


@pytest.fixture
def vllm_experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU has no kernel for FP8 per channel; loading needs none. Imported late: vLLM makes every fork slower."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8,
    )

    from tests.checkpoint import vllm_experts

    monkeypatch.setattr(compressed_tensors_moe_w8a8_fp8, "select_fp8_moe_backend", lambda **_: (None, None))
    return vllm_experts


@pytest.fixture(scope="module", params=[GAUDI2, HOPPER], ids=lambda profile: profile.name)
def converted(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint, converted."""
    return convert(source, tmp_path_factory.mktemp("converted") / "fp8", request.param).target


def iterate(folder: Path, local: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """vLLM's iterator over a checkpoint."""
    from vllm.model_executor.model_loader import weight_utils

    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    return weight_utils.safetensors_weights_iterator(files, False, local_expert_ids=local)  # type: ignore[no-any-return]


def compressed_tensors(folder: Path) -> Any:
    """What vLLM makes of the checkpoint's own quantization_config."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = json.loads((folder / "config.json").read_text())
    return CompressedTensorsConfig.from_config(config["quantization_config"])


def m3hal_fp8(folder: Path) -> Any:
    """What ``--quantization m3hal_fp8`` makes of an MXFP4 checkpoint's."""
    from m3hal.vllm.quantization import M3halFp8Config

    return M3halFp8Config.from_config(json.loads((folder / "config.json").read_text())["quantization_config"])


def decoded(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that a layer holds after loading."""
    return (
        layer.w13_weight.double() * layer.w13_weight_scale.double(),
        layer.w2_weight.double() * layer.w2_weight_scale.double(),
    )


def test_compressed_tensors_takes_the_checkpoint(vllm_experts: Any, converted: Path, tmp_path: Path) -> None:
    """FP8 experts per channel; every parameter written, with the source's numbers, gate first, then up."""
    layer = vllm_experts.build(compressed_tensors(converted))
    assert type(layer.quant_method).__name__ == "CompressedTensorsW8A8Fp8MoEMethod"
    vllm_experts.fill(layer, iterate(converted))
    plain = dict(iterate(write(tmp_path / "bf16", SMALL, layout="bf16")))
    w13, w2 = decoded(layer)
    for expert in range(SMALL.experts):
        gate, up, down = (plain[f"{LAYER}experts.{expert}.{part}.weight"].double() for part in ("w1", "w3", "w2"))
        assert torch.equal(w13[expert], torch.cat((gate, up)))
        assert torch.equal(w2[expert], down)


def test_nothing_else_is_quantised(converted: Path) -> None:
    """vLLM's own look-up by module name: attention, router, shared experts, dense MLP and head are left alone."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    ignore = compressed_tensors(converted).ignore
    for prefix in ("", "language_model."):
        layer = f"{prefix}model.layers.1."
        for module in (
            f"{layer}self_attn.qkv_proj",
            f"{layer}self_attn.o_proj",
            f"{layer}block_sparse_moe.gate",
            f"{layer}block_sparse_moe.shared_experts.gate_up_proj",
            f"{layer}block_sparse_moe.shared_experts.down_proj",
            f"{prefix}model.layers.0.mlp.gate_up_proj",
            f"{prefix}lm_head",
        ):
            assert should_ignore_layer(module, ignore=ignore), module
        assert not should_ignore_layer(f"{layer}block_sparse_moe.experts.0.w1", ignore=ignore)


MANY = Synthetic(**{**vars(SMALL), "layers": 2, "experts": 16})


class CountingReader:
    """In the place of ``safe_open``: how many bytes of which tensors were asked for."""

    def __init__(self, read: Counter[str], *args: Any, **keywords: Any) -> None:
        self._read, self._file = read, safe_open(*args, **keywords)

    def __enter__(self) -> CountingReader:
        self._inner = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> Any:
        return self._inner.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._inner.get_tensor(name)
        self._read[name] += tensor.nbytes
        return tensor


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_a_rank_reads_its_own_experts_only(
    vllm_experts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """``--enable-ep-weight-filter`` on 8 ranks: codes of 2 of 16 experts, all scales, everything that is no expert."""
    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.model_loader.ep_weight_filter import compute_local_expert_ids

    folder = convert(write(tmp_path / "source", MANY), tmp_path / "fp8", GAUDI2).target
    everything = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    read: Counter[str] = Counter()
    monkeypatch.setattr(weight_utils, "safe_open", lambda *a, **k: CountingReader(read, *a, **k))
    local = compute_local_expert_ids(16, 8, rank)
    assert local == {2 * rank, 2 * rank + 1}
    layer = vllm_experts.build(compressed_tensors(folder), ranks=8, rank=rank, experts=16)
    vllm_experts.fill(layer, iterate(folder, local))
    foreign = {
        name
        for name in everything
        if name.startswith(LAYER + "experts.") and int(name.split(".experts.")[1].split(".")[0]) not in local
    }
    assert set(read) == {name for name in everything if name not in foreign or name.endswith("_scale")}
    assert read == {name: everything[name].nbytes for name in read}
    scales = {name for name in everything if name.endswith("_scale")}
    assert scales <= set(read)
    w13, w2 = decoded(layer)
    for slot, expert in enumerate(sorted(local)):
        part = {w: everything[f"{LAYER}experts.{expert}.{w}.weight"].double() for w in ("w1", "w2", "w3")}
        scale = {w: everything[f"{LAYER}experts.{expert}.{w}.weight_scale"].double() for w in part}
        assert torch.equal(w13[slot], torch.cat((part["w1"] * scale["w1"], part["w3"] * scale["w3"])))
        assert torch.equal(w2[slot], part["w2"] * scale["w2"])


def test_converting_at_load_time_gives_the_same_bytes(vllm_experts: Any, source: Path, tmp_path: Path) -> None:
    """``--quantization m3hal_fp8`` on MXFP4 against stock compressed-tensors on the converter's output, all ranks."""
    offline = convert(source, tmp_path / "fp8", HOPPER).target
    for rank in range(3):
        loaded = vllm_experts.build(m3hal_fp8(source), ranks=3, rank=rank)
        vllm_experts.fill(loaded, iterate(source, {rank}))
        stock = vllm_experts.build(compressed_tensors(offline), ranks=3, rank=rank)
        vllm_experts.fill(stock, iterate(offline, {rank}))
        for (name, ours), (other, theirs) in zip(loaded.named_parameters(), stock.named_parameters(), strict=True):
            assert name == other
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
            assert not ours.isnan().any()


def test_scales_may_come_first(vllm_experts: Any, source: Path) -> None:
    """The order of a checkpoint's tensors does not matter."""
    layers = [vllm_experts.build(m3hal_fp8(source)) for _ in range(2)]
    weights = list(iterate(source))
    vllm_experts.fill(layers[0], weights)
    vllm_experts.fill(layers[1], reversed(weights))
    for first, second in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_a_row_too_wide_is_refused_at_load_time(vllm_experts: Any, source: Path) -> None:
    """With layer, expert, matrix, row and block."""
    layer = vllm_experts.build(m3hal_fp8(source))
    name = LAYER + "experts.1.w1.weight_scale"
    weights = {key: tensor.clone() for key, tensor in iterate(source)}
    weights[name][7, 2] = 150
    with pytest.raises(InexactError, match=r"block_sparse_moe.experts.1.w1: row 7 spans .* in block 2"):
        vllm_experts.fill(layer, weights.items())
