from .index_topk import minimax_m3_index_decode, minimax_m3_index_score, minimax_m3_index_topk
from .sparse_attn import minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode

__all__ = [
    "minimax_m3_index_decode",
    "minimax_m3_index_score",
    "minimax_m3_index_topk",
    "minimax_m3_sparse_attn",
    "minimax_m3_sparse_attn_decode",
]
