"""What vLLM's own MiniMax-M3 kernels offer on NVIDIA GPUs where they are faster than m3hal-triton's, as data."""

from m3hal.dispatch.manifest import Impl, Limit, Manifest, Rung, one_of
from m3hal_nvidia.vllm_limits import FEW_TOKENS
from m3hal_nvidia.vllm_recorded import SPARSE_DECODE

_NAN = "its maximum over a block's keys drops NaN, which must make the block's score NaN"


def _verify(kv_format: str, *limits: Limit) -> Impl:
    """``sparse_attention`` over caches of a format."""
    return Impl(
        "m3hal_nvidia.vllm_msa:sparse_attention",
        limits=(
            one_of("dtype", "bfloat16"),
            one_of("kv_format", kv_format),
            one_of("block_size", 128),
            one_of("head_dim", 128),
            one_of("return_lse", False),
            *limits,
        ),
        predicate="m3hal_nvidia.vllm_limits:one_block_pages",
        traits={"p_dtype": "bfloat16", "mma_accum": "bfloat16"},
        layouts=("hnd",),
        memory="self",
        rungs=(
            Rung("minimax_m3_sparse_attn_decode", ("verify",), 0, FEW_TOKENS),
            Rung("m3hal-triton", ("verify",), FEW_TOKENS + 1),
            Rung("m3hal-triton", ("prefill", "decode")),
        ),
        files=("vllm_limits.py", "vllm_recorded.py"),
        calls=(SPARSE_DECODE,),
        traceable=False,
        name=f"vllm_sparse_verify, {kv_format}",
    )


MANIFEST = Manifest(
    name="nvidia_vllm",
    vendor="NVIDIA",
    api=">=1,<2",
    priority=60,  # before m3hal-triton's, whose kernels it runs beside
    devices=("cuda:sm_90",),
    libraries={"torch": ">=2.9", "vllm": ">=0.33,<0.34", "m3hal-triton": ">=0.1,<0.2"},
    probe="m3hal_nvidia.probe:probe",
    operators={
        "sparse_attention": (
            _verify("bfloat16"),
            _verify("fp8_e4m3", one_of("num_kv_heads", 1)),  # for four of them it was slower, 11.9 us against 10.9
        ),
    },
    withheld={
        "block_scores": f"of vLLM 0.33's minimax_m3_index_score and minimax_m3_index_decode_score: {_NAN}",
        "select_blocks": f"of vLLM 0.33's minimax_m3_index_decode: {_NAN}; and its choice forces blocks by scores of "
        "1e29 and 1e30, and takes a score below -1e30 for an absent block",
        "topk_blocks": "vLLM 0.33's minimax_m3_index_topk leaves ties open, forces blocks by scores of 1e29 and 1e30, "
        "and takes NaN and scores below -1e30 for absent blocks",
        "qk_norm_rope_insert": "vLLM 0.33's operator writes k and v back into the row and takes cos and sin in bf16",
    },
)
