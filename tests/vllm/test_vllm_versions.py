"""Every hook, signature and field of vLLM that m3hal uses is there, in the installed vLLM and in 0.33.

0.33 is read from its wheel, which is not in the repository: ``pip download --no-deps vllm==0.33.0`` into a folder that
``M3HAL_VLLM_WHEELS`` names.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_sources import Sources, absolute, overlay, parameters

OURS = Path(__file__).parents[2] / "m3hal" / "vllm"
REASON = (
    "M3HAL_VLLM_WHEELS names no folder with the wheel of vLLM 0.33; `pip download --no-deps vllm==0.33.0` fetches it"
)


def next_wheel() -> Path | None:
    folder = os.environ.get("M3HAL_VLLM_WHEELS")
    return next(iter(sorted(Path(folder).glob("vllm-0.33.*.whl"))), None) if folder else None


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module", params=["installed", "0.33"])
def vllm(request: pytest.FixtureRequest) -> Sources:
    if request.param == "installed":
        return Sources(installed().parent)
    wheel = next_wheel()
    return Sources(wheel) if wheel else pytest.skip(REASON)


def imports() -> set[tuple[str, str]]:
    """(module, name) of every import of vLLM's in m3hal's plugin."""
    found = set()
    for file in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(absolute("", node, False), alias.name) for alias in node.names}
    return found


def test_every_import_is_there(vllm: Sources) -> None:
    """Whatever ``from vllm... import`` names."""
    wanted = imports()
    assert len(wanted) > 40
    assert [f"{module}.{name}" for module, name in sorted(wanted) if vllm.find(module, name) is None] == []


LAYERS, QUANT = "vllm.model_executor.layers", "vllm.model_executor.layers.quantization.base_config"
MODELS = "vllm.model_executor.models"
_SIZES = ("hidden_size", "head_size", "total_num_heads", "total_num_kv_heads")
_LINEAR = ("bias", "quant_config", "prefix")
#: what m3hal overrides: the parameters that vLLM passes, in order
OVERRIDDEN: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.__init__"): (
        *("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.build"): (
        *("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    ("vllm.v1.attention.backend", "AttentionBackend.get_name"): (),
    ("vllm.v1.attention.backend", "AttentionBackend.get_builder_cls"): (),
    ("vllm.v1.attention.backend", "AttentionBackend.get_impl_cls"): (),
    ("vllm.v1.attention.backend", "AttentionBackend.get_supported_kernel_block_sizes"): ("kv_cache_spec",),
    ("vllm.v1.attention.backend", "AttentionBackend.supported_kv_cache_layouts"): (),
    (f"{LAYERS}.attention_layer_base", "AttentionLayerBase.get_attn_backend"): (),
    (f"{LAYERS}.attention_layer_base", "AttentionLayerBase.get_kv_cache_spec"): ("vllm_config",),
    (f"{LAYERS}.attention_layer_base", "AttentionLayerBase.bind_kv_cache"): ("kv_cache",),
    (f"{MODELS}.config", "VerifyAndUpdateConfig.verify_and_update_config"): ("vllm_config",),
    (f"{MODELS}.config", "VerifyAndUpdateConfig.verify_and_update_model_config"): ("model_config",),
    (QUANT, "QuantizationConfig.get_name"): (),
    (QUANT, "QuantizationConfig.get_supported_act_dtypes"): (),
    (QUANT, "QuantizationConfig.get_min_capability"): (),
    (QUANT, "QuantizationConfig.get_config_filenames"): (),
    (QUANT, "QuantizationConfig.from_config"): ("config",),
    (QUANT, "QuantizationConfig.get_quant_method"): ("layer", "prefix"),
    (QUANT, "QuantizationConfig.override_quantization_method"): ("hf_quant_cfg", "user_quant", "hf_config"),
    (QUANT, "QuantizeMethodBase.process_weights_after_loading"): ("layer",),
    (f"{LAYERS}.linear", "LinearMethodBase.apply"): ("layer", "x", "bias"),
    (f"{LAYERS}.linear", "LinearMethodBase.create_weights"): (
        *("layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size", "params_dtype"),
    ),
    (f"{MODELS}.registry", "_BaseRegisteredModel.inspect_model_cls"): (),
    (f"{MODELS}.registry", "_BaseRegisteredModel.load_model_cls"): (),
}
#: what m3hal calls: the parameters that it gives
CALLED: dict[tuple[str, str], tuple[str, ...]] = {
    (f"{LAYERS}.linear", "MinimaxM3QKVParallelLinearWithIndexer.__init__"): (
        *(*_SIZES, "total_num_index_heads", "index_head_size", *_LINEAR),
    ),
    (f"{LAYERS}.linear", "QKVParallelLinear.__init__"): (*_SIZES, *_LINEAR),
    (f"{LAYERS}.linear", "RowParallelLinear.__init__"): ("input_size", "output_size", "reduce_results", *_LINEAR),
    (f"{LAYERS}.linear", "MergedColumnParallelLinear.__init__"): ("input_size", "output_sizes", *_LINEAR),
    (f"{LAYERS}.fused_moe", "GateLinear.__init__"): (
        *("input_size", "output_size", "params_dtype", "out_dtype", "prefix"),
    ),
    (f"{LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding.__init__"): (
        *("num_embeddings", "embedding_dim", "prefix"),
    ),
    (f"{LAYERS}.vocab_parallel_embedding", "ParallelLMHead.__init__"): ("num_embeddings", "embedding_dim", "prefix"),
    (f"{LAYERS}.logits_processor", "LogitsProcessor.__init__"): ("vocab_size",),
    (f"{MODELS}.utils", "make_layers"): ("num_hidden_layers", "layer_fn", "prefix"),
    (f"{MODELS}.utils", "maybe_prefix"): ("prefix", "name"),
    (f"{MODELS}.registry", "_ModelRegistry.register_model"): ("model_arch", "model_cls"),
    (f"{MODELS}.registry", "_ModelRegistry.inspect_model_cls"): ("architectures", "model_config"),
    (f"{MODELS}.registry", "_ModelRegistry._raise_for_unsupported"): ("architectures",),
    (f"{LAYERS}.quantization", "register_quantization_config"): ("quantization",),
    (f"{LAYERS}.quantization", "get_quantization_config"): ("quantization",),
    ("vllm.model_executor.model_loader.weight_utils", "default_weight_loader"): ("param", "loaded_weight"),
    ("vllm.distributed", "tensor_model_parallel_all_reduce"): ("input_",),
    ("vllm.distributed", "get_ep_group"): (),
}
CONFIG = "vllm.config"
#: class -> fields, members and methods that m3hal reads or gives
FIELDS: dict[tuple[str, str], str] = {
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"): (
        "block_size num_kv_heads head_size dtype head_size_v num_head_slots state_content_bytes"
    ),
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): "cache_role",
    ("vllm.v1.kv_cache_interface", "SparseCacheRole"): "INDEXER",
    ("vllm.v1.kv_cache_layout", "KVCacheLayout"): "LBHNC",
    ("vllm.v1.attention.backend", "AttentionCGSupport"): "NEVER",
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"): (
        "query_start_loc seq_lens block_table_tensor max_query_len max_seq_len num_actual_tokens slot_mapping num_reqs"
    ),
    ("vllm.forward_context", "ForwardContext"): "attn_metadata no_compile_layers",
    (CONFIG, "VllmConfig"): (
        "model_config cache_config parallel_config scheduler_config speculative_config lora_config kv_transfer_config "
        "attention_config compilation_config additional_config quant_config device_config kernel_config "
        "aux_output_config"
    ),
    (CONFIG, "CacheConfig"): (
        "cache_dtype block_size user_specified_block_size kv_sharing_fast_prefill kv_cache_dtype_skip_layers "
        "kv_offloading_size"
    ),
    (CONFIG, "AttentionConfig"): "backend indexer_kv_dtype",
    (CONFIG, "KernelConfig"): "moe_backend",
    ("vllm.config.aux_output", "AuxOutputConfig"): "enable_return_routed_experts",
    (CONFIG, "CompilationConfig"): "static_forward_context",
    (CONFIG, "SchedulerConfig"): "max_num_batched_tokens max_num_seqs",
    (CONFIG, "DeviceConfig"): "device_type",
    (CONFIG, "SpeculativeConfig"): "method",
    (CONFIG, "ParallelConfig"): (
        "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel enable_eplb enable_dbo "
        "decode_context_parallel_size prefill_context_parallel_size enable_elastic_ep"
    ),
    (CONFIG, "ModelConfig"): (
        "architecture architectures hf_config hf_text_config dtype max_model_len quantization runner_type registry "
        "model_arch_config multimodal_config served_model_name enable_sleep_mode enable_prompt_embeds _model_info "
        "_architecture"
    ),
    (f"{LAYERS}.fused_moe", "RoutedExperts"): "moe_config layer_name _map_global_expert_id_to_local_expert_id",
    (f"{MODELS}.registry", "_ModelRegistry"): "models",
    (f"{MODELS}.interfaces", "EagleModelMixin"): "aux_hidden_state_layers",
    (f"{MODELS}.interfaces", "SupportsEagle3"): "set_aux_hidden_state_layers",
}


@pytest.mark.parametrize("where", OVERRIDDEN, ids=lambda key: key[1])
def test_what_is_overridden_is_called_as_m3hal_expects(vllm: Sources, where: tuple[str, str]) -> None:
    """The same parameters in the same order, and no other that a caller must give."""
    function = vllm.function(*where)
    assert function is not None
    names, required = parameters(function)
    assert names[: len(OVERRIDDEN[where])] == list(OVERRIDDEN[where])
    assert required <= set(OVERRIDDEN[where])


@pytest.mark.parametrize("where", CALLED, ids=lambda key: key[1])
def test_what_is_called_takes_what_m3hal_gives(vllm: Sources, where: tuple[str, str]) -> None:
    """Each parameter by its name, and nothing else is required."""
    function = vllm.function(*where)
    assert function is not None
    names, required = parameters(function)
    assert [name for name in CALLED[where] if name not in names] == []
    assert required <= set(CALLED[where])


@pytest.mark.parametrize("where", FIELDS, ids=lambda key: key[1])
def test_fields_are_there(vllm: Sources, where: tuple[str, str]) -> None:
    """Of configurations, cache specs and metadata; also inherited ones."""
    assert set(FIELDS[where].split()) - vllm.attributes(*where) == set()


def test_no_field_is_used_that_is_not_checked() -> None:
    """The tables above hold every field of vLLM's configuration that the plugin's sources mention."""
    text = "\n".join(file.read_text() for file in OURS.glob("*.py"))
    used = set(re.findall(r"\b(?:vllm|model|cache|parallel|scheduler|attention|compilation)_config\.(\w+)", text))
    known = {name for (module, _), fields in FIELDS.items() if module == CONFIG for name in fields.split()}
    assert used - known == set()


def test_changes_are_noticed(tmp_path: Path) -> None:
    """A moved name is followed; a renamed one, a new required parameter and a lost field are not there."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .new import *\nfrom .new import moved as old\n")
    (package / "new.py").write_text(
        "class Base:\n    field: int\n    def run(self, x, y, *, z, w=1): self.made = x\nclass moved(Base): pass\n"
    )
    sources = Sources(tmp_path)
    assert sources.find("vllm", "old") is not None
    assert sources.find("vllm", "renamed") is None
    function = sources.function("vllm", "old.run")
    assert function is not None
    assert parameters(function) == (["x", "y", "z", "w"], {"x", "y", "z"})
    assert sources.attributes("vllm", "old") == {"field", "run", "made"}


@pytest.mark.engine
@pytest.mark.slow
def test_the_engine_runs_on_the_next_python(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any, tmp_path: Path
) -> None:
    """vLLM 0.33's Python over the installed compiled modules: the tokens are transformers', cached ones too."""
    wheel = next_wheel()
    if wheel is None:
        pytest.skip(REASON)
    tree = overlay(wheel, installed(), tmp_path)
    found = engine("plain", env={"PYTHONPATH": str(tree)}, checkpoint=checkpoint, prompts=prompts)
    assert found["version"].startswith("0.33.")
    for mode, completions in found["rounds"].items():
        assert difference(completions, oracle) == "", mode
