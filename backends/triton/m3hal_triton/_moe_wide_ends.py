"""How the products of :mod:`_moe_wide` end: activations and outputs, from sums in the matrix unit's layout to memory.

What comes here is executed once a tile by all the groups that multiply, while the matrix unit waits: its length counts,
and each of its instructions is one that the loops' have to make room for.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from m3hal_triton._launch import LOG2_E

#: rows of a tile
ROWS = gl.constexpr(128)
_LOG2_E = gl.constexpr(LOG2_E)
_ALL = gl.constexpr(tl.PropagateNan.ALL)
#: [features, tokens] as they are stored, a token's together: of hidden activations, and of outputs
_HIDDEN = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 8], [0, 1]))
_OUTPUTS = gl.constexpr(gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1]))
_TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.constexpr_function
def sums_of(WIDTH, BITS):
    """How sums [ROWS, WIDTH] of operands of BITS are held."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH, 256 // BITS])


@gluon.jit
def _halves(sums):
    """[R, W] as two of [R, W / 2]; moves nothing."""
    R: gl.constexpr = sums.shape[0]
    W: gl.constexpr = sums.shape[1]
    return gl.split(gl.permute(gl.reshape(sums, [R, 2, W // 2]), [0, 2, 1]))


@gluon.jit
def _store_hidden(result, hidden, inner, start, count, feature):
    """[ROWS / 2, W] features, by 64 tokens, as there is no more room to exchange them."""
    W: gl.constexpr = result.shape[1]
    if W > 64:
        low, high = _halves(result)
        _store_hidden(low, hidden, inner, start, count, feature)
        _store_hidden(high, hidden, inner, start + W // 2, count - W // 2, feature)
    else:
        result = gl.convert_layout(result, _HIDDEN)
        token = gl.arange(0, W, gl.SliceLayout(0, _HIDDEN))
        mine = feature + gl.arange(0, ROWS // 2, gl.SliceLayout(1, _HIDDEN))
        at = hidden + ((start + token).to(gl.int64) * inner)[None, :] + mine[:, None]
        gl.store(at, result, mask=(token < count)[None, :] & (mine < inner)[:, None])


@gluon.jit
def _approximate(OPERATION: gl.constexpr, x):
    """By an instruction of the multiplexed unit, to a unit in the last place or two."""
    return gl.inline_asm_elementwise(OPERATION + " $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scales(given, start, count, FIRST: gl.constexpr, W: gl.constexpr, SLOTS: gl.constexpr):
    """What the sums of an item's tokens FIRST and following are multiplied by; asked for before there are sums."""
    token = FIRST + gl.arange(0, W, _TOKENS)
    whose = gl.load(given[1] + start + token, mask=token < count, other=0) // SLOTS
    return gl.load(given[0] + whose, mask=token < count, other=0.0)


@gluon.jit
def _finish_up(sums, scale, factor, given, hidden, inner, start, count, row, feature, BITS: gl.constexpr):
    """The activation of gate and up rows, which alternate by eight: a thread has both."""
    numbers = given[2]
    W: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = sums_of(W, BITS)
    if factor is not None:
        sums = sums * gl.convert_layout(scale, gl.SliceLayout(0, LAYOUT))[None, :]
        sums = sums * gl.load(factor + row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    both = gl.permute(gl.reshape(sums, [ROWS // 16, 2, 8, W]), [0, 2, 3, 1])
    gate, up = gl.split(gl.reshape(both, [ROWS // 2, W, 2]))
    alpha, beta, limit = numbers
    gate = gl.minimum(gate, limit, propagate_nan=_ALL)
    up = gl.minimum(gl.maximum(up, -limit, propagate_nan=_ALL), limit, propagate_nan=_ALL)
    power = _approximate("ex2.approx.ftz.f32", gate * (-alpha * _LOG2_E))
    result = gate * _approximate("rcp.approx.ftz.f32", 1.0 + power) * (up + beta)
    _store_hidden(result.to(hidden.dtype.element_ty), hidden, inner, start, count, feature)


@gluon.jit
def _finish_down(sums, factors, given, out, rows, start, count, output):
    """Stores fp16 [ROWS, W], each token's over a power of two with which the largest lies below 2**15."""
    parts, powers = out
    W: gl.constexpr = sums.shape[1]
    if W > 32:  # there is no more room to exchange them
        low, high = _halves(sums)
        _finish_down(low, factors, given, out, rows, start, count, output)
        _finish_down(high, factors, given, out, rows, start + W // 2, count - W // 2, output)
    else:
        sums = gl.convert_layout(sums, _OUTPUTS)
        token = gl.arange(0, W, gl.SliceLayout(0, _OUTPUTS))
        mine = gl.arange(0, ROWS, gl.SliceLayout(1, _OUTPUTS))
        there = token < count
        if given is not None:
            sums = sums * factors[:, None]
        # exponents a bit higher and one more: infinity and NaN have none left
        exponents = (sums.to(gl.uint32, bitcast=True) << 1) + (1 << 24)
        exponent = gl.maximum((gl.max(exponents, 0) >> 24).to(gl.int32) - 1, 20)
        sums = sums * ((268 - exponent) << 23).to(gl.float32, bitcast=True)[None, :]
        power = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
        if given is not None:
            power = power * gl.load(given + start + token, mask=there, other=0.0)
        gl.store(powers + (start + token) * (rows // ROWS) + output // ROWS, power, mask=there)
        at = parts + ((start + token).to(gl.int64) * rows)[None, :] + (output + mine)[:, None]
        gl.store(at, sums.to(gl.float16), mask=there[None, :] & (mine < ROWS)[:, None])


@gluon.jit
def finish(
    sums, scale, factor, given, out, height, where, FIRST: gl.constexpr, SLOTS: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """What an item's tokens FIRST and following came to."""
    tile, expert, start, count = where
    output = tile * ROWS
    row = expert * height + output
    if SLOTS > 0:
        _finish_up(
            sums, scale, factor, given, out, height // 2, start + FIRST, count - FIRST, row, output // 2, BITS
        )  # fmt: skip
    else:
        factors = 1.0
        if factor is not None:
            factors = gl.load(factor + row + gl.arange(0, ROWS, gl.SliceLayout(1, _OUTPUTS)))
        _finish_down(sums, factors, given, out, height, start + FIRST, count - FIRST, output)
