"""What m3hal's model refuses to be configured for, because it would be ignored or was never tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

#: what activations are computed in
DTYPES = ("float32", "bfloat16")
#: vLLM's name of a cache's format -> m3hal's; ``auto`` is the model's dtype. Of keys and values, and of index keys.
KV_FORMATS: Mapping[str, str] = {
    **{name: name for name in DTYPES},
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "nvfp4": "nvfp4",
}
INDEX_FORMATS: Mapping[str, str] = {"bf16": "bfloat16", "fp8": "fp8_e4m3", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}

#: KV connectors that were run
CONNECTORS = ("ExampleConnector",)
#: methods of speculative decoding that were run
SPECULATIVE = ("ngram", "eagle3")


def refusals(vllm_config: Any) -> Iterator[str]:
    """Why m3hal can't serve this configuration, one sentence each, the most likely mistakes first."""
    yield from _cache(vllm_config)
    yield from _features(vllm_config)
    yield from _quantisation(vllm_config.model_config)
    yield from _model(vllm_config.model_config.hf_text_config)


def kv_format(vllm_config: Any) -> str:
    """The format of keys and values by m3hal's name. Raises ValueError, one sentence."""
    asked = vllm_config.cache_config.cache_dtype
    return _format(asked, KV_FORMATS, vllm_config, f"KV cache; --kv-cache-dtype {asked}")


def index_format(vllm_config: Any) -> str:
    """The format of index keys by m3hal's name. Raises ValueError, one sentence."""
    asked = vllm_config.attention_config.indexer_kv_dtype
    return _format(asked, INDEX_FORMATS, vllm_config, f"index cache; indexer_kv_dtype {asked!r}")


def _format(asked: str, known: Mapping[str, str], vllm_config: Any, what: str) -> str:
    if asked == "auto":
        return dtype_name(vllm_config.model_config.dtype)
    if asked not in known:
        cache, _, option = what.partition("; ")
        raise ValueError(f"m3hal's {cache} holds {', '.join(known)}; {option} is not supported, use 'auto'.")
    found = known[asked]
    on_gaudi = vllm_config.device_config.device_type == "hpu"  # whose E4M3 ends at 240
    return "fp8_e4m3_240" if found == "fp8_e4m3" and on_gaudi else found


def dtype_name(dtype: Any) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _cache(vllm_config: Any) -> Iterator[str]:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    block = model.hf_text_config.sparse_attention_config["sparse_block_size"]
    if cache.user_specified_block_size and cache.block_size != block:
        yield (
            f"MiniMax-M3 needs one sparse block per page: --block-size {cache.block_size} differs from the model's "
            f"sparse_block_size {block}; leave --block-size out or set it to {block}."
        )
    if dtype_name(model.dtype) not in DTYPES:
        yield f"m3hal computes in {' or '.join(DTYPES)}; --dtype is {dtype_name(model.dtype)}."
        return
    for format_of in (kv_format, index_format):
        try:
            format_of(vllm_config)
        except ValueError as error:
            yield str(error)


def _features(vllm_config: Any) -> Iterator[str]:
    """What would be ignored, or was never run; docs/serving.md has the table."""
    for feature, wanted in {**_parallelism(vllm_config), **_caches(vllm_config), **_others(vllm_config)}.items():
        if wanted:
            yield f"m3hal does not support {feature} yet; leave it out, or serve vLLM's own model with backend 'vllm'."


def _parallelism(vllm_config: Any) -> Mapping[str, bool]:
    parallel = vllm_config.parallel_config
    data = "data parallelism (--data-parallel-size)"
    together = f"{data[:-1]} together with --enable-expert-parallel)" if parallel.enable_expert_parallel else data
    return {
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        together: parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "rebalancing experts (--enable-eplb)": parallel.enable_eplb,
        "changing the number of ranks (--enable-elastic-ep)": parallel.enable_elastic_ep,
        "micro-batching (--enable-dbo)": parallel.enable_dbo,
    }


def _caches(vllm_config: Any) -> Mapping[str, bool]:
    cache = vllm_config.cache_config
    return {
        f"moving KV caches between engines other than by {' or '.join(CONNECTORS)}, in plain formats, "
        "(--kv-transfer-config)": not _moves_plainly(vllm_config),
        "moving KV caches out of the device (--kv-offloading-size)": cache.kv_offloading_size is not None,
        "keeping layers out of the KV cache's format (--kv-cache-dtype-skip-layers)": bool(
            getattr(cache, "kv_cache_dtype_skip_layers", None)
        ),
        "sharing KV caches between layers (--kv-sharing-fast-prefill)": cache.kv_sharing_fast_prefill,
    }


def _moves_plainly(vllm_config: Any) -> bool:
    """Connectors that were run; they take tokens out of pages, and a token's bytes lie together in plain pages only."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return True
    formats = {kv_format(vllm_config), index_format(vllm_config)}
    return transfer.kv_connector in CONNECTORS and formats <= set(DTYPES)


def _others(vllm_config: Any) -> Mapping[str, bool]:
    model, attention, kernels = vllm_config.model_config, vllm_config.attention_config, vllm_config.kernel_config
    speculative = vllm_config.speculative_config
    return {
        "LoRA (--enable-lora)": vllm_config.lora_config is not None,
        f"the {model.runner_type!r} runner": model.runner_type != "generate",
        f"speculative decoding other than {' and '.join(map(repr, SPECULATIVE))}": speculative is not None
        and speculative.method not in SPECULATIVE,
        "sleep mode (--enable-sleep-mode)": model.enable_sleep_mode,
        "prompts as embeddings (--enable-prompt-embeds)": model.enable_prompt_embeds,
        "reporting routed experts (--enable-return-routed-experts)": (
            vllm_config.aux_output_config.enable_return_routed_experts
        ),
        "choosing a backend of vLLM's (--attention-backend)": attention.backend is not None,
        "choosing a backend of vLLM's (--moe-backend)": kernels.moe_backend != "auto",
        "vLLM's options for its own MiniMax-M3 in --attention-config": any(
            getattr(attention, field.name) != field.default
            for field in fields(attention)
            if field.name.startswith("minimax_m3_")
        ),
    }


def _quantisation(model_config: Any) -> Iterator[str]:
    from m3hal.vllm.quantization import expert_format

    try:
        expert_format(model_config)
    except ValueError as error:
        yield f"{error}; leave it out, or serve vLLM's own model with backend 'vllm'."


def _model(text: Any) -> Iterator[str]:
    """Constants of MiniMax-M3 that the code takes for granted."""
    sparse = text.sparse_attention_config
    rope = getattr(text, "rope_parameters", None) or {}
    layers = zip(sparse["sparse_attention_freq"], sparse["sparse_disable_index_value"], strict=True)
    granted = {
        "use_gemma_norm": (text.use_gemma_norm, True),
        "qk_norm_type": (text.qk_norm_type, "per_head"),
        "hidden_act": (text.hidden_act, "swigluoai"),
        "scoring_func": (text.scoring_func, "sigmoid"),
        "attention_output_gate": (text.attention_output_gate, False),
        "tie_word_embeddings": (text.tie_word_embeddings, False),
        "sparse_score_type": (sparse["sparse_score_type"], "max"),
        "sparse_disable_index_value": (all(disabled for used, disabled in layers if used), True),
        "sparse_index_dim": (sparse["sparse_index_dim"], text.head_dim),  # vLLM's fused projection assumes it
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for key, (value, expected) in granted.items():
        if value != expected:
            yield f"m3hal implements MiniMax-M3 with {key} {expected!r}; this checkpoint has {value!r}."
