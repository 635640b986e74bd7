"""FlashInfer's functions as they were in version 0.7.4, against which the installed ones are compared.

Read in the wheel ``flashinfer_python-0.7.4-py3-none-any.whl``, whose build metadata names the commit linked here.
"""

from m3hal.dispatch.manifest import Symbol

_COMMIT = "https://github.com/flashinfer-ai/flashinfer/blob/77039051b0be921788dc2784ec41423b558878ec/flashinfer"
_DATE = "2026-11-30"
_NORMS = f"{_COMMIT}/norm/__init__.py"
_TABLE = "flashinfer.trace.templates.norm"

GEMMA_NORM = Symbol(
    "flashinfer.norm:gemma_rmsnorm",
    ("input", "weight", "eps=1e-06", "out=None", "enable_pdl=None"),
    _NORMS,
    _DATE,
    {f"{_TABLE}:gemma_rmsnorm_trace.inputs.hidden_states.0": "['batch_size', 'hidden_size']"},
)
PLAIN_NORM = Symbol(
    "flashinfer.norm:rmsnorm",
    ("input", "weight", "eps=1e-06", "out=None", "enable_pdl=None"),
    _NORMS,
    _DATE,
    {f"{_TABLE}:rmsnorm_trace.inputs.hidden_states.0": "['batch_size', 'hidden_size']"},
)
#: writes the sum over ``residual`` and the norm over ``input``
FUSED_ADD_NORM = Symbol(
    "flashinfer.norm:gemma_fused_add_rmsnorm",
    ("input", "residual", "weight", "eps=1e-06", "enable_pdl=None"),
    _NORMS,
    _DATE,
    {f"{_TABLE}:gemma_fused_add_rmsnorm_trace.inputs.residual.0": "['batch_size', 'hidden_size']"},
)
TOPK_SELECT = Symbol(
    "flashinfer.msa_ops:msa_topk_select",
    (
        "max_score",
        "topk",
        "num_valid_pages=None",
        "output=None",
        "force_begin_blocks=0",
        "force_end_blocks=0",
    ),
    f"{_COMMIT}/msa_ops/sparse_topk_select.py",
    _DATE,
    {
        "flashinfer.trace.templates.msa:msa_topk_select_trace.inputs.max_score.0": "['num_qo_heads', 'max_k_tiles', "
        "'total_q']",
        "flashinfer.trace.templates.msa:msa_topk_select_trace.outputs.block_indices.0": "['total_q', 'num_qo_heads', "
        "'topk']",
    },
)
