from .sparse_topk_select import msa_topk_select as msa_topk_select
