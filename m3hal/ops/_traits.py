"""Numeric freedoms that several operators share; the others stand in their operator's own file."""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.formats import e4m3
from m3hal.ops._operator import Trait

#: what a reference runs with unless told otherwise: nothing is rounded but the outputs
EXACT: Mapping[str, str] = {}

BATCH_INVARIANT = Trait("batch_invariant", ("no", "yes"), False, "a row's bits do not depend on the rest of the batch")
MMA_ACCUM = Trait(
    "mma_accum",
    ("float32", "float22", "float16", "bfloat16"),
    False,
    "accumulator of the matrix products; float22: fp32 without its last ten bits, as Hopper's unit sums FP8 products",
)
ROPE_TABLE = Trait("rope_table", ("float32", "bfloat16"), True, "what cos and sin are rounded to before the rotation")
P_DTYPE = Trait(
    "p_dtype",
    ("float32", "bfloat16", "e4m3x448"),
    True,
    "what the probabilities exp(score - max) are rounded to before they meet the values; e4m3x448 after times 448",
)
Q_DTYPE = Trait("q_dtype", ("given", "e4m3"), True, "what queries are rounded to before they meet the keys")
KV_DEQUANT_ROUND = Trait(
    "kv_dequant_round",
    ("exact", "e4m3", "e4m3_shift3"),
    True,
    "what code * scale of an nvfp4 or mxfp4 cache is rounded to before use; e4m3_shift3: with the scale divided by 8, "
    "so that nothing saturates",
)
TOPK_KEY_BITS = Trait("topk_key_bits", ("32", "29", "16"), False, "bits of a score that take part in the ranking")
NVFP4_QUANTIZER = Trait(
    "nvfp4_quantizer",
    ("division", "reciprocal", "token_global"),
    True,
    "how NVFP4 codes are found: correctly rounded division, multiplication by a reciprocal, one global scale per token",
)
MX_SCALE_RULE = Trait(
    "mx_scale_rule",
    ("own", "ceil", "floor", "even"),
    True,
    "how the power-of-two scale of an MX block is rounded; own: ceil for mxfp8, even for mxfp4",
)
KV_SCALE_USED = Trait("kv_scale_used", ("yes", "no"), True, "whether an FP8 cache write divides by k_scale and v_scale")
DOUBLE_ROUNDING = Trait(
    "double_rounding",
    ("no", "bfloat16"),
    True,
    "what a value is rounded to on its way to a narrower format: that of a cache, or of experts' hidden activations",
)


def as_queries(q: torch.Tensor, compute: torch.dtype, traits: Mapping[str, str]) -> torch.Tensor:
    """Queries in the dtype of the computation, rounded as ``q_dtype`` says."""
    return e4m3.rounded(q.to(compute)) if traits.get("q_dtype") == "e4m3" else q.to(compute)
