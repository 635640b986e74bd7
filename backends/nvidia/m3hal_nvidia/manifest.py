"""What NVIDIA GPUs offer to MiniMax-M3 through FlashInfer, as data."""

from m3hal.dispatch.manifest import Impl, Manifest, at_most, one_of
from m3hal_nvidia.recorded import FUSED_ADD_NORM, GEMMA_NORM, PLAIN_NORM, TOPK_SELECT

_BF16 = one_of("dtype", "bfloat16")
_GEMMA = one_of("weight_offset", 1.0)
#: a row in fp32 in shared memory, with room to spare
_WIDTH = at_most("hidden_size", 32768)
_FILES = ("recorded.py",)

MANIFEST = Manifest(
    name="nvidia",
    vendor="NVIDIA",
    api=">=1,<2",
    devices=("cuda:sm_90", "cuda:sm_100", "cuda:sm_103", "cuda:sm_107"),  # H100/H200, B200, B300, Rubin
    libraries={"torch": ">=2.9", "flashinfer-python": ">=0.7.4,<0.8"},
    probe="m3hal_nvidia.probe:probe",
    operators={
        "rms_norm": (
            Impl(
                "m3hal_nvidia.norms:rms_norm_gemma",
                limits=(_BF16, _GEMMA, _WIDTH),
                calls=(GEMMA_NORM,),
                files=_FILES,
                memory="self",
                traceable=False,
                alignment=16,
                views="rows",
                name="gemma_rmsnorm",
            ),
            Impl(
                "m3hal_nvidia.norms:rms_norm_plain",
                limits=(_BF16, one_of("weight_offset", 0.0), _WIDTH),
                calls=(PLAIN_NORM,),
                files=_FILES,
                memory="self",
                traceable=False,
                alignment=16,
                views="rows",
                name="rmsnorm",
            ),
        ),
        "add_rms_norm": (
            Impl(
                "m3hal_nvidia.norms:add_rms_norm_gemma",
                limits=(_BF16, _GEMMA, _WIDTH),
                calls=(FUSED_ADD_NORM,),
                files=_FILES,
                memory="self",
                traceable=False,
                alignment=16,
                views="rows",
                name="gemma_fused_add_rmsnorm on copies",
            ),
        ),
        "topk_blocks": (
            Impl(
                "m3hal_nvidia.blocks:topk_blocks",
                limits=(one_of("top_k_blocks", 16), at_most("max_context", 1 << 24)),
                predicate="m3hal_nvidia.limits:forced",
                devices=("cuda:sm_100", "cuda:sm_103", "cuda:sm_107"),
                calls=(TOPK_SELECT,),
                files=_FILES,
                memory="self",
                traceable=False,
                name="msa_topk_select on a masked copy",
            ),
        ),
    },
    withheld={
        "block_scores": "every scorer of FlashInfer 0.7.4 leaves NaN keys out of its maximum, where the definition has "
        "a visible NaN make its block's score NaN, and to find those keys afterwards would read the whole index cache "
        "a second time; besides, msa_proxy_score has no kernel for sm_100, sm_103 and sm_107, on sm_90 prefills from "
        "fp8 queries and keys only, and takes its short decode path by counting tokens, which a ragged batch that is "
        "padded can satisfy by accident; msa_icp_index_score_sharded, for sm_100, sm_103 and sm_107, is experimental "
        "and takes four heads, fp8 queries and keys, and the shard of one of two or four ranks",
        "select_blocks": "on sm_90 FlashInfer's msa_topk_select leaves ties open, and one of its kernels forces blocks "
        "by scores of 1e14 and 1e16 and takes a score below -1e30 for an absent block; on sm_100 there is no "
        "msa_proxy_score to go before it",
        "sparse_attention": "FlashInfer's msa_sparse_attention and msa_sparse_decode_attention have no adapter yet",
        "paged_attention": "FlashInfer's batch wrappers plan on the host and have no adapter yet",
        "moe_experts": "FlashInfer's fused MoE has no adapter yet",
    },
)
