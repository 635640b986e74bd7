"""The operators that work row by row, against their definitions."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, poisoned, sparse_site
from m3hal_conformance.compare import ulps
from m3hal_triton.qk_norm_rope_insert import qk_norm_rope_insert
from m3hal_triton.rms_norm import add_rms_norm, rms_norm
from m3hal_triton.swiglu_oai import swiglu_oai

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import QKNorms, load
from m3hal.ops.rope_partial import rope_table

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
#: fp32 sums of another order move an fp32 result by a few units; bf16 results by one
UNITS = {torch.float32: 8.0, torch.bfloat16: 1.0}


def _close(actual, exact, unit=None, scale=1.0):
    score = ulps("out", actual, exact, scale * UNITS[actual.dtype], unit)
    assert score.passed, str(score)


def _randn(*shape, dtype):
    return torch.randn(*shape).to(dtype).to(DEVICE)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 48), (2, 3, 128), (2, 40), (0, 48)])
def test_rms_norm(dtype, shape):
    """Rows in parts, whole and filled up, one of zeros, one with a NaN, in a strided view."""
    op, site = load("rms_norm"), sparse_site(dtype)
    x, weight = _randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2], _randn(shape[-1], dtype=dtype)
    if shape[0]:
        x[0] = 0
        x[-1, ..., 1] = float("nan")
    out = rms_norm(site)(x, weight, out=poisoned(*shape, dtype=dtype))
    exact = op.reference(x.double(), weight.double(), **op.static_values(site))
    assert torch.equal(out.isnan(), exact.isnan())
    _close(out.nan_to_num(0.0), exact.nan_to_num(0.0))


@DTYPES
def test_add_rms_norm(dtype):
    """The norm of the unrounded sum, and the sum rounded once; inputs stay."""
    op, site = load("add_rms_norm"), sparse_site(dtype)
    x, residual, weight = _randn(5, 96, dtype=dtype), _randn(5, 96, dtype=dtype), _randn(96, dtype=dtype)
    before = x.clone(), residual.clone()
    out, total = add_rms_norm(site)(x, residual, weight)
    exact, exact_total = op.reference(x.double(), residual.double(), weight.double(), **op.static_values(site))
    _close(out, exact)
    assert torch.equal(total, exact_total.to(dtype))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
def test_swiglu_oai(dtype):
    """Both clamps, gates far below, NaN."""
    site = replace(sparse_site(dtype), alpha=1.702, beta=1.0, limit=7.0)
    op = load("swiglu_oai")
    x = (_randn(7, 2 * 40, dtype=torch.float32) * 6).to(dtype)
    x[0, 0], x[1, 45], x[2, :4] = float("nan"), float("nan"), -1e4
    out = swiglu_oai(site)(x, out=poisoned(7, 40, dtype=dtype))
    exact = op.reference(x.double(), **op.static_values(site))
    assert torch.equal(out.isnan(), exact.isnan())
    # alpha * gate is rounded before its exponential is taken: at -20 that moves an fp32 result by 16 units
    _close(out.nan_to_num(0.0), exact.nan_to_num(0.0), scale=4.0 if dtype == torch.float32 else 1.0)


def _cache(layout, dtype, heads, dim, values):
    made = KVLayout(layout, str(dtype).removeprefix("torch."), 16, heads, dim, values)
    buffer = torch.full((4, 2, *made.page_shape()), float("nan"), dtype=dtype, device=DEVICE)
    return PagedCache(buffer[:, 1], made)


@DTYPES
@pytest.mark.parametrize("indexed", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize(("heads", "rotary"), [((4, 2, 2), 16), ((20, 1, 3), 32)])
def test_qk_norm_rope_insert(dtype, indexed, heads, rotary):
    """q and index_q out, k, v and index_k cached, absent slots unwritten, every head kind with its own weight."""
    q_heads, kv_heads, index_heads = heads
    counts = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "num_index_heads": index_heads if indexed else 0}
    site = sparse_site(dtype, rotary_dim=rotary, **counts)
    op = load("qk_norm_rope_insert")
    width = (q_heads + 2 * kv_heads) * 32 + ((index_heads + 1) * 32 if indexed else 0)
    qkv = _randn(5, width + 7, dtype=dtype)[:, :width]
    weights = [_randn(32, dtype=dtype) for _ in range(4)]
    norms = QKNorms(*weights) if indexed else QKNorms(*weights[:2])
    positions, table = torch.tensor([0, 5, 99, 3, 64], device=DEVICE), rope_table(100, rotary, 1e4).to(DEVICE)
    slots, index_slots = (
        torch.tensor([3, -1, 40, 63, 16], device=DEVICE),
        torch.tensor([-1, 2, 33, 9, 62], device=DEVICE),
    )

    def call(function, number=lambda t: t, **out):
        kv, keys = _cache("nhd", dtype, kv_heads, 32, True), _cache("hnd", dtype, 1, 32, False)
        kv, keys = replace(kv, buf=number(kv.buf)), replace(keys, buf=number(keys.buf))
        wide = QKNorms(*(number(w) for w in weights[: 4 if indexed else 2]))
        caches = (kv, keys, slots, index_slots) if indexed else (kv, None, slots, None)
        return (
            function(number(qkv), wide if number(qkv) is not qkv else norms, positions, table, *caches, **out),
            kv,
            keys,
        )

    q = poisoned(5, q_heads, 32, dtype=dtype)
    index_q = poisoned(5, index_heads, 32, dtype=dtype) if indexed else None
    _, kv, keys = call(qk_norm_rope_insert(site), out=(q, index_q))
    statics = op.static_values(site)
    (exact_q, exact_index_q), exact_kv, exact_keys = call(
        lambda *a: op.reference(*a, **statics), lambda t: t.double() if t.is_floating_point() else t
    )

    def pair(exact):  # the unit is that of the larger of a rotated pair
        half = rotary // 2
        size = exact.abs().clone()
        large = torch.maximum(size[..., :half], size[..., half : 2 * half])
        size[..., : 2 * half] = torch.cat([large, large], -1)
        return size

    _close(q, exact_q, pair(exact_q))
    if indexed:
        _close(index_q, exact_index_q, pair(exact_index_q))
    for ours, exact in [(kv.k, exact_kv.k), (kv.v, exact_kv.v)] + ([(keys.k, exact_keys.k)] if indexed else []):
        assert torch.equal(ours.isnan(), exact.isnan())
        _close(ours.nan_to_num(0.0), exact.nan_to_num(0.0), pair(exact.nan_to_num(0.0)))
