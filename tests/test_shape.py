"""The model's numbers and the sites where its operators run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import m3hal
from m3hal import ops
from m3hal.shape import SITE_ATTRIBUTES

ENGINE: dict[str, Any] = {"dtype": "bfloat16", "page_size": 128, "max_tokens": 64, "max_seqs": 4, "max_context": 1024}
M3 = m3hal.ModelShape.from_config(m3hal.MINIMAX_M3, **ENGINE)


def test_published_model() -> None:
    """The numbers that the sites hand to the operators."""
    sites = {site.kind: site for site in M3.sites()}
    assert list(sites) == ["dense_attention", "sparse_attention", "dense_mlp", "moe"]
    attention, moe = sites["sparse_attention"], sites["moe"]
    assert (attention.num_q_heads, attention.num_kv_heads, attention.head_dim, attention.rotary_dim) == (64, 4, 128, 64)
    assert (attention.block_size, attention.top_k_blocks, attention.init_blocks, attention.local_blocks) == (
        128,
        16,
        0,
        1,
    )
    assert attention.scale == 128**-0.5
    assert (moe.num_experts, moe.top_k_experts, moe.intermediate_size, moe.routed_scale) == (128, 4, 3072, 2.0)
    assert (moe.alpha, moe.beta, moe.limit) == (1.702, 1.0, 7.0)
    assert sites["dense_mlp"].intermediate_size == 12288
    assert sites["dense_attention"].num_index_heads == 0
    assert (M3.num_dense_attention_layers, M3.num_dense_mlp_layers) == (3, 3)


@pytest.mark.parametrize("name", ops.NAMES)
def test_static_parameters_are_attributes_of_a_site(name: str) -> None:
    """By the same name, so that binding needs no translation."""
    assert set(ops.load(name).statics) <= set(SITE_ATTRIBUTES)


def test_transformers_spelling_means_the_same_model() -> None:
    """A configuration that transformers wrote gives the shape of the published one."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers' own configuration class")
    published = dict(m3hal.MINIMAX_M3)
    config = transformers.models.minimax_m3_vl.configuration_minimax_m3_vl.MiniMaxM3VLTextConfig(
        **{key: published[key] for key in ("num_hidden_layers", "sparse_attention_config", "moe_layer_freq")}
    )
    assert m3hal.ModelShape.from_config(config.to_dict(), **ENGINE) == M3
    assert m3hal.ModelShape.from_config({"text_config": published}, **ENGINE) == M3


def test_tensor_and_expert_parallel_ranks() -> None:
    """Heads and rows split; with more ranks than kv heads, each holds a copy of one; experts split whole."""
    two = m3hal.ModelShape.from_config(m3hal.MINIMAX_M3, tensor_parallel=2, **ENGINE)
    assert (two.num_q_heads, two.num_kv_heads, two.num_index_heads, two.intermediate_size) == (32, 2, 2, 1536)
    eight = m3hal.ModelShape.from_config(m3hal.MINIMAX_M3, tensor_parallel=8, expert_parallel=8, **ENGINE)
    assert (eight.num_q_heads, eight.num_kv_heads, eight.num_index_heads) == (8, 1, 1)
    assert (eight.num_local_experts, eight.intermediate_size) == (16, 3072)
    with pytest.raises(ValueError, match="64 attention heads can't be split over 3 ranks"):
        m3hal.ModelShape.from_config(m3hal.MINIMAX_M3, tensor_parallel=3, **ENGINE)


@pytest.mark.parametrize("key", ["swiglu_alpha", "rms_norm_eps", "routed_scaling_factor", "use_gemma_norm"])
def test_no_constant_has_a_default(key: str) -> None:
    """A configuration without one is refused by its name."""
    config = {name: value for name, value in m3hal.MINIMAX_M3.items() if name != key}
    with pytest.raises(ValueError, match=key):
        m3hal.ModelShape.from_config(config, **ENGINE)


@pytest.mark.parametrize("layers", [1, 3, 5, 60])
def test_an_engine_may_run_fewer_layers_than_are_listed(layers: int) -> None:
    """As with vLLM's --hf-overrides: kinds of layers are counted among those that run."""
    made = m3hal.ModelShape.from_config({**m3hal.MINIMAX_M3, "num_hidden_layers": layers}, **ENGINE)
    assert made.num_layers == layers
    assert made.num_dense_attention_layers == made.num_dense_mlp_layers == min(layers, 3)
    with pytest.raises(ValueError, match="sparse_attention_freq lists 60 layers, and num_hidden_layers is 61"):
        m3hal.ModelShape.from_config({**m3hal.MINIMAX_M3, "num_hidden_layers": 61}, **ENGINE)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim"])
def test_no_size_is_zero(key: str) -> None:
    """A configuration that says so is refused by name, before anything is divided by it."""
    with pytest.raises(ValueError, match="must be 1 or more, not 0"):
        m3hal.ModelShape.from_config({**m3hal.MINIMAX_M3, key: 0}, **ENGINE)


def test_index_heads_follow_kv_heads() -> None:
    """MSA selects blocks per GQA group; another number of index heads is another function."""
    sparse = m3hal.MINIMAX_M3["sparse_attention_config"] | {"sparse_num_index_heads": 8}
    with pytest.raises(ValueError, match=r"sparse_num_index_heads \(8\) must equal num_key_value_heads \(4\)"):
        m3hal.ModelShape.from_config({**m3hal.MINIMAX_M3, "sparse_attention_config": sparse}, **ENGINE)


def test_sites_that_no_config_gives() -> None:
    """A drafter's, and a layer's that returns its lse, are planned as they are given."""
    dense, *_ = M3.sites()
    given = (replace(dense, return_lse=True), replace(dense, kind="drafter", causal=False, window_left=1024))
    shape = replace(M3, given_sites=given)
    assert shape.sites() == given
    made = m3hal.plan(shape, "cpu", m3hal.Policy.resolve({"backend": "reference"}, environ={}), engine={})
    assert made.site("dense_attention").return_lse
    assert made.choice("paged_attention", "drafter").is_served


def test_experts_and_projections_stored_differently() -> None:
    """Attention and the dense MLP take the projections' format; a moe site tells both; alike, there is one."""
    mixed = m3hal.ModelShape.from_config(m3hal.MINIMAX_M3, **ENGINE, weight_format="nvfp4", projection_format="mxfp8")
    assert {site.kind: (site.weight_format, site.projection_format) for site in mixed.sites()} == {
        "dense_attention": ("mxfp8", ""),
        "sparse_attention": ("mxfp8", ""),
        "dense_mlp": ("mxfp8", ""),
        "moe": ("nvfp4", "mxfp8"),
    }
    alike = [replace(mixed, projection_format=format) for format in ("", "nvfp4")]
    assert all(s.weight_format == "nvfp4" and not s.projection_format for shape in alike for s in shape.sites())


def test_model_without_dense_layers_has_no_dense_sites() -> None:
    """A kind of layer that is absent has no site."""
    sparse_only = replace(M3, num_dense_attention_layers=0, num_dense_mlp_layers=0)
    assert [site.kind for site in sparse_only.sites()] == ["sparse_attention", "moe"]
