"""The loop of the experts' products for many tokens on Hopper, in Gluon: stored codes go from memory to registers, and
their conversion runs while the matrix unit still has the products of the step before.

A tile is 128 rows of a weight matrix times the tokens of a work item. Each of 256 threads loads the 16 neighbouring
codes of its two rows and multiplies them where they are, in the order of :func:`_moe_decode.columns`; tokens come by
way of shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from m3hal_triton._moe_decode import LIFT_E4M3

# by the names of triton 3.9 and of 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_meet = getattr(gl, "barrier", None) or gl.thread_barrier

ROWS = gl.constexpr(128)
#: columns of a step, and words of a row's codes there
DEPTH, WORDS = gl.constexpr(64), gl.constexpr(16)
_LIFT = gl.constexpr(LIFT_E4M3.value)
_LANES, _WARPS = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]]
#: [128, words of a step]: four neighbouring words of rows r and r + 8
_CODES = gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_LANES], _WARPS, [], [128, 16])
#: the same as [128, lanes, words], where a lane's words of a row have one block scale
_GROUPED = gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
    [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0], [64, 0, 0]],
    [],
    [128, 4, 4],
)
CODES, _WORDS_OF_LANES = gl.constexpr(_CODES), gl.constexpr(_GROUPED)
_SCALES = gl.constexpr(gl.SliceLayout(2, _GROUPED))
#: [tokens, columns of a step]: 16 bytes of a thread
TOKENS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_LINES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_BOTH = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
_DECODED = gl.constexpr(_BOTH + " }")
_SCALED = gl.constexpr(_BOTH + " mul.f16x2 $0, $0, $6; mul.f16x2 $1, $1, $6; }")


@gluon.constexpr_function
def sums_of(WIDTH):
    """The layout of sums [128, WIDTH]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH, 16])


@gluon.constexpr_function
def _operand_of(WIDTH):
    return gl.DotOperandLayout(0, sums_of(WIDTH), 2)


@gluon.jit
def _weights(words, scales, base, LAYOUT: gl.constexpr, MX: gl.constexpr):
    """A step's left operand, fp16 [128, 64]; its elements stay in the thread that loaded them."""
    words = gl.convert_layout(gl.reshape(words, [128, 4, 4]), _WORDS_OF_LANES)
    two = gl.join(words, words)
    if MX:
        exponent = gl.maximum(scales.to(gl.int32) - base + (127 + _LIFT), 0)
        power = (exponent << 23).to(gl.float32, bitcast=True).to(gl.float16)
        pair = power.to(gl.int16, bitcast=True).to(gl.int32) * 65537
        pair = gl.expand_dims(pair, 2) + gl.zeros([128, 4, 4], gl.int32, _WORDS_OF_LANES)
        pairs = gl.join(pair, pair)
        tile = gl.inline_asm_elementwise(
            _SCALED, "=r,=r,r,r,r,r,r,r,r,r", [gl.join(two, two), gl.join(pairs, pairs)],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        tile = gl.inline_asm_elementwise(
            _DECODED, "=r,=r,r,r,r,r", [gl.join(two, two)], dtype=gl.float16, is_pure=True, pack=4
        )
    tile = gl.reshape(gl.permute(gl.reshape(tile, [128, 4, 8, 2]), [0, 2, 1, 3]), [128, 64])
    return gl.convert_layout(tile, LAYOUT)


@gluon.jit
def _fetch(buffer, more, inputs, offsets, extra, k, size, count, BT: gl.constexpr, BX: gl.constexpr):
    """Tokens of a step into a buffer; nothing beyond the last step, nor of tokens that the item hasn't."""
    column = k + gl.arange(0, DEPTH, gl.SliceLayout(0, TOKENS))
    inside = (column < size)[None, :]
    token = gl.arange(0, BT, gl.SliceLayout(1, TOKENS))
    _copy(buffer, inputs + (offsets[:, None] + column[None, :]), mask=inside & (token < count)[:, None])
    if BX > 0:
        token = BT + gl.arange(0, BX, gl.SliceLayout(1, TOKENS))
        _copy(more, inputs + (extra[:, None] + column[None, :]), mask=inside & (token < count)[:, None])
    async_copy.commit_group()


@gluon.jit
def _step(
    total, extra, now, before, buffers, others, step, inputs, offsets, extra_offsets, size, count,
    BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the products of a step, whose weights are ``now``, then waits for those of the step before."""
    async_copy.wait_group(STAGES - 3)
    _meet()  # all have waited for the step before the last: its buffer is free
    read = step % STAGES
    total = warpgroup_mma(now, buffers.index(read).permute([1, 0]), total, is_async=True)
    if BX > 0:
        extra = warpgroup_mma(now, others.index(read).permute([1, 0]), extra, is_async=True)
    ahead = step + STAGES - 2
    write = ahead % STAGES
    _fetch(
        buffers.index(write), others.index(write), inputs, offsets, extra_offsets, ahead * DEPTH, size, count, BT, BX
    )
    # weights are named, so that their registers are kept that long
    if BX > 0:
        total, extra, before = warpgroup_mma_wait(2, deps=[total, extra, before])
    else:
        total, before = warpgroup_mma_wait(1, deps=[total, before])
    return total, extra


@gluon.jit
def product(
    row, inputs, offsets, extra_offsets, size, count,
    BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr, MX: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    """fp32 [128, BT], and [128, BX] of the tokens from BT on. row: of :func:`rows_of`.

    offsets: of each token in ``inputs``. size: columns, a multiple of two steps'. FETCH: steps by which the L2 cache is
    asked for codes before they are loaded.
    """
    codes, scales, base, lines = row
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LAYOUT: gl.constexpr = _operand_of(BT)
    buffers = gl.allocate_shared_memory(gl.float16, [STAGES, BT, DEPTH], SHARED)
    others = gl.allocate_shared_memory(gl.float16, [STAGES, BX if BX > 0 else 8, DEPTH], SHARED)
    total = gl.zeros([128, BT], gl.float32, sums_of(BT))
    extra = 0.0
    if BX > 0:
        extra = gl.zeros([128, BX], gl.float32, sums_of(BX))
    for stage in gl.static_range(STAGES - 2):
        _fetch(
            buffers.index(stage), others.index(stage), inputs, offsets, extra_offsets, stage * DEPTH, size, count,
            BT, BX,
        )  # fmt: skip
    scale = 0
    if MX:
        scale = gl.load(scales)
    even = _weights(gl.load(codes), scale, base, LAYOUT, MX)
    odd = even
    code = gl.load(codes + WORDS)
    if MX:
        scale = gl.load(scales + 2)
    for step in range(0, size // DEPTH, 2):
        there = (step + 2) * DEPTH < size
        far = gl.minimum((step + FETCH) * WORDS, size // DEPTH * WORDS - 2 * WORDS)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(lines + far).to(gl.int64)], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        total, extra = _step(
            total, extra, even, odd, buffers, others, step, inputs, offsets, extra_offsets, size, count, BT, BX, STAGES
        )
        odd = _weights(code, scale, base, LAYOUT, MX)
        code = gl.load(codes + (step + 2) * WORDS, mask=there, other=0)
        if MX:
            scale = gl.load(scales + (step + 2) * 2, mask=there, other=0)
        total, extra = _step(
            total, extra, odd, even, buffers, others, step + 1, inputs, offsets, extra_offsets, size, count,
            BT, BX, STAGES,
        )  # fmt: skip
        even = _weights(code, scale, base, LAYOUT, MX)
        code = gl.load(codes + (step + 3) * WORDS, mask=there, other=0)
        if MX:
            scale = gl.load(scales + (step + 3) * 2, mask=there, other=0)
    if BX > 0:
        total, extra = warpgroup_mma_wait(0, deps=[total, extra])
    else:
        total = warpgroup_mma_wait(0, deps=[total])
    async_copy.wait_group(0)
    return total, extra


@gluon.jit
def rows_of(matrix, expert, tile, height, MX: gl.constexpr):
    """What a tile's rows need of a packed matrix: pointers to words and scales, exponents, and pointers to lines."""
    codes, code_strides, scales, scale_strides, base, _ = matrix
    row = gl.minimum(tile * ROWS + gl.arange(0, 128, gl.SliceLayout(1, CODES)), height - 1)
    word = gl.arange(0, 16, gl.SliceLayout(0, CODES))
    codes = codes + expert.to(gl.int64) * code_strides[0]
    code = codes + ((row * code_strides[1])[:, None] + word[None, :])
    scale, bases = 0, 0
    if MX:
        row = gl.minimum(tile * ROWS + gl.arange(0, 128, gl.SliceLayout(1, _SCALES)), height - 1)
        group = gl.arange(0, 4, gl.SliceLayout(0, _SCALES)) // 2
        scale = scales + expert.to(gl.int64) * scale_strides[0] + ((row * scale_strides[1])[:, None] + group[None, :])
        bases = gl.expand_dims(gl.load(base + expert * height + row), 1)
    place = gl.arange(0, 256, _LINES)
    row = gl.minimum(tile * ROWS + place // 2, height - 1)
    return code, scale, bases, codes + (row * code_strides[1] + place % 2 * 16)
