"""FlashInfer's own tables of its tensors' axes."""

from types import SimpleNamespace as TraceTemplate


def Tensor(axes, **options):
    return axes


rmsnorm_trace = TraceTemplate(inputs={"hidden_states": Tensor(["batch_size", "hidden_size"])})
gemma_rmsnorm_trace = TraceTemplate(inputs={"hidden_states": Tensor(["batch_size", "hidden_size"])})
gemma_fused_add_rmsnorm_trace = TraceTemplate(inputs={"residual": Tensor(["batch_size", "hidden_size"])})
