"""One model served on the CPU as MXFP4 decoded to BF16, as FP8, and as FP8 made of MXFP4 while it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m3hal.checkpoint import mxfp4, tiny
from m3hal.checkpoint.convert import GAUDI2, HOPPER, convert

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def quark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its experts rounded to MXFP4, in Quark's layout."""
    folder = tmp_path_factory.mktemp("quark")
    return mxfp4.to_mxfp4(tiny.write(folder / "bf16", dtype="bfloat16"), folder / "mxfp4", shard_bytes=1 << 20)


@pytest.fixture(scope="module")
def decoded(quark: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers as an unquantised BF16 checkpoint."""
    from safetensors.torch import load_file, save_file

    folder = tiny.write(tmp_path_factory.mktemp("decoded"), dtype="bfloat16")
    weights = {name: tensor for shard in quark.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for name in [name for name in weights if name.endswith("_scale")]:
        scales, codes = weights.pop(name).numpy(), weights[name.removesuffix("_scale")].numpy()
        exact = mxfp4.dequantize(codes, scales)
        weights[name.removesuffix("_scale")] = torch.from_numpy(exact).bfloat16()
        assert np.array_equal(weights[name.removesuffix("_scale")].double().numpy(), exact)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain(engine: Any, decoded: Path, prompts: Any) -> Any:
    return engine("quantised", checkpoint=decoded, prompts=prompts)


@pytest.fixture(scope="module")
def offline(engine: Any, quark: Path, prompts: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = convert(quark, tmp_path_factory.mktemp("hopper") / "fp8", HOPPER).target
    return engine("quantised", checkpoint=folder, prompts=prompts)


@pytest.fixture(scope="module")
def while_loading(engine: Any, quark: Path, prompts: Any) -> Any:
    return engine("quantised", checkpoint=quark, prompts=prompts, settings={"quantization": "m3hal_fp8"})


def test_fp8_gives_the_tokens_of_the_source(plain: Any, offline: Any) -> None:
    """The same numbers, computed in the same order: not one bit of a log-probability differs."""
    assert offline["architecture"] == plain["architecture"] == "M3HalForCausalLM"
    assert (plain["quantization"], offline["quantization"]) == (None, "compressed-tensors")
    assert offline["completions"] == plain["completions"]


def test_experts_are_held_as_fp8(plain: Any, offline: Any) -> None:
    """A byte per weight, not a silent BF16 copy; nothing else is quantised."""
    routed = {name for name in plain["parameters"] if name.endswith((".w13", ".w2"))}
    assert {offline["parameters"][name][0] for name in routed} == {"torch.float8_e4m3fn"}
    for name, found in plain["parameters"].items():
        assert name in routed or offline["parameters"][name] == found, name


@pytest.mark.slow  # tests/checkpoint/test_vllm_loading.py compares the bytes without an engine
def test_converting_while_loading_holds_the_same_bytes(offline: Any, while_loading: Any) -> None:
    """Every parameter of ``--quantization m3hal_fp8`` is the converted checkpoint's, and so is every token."""
    assert while_loading["quantization"] == "m3hal_fp8"
    assert while_loading["parameters"] == offline["parameters"]
    assert while_loading["completions"] == offline["completions"]


@pytest.mark.slow
def test_the_gaudi2_profile_says_the_same_numbers(
    engine: Any, plain: Any, quark: Path, prompts: Any, tmp_path: Path
) -> None:
    """Other bytes, other scales, the same tokens; its E4M3 is read with a largest number of 240."""
    folder = convert(quark, tmp_path / "fp8", GAUDI2).target
    found = engine("quantised", checkpoint=folder, prompts=prompts[:2])
    assert [c["tokens"] for c in found["completions"]] == [c["tokens"] for c in plain["completions"][:2]]


@pytest.mark.slow
def test_two_ranks(engine: Any, decoded: Path, quark: Path, prompts: Any) -> None:
    """Each rank converts whole rows and keeps its slice: two ranks on MXFP4 are two ranks on BF16, bit for bit."""
    found = [
        engine(
            "quantised",
            env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            checkpoint=folder,
            prompts=prompts[:2],
            settings={"tensor_parallel_size": 2, **extra},
        )["completions"]
        for folder, extra in ((decoded, {}), (quark, {"quantization": "m3hal_fp8"}))
    ]
    assert found[0] == found[1]
