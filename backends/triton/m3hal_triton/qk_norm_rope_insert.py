"""``qk_norm_rope_insert``: norm, rotation and cache insertion in one pass over the projection's rows.

A program takes ROWS heads of one kind: all of one token's, so that they share its angles, or over as many tokens as
it needs. A head is read in parts of HALF columns, the two that rotate against each other and what passes through: all
lie in registers alike, so pairs meet there, and sums over a head need no exchange of layouts.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.ops import QKNorms, load
from m3hal.shape import Site
from m3hal_triton import _encode, _pages
from m3hal_triton._launch import converts
from m3hal_triton._rows import items

#: tokens whose programs stand side by side: those that encode hide behind the many that only move q
TOKENS = 8
#: heads of a program for q, and for the others, which need more registers
ROWS, FEW = 16, 8
#: of a program; 2 are 1 to 4 % faster at 8192 tokens, and up to 1.2 us slower at one
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
    tokens = qkv.shape[0]
    if not tokens:
        return result
    # without an indexer, its arguments are stand-ins that nothing reads
    q, index_q = result[0], result[0] if result[1] is None else result[1]
    keys = kv if index_cache is None else index_cache
    index_norms = (norms.q, norms.k) if norms.index_q is None else (norms.index_q, norms.index_k)
    index_slots = slots if index_slots is None else index_slots
    programs = 2 * triton.cdiv(TOKENS * site.num_kv_heads, FEW) + triton.cdiv(TOKENS * site.num_q_heads, ROWS)
    if site.num_index_heads:
        programs += triton.cdiv(TOKENS * site.num_index_heads, FEW) + triton.cdiv(TOKENS, FEW)
    _heads[(triton.cdiv(tokens, TOKENS) * programs,)](
        qkv, norms.q, norms.k, *index_norms, positions, cos_sin,
        _pages.memory(kv), _pages.keys(kv), _pages.values(kv), kv.k_scale, kv.v_scale,
        _pages.memory(keys), _pages.keys(keys), slots, index_slots, q, index_q,
        tokens, qkv.stride(), cos_sin.stride(), q.stride(), index_q.stride(),
        tuple(t.stride(0) for t in (positions, slots, index_slots, norms.q, norms.k, *index_norms)),
        site.eps, site.weight_offset,
        Q_HEADS=site.num_q_heads,
        KV_HEADS=site.num_kv_heads,
        INDEX_HEADS=site.num_index_heads,
        TOKENS=TOKENS,
        ROWS=ROWS,
        FEW=FEW,
        DIM=site.head_dim,
        INDEX_DIM=site.index_dim or site.head_dim,
        HALF=site.rotary_dim // 2,
        PAGE=kv.layout.page_size,
        FORMAT=kv.layout.format,
        INDEX_PAGE=keys.layout.page_size,
        INDEX_FORMAT=keys.layout.format,
        NATIVE=converts(qkv.device),
        num_warps=WARPS,
    )  # fmt: skip
    return result


@triton.jit
def _read(at, column, mask, DIM: tl.constexpr, HALF: tl.constexpr):
    """Heads at pointers of their first elements, as a tuple of DIM / HALF parts [ROWS, HALF]."""
    half = tl.arange(0, HALF)[None, :]
    parts = (tl.load(at + half * column, mask=mask, other=0.0),)
    for i in tl.static_range(1, DIM // HALF):
        parts = parts + (tl.load(at + (i * HALF + half) * column, mask=mask, other=0.0),)  # noqa: RUF005
    return parts


@triton.jit
def _turned(parts, token, real, gain, turn, DIM: tl.constexpr, HALF: tl.constexpr):
    """Parts of heads, normalised and rotated, in fp32. gain: weight and its stride. turn: see :func:`_heads`."""
    positions, position, cos_sin, table, eps, offset = turn
    half = tl.arange(0, HALF)[None, :]
    # an absent head's angles are those of position 0
    angles = cos_sin + tl.load(positions + token * position, mask=real, other=0).to(tl.int64) * table[0]
    cos = tl.load(angles + half * table[1]).to(tl.float32)
    sin = tl.load(angles + (HALF + half) * table[1]).to(tl.float32)
    square = parts[0].to(tl.float32) * parts[0].to(tl.float32)
    for i in tl.static_range(1, DIM // HALF):
        square += parts[i].to(tl.float32) * parts[i].to(tl.float32)
    scale = tl.rsqrt(tl.sum(square, 1)[:, None] / DIM + eps)
    first = parts[0].to(tl.float32) * scale * (offset + tl.load(gain[0] + half * gain[1]).to(tl.float32))
    second = parts[1].to(tl.float32) * scale * (offset + tl.load(gain[0] + (HALF + half) * gain[1]).to(tl.float32))
    turned = (first * cos - second * sin, second * cos + first * sin)
    for i in tl.static_range(2, DIM // HALF):
        factor = offset + tl.load(gain[0] + (i * HALF + half) * gain[1]).to(tl.float32)
        turned = turned + (parts[i].to(tl.float32) * scale * factor,)  # noqa: RUF005
    return turned


@triton.jit
def _query(
    program, span, at, row, gain, turn, out, strides,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Heads from column ``at`` of the rows on, to ``out``."""
    token, head, real = items(program, span[0], span[1], HEADS, ROWS)
    parts = _read(at + token * row[0] + head * DIM * row[1], row[1], real, DIM, HALF)
    turned = _turned(parts, token, real, gain, turn, DIM, HALF)
    to = out + token * strides[0] + head * strides[1]
    for i in tl.static_range(DIM // HALF):
        column = (i * HALF + tl.arange(0, HALF)[None, :]) * strides[2]
        tl.store(to + column, turned[i].to(out.dtype.element_ty), mask=real)


@triton.jit
def _kept(
    program, span, at, row, slots, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr
):
    """Heads from column ``at`` of the rows on, and where they go; slot -1: nowhere. slots: pointer and stride."""
    token, head, real = items(program, span[0], span[1], HEADS, ROWS)
    slot = tl.load(slots[0] + token * slots[1], mask=real, other=-1).to(tl.int64)
    parts = _read(at + token * row[0] + head * DIM * row[1], row[1], real, DIM, HALF)
    return parts, token, real, head, slot


@triton.jit
def _key(
    program, span, at, row, gain, turn, slots, cache, part, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    parts, token, real, head, slot = _kept(program, span, at, row, slots, HEADS, ROWS, DIM, HALF)
    turned = _turned(parts, token, real, gain, turn, DIM, HALF)
    for i in tl.static_range(DIM // HALF):
        _encode.put(turned[i], slot >= 0, cache, part, slot, head, scale, i * HALF, DIM, PAGE, FORMAT, False, NATIVE)


@triton.jit
def _value(
    program, span, at, row, slots, cache, part, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    parts, _, _, head, slot = _kept(program, span, at, row, slots, HEADS, ROWS, DIM, HALF)
    for i in tl.static_range(DIM // HALF):
        _encode.put(parts[i], slot >= 0, cache, part, slot, head, scale, i * HALF, DIM, PAGE, FORMAT, True, NATIVE)


@triton.jit(do_not_specialize=["tokens"])
def _heads(
    qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin,
    kv, keys, values, k_scale, v_scale, index_cache, index_keys, slots, index_slots, q_out, index_q_out,
    tokens, row, table, q_strides, index_q_strides, strides, eps, offset,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr,
    DIM: tl.constexpr, INDEX_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    INDEX_PAGE: tl.constexpr, INDEX_FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """For every TOKENS tokens, programs for k, v, index_k, index_q and q."""
    VALUE: tl.constexpr = (TOKENS * KV_HEADS + FEW - 1) // FEW
    INDEX_KEY: tl.constexpr = 2 * VALUE
    INDEX_QUERY: tl.constexpr = INDEX_KEY + ((TOKENS + FEW - 1) // FEW if INDEX_HEADS > 0 else 0)
    QUERY: tl.constexpr = INDEX_QUERY + (TOKENS * INDEX_HEADS + FEW - 1) // FEW
    END: tl.constexpr = QUERY + (TOKENS * Q_HEADS + ROWS - 1) // ROWS
    start, program = tl.program_id(0) // END * TOKENS, tl.program_id(0) % END
    span = (start, tl.minimum(tokens - start, TOKENS))
    turn = (positions, strides[0], cos_sin, table, eps, offset)
    to, index_to = (slots, strides[1]), (index_slots, strides[2])
    k = qkv + Q_HEADS * DIM * row[1]
    v = k + KV_HEADS * DIM * row[1]
    index_q = v + KV_HEADS * DIM * row[1]
    if program < VALUE:
        gain = (k_weight, strides[4])
        _key(program, span, k, row, gain, turn, to, kv, keys, k_scale, KV_HEADS, FEW, DIM, HALF, PAGE, FORMAT, NATIVE)
    elif program < INDEX_KEY:
        program -= VALUE
        _value(program, span, v, row, to, kv, values, v_scale, KV_HEADS, FEW, DIM, HALF, PAGE, FORMAT, NATIVE)
    elif program >= QUERY:
        gain = (q_weight, strides[3])
        program -= QUERY
        _query(program, span, qkv, row, gain, turn, q_out, q_strides, Q_HEADS, ROWS, DIM, HALF)
    elif INDEX_HEADS > 0:
        if program < INDEX_QUERY:
            gain = (index_k_weight, strides[6])
            index_k = index_q + INDEX_HEADS * INDEX_DIM * row[1]
            _key(
                program - INDEX_KEY, span, index_k, row, gain, turn, index_to, index_cache, index_keys, None,
                1, FEW, INDEX_DIM, HALF, INDEX_PAGE, INDEX_FORMAT, NATIVE,
            )  # fmt: skip
        else:
            gain = (index_q_weight, strides[5])
            program -= INDEX_QUERY
            _query(
                program, span, index_q, row, gain, turn, index_q_out, index_q_strides, INDEX_HEADS, FEW, INDEX_DIM,
                HALF,
            )  # fmt: skip
