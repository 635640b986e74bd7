"""What portable Triton kernels offer to MiniMax-M3, as data."""

from m3hal.dispatch.manifest import Impl, Manifest, at_most, multiple_of, one_of

_PLAIN = one_of("dtype", "float32", "bfloat16")
_HEADS = (one_of("head_dim", 32, 64, 128, 256), multiple_of("page_size", 16), at_most("num_q_heads", 256))
_CACHE = one_of("kv_format", "float32", "bfloat16")
_BLOCKS = (multiple_of("block_size", 16), at_most("top_k_blocks", 64))
_INDEX = one_of("index_dim", 32, 64, 128)
_RANKED = (at_most("top_k_blocks", 64), at_most("max_context", 1 << 20))
_SHARED = ("_plan.py", "_launch.py")

MANIFEST = Manifest(
    name="triton",
    vendor="m3hal",
    api=">=1,<2",
    priority=50,
    devices=("cuda:sm_90", "cuda:sm_100", "cuda:sm_103", "hip:gfx950"),
    libraries={"torch": ">=2.9", "triton": ">=3.6,<3.10"},
    probe="m3hal_triton.probe:probe",
    operators={
        "block_scores": (
            Impl(
                "m3hal_triton.select_blocks:block_scores",
                limits=(_PLAIN, _INDEX, at_most("num_index_heads", 16), *_BLOCKS, *_RANKED),
                predicate="m3hal_triton.limits:indexer",
                layouts=("hnd", "nhd"),
                files=("_score.py", "_choose.py", "topk_blocks.py", *_SHARED),
            ),
        ),
        "select_blocks": (
            Impl(
                "m3hal_triton.select_blocks:select_blocks",
                limits=(_PLAIN, _INDEX, at_most("num_index_heads", 16), *_BLOCKS, *_RANKED),
                predicate="m3hal_triton.limits:indexer",
                layouts=("hnd", "nhd"),
                files=("_score.py", "_choose.py", "topk_blocks.py", *_SHARED),
            ),
        ),
        "topk_blocks": (Impl("m3hal_triton.topk_blocks:topk_blocks", limits=_RANKED, files=("_choose.py",)),),
        "merge_topk": (Impl("m3hal_triton.topk_blocks:merge_topk", limits=_RANKED, files=("_choose.py",)),),
        "sparse_attention": (
            Impl(
                "m3hal_triton.sparse_attention:sparse_attention",
                limits=(_PLAIN, _CACHE, *_HEADS, *_BLOCKS),
                predicate="m3hal_triton.limits:attention",
                traits={"p_dtype": "bfloat16"},
                layouts=("hnd", "nhd"),
                files=("_sparse_decode.py", "_sparse_prefill.py", *_SHARED),
            ),
        ),
    },
)
