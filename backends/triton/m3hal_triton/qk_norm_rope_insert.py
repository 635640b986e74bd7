"""``qk_norm_rope_insert``: norm, rotation and cache insertion in one pass over the projection's rows.

A program takes ROWS heads of one kind: all of one token's, so that they share its angles, or over as many tokens as
it needs. A head is read in parts of HALF columns, the two that rotate against each other and what passes through: all
lie in registers alike, so pairs meet there, and sums over a head need no exchange of layouts. All loads come before
the first number that is waited for.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.ops import QKNorms, load
from m3hal.shape import Site
from m3hal_triton import _encode, _pages
from m3hal_triton._launch import after, converts, programmatic
from m3hal_triton._rows import items


class Shares(NamedTuple):
    """How heads are shared out among programs.

    tokens: whose programs stand side by side: those that encode hide behind the many that only move q. rows, few:
    heads of a program for q, and for the others, which need more registers. warps: of a program; few is twice as many
    and rows four times, so that a head's sum of squares is added up in the same order whatever the batch. apart:
    whether a program encodes one part of its heads, of which it reads all.
    """

    tokens: int
    rows: int
    few: int
    warps: int
    apart: bool = False


#: of few tokens: how long one warp's instructions take is all there is to save
FEW = Shares(1, 4, 2, 1, apart=True)
#: of many; 2 warps are 1 to 4 % faster at 8192 tokens, and up to 1.2 us slower at one
MANY = Shares(8, 16, 8, 4)
#: between them, where codes of four bits are most of the work
MIDDLE = MANY._replace(apart=True)
#: the most programs of one warp: a GPU starts about 800 programs in a microsecond
MOST = 640
#: the most tokens for MIDDLE
MOST_APART = 64


def shares(format: str, tokens: int, programs: int, early: bool) -> Shares:
    """For so many tokens and a cache's format. programs: of a token in FEW. early: on GPUs whose kernels overlap."""
    if early and tokens * programs <= MOST:
        return FEW
    return MIDDLE if early and tokens <= MOST_APART and format == "nvfp4" else MANY


def programs_of(site: Site, of: Shares) -> int:
    """For ``of.tokens`` tokens."""
    pieces, index_pieces = (2 * dim // site.rotary_dim if of.apart else 1 for dim in (site.head_dim, site.index_dim))
    found = 2 * pieces * triton.cdiv(of.tokens * site.num_kv_heads, of.few)
    found += triton.cdiv(of.tokens * site.num_q_heads, of.rows)
    if site.num_index_heads:
        found += triton.cdiv(of.tokens * site.num_index_heads, of.few) + index_pieces * triton.cdiv(of.tokens, of.few)
    return found


def qk_norm_rope_insert(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor | None]]:
    """The callable for a site, with an indexer or without."""
    op = load("qk_norm_rope_insert")
    programs = {of: programs_of(site, of) for of in (FEW, MIDDLE, MANY)}
    return partial(_insert, site, programs, partial(op.fake, **op.static_values(site)))


def _insert(
    site: Site,
    programs: dict[Shares, int],
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
    early = programmatic(qkv.device)
    of = shares(kv.layout.format, tokens, programs[FEW], early)
    _heads[(triton.cdiv(tokens, of.tokens) * programs[of],)](
        qkv, norms.q, norms.k, *index_norms, positions, cos_sin,
        _pages.memory(kv), _pages.keys(kv), _pages.values(kv), kv.k_scale, kv.v_scale,
        _pages.memory(keys), _pages.keys(keys), slots, index_slots, q, index_q,
        tokens, qkv.stride(), cos_sin.stride(), q.stride(), index_q.stride(),
        tuple(t.stride(0) for t in (positions, slots, index_slots, norms.q, norms.k, *index_norms)),
        site.eps, site.weight_offset,
        Q_HEADS=site.num_q_heads,
        KV_HEADS=site.num_kv_heads,
        INDEX_HEADS=site.num_index_heads,
        TOKENS=of.tokens,
        ROWS=of.rows,
        FEW=of.few,
        DIM=site.head_dim,
        INDEX_DIM=site.index_dim or site.head_dim,
        HALF=site.rotary_dim // 2,
        PAGE=kv.layout.page_size,
        FORMAT=kv.layout.format,
        INDEX_PAGE=keys.layout.page_size,
        INDEX_FORMAT=keys.layout.format,
        NATIVE=converts(qkv.device),
        EARLY=early,
        APART=of.apart,
        num_warps=of.warps,
        **after(early),
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
def _gain(weight, column, like, offset):
    """Factors of columns, read like ``like`` [ROWS, HALF] and so in its layout. weight: pointer and stride."""
    return offset + tl.load(weight[0] + (tl.zeros(like.shape, tl.int32) + column) * weight[1]).to(tl.float32)


@triton.jit
def _angles(token, real, turn, like):
    """cos and sin in fp32. turn: see :func:`_heads`."""
    positions, position, cos_sin, table, _, _ = turn
    half = tl.zeros(like.shape, tl.int32) + tl.arange(0, like.shape[1])[None, :]
    # an absent head's angles are those of position 0
    at = cos_sin + tl.load(positions + token * position, mask=real, other=0).to(tl.int64) * table[0]
    sin = at + like.shape[1] * table[1]
    return tl.load(at + half * table[1]).to(tl.float32), tl.load(sin + half * table[1]).to(tl.float32)


@triton.jit
def _norm(parts, eps):
    """1 / sqrt(mean of squares + eps), [ROWS, 1]. Fused by name here and below: the same bits in every kernel."""
    square = parts[0].to(tl.float32) * parts[0].to(tl.float32)
    for i in tl.static_range(1, len(parts)):
        square = tl.fma(parts[i].to(tl.float32), parts[i].to(tl.float32), square)
    return tl.rsqrt(tl.sum(square, 1)[:, None] / (len(parts) * square.shape[1]) + eps)


@triton.jit
def _turned(parts, gains, angles, eps):
    """Parts of heads, normalised and rotated, in fp32."""
    cos, sin = angles
    scale = _norm(parts, eps)
    first, second = parts[0].to(tl.float32) * scale * gains[0], parts[1].to(tl.float32) * scale * gains[1]
    turned = (tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin))
    for i in tl.static_range(2, len(parts)):
        turned = turned + (parts[i].to(tl.float32) * scale * gains[i],)  # noqa: RUF005
    return turned


@triton.jit
def _turned_part(parts, piece, gain, gain_beside, angles, eps):
    """Part ``piece`` of :func:`_turned`. gain: its own; gain_beside: of the part that rotates against it."""
    cos, sin = angles
    own, beside = parts[0], tl.where(piece == 0, parts[1], parts[0])
    for i in tl.static_range(1, len(parts)):
        own = tl.where(piece == i, parts[i], own)
    scale = _norm(parts, eps)
    own, beside = own.to(tl.float32) * scale * gain, beside.to(tl.float32) * scale * gain_beside
    turned = tl.fma(own, cos, beside * tl.where(piece == 0, -sin, sin))
    return (tl.where(piece < 2, turned, own),)


@triton.jit
def _query(
    program, span, at, row, weight, turn, out, strides,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Heads from column ``at`` of the rows on, to ``out``."""
    token, head, real = items(program, span[0], span[1], HEADS, ROWS)
    parts = _read(at + token * row[0] + head * DIM * row[1], row[1], real, DIM, HALF)
    half = tl.arange(0, HALF)[None, :]
    gains = (_gain(weight, half, parts[0], turn[5]),)
    for i in tl.static_range(1, DIM // HALF):
        gains = gains + (_gain(weight, i * HALF + half, parts[0], turn[5]),)  # noqa: RUF005
    turned = _turned(parts, gains, _angles(token, real, turn, parts[0]), turn[4])
    to = out + token * strides[0] + head * strides[1]
    for i in tl.static_range(DIM // HALF):
        tl.store(to + (i * HALF + half) * strides[2], turned[i].to(out.dtype.element_ty), mask=real)


@triton.jit
def _key(
    program, span, at, row, weight, turn, slots, cache, part, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Heads from column ``at`` of the rows on, to their slots; slot -1: nowhere. slots: pointer and stride."""
    piece = program % PIECES
    token, head, real = items(program // PIECES, span[0], span[1], HEADS, ROWS)
    slot = tl.load(slots[0] + token * slots[1], mask=real, other=-1).to(tl.int64)
    scale = _encode.loaded(scale)
    parts = _read(at + token * row[0] + head * DIM * row[1], row[1], real, DIM, HALF)
    half = tl.arange(0, HALF)[None, :]
    gains = (_gain(weight, piece * HALF + half, parts[0], turn[5]),)
    if PIECES > 1:
        gains = gains + (_gain(weight, tl.where(piece == 0, HALF, 0) + half, parts[0], turn[5]),)  # noqa: RUF005
    else:
        for i in tl.static_range(1, DIM // HALF):
            gains = gains + (_gain(weight, i * HALF + half, parts[0], turn[5]),)  # noqa: RUF005
    angles = _angles(token, real, turn, parts[0])
    by = _encode.divisor(scale, FORMAT, NATIVE)
    if PIECES > 1:
        turned = _turned_part(parts, piece, gains[0], gains[1], angles, turn[4])
    else:
        turned = _turned(parts, gains, angles, turn[4])
    _encode.put(turned, piece, slot >= 0, cache, part, slot, head, by, DIM, PAGE, FORMAT, False, NATIVE)


@triton.jit
def _value(
    program, span, at, row, slots, cache, part, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The same of values, which are neither normalised nor rotated."""
    piece = program % PIECES
    token, head, real = items(program // PIECES, span[0], span[1], HEADS, ROWS)
    slot = tl.load(slots[0] + token * slots[1], mask=real, other=-1).to(tl.int64)
    scale = _encode.loaded(scale)
    at = at + token * row[0] + (head * DIM + piece * HALF) * row[1]
    parts = _read(at, row[1], real, DIM // PIECES, HALF)
    by = _encode.divisor(scale, FORMAT, NATIVE)
    _encode.put(parts, piece, slot >= 0, cache, part, slot, head, by, DIM, PAGE, FORMAT, True, NATIVE)


@triton.jit(do_not_specialize=["tokens"])
def _heads(
    qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin,
    kv, keys, values, k_scale, v_scale, index_cache, index_keys, slots, index_slots, q_out, index_q_out,
    tokens, row, table, q_strides, index_q_strides, strides, eps, offset,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr,
    DIM: tl.constexpr, INDEX_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    INDEX_PAGE: tl.constexpr, INDEX_FORMAT: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """For every TOKENS tokens, programs for k, v, index_k, index_q and q.

    EARLY: launched before the kernel ahead has ended, and lets the next one be, which waits itself for what it reads.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PIECES: tl.constexpr = DIM // HALF if APART else 1
    INDEX_PIECES: tl.constexpr = INDEX_DIM // HALF if APART else 1
    VALUE: tl.constexpr = (TOKENS * KV_HEADS + FEW - 1) // FEW * PIECES
    INDEX_KEY: tl.constexpr = 2 * VALUE
    INDEX_QUERY: tl.constexpr = INDEX_KEY + ((TOKENS + FEW - 1) // FEW * INDEX_PIECES if INDEX_HEADS > 0 else 0)
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
        _key(
            program, span, k, row, (k_weight, strides[4]), turn, to, kv, keys, k_scale,
            KV_HEADS, FEW, DIM, HALF, PIECES, PAGE, FORMAT, NATIVE,
        )  # fmt: skip
    elif program < INDEX_KEY:
        program -= VALUE
        _value(program, span, v, row, to, kv, values, v_scale, KV_HEADS, FEW, DIM, HALF, PIECES, PAGE, FORMAT, NATIVE)
    elif program >= QUERY:
        program -= QUERY
        _query(program, span, qkv, row, (q_weight, strides[3]), turn, q_out, q_strides, Q_HEADS, ROWS, DIM, HALF)
    elif INDEX_HEADS > 0:
        if program < INDEX_QUERY:
            index_k = index_q + INDEX_HEADS * INDEX_DIM * row[1]
            _key(
                program - INDEX_KEY, span, index_k, row, (index_k_weight, strides[6]), turn, index_to, index_cache,
                index_keys, None, 1, FEW, INDEX_DIM, HALF, INDEX_PIECES, INDEX_PAGE, INDEX_FORMAT, NATIVE,
            )  # fmt: skip
        else:
            program -= INDEX_QUERY
            _query(
                program, span, index_q, row, (index_q_weight, strides[5]), turn, index_q_out, index_q_strides,
                INDEX_HEADS, FEW, INDEX_DIM, HALF,
            )  # fmt: skip
