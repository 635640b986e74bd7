"""Stored keys and values from memory to the registers of the matrix unit, for programs of one warp on NVIDIA GPUs.

A converted tile that goes through shared memory on its way to the matrix unit costs more of that memory's bandwidth
than the multiprocessor has: on an H200 an FP8 decode read at a third of the rate of its floor. So each thread loads the
words whose numbers it will hold as operands. What decides that is the order of lanes alone: four lanes along the axis
that a product sums over and eight along the other. The rest is naming: which key a row of the tile is (:func:`keys_of`)
and which element a column is (:func:`key_dims`, :func:`value_dims`); queries and outputs follow these names.

Heads of 128 elements, fp16 products. FORMAT is fp8_e4m3 or nvfp4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._decode import LIFT, OPERANDS, UNPACK, hidden

#: elements of a head
DIM = tl.constexpr(128)


@triton.jit
def keys_of(KEYS: tl.constexpr):
    """int32 [KEYS]: the key, counted from a step's first, that a row of the tiles is."""
    row = tl.arange(0, KEYS)
    return (row // 8 * 2 + row % 2) * 4 + row // 2 % 4


@triton.jit
def key_dims(FORMAT: tl.constexpr):
    """int32 [128]: the element that a column of :func:`load_keys` is."""
    column = tl.arange(0, DIM)
    return _element(column // 2 % 4 * 32 + column // 8 * 2 + column % 2, FORMAT)


@triton.jit
def value_dims(FORMAT: tl.constexpr):
    """int32 [128]: the element that a column of :func:`load_values` is."""
    column = tl.arange(0, DIM)
    word = column % 8
    place = (column // 64 * 8 + word) * 8 + column // 8 % 8
    if FORMAT == "nvfp4":
        place = word * 16 + column // 8
    return _element(place, FORMAT)


@triton.jit
def load_keys(cache, part, page, head, offset, scales, KEYS: tl.constexpr, FORMAT: tl.constexpr):
    """fp16 [128, KEYS]. page: int64; offset: int32, of the step's first key in its page; scales: next_key_scales'."""
    WORDS: tl.constexpr = 2 if FORMAT == "nvfp4" else 4  # of a lane, for a key
    quarter, word = tl.arange(0, 4)[:, None, None], tl.arange(0, WORDS)[None, None, :]
    base = cache + (page * part.page + head * part.head + part.codes)
    at = base + (offset + keys_of(KEYS))[None, :, None] * part.token + (quarter * WORDS + word) * 8
    words = tl.load(tl.max_contiguous(at.to(tl.pointer_type(tl.int64)), [1, 1, 1]))
    tile = tl.reshape(_numbers(words, scales, 4, KEYS, WORDS, FORMAT), (4, KEYS, 16, 2))
    return tl.trans(tl.reshape(tl.permute(tile, (1, 2, 0, 3)), (KEYS, DIM)))


@triton.jit
def load_values(cache, part, page, head, offset, until, scales, KEYS: tl.constexpr, FORMAT: tl.constexpr):
    """fp16 [KEYS, 128]; keys of the page from ``until`` on are zero, whatever their bytes hold."""
    WORDS: tl.constexpr = 8 if FORMAT == "nvfp4" else 16
    word = tl.arange(0, WORDS)[None, :, None]
    key = offset + _value_keys(KEYS)
    base = cache + (page * part.page + head * part.head + part.codes)
    at = tl.max_contiguous((base + key * part.token + word * 8).to(tl.pointer_type(tl.int64)), [1, 1, 1])
    words = tl.load(at, mask=key + word * 0 < until, other=0)
    tile = _numbers(words, scales, 4, WORDS, KEYS // 4, FORMAT)
    tile = tl.reshape(tile, (4, WORDS // 8, 8, KEYS // 8, 2, DIM // WORDS))
    return tl.reshape(tl.permute(tile, (3, 0, 4, 1, 5, 2)), (KEYS, DIM))


@triton.jit
def load_key_scales(cache, part, page, head, offset, KEYS: tl.constexpr, FORMAT: tl.constexpr):
    """Scales of :func:`load_keys`; loaded a step ahead, because they are too few bytes for an asynchronous copy."""
    scales = 0
    if FORMAT == "nvfp4":
        quarter, word = tl.arange(0, 4)[:, None, None], tl.arange(0, 2)[None, None, :]
        base = cache + (page * part.page + head * part.scale_head + part.scales)
        at = base + (offset + keys_of(KEYS))[None, :, None] * 8 + quarter * 2 + word
        scales = tl.load(tl.max_contiguous(at, [1, 1, 1]))
    return scales


@triton.jit
def load_value_scales(cache, part, page, head, offset, until, KEYS: tl.constexpr, FORMAT: tl.constexpr):
    """Scales of :func:`load_values`."""
    scales = 0
    if FORMAT == "nvfp4":
        word = tl.arange(0, 8)[None, :, None]
        key = offset + _value_keys(KEYS)
        base = cache + (page * part.page + head * part.scale_head + part.scales)
        at = base + key // 4 * 32 + word * 4 + key % 4
        scales = tl.load(tl.max_contiguous(at, [1, 1, 1]), mask=key + word * 0 < until, other=0)
    return scales


@triton.jit
def _value_keys(KEYS: tl.constexpr):
    """int32 [4, 1, KEYS / 4]: the keys of a lane, every fourth."""
    return tl.arange(0, 4)[:, None, None] + tl.arange(0, KEYS // 4)[None, None, :] * 4


@triton.jit
def _element(place, FORMAT: tl.constexpr):
    """The element at a place of a converted word: four-bit codes fill registers in another order."""
    if FORMAT == "nvfp4":
        place = place // 8 * 8 + place % 4 * 2 + place % 8 // 4
    return place


@triton.jit
def _twice(x):
    return tl.join(x, x)


@triton.jit
def _numbers(words, scales, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr):
    """fp16 [A, B, C, n] of words [A, B, C] of n codes; the branch is explained at :func:`hidden`."""
    if FORMAT == "nvfp4":
        lifted = (scales.to(tl.float8e4nv, bitcast=True).to(tl.float16) * LIFT).to(tl.float16)
        tile = tl.reshape(hidden(A * B * C, 16), (A, B, C, 16))
        if tl.num_programs(0) > 0:
            codes = tl.reshape(_twice(_twice(_twice(_twice(words)))), (A, B, C, 16))
            step = tl.reshape(_twice(_twice(_twice(_twice(lifted)))), (A, B, C, 16))
            tile = tl.inline_asm_elementwise(UNPACK, OPERANDS, [codes, step], dtype=tl.float16, is_pure=True, pack=16)
    else:
        tile = tl.reshape(hidden(A * B * C, 8), (A, B, C, 8))
        if tl.num_programs(0) > 0:
            tile = tl.inline_asm_elementwise(
                "{ .reg .b16 a, b, c, d; mov.b64 {a, b, c, d}, $4; cvt.rn.f16x2.e4m3x2 $0, a;"
                " cvt.rn.f16x2.e4m3x2 $1, b; cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }",
                "=r,=r,=r,=r,l,l,l,l,l,l,l,l",
                [tl.reshape(_twice(_twice(_twice(words))), (A, B, C, 8))],
                dtype=tl.float16,
                is_pure=True,
                pack=8,
            )
    return tile
