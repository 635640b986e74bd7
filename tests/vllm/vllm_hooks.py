"""What of vLLM m3hal's plugin uses, and what a vLLM has of it: read in sources, or in a record of them.

    python tests/vllm/vllm_hooks.py .cache/wheels/vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl

writes the record of a wheel, ``vllm_0_33.json``: with it the quick tests cover a version that is not installed.
"""

from __future__ import annotations

import ast
import datetime
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_sources import Sources, absolute, parameters

OURS = Path(__file__).parents[2] / "m3hal" / "vllm"
RECORD = Path(__file__).parent / "vllm_0_33.json"


def imports() -> set[tuple[str, str]]:
    """(module, name) of every import of vLLM's in m3hal's plugin."""
    found = set()
    for file in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(absolute("", node, False), alias.name) for alias in node.names}
    return found


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


@dataclass(frozen=True)
class Hooks:
    """What a vLLM has of the above.

    imports: "module.name" of what is there. functions: "module:path" -> parameters in order, and those that a caller
    must give. fields: "module:class" -> those that are there.
    """

    imports: frozenset[str]
    functions: Mapping[str, tuple[list[str], set[str]]]
    fields: Mapping[str, set[str]]

    @classmethod
    def of(cls, sources: Sources) -> Hooks:
        """Read in sources."""
        there = frozenset(f"{module}.{name}" for module, name in imports() if sources.find(module, name) is not None)
        found = {key: sources.function(*key) for key in (*OVERRIDDEN, *CALLED)}
        functions = {":".join(key): parameters(function) for key, function in found.items() if function is not None}
        fields = {":".join(key): set(used.split()) & sources.attributes(*key) for key, used in FIELDS.items()}
        return cls(there, functions, fields)

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Hooks:
        """As they were written down."""
        functions = {key: (names, set(required)) for key, (names, required) in record["functions"].items()}
        return cls(
            frozenset(record["imports"]), functions, {key: set(names) for key, names in record["fields"].items()}
        )

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        return {
            "imports": sorted(self.imports),
            "functions": {key: [names, sorted(required)] for key, (names, required) in sorted(self.functions.items())},
            "fields": {key: sorted(names) for key, names in sorted(self.fields.items())},
        }


def main(wheel: Path) -> None:
    """Writes the record."""
    version = wheel.name.split("-")[1]
    source = {
        "version": version,
        "source": f"https://pypi.org/project/vllm/{version}/#files, {wheel.name}",
        "date": datetime.date.today().isoformat(),
    }
    RECORD.write_text(json.dumps({**source, **Hooks.of(Sources(wheel)).to_json()}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
