"""vLLM's functions as they were in version 0.33.0, against which the installed ones are compared.

Read in the wheel ``vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl``.
"""

from m3hal.dispatch.manifest import Symbol

_FOLDER = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/models/minimax_m3/common/ops"
_MODULE = "vllm.models.minimax_m3.common.ops.sparse_attn"

#: an equal number of query tokens of each request; writes ``output``
SPARSE_DECODE = Symbol(
    f"{_MODULE}:minimax_m3_sparse_attn_decode",
    (
        "q",
        "kv_cache",
        "topk_idx",
        "block_table",
        "seq_lens",
        "num_kv_heads",
        "sm_scale",
        "output",
        "decode_query_len",
        "k_scale=None",
        "v_scale=None",
    ),
    f"{_FOLDER}/sparse_attn.py",
    "2026-11-30",
    {f"{_MODULE}:SPARSE_BLOCK_SIZE": "128"},
)
