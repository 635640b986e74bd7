"""aiter's functions as they were at tag v0.1.20.post1, against which the installed ones are compared.

The kernels behind them were read at v0.1.18 and v0.1.20.post1: the norms compute in fp32 and normalise the sum before
it is rounded; the router takes its weights from the sigmoid and not from (sigmoid + bias) - bias.
"""

from m3hal.dispatch.manifest import Symbol

_COMMIT = "https://github.com/ROCm/aiter/blob/de07f3885ee5f2030ba72b6cc5940d674fd457cf/aiter/ops"
_DATE = "2026-11-30"

NORM = Symbol(
    "aiter.ops.rmsnorm:rmsnorm",
    ("out", "input", "weight", "epsilon", "gemma_norm=False"),
    f"{_COMMIT}/rmsnorm.py",
    _DATE,
)
ADD_NORM = Symbol(
    "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",
    (
        "out",
        "input",
        "residual_in",
        "residual_out",
        "weight",
        "epsilon",
        "gemma_norm=False",
        "use_model_sensitive_rmsnorm=0",
    ),
    f"{_COMMIT}/rmsnorm.py",
    _DATE,
)
#: writes ``topk_weights`` and ``topk_ids``, both by the strides of the ids
GROUPED_TOPK = Symbol(
    "aiter.ops.topk:biased_grouped_topk_hip",
    (
        "gating_output",
        "correction_bias",
        "topk_weights",
        "topk_ids",
        "num_expert_group",
        "topk_grp",
        "need_renorm",
        "routed_scaling_factor=1.0",
    ),
    f"{_COMMIT}/topk.py",
    _DATE,
)
