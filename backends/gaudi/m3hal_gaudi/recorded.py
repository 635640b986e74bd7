"""Functions of Habana's torch bridge as its last public sources have them, against which the installed are compared."""

from m3hal.dispatch.manifest import Symbol

_REPOSITORY = "https://github.com/HabanaAI/gaudi-pytorch-bridge/blob"
_PACKAGE = "python_packages/habana_frameworks/torch/hpex"
_DATE = "2026-11-30"

#: what ``FusedRMSNorm.apply`` passes on; data and gamma of one dtype, [1, rows, n] and [n]
ROW_NORM = Symbol(
    "habana_frameworks.torch.hpex.normalization:FusedRMSNorm.forward",
    ("ctx", "data_in", "gamma", "eps", "use_stages=True", "bwd_mode=0"),
    f"{_REPOSITORY}/5a56187e98684ceff3de8965ce88a284cf7d7eef/{_PACKAGE}/normalization/FusedRMSNorm.py",
    _DATE,
)
#: NeoX halves, in fp32 as soon as one of its tensors is. It is what apply_rotary_pos_emb does by default, but names its
#: arguments, whose order can so be compared.
ROTARY = Symbol(
    "habana_frameworks.torch.hpex.kernels:RotaryPosEmbeddingHelperV1.forward",
    ("ctx", "p", "cos", "sin", "offset"),
    f"{_REPOSITORY}/39403e490aa44f9ab3415a5404ee6fc4922ffb3a/{_PACKAGE}/kernels/RotaryPosEmbeddingHelper.py",
    _DATE,
)
