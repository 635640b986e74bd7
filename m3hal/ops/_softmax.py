"""Softmax attention over an explicit set of visible keys, the mathematics that both attention operators share."""

from __future__ import annotations

from m3hal._lazy import torch


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q k^T) v`` over the visible keys, in the dtype of ``q``.

    q [T, G, Hg, D] (G kv heads, Hg query heads that share one), k and v [G, S, D], visible bool [T, G, S].
    Returns out [T, G, Hg, D] and the natural-log lse [T, G, Hg]; a row that sees no key gives zeros and -inf. A hidden
    key contributes nothing, whatever its bytes hold.
    """
    scores = torch.einsum("tghd,gsd->tghs", q, k) * scale
    scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    seen = visible.any(-1)[:, :, None, None]
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    return _weighted_sum(weights, v), lse


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``weights @ v`` in which weight zero means absent: IEEE arithmetic alone would make 0 * NaN a NaN."""
    broken = ~torch.isfinite(v)
    total = torch.einsum("tghs,gsd->tghd", weights, v.masked_fill(broken, 0.0))
    if broken.any():
        tainted = torch.einsum("tghs,gsd->tghd", (weights > 0).to(v.dtype), broken.to(v.dtype)) > 0
        total = total.masked_fill(tainted, float("nan"))
    return total
