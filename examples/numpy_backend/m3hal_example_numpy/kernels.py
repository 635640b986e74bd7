"""Six operators of MiniMax-M3 in NumPy. Their contracts stand in the files of the same names in ``m3hal/ops/``."""

from __future__ import annotations

from typing import Any

import numpy as np

from m3hal_example_numpy.edge import numpy_kernel

Array = np.ndarray[Any, Any]


@numpy_kernel
def rms_norm(x: Array, weight: Array, out: Array, *, eps: float, weight_offset: float) -> None:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    out[...] = x / np.sqrt(mean_square + eps) * (weight + weight_offset)


@numpy_kernel
def add_rms_norm(
    x: Array, residual: Array, weight: Array, out: Array, residual_out: Array, *, eps: float, weight_offset: float
) -> None:
    total = x + residual
    mean_square = np.mean(np.square(total), axis=-1, keepdims=True)
    out[...] = total / np.sqrt(mean_square + eps) * (weight + weight_offset)
    residual_out[...] = total


@numpy_kernel
def rope_partial(x: Array, positions: Array, cos_sin: Array, out: Array, *, rotary_dim: int) -> None:
    cos, sin = np.split(cos_sin[positions][:, None], 2, axis=-1)
    first, second = np.split(x[..., :rotary_dim], 2, axis=-1)
    out[...] = np.concatenate((first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]), axis=-1)


@numpy_kernel
def swiglu_oai(gate_up: Array, out: Array, *, alpha: float, beta: float, limit: float) -> None:
    gate, up = np.split(gate_up, 2, axis=-1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    out[...] = gate * sigmoid(alpha * gate) * (up + beta)


@numpy_kernel
def route_topk(
    logits: Array,
    bias: Array,
    weights: Array,
    ids: Array,
    *,
    top_k_experts: int,
    renormalize: bool,
    routed_scale: float,
) -> None:
    score = sigmoid(logits)
    choice = descending(score + bias)[:, :top_k_experts]
    chosen = np.nan_to_num(np.take_along_axis(score, choice, axis=-1), nan=0.0)
    total = chosen.sum(axis=-1, keepdims=True)
    if renormalize:
        chosen = np.divide(chosen, total, out=np.zeros_like(chosen), where=total > 0)
    weights[...], ids[...] = chosen * routed_scale, choice


@numpy_kernel
def topk_blocks(
    scores: Array, visible_blocks: Array, out: Array, *, top_k_blocks: int, init_blocks: int, local_blocks: int
) -> None:
    block = np.arange(scores.shape[-1])
    last = visible_blocks[:, None, None]  # one past the newest block that the token sees
    visible = np.broadcast_to(block < last, scores.shape)
    forced = visible & ((block < init_blocks) | (block >= last - local_blocks))
    ranked = descending(scores, ~forced, ~visible)[..., :top_k_blocks]
    absent = np.iinfo(np.int32).max  # sorts behind every id
    ids = np.where(np.take_along_axis(visible, ranked, axis=-1), ranked, absent)
    ids.sort(axis=-1)
    out[...] = -1
    out[..., : ids.shape[-1]] = np.where(ids == absent, -1, ids)


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(88.8) is inf in fp32, and 1 / (1 + inf) is the right zero
        return 1 / (1 + np.exp(-x))


def descending(scores: Array, *classes: Array) -> Array:
    """Indices along the last axis by class (False first, the last class weighs most), then score; ties: lower index.

    NaN comes after every number. ``lexsort`` is stable and takes its most significant key last.
    """
    missing = np.isnan(scores)
    order: Array = np.lexsort((-np.where(missing, 0, scores), missing, *classes), axis=-1)
    return order
