"""A ring of tokens in shared memory between warps that copy and warps that multiply stored codes, in Gluon on Hopper.

One group of four warps fills a slot when both others have done with it (:func:`fetch`); each of those multiplies its 64
rows of weights by what is in the next slot (:func:`product`), converts the codes of the step after while the matrix
unit has the products, and says so when it needs the slot before no more. Codes go from memory to the registers where
the unit takes them: each thread loads 16 neighbouring codes of two rows, and tokens are in the order of
:func:`_moe_decode.columns`.

ring: buffers fp16 [STAGES, BT, 64], others [STAGES, BX, 64] for tokens beside the tile, and barriers full and free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from m3hal_triton._hopper import all_warps, copy_bytes, next_slot, release
from m3hal_triton._moe_decode import LIFT_E4M3

ROWS, HALF = gl.constexpr(128), gl.constexpr(64)
#: columns of a step, and words of a row's codes there
DEPTH, WORDS = gl.constexpr(64), gl.constexpr(16)
_LIFT = gl.constexpr(LIFT_E4M3.value)
_LANES, _WARPS = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
#: [64, words of a step]: four neighbouring words of rows r and r + 8
_CODES = gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_LANES], _WARPS, [], [64, 16])
#: the same as [64, lanes, words], where a lane's words of a row have one block scale
_GROUPED = gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
    [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0]],
    [],
    [64, 4, 4],
)
CODES, _WORDS_OF_LANES = gl.constexpr(_CODES), gl.constexpr(_GROUPED)
_SCALES = gl.constexpr(gl.SliceLayout(2, _GROUPED))
#: [tokens, columns of a step]: 16 bytes of a thread
TOKENS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_BOTH = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
_DECODED = gl.constexpr(_BOTH + " }")
_SCALED = gl.constexpr(_BOTH + " mul.f16x2 $0, $0, $6; mul.f16x2 $1, $1, $6; }")


@gluon.constexpr_function
def sums_of(WIDTH):
    """The layout of sums [64, WIDTH]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])


@gluon.constexpr_function
def _operand_of(WIDTH):
    return gl.DotOperandLayout(0, sums_of(WIDTH), 2)


@gluon.jit
def _weights(words, scales, base, LAYOUT: gl.constexpr, MX: gl.constexpr):
    """A step's left operand, fp16 [64, 64]; its elements stay in the thread that loaded them."""
    words = gl.convert_layout(gl.reshape(words, [64, 4, 4]), _WORDS_OF_LANES)
    two = gl.join(words, words)
    if MX:
        exponent = gl.maximum(scales.to(gl.int32) - base + (127 + _LIFT), 0)
        power = (exponent << 23).to(gl.float32, bitcast=True).to(gl.float16)
        pair = power.to(gl.int16, bitcast=True).to(gl.int32) * 65537
        pair = gl.expand_dims(pair, 2) + gl.zeros([64, 4, 4], gl.int32, _WORDS_OF_LANES)
        pairs = gl.join(pair, pair)
        tile = gl.inline_asm_elementwise(
            _SCALED, "=r,=r,r,r,r,r,r,r,r,r", [gl.join(two, two), gl.join(pairs, pairs)],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        tile = gl.inline_asm_elementwise(
            _DECODED, "=r,=r,r,r,r,r", [gl.join(two, two)], dtype=gl.float16, is_pure=True, pack=4
        )
    tile = gl.reshape(gl.permute(gl.reshape(tile, [64, 4, 8, 2]), [0, 2, 1, 3]), [64, 64])
    return gl.convert_layout(tile, LAYOUT)


@gluon.jit
def leave():
    """Ends a group of warps here, and not where Triton has groups wait for more work.

    ptxas finds no registers for products side by side in a loop that goes through all of the groups' limits.
    """
    gl.inline_asm_elementwise(
        "exit; mov.b32 $0, $1;", "=r,r", [gl.zeros([128], gl.int32, LINES)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rows_of(matrix, expert, tile, height, SIZE: gl.constexpr, part: gl.constexpr, MX: gl.constexpr):
    """What a group's rows of a tile need of a packed matrix: pointers to words and scales, and exponents."""
    codes, scales, base, _ = matrix
    place = (expert * (height // ROWS) + tile).to(gl.int64)  # of 128 rows
    row = part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, CODES))
    word = gl.arange(0, 16, gl.SliceLayout(0, CODES))
    code = codes + place * (SIZE // 4 * ROWS) + ((row * (SIZE // 4))[:, None] + word[None, :])
    scale, bases = 0, 0
    if MX:  # in pieces of 128 rows of 8
        row = part * HALF + gl.arange(0, HALF, gl.SliceLayout(1, _SCALES))
        group = gl.arange(0, 4, gl.SliceLayout(0, _SCALES)) // 2
        scale = scales + place * (SIZE // 32 * ROWS) + ((row * 8)[:, None] + group[None, :])
        bases = gl.expand_dims(gl.load(base + (expert * height + tile * ROWS + row)), 1)
    return code, scale, bases


@gluon.jit
def _codes_at(row, step, MX: gl.constexpr):
    """Words of a step, and their scales."""
    codes, scales, _ = row
    stored = 0
    if MX:  # four steps' lie in one piece
        stored = gl.load(scales + (step // 4 * 1024 + step % 4 * 2))
    return gl.load(codes + step * WORDS), stored


@gluon.jit
def _step(
    total, extra, now, before, ring, slot, phase, is_later, BX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the products of a step, whose weights are ``now``, then waits for those of the step before."""
    buffers, others, full, free = ring
    mbarrier.wait(full.index(slot), phase)
    fence_async_shared()  # tokens weren't copied by the unit that the matrix unit is in step with
    total = warpgroup_mma(now, buffers.index(slot).permute([1, 0]), total, is_async=True)
    # weights are named, so that their registers are kept that long
    if BX > 0:
        extra = warpgroup_mma(now, others.index(slot).permute([1, 0]), extra, is_async=True)
        total, extra, before = warpgroup_mma_wait(2, deps=[total, extra, before])
    else:
        total, before = warpgroup_mma_wait(1, deps=[total, before])
    all_warps()
    release(free, slot, is_later, STAGES)
    slot, phase = next_slot(slot, phase, STAGES)
    return total, extra, slot, phase


@gluon.jit
def product(
    row, ring, slot, phase, steps: gl.constexpr,
    BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr, MX: gl.constexpr,
):  # fmt: skip
    """fp32 [64, BT], and [64, BX] of the tokens from BT on; and where the ring is then. steps: an even number."""
    LAYOUT: gl.constexpr = _operand_of(BT)
    total = gl.zeros([64, BT], gl.float32, sums_of(BT))
    extra = 0.0
    if BX > 0:
        extra = gl.zeros([64, BX], gl.float32, sums_of(BX))
    base = row[2]
    code, scale = _codes_at(row, 0, MX)
    even = _weights(code, scale, base, LAYOUT, MX)
    odd = even
    code, scale = _codes_at(row, 1, MX)
    for step in range(0, steps, 2):
        total, extra, slot, phase = _step(total, extra, even, odd, ring, slot, phase, step > 0, BX, STAGES)
        odd = _weights(code, scale, base, LAYOUT, MX)
        code, scale = _codes_at(row, gl.minimum(step + 2, steps - 1), MX)
        total, extra, slot, phase = _step(total, extra, odd, even, ring, slot, phase, step >= 0, BX, STAGES)
        even = _weights(code, scale, base, LAYOUT, MX)
        code, scale = _codes_at(row, gl.minimum(step + 3, steps - 1), MX)
    return total, extra, slot, phase


@gluon.jit
def ended(total, extra, ring, slot, BX: gl.constexpr, STAGES: gl.constexpr):
    """Sums, when the last step's products are there."""
    if BX > 0:
        total, extra = warpgroup_mma_wait(0, deps=[total, extra])
    else:
        total = warpgroup_mma_wait(0, deps=[total])
    all_warps()
    release(ring[3], slot, True, STAGES)
    return total, extra


@gluon.jit
def fetch(
    ring, slot, phase, inputs, offsets, extra, step, count, line,
    BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A step's tokens into the ring, zeros for those that the item hasn't; and codes of a later step into the cache."""
    buffers, others, full, free = ring
    mbarrier.wait(free.index(slot), phase ^ 1)
    column = step * DEPTH + gl.arange(0, DEPTH, gl.SliceLayout(0, TOKENS))
    token = gl.arange(0, BT, gl.SliceLayout(1, TOKENS))
    copy_bytes(buffers.index(slot), inputs + (offsets[:, None] + column[None, :]), mask=(token < count)[:, None])
    if BX > 0:
        token = BT + gl.arange(0, BX, gl.SliceLayout(1, TOKENS))
        copy_bytes(others.index(slot), inputs + (extra[:, None] + column[None, :]), mask=(token < count)[:, None])
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )
    return next_slot(slot, phase, STAGES)
