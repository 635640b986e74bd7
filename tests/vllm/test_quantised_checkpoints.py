"""Quantised checkpoints in stock vLLM on the CPU, in fp32 against transformers on the same numbers.

The numbers are decoded by ml_dtypes. Weights are held as they are stored; routed experts are the plan's, projections
too, as vLLM has no CPU kernel for these formats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m3hal.checkpoint import mxfp4, quantised, tiny

pytestmark = pytest.mark.engine

LAYOUTS = ("mixed", "mxfp8", "nvfp4", "mxfp4")
FAST = ("mixed",)  # NVFP4 experts, MXFP8 projections, and scales of an FP8 cache
MARKED = [layout if layout in FAST else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS]
CODES = {"mxfp8": "torch.float8_e4m3fn", "nvfp4": "torch.uint8", "mxfp4": "torch.uint8"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantised")
    made = {layout: quantised.write(folder / layout, layout) for layout in quantised.LAYOUTS}
    return {**made, "mxfp4": mxfp4.to_mxfp4(tiny.write(folder / "plain"), folder / "mxfp4")}


@pytest.fixture(scope="module", params=MARKED)
def served(
    request: pytest.FixtureRequest, engine: Any, checkpoints: dict[str, Path], prompts: Any, tmp_path_factory: Any
) -> Any:
    """The layout, what vLLM completes under which plan, and what transformers does."""
    plan = tmp_path_factory.mktemp("plan") / "plan.json"
    layout, job = request.param, {"checkpoint": checkpoints[request.param], "prompts": prompts[:3]}
    kv = "fp8" if layout == "mixed" else "float32"
    theirs = engine("rounded_oracle", **job, kv=kv, index="float32")
    ours = engine("quantised", env={"M3HAL_EXPORT_PLAN": str(plan)}, **job, settings={"dtype": "float32"})
    return layout, {**ours, "plan": json.loads(plan.read_text())}, theirs["completions"]


def test_tokens_equal_transformers(served: Any, difference: Any) -> None:
    """Nothing but the stored numbers decides: with caches in the model's dtype the log-probabilities agree, too."""
    layout, ours, theirs = served
    flips = 0.01 if layout == "mixed" else 1e-4  # of codes of the FP8 cache
    assert difference(ours["completions"], theirs, flips) == ""


@pytest.mark.slow
def test_two_ranks_equal_transformers(
    engine: Any, checkpoints: dict[str, Path], served: Any, prompts: Any, difference: Any
) -> None:
    """Each rank holds its slices of codes and scales, of projections and of experts."""
    layout, _, theirs = served
    job = {"checkpoint": checkpoints[layout], "prompts": prompts[:3]}
    settings = {"dtype": "float32", "tensor_parallel_size": 2}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ours = engine("quantised", env=env, **job, settings=settings)
    assert difference(ours["completions"], theirs, 0.01 if layout == "mixed" else 1e-4) == ""


def test_weights_are_held_as_they_are_stored(served: Any) -> None:
    """Codes and scales, no copy in the model's dtype."""
    layout, ours, _ = served
    dtypes = {name: dtype for name, (dtype, _) in ours["parameters"].items()}
    projection, experts = ("mxfp8", "nvfp4") if layout == "mixed" else (layout, layout)
    moe = "model.layers.1.block_sparse_moe."
    assert dtypes[f"{moe}shared_experts.gate_up_proj.weight"] == CODES[projection]
    assert dtypes[f"{moe}experts.w13"] == dtypes[f"{moe}experts.w2"] == CODES[experts]
    assert dtypes[f"{moe}gate.weight"] == "torch.float32"
    assert ours["quantization"] == "m3hal_stored"


def test_the_plan_knows_what_each_site_stores(served: Any) -> None:
    """Experts and projections have formats of their own in the plan that the engine wrote."""
    layout, ours, _ = served
    projection, experts = ("mxfp8", "nvfp4") if layout == "mixed" else (layout, layout)
    sites = ours["plan"]["sites"]
    assert {kind: site["weight_format"] for kind, site in sites.items() if kind != "moe"} == {
        "dense_attention": projection,
        "sparse_attention": projection,
        "dense_mlp": projection,
    }
    assert sites["moe"]["weight_format"] == experts
    assert sites["moe"]["projection_format"] == (projection if projection != experts else "")


@pytest.fixture(scope="module")
def loaded(engine: Any, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What vLLM's loader says about whole and damaged checkpoints, all layouts in one process."""
    return engine("loading", checkpoints=checkpoints, work=tmp_path_factory.mktemp("damaged"))


def _projection(layout: str) -> str:
    shared, query = "block_sparse_moe.shared_experts.up_proj", "self_attn.index_q_proj"
    return f"model.layers.1.{shared if layout in ('nvfp4', 'mxfp4') else query}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("expert without scale", "lacks 1 tensors, among them {expert}.weight_scale"),
        ("projection without scale", "lacks 1 tensors, among them {projection}.weight_scale"),
        ("scale too many", "tensor language_model.lm_head.{scale} has no place in the model that its config describes"),
        ("expert too wide", "tensor language_model.{expert}.weight is ["),
        ("projection too tall", "tensor language_model.{projection}.weight is ["),
        ("scale too wide", "tensor language_model.{projection}.{scale} is ["),
        ("projection not quantised", "tensor language_model.{projection}.weight does not fit: it is torch.float32"),
    ],
)
def test_a_wrong_tensor_is_named(loaded: Any, layout: str, case: str, sentence: str) -> None:
    """Missing, extra, wrongly shaped and wrongly typed tensors, of experts and of projections."""
    found = loaded[f"{layout}: {case}"]
    expert = "model.layers.1.block_sparse_moe.experts.3.w2"
    scale = "weight_scale_inv" if layout == "mxfp8" else "weight_scale"
    assert sentence.format(expert=expert, projection=_projection(layout), scale=scale) in found["error"]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("nvfp4: expert's global scale is zero", "an NVFP4 global scale is 0.0"),
        ("mixed: expert's global scale is zero", "an NVFP4 global scale is 0.0"),
        ("mixed: cache's scale is negative", "k_scale must be one positive number; it is -1.0"),
    ],
)
def test_a_scale_that_cannot_be_is_named(loaded: Any, case: str, sentence: str) -> None:
    """Scales that would make every number zero, or turn it."""
    assert sentence in loaded[case]["error"]


@pytest.mark.parametrize("layout", ["mxfp8", "mxfp4"])
def test_scale_bytes_are_bytes_whatever_their_label(loaded: Any, layout: str) -> None:
    """U8 and F8_E8M0 of the same bytes load alike: no conversion of 119 to 2**-8 or back."""
    assert loaded[f"{layout}: scales labelled E8M0"] == loaded[f"{layout}: whole"]
    assert len(set(loaded[f"{layout}: whole"]["w2_scale"])) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_the_text_model_is_skipped(loaded: Any, layout: str) -> None:
    """The vision tower that every one of the checkpoints has, and a drafter's tensors."""
    assert loaded[f"{layout}: with a drafter's tensors"] == loaded[f"{layout}: whole"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpus_keep_vllms_own_projections(loaded: Any, layout: str) -> None:
    """Where vLLM has kernels its own methods hold and compute the projections, found by m3hal's module names."""
    own = "QuarkLinearMethod" if layout == "mxfp4" else "ModelOptLinearMethod"
    attention = "UnquantizedLinearMethod" if layout in ("mxfp4", "nvfp4") else own
    assert loaded[f"{layout}: on a GPU"] == {"gate_up_proj": own, "qkv_proj": attention}
