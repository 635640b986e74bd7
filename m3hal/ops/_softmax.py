"""Softmax attention over an explicit set of visible keys, the mathematics that both attention operators share."""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.ops._traits import EXACT

#: queries at a time, so that their scores stay in a CPU's cache and a long prefill in memory
TILE = 128


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    traits: Mapping[str, str] = EXACT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q k^T) v`` over the visible keys, in the dtype of ``q``.

    q [T, G, Hg, D] (G kv heads, Hg query heads that share one), k and v [G, S, D], visible bool [T, G, S], or
    [T, 1, S] when all heads see the same keys. ``traits`` may hold ``p_dtype``.
    Returns out [T, G, Hg, D] and the natural-log lse [T, G, Hg]; a row that sees no key gives zeros and -inf. A hidden
    key contributes nothing, whatever its bytes hold.
    """
    tiles = zip(torch.split(q, TILE), torch.split(visible, TILE), strict=True)
    parts = [_attend(rows, k, v, seen, scale, traits.get("p_dtype", "float32")) for rows, seen in tiles]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, p_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("tghd,gsd->tghs", q, k) * scale
    scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
    seen = visible.any(-1)[:, :, None, None]
    top = torch.where(seen, scores.amax(-1, keepdim=True), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    mixed = _weighted_sum(_rounded(weights, p_dtype), v)
    return mixed / torch.where(seen, total, 1.0), (total.log() + top).squeeze(-1)


def _rounded(weights: torch.Tensor, p_dtype: str) -> torch.Tensor:
    """The probabilities as a kernel hands them to its second matrix product; they are at most 1."""
    if p_dtype == "bfloat16":
        return weights.to(torch.bfloat16).to(weights.dtype)
    if p_dtype == "e4m3x448":
        return (weights * 448.0).to(torch.float8_e4m3fn).to(weights.dtype) / 448.0
    return weights


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``weights @ v`` in which weight zero means absent: IEEE arithmetic alone would make 0 * NaN a NaN."""
    if torch.isfinite(v.sum()):  # then so is every value
        return torch.einsum("tghs,gsd->tghd", weights, v)
    broken = ~torch.isfinite(v)
    tainted = torch.einsum("tghs,gsd->tghd", (weights > 0).to(v.dtype), broken.to(v.dtype)) > 0
    return torch.einsum("tghs,gsd->tghd", weights, v.masked_fill(broken, 0.0)).masked_fill(tainted, float("nan"))
