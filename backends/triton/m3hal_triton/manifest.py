"""What portable Triton kernels offer to MiniMax-M3, as data."""

from collections.abc import Mapping
from typing import Any

from m3hal.dispatch.manifest import Impl, Limit, Manifest, at_least, at_most, multiple_of, one_of

_PLAIN = one_of("dtype", "float32", "bfloat16")
_HEADS = (
    one_of("head_dim", 32, 64, 128, 256),
    multiple_of("page_size", 16),
    at_most("num_q_heads", 256),
    at_least("scale", 1e-6),
)
_KV = one_of("kv_format", "float32", "bfloat16", "fp8_e4m3", "nvfp4")
_STORED = (
    one_of("kv_format", "float32", "bfloat16", "fp8_e4m3", "nvfp4"),
    one_of("index_format", "", "float32", "bfloat16", "fp8_e4m3", "nvfp4", "mxfp4"),
)
_BLOCKS = (multiple_of("block_size", 16), at_most("top_k_blocks", 64))
_INDEX = (
    one_of("index_dim", 32, 64, 128),
    one_of("index_format", "float32", "bfloat16", "fp8_e4m3", "nvfp4", "mxfp4"),
    at_most("num_index_heads", 16),
)
_RANKED = (at_most("top_k_blocks", 64), at_most("max_context", 1 << 20))
_SHARED = ("_plan.py", "_launch.py", "_decode.py", "_pages.py")

_ROW = (_PLAIN, at_most("hidden_size", 16384))
_CACHE_PAGES = ("hnd", "nhd")
_EVERY_PAGE = (*_CACHE_PAGES, "msa_slot", "planar")
_WRITES = ("_encode.py", "_pages.py", "_rows.py", "_launch.py")
_STORES = ("float32", "bfloat16", "fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")
_WEIGHTS = ("float32", "bfloat16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")
_EXPERTS = (
    _PLAIN,
    one_of("weight_format", *_WEIGHTS),
    one_of("shared_format", "", *_WEIGHTS),
    at_least("shared_intermediate_size", 0),
    at_most("lora_rank", 256),
    at_most("num_local_experts", 1024),
    at_most("top_k_experts", 32),
)
_GROUPED = (
    "_moe_align.py",
    "_moe_batch.py",
    "_moe_by_warps.py",
    "_moe_choice.py",
    "_moe_combine.py",
    "_moe_decode.py",
    "_moe_few.py",
    "_moe_gemm.py",
    "_moe_launch.py",
    "_moe_launch_few.py",
    "_moe_lora.py",
    "_moe_one.py",
    "_moe_product.py",
    "_moe_ring.py",
    "_moe_tuning.py",
    "_moe_weights.py",
    "_moe_wide.py",
    "_moe_wide_codes.py",
    "_moe_wide_ends.py",
    "_workspace.py",
    "_hopper.py",
    "_decode.py",
    "_launch.py",
    "_encode.py",
    "quantize.py",
)
_BLACKWELL = ("cuda:sm_100", "cuda:sm_103")
_FP8_BY_BF16 = {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16"}
_PRODUCT = ("_gate.py", "_parts.py", "_stored.py", "_launch.py", "_encode.py", "quantize.py")


def _linear(factory: str, *limits: Limit, formats: tuple[str, ...], traits: Mapping[str, str], name: str = "") -> Impl:
    """A product with weights of these formats. What the router's takes apart is added up from memory of its own."""
    return Impl(
        f"m3hal_triton.linear:{factory}",
        limits=(*limits, one_of("weight_format", *formats), one_of("projection_format", "", *formats)),
        traits=traits,
        memory="self",
        traceable=False,
        files=_PRODUCT,
        name=name,
    )


def _experts(factory: str, traits: Mapping[str, str] | None = None) -> Impl:
    """The experts; a variant is named by its factory."""
    return Impl(
        f"m3hal_triton.moe_experts:{factory}",
        limits=_EXPERTS,
        predicate="m3hal_triton.limits:experts",
        traits=traits or {},
        traceable=False,
        files=_GROUPED,
        name=factory if traits else "",
    )


def _rounding_experts(factory: str, formats: tuple[str, ...], traits: Mapping[str, str], **own: Any) -> Impl:
    """Experts of these formats beside activations that are rounded; a variant is named by its factory."""
    limits = (one_of("dtype", "bfloat16"), one_of("weight_format", *formats), *own.pop("limits", ()))
    return Impl(
        f"m3hal_triton.{factory}",
        limits=(*limits, at_most("num_local_experts", 1024), at_most("top_k_experts", 32)),
        traits=traits,
        traceable=False,
        files=(*_GROUPED, *own.pop("files", ())),
        name=factory.split(":")[1],
        **own,
    )


def _scaled_experts(activation: str, *formats: str, devices: tuple[str, ...]) -> Impl:
    """Where the matrix unit takes blocks of codes and their scales."""
    return _rounding_experts(
        f"moe_scaled:{activation}_activations",
        formats,
        {"activation_format": activation},
        limits=(multiple_of("hidden_size", 32), multiple_of("intermediate_size", 32)),
        files=("_moe_scaled.py",),
        devices=devices,
    )


def _attention(
    module: str, factory: str, limits: tuple[Limit, ...], predicate: str, files: tuple[str, ...]
) -> tuple[Impl, ...]:
    """By dtype: probabilities are rounded to bf16 before they meet bf16 values, and not at all in fp32; then the
    variants that are batch invariant, and slower."""
    return tuple(
        Impl(
            f"m3hal_triton.{module}:{name}",
            limits=(one_of("dtype", dtype), *limits),
            predicate=predicate,
            traits=rounded | invariant,
            layouts=_EVERY_PAGE,
            files=files,
            name=dtype + ("_batch_invariant" if invariant else ""),
        )
        for name, invariant in ((factory, {}), ("batch_invariant", {"batch_invariant": "yes"}))
        for dtype, rounded in (("bfloat16", {"p_dtype": "bfloat16"}), ("float32", {}))
    )


def _indexer(factory: str) -> tuple[Impl, ...]:
    """A factory of the indexer, then its variant that is batch invariant."""
    return tuple(
        Impl(
            f"m3hal_triton.select_blocks:{factory}{suffix}",
            limits=(_PLAIN, *_INDEX, *_BLOCKS, *_RANKED),
            predicate="m3hal_triton.limits:indexer",
            traits=traits,
            layouts=_EVERY_PAGE,
            files=(
                "_score.py",
                "_score_tiles.py",
                "_hopper.py",
                "_operands.py",
                "_choose.py",
                "topk_blocks.py",
                *_SHARED,
            ),
            name=suffix.removeprefix("_"),
        )
        for suffix, traits in (("", {}), ("_batch_invariant", {"batch_invariant": "yes"}))
    )


MANIFEST = Manifest(
    name="triton",
    vendor="m3hal",
    api=">=1,<2",
    priority=50,
    devices=("cuda:sm_90", "cuda:sm_100", "cuda:sm_103", "hip:gfx950"),
    libraries={"torch": ">=2.9", "triton": ">=3.6,<3.10"},
    probe="m3hal_triton.probe:probe",
    operators={
        "rms_norm": (Impl("m3hal_triton.rms_norm:rms_norm", limits=_ROW, files=("_launch.py",)),),
        "add_rms_norm": (Impl("m3hal_triton.rms_norm:add_rms_norm", limits=_ROW, files=("_launch.py",)),),
        "swiglu_oai": (Impl("m3hal_triton.swiglu_oai:swiglu_oai", limits=(_PLAIN,), files=("_launch.py",)),),
        "linear": (
            _linear("linear", _PLAIN, formats=_STORES, traits={}),
            _linear(
                "batch_invariant",
                _PLAIN,
                formats=_STORES,
                traits={"batch_invariant": "yes"},
                name="batch_invariant",
            ),
            _linear(
                "linear_fp8",
                one_of("dtype", "bfloat16"),
                formats=("fp8_e4m3",),
                traits={"activation_format": "fp8_e4m3"},
                name="fp8",
            ),
        ),
        "quantize": (
            Impl(
                "m3hal_triton.quantize:quantize",
                limits=(_PLAIN, one_of("activation_format", *_STORES)),
                files=("_encode.py", "_launch.py"),
            ),
        ),
        "dequantize": (
            Impl("m3hal_triton.dequantize:dequantize", limits=(_PLAIN,), files=("_stored.py", "_launch.py")),
        ),
        "route_topk": (
            Impl(
                "m3hal_triton.route_topk:route_topk",
                limits=(at_most("num_experts", 1024), at_most("top_k_experts", 32), at_least("forced_routing", 0)),
                files=("_choose.py", "_launch.py"),
            ),
        ),
        "moe_experts": (
            _experts("moe_experts"),
            _experts("batch_invariant", {"batch_invariant": "yes"}),
            _rounding_experts(
                "moe_experts:fp8_activations",
                ("fp8_e4m3",),
                _FP8_BY_BF16 | {"mma_accum": "float22"},
                devices=("cuda:sm_90",),
            ),
            _rounding_experts(
                "moe_experts:fp8_activations", ("fp8_e4m3",), _FP8_BY_BF16, devices=(*_BLACKWELL, "hip:gfx950")
            ),
            _scaled_experts("mxfp8", "mxfp4", "mxfp8", devices=(*_BLACKWELL, "hip:gfx950")),
            _scaled_experts("mxfp4", "mxfp4", devices=(*_BLACKWELL, "hip:gfx950")),
            _scaled_experts("nvfp4", "nvfp4", devices=_BLACKWELL),
        ),
        "kv_write": (
            Impl(
                "m3hal_triton.kv_write:kv_write",
                limits=(_PLAIN, *_STORED),
                layouts=_EVERY_PAGE,
                files=_WRITES,
            ),
        ),
        "kv_read": (
            Impl(
                "m3hal_triton.kv_read:kv_read",
                limits=_STORED,
                layouts=_EVERY_PAGE,
                files=("_pages.py", "_rows.py"),
            ),
        ),
        "kv_copy_blocks": (Impl("m3hal_triton.kv_copy_blocks:kv_copy_blocks", memory="self", layouts=_EVERY_PAGE),),
        "rope_partial": (Impl("m3hal_triton.rope_partial:rope_partial", limits=(_PLAIN,), files=("_rows.py",)),),
        "qk_norm_rope_insert": (
            Impl(
                "m3hal_triton.qk_norm_rope_insert:qk_norm_rope_insert",
                limits=(_PLAIN, *_STORED),
                predicate="m3hal_triton.limits:rotated_cache",
                layouts=_EVERY_PAGE,
                files=_WRITES,
            ),
        ),
        "block_scores": _indexer("block_scores"),
        "select_blocks": _indexer("select_blocks"),
        "topk_blocks": (
            Impl(
                "m3hal_triton.topk_blocks:topk_blocks",
                limits=_RANKED,
                predicate="m3hal_triton.limits:ranked",
                files=("_choose.py", "_launch.py"),
            ),
        ),
        "merge_topk": (
            Impl("m3hal_triton.topk_blocks:merge_topk", limits=_RANKED, files=("_choose.py", "_launch.py")),
        ),
        "sparse_attention": _attention(
            "sparse_attention",
            "sparse_attention",
            limits=(_KV, *_HEADS, *_BLOCKS),
            predicate="m3hal_triton.limits:attention",
            files=(
                "_softmax.py",
                "_sparse_decode_run.py",
                "_sparse_decode.py",
                "_sparse_tiles.py",
                "_hopper.py",
                "_sparse_by_warps.py",
                "_sparse_by_warps_fp8.py",
                "_operands.py",
                "_sparse_prefill_run.py",
                "_sparse_prefill.py",
                "_sparse_sort.py",
                "_sparse_union.py",
                *_SHARED,
            ),
        ),
        "paged_attention": _attention(
            "paged_attention",
            "paged_attention",
            limits=(_KV, *_HEADS),
            predicate="m3hal_triton.limits:cache",
            files=("_softmax.py", *_SHARED),
        ),
    },
)
