"""The router's product: bf16 tokens times an fp32 weight of few rows, in fp32.

Few tokens: a program for each row of the weight, which is read once, and products on the ordinary units. More: the
weight is split into three bf16 numbers whose sum it is, bit for bit, and their products are added up from the smallest
on, in sums of one tile's depth, as matrix units drop bits of long ones. What is not finite in a token makes all its
logits NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3hal_triton._launch import after, multiprocessors, power_of_two_above, programmatic
from m3hal_triton._parts import add_up, shared_out

#: tokens up to which each row of the weight has a program
FEW = 8
#: columns of a token and of the weight that a program of few tokens holds at a time
WIDEST = 8192
#: (tokens up to which, tile's tokens at most, rows of the weight, depth; warps, stages)
TILES = (
    (16, 16, 32, 128, 4, 3),
    (64, 64, 32, 64, 4, 4),
    (2048, 128, 64, 64, 8, 3),
    (float("inf"), 128, 64, 64, 8, 4),
)
#: where sums are to have one order: the tile of any number of tokens, and into how many parts the depth goes
STEADY_TILE, STEADY_PARTS = TILES[1], 8
#: columns of a thread of few tokens
COLUMNS_PER_THREAD = 32


def gate(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, steady: bool = False) -> None:
    """Writes x [T, K] times weight^T [N, K] to out [T, N]. steady: with one order of sums for any T."""
    tokens, width = x.shape
    rows = len(weight)
    early = programmatic(x.device)
    if tokens <= FEW and not steady:
        columns = min(power_of_two_above(width), WIDEST)
        _gate_few[(rows,)](
            x, weight, out, x.stride(), weight.stride(), out.stride(), tokens, width,
            TOKENS=power_of_two_above(tokens), COLUMNS=columns, EARLY=early,
            num_warps=max(1, min(16, columns // COLUMNS_PER_THREAD // 32)), **after(early),
        )  # fmt: skip
        return
    tile = STEADY_TILE if steady else next(tile for tile in TILES if tokens <= tile[0])
    _, most, block_n, block_k, warps, stages = tile
    block_m = most if steady else min(most, max(16, power_of_two_above(tokens)))
    tiles, steps = triton.cdiv(tokens, block_m) * triton.cdiv(rows, block_n), triton.cdiv(width, block_k)
    shares = STEADY_PARTS if steady else multiprocessors(x.device) // tiles
    each, parts = shared_out(steps, shares)
    made = out if parts == 1 else out.new_empty(parts, tokens, rows, dtype=torch.float32)
    _gate_many[(triton.cdiv(tokens, block_m), triton.cdiv(rows, block_n), parts)](
        x, weight, made, x.stride(), weight.stride(), made.stride()[-2:], 0 if parts == 1 else made.stride(0),
        tokens, rows, width,
        STEPS=each, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EARLY=early, num_warps=warps, num_stages=stages,
        **after(early),
    )  # fmt: skip
    if parts > 1:
        add_up(made, out)


@triton.jit(do_not_specialize=["tokens"])
def _gate_few(
    x, weight, out, x_strides, weight_strides, out_strides, tokens, width,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight += row * weight_strides[0]
    token = tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    # weights are there before the kernel that makes the tokens has ended
    factor = tl.load(weight + column * weight_strides[1], mask=column < width, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, width, COLUMNS):
        at = first + column
        there = (at < width) & (token < tokens)
        number = tl.load(x + token.to(tl.int64) * x_strides[0] + at * x_strides[1], mask=there, other=0.0)
        total += tl.sum(number.to(tl.float32) * factor, 1)
        at += COLUMNS
        factor = tl.load(weight + at * weight_strides[1], mask=at < width, other=0.0)
    at = tl.arange(0, TOKENS)
    tl.store(out + at.to(tl.int64) * out_strides[0] + row * out_strides[1], total, mask=at < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _gate_many(
    x, weight, out, x_strides, weight_strides, out_strides, part_stride, tokens, rows, width,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    part = tl.program_id(2)
    depth = tl.arange(0, BLOCK_K)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(part * STEPS, (part + 1) * STEPS):
        column = step * BLOCK_K + depth
        inside = column < width
        left = tl.load(x + token * x_strides[0] + column * x_strides[1], mask=(token < tokens) & inside, other=0.0)
        at = weight + row * weight_strides[0] + column * weight_strides[1]
        whole = tl.load(at, mask=(row < rows) & inside, other=0.0)
        high = _first_bits(whole)
        rest = whole - high
        middle = _first_bits(rest)
        low, middle, high = (rest - middle).to(tl.bfloat16), middle.to(tl.bfloat16), high.to(tl.bfloat16)
        tile = tl.dot(left, tl.trans(low))
        tile = tl.dot(left, tl.trans(middle), tile)
        total += tl.dot(left, tl.trans(high), tile)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    to = out + part * part_stride + token * out_strides[0] + column * out_strides[1]
    tl.store(to, total, mask=(token < tokens) & (column < rows))


@triton.jit
def _first_bits(x):
    """fp32 of the first eight significant bits, which is what bf16 holds: three times eight are all."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
