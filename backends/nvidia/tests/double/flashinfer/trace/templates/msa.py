"""FlashInfer's own tables of its tensors' axes."""

from types import SimpleNamespace as TraceTemplate


def Tensor(axes, **options):
    return axes


msa_topk_select_trace = TraceTemplate(
    inputs={"max_score": Tensor(["num_qo_heads", "max_k_tiles", "total_q"])},
    outputs={"block_indices": Tensor(["total_q", "num_qo_heads", "topk"], dtype="int32")},
)
