"""``qk_norm_rope_insert``: norm, rotation and cache insertion in one pass over the projection's rows.

A program takes ROWS heads of one kind, over as many tokens as it needs. Each head is read in three parts, the two
halves that rotate against each other and what passes through, so that the pairs meet in registers.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.ops import QKNorms, load
from m3hal.shape import Site

#: heads of one program, and its warps, found on an H200
ROWS = 16
WARPS = 4


def qk_norm_rope_insert(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor | None]]:
    """The callable for a site, with an indexer or without."""
    op = load("qk_norm_rope_insert")
    return partial(_insert, site, partial(op.fake, **op.static_values(site)))


def _insert(
    site: Site,
    fake: partial[tuple[torch.Tensor, torch.Tensor | None]],
    qkv: torch.Tensor,
    norms: QKNorms,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: PagedCache,
    index_cache: PagedCache | None,
    slots: torch.Tensor,
    index_slots: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    result = fake(qkv) if out is None else out
    if not qkv.shape[0]:
        return result
    q, index_q = result
    indexed = site.num_index_heads > 0
    k, v = kv.k, kv.v
    # without an indexer, its arguments are stand-ins that nothing reads
    index_k = index_cache.k if index_cache is not None else k
    tokens = qkv.shape[0]
    # programs of each kind of head, in the order of the row: q, k, v, index_q, index_k
    heads = [site.num_q_heads, site.num_kv_heads, site.num_kv_heads]
    heads += [site.num_index_heads, 1] if indexed else []
    programs = [triton.cdiv(tokens * count, ROWS) for count in heads]
    ends = [sum(programs[: i + 1]) for i in range(5)]
    _heads[(ends[-1],)](
        qkv, norms.q, norms.k,
        norms.index_q if indexed else norms.q,
        norms.index_k if indexed else norms.k,
        positions, cos_sin, k, v, index_k, slots,
        index_slots if indexed else slots,
        q,
        index_q if indexed else q,
        tokens, *ends[:4],
        *qkv.stride(), *cos_sin.stride(), *k.stride(), *v.stride(),
        index_k.stride(0), index_k.stride(2), index_k.stride(3),
        *q.stride(), *(index_q.stride() if indexed else q.stride()),
        site.eps, site.weight_offset,
        Q_HEADS=site.num_q_heads,
        KV_HEADS=site.num_kv_heads,
        INDEX_HEADS=site.num_index_heads,
        ROWS=ROWS,
        DIM=site.head_dim,
        INDEX_DIM=site.index_dim or site.head_dim,
        HALF=site.rotary_dim // 2,
        PAGE=kv.layout.page_size,
        INDEX_PAGE=index_cache.layout.page_size if index_cache is not None else 1,
        num_warps=WARPS,
    )  # fmt: skip
    return result


@triton.jit
def _store(at, stride, first, second, rest, mask, HALF: tl.constexpr, REST: tl.constexpr):
    """The three parts of heads to pointers of their first elements [H, 1]."""
    half = tl.arange(0, HALF)[None, :]
    tl.store(at + half * stride, first.to(at.dtype.element_ty), mask=mask)
    tl.store(at + (HALF + half) * stride, second.to(at.dtype.element_ty), mask=mask)
    if REST > 0:
        other = tl.arange(0, REST)[None, :]
        tl.store(at + (2 * HALF + other) * stride, rest.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _turned(
    at, stride, weight, angles, angle, eps, offset, mask, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    """Heads at pointers of their first elements [H, 1], normalised and rotated, in fp32: three parts."""
    half = tl.arange(0, HALF)
    first = tl.load(at + half[None, :] * stride, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + (HALF + half)[None, :] * stride, mask=mask, other=0.0).to(tl.float32)
    # an absent head's angles are those of position 0
    cos = tl.load(angles + half[None, :] * angle).to(tl.float32)
    sin = tl.load(angles + (HALF + half)[None, :] * angle).to(tl.float32)
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    rest = first
    if REST > 0:
        other = tl.arange(0, REST)
        rest = tl.load(at + (2 * HALF + other)[None, :] * stride, mask=mask, other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, 1)
    scale = tl.div_rn(1.0, tl.sqrt_rn(square / DIM + eps))[:, None]
    first = first * scale * (offset + tl.load(weight + half).to(tl.float32))[None, :]
    second = second * scale * (offset + tl.load(weight + HALF + half).to(tl.float32))[None, :]
    if REST > 0:
        rest = rest * scale * (offset + tl.load(weight + 2 * HALF + other).to(tl.float32))[None, :]
    return first * cos - second * sin, second * cos + first * sin, rest


@triton.jit
def _heads(
    qkv,
    q_weight,
    k_weight,
    index_q_weight,
    index_k_weight,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    index_cache,
    slots,
    index_slots,
    q_out,
    index_q_out,
    tokens,
    q_end,
    k_end,
    v_end,
    index_q_end,
    row_token,
    row_column,
    table_row,
    table_column,
    k_page,
    k_head,
    k_slot,
    k_dim,
    v_page,
    v_head,
    v_slot,
    v_dim,
    i_page,
    i_slot,
    i_dim,
    q_token,
    q_head,
    q_dim,
    iq_token,
    iq_head,
    iq_dim,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    INDEX_PAGE: tl.constexpr,
):
    REST: tl.constexpr = DIM - 2 * HALF
    INDEX_REST: tl.constexpr = INDEX_DIM - 2 * HALF
    program = tl.program_id(0)
    r = tl.arange(0, ROWS)[:, None]
    if program < q_end:
        item = program.to(tl.int64) * ROWS + r
        token, head = item // Q_HEADS, item % Q_HEADS
        real = token < tokens
        turning = token
        if Q_HEADS % ROWS == 0:  # all heads are one token's, and share its angles
            turning = program.to(tl.int64) * ROWS // Q_HEADS + tl.zeros((1, 1), tl.int64)
        angles = cos_sin + tl.load(positions + turning, mask=turning < tokens, other=0).to(tl.int64) * table_row
        at = qkv + token * row_token + head * DIM * row_column
        a, b, c = _turned(at, row_column, q_weight, angles, table_column, eps, offset, real, DIM, HALF, REST)
        _store(q_out + token * q_token + head * q_head, q_dim, a, b, c, real, HALF, REST)
    elif program < v_end:
        item = tl.where(program < k_end, program - q_end, program - k_end).to(tl.int64) * ROWS + r
        token, head = item // KV_HEADS, item % KV_HEADS
        real = token < tokens
        slot = tl.load(slots + token, mask=real, other=-1).to(tl.int64)
        kept = real & (slot >= 0)
        page, place = slot // PAGE, slot % PAGE
        if program < k_end:
            angles = cos_sin + tl.load(positions + token, mask=real, other=0).to(tl.int64) * table_row
            at = qkv + token * row_token + (Q_HEADS + head) * DIM * row_column
            a, b, c = _turned(at, row_column, k_weight, angles, table_column, eps, offset, kept, DIM, HALF, REST)
            _store(k_cache + page * k_page + head * k_head + place * k_slot, k_dim, a, b, c, kept, HALF, REST)
        else:
            dim = tl.arange(0, DIM)[None, :]
            value_at = qkv + token * row_token + ((Q_HEADS + KV_HEADS + head) * DIM + dim) * row_column
            value_to = v_cache + page * v_page + head * v_head + place * v_slot + dim * v_dim
            tl.store(value_to, tl.load(value_at, mask=kept, other=0.0).to(v_cache.dtype.element_ty), mask=kept)
    elif INDEX_HEADS > 0:
        row = qkv + (Q_HEADS + 2 * KV_HEADS) * DIM * row_column
        if program < index_q_end:
            item = (program - v_end).to(tl.int64) * ROWS + r
            token, head = item // INDEX_HEADS, item % INDEX_HEADS
            real = token < tokens
            angles = cos_sin + tl.load(positions + token, mask=real, other=0).to(tl.int64) * table_row
            at = row + token * row_token + head * INDEX_DIM * row_column
            a, b, c = _turned(
                at, row_column, index_q_weight, angles, table_column, eps, offset, real, INDEX_DIM, HALF, INDEX_REST
            )
            _store(index_q_out + token * iq_token + head * iq_head, iq_dim, a, b, c, real, HALF, INDEX_REST)
        else:
            token = (program - index_q_end).to(tl.int64) * ROWS + r
            real = token < tokens
            slot = tl.load(index_slots + token, mask=real, other=-1).to(tl.int64)
            kept = real & (slot >= 0)
            angles = cos_sin + tl.load(positions + token, mask=real, other=0).to(tl.int64) * table_row
            at = row + token * row_token + INDEX_HEADS * INDEX_DIM * row_column
            a, b, c = _turned(
                at, row_column, index_k_weight, angles, table_column, eps, offset, kept, INDEX_DIM, HALF, INDEX_REST
            )
            to = index_cache + slot // INDEX_PAGE * i_page + slot % INDEX_PAGE * i_slot
            _store(to, i_dim, a, b, c, kept, HALF, INDEX_REST)
