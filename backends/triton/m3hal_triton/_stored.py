"""Reads stored numbers: codes and scales of any format of :mod:`m3hal.formats`, exactly."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_values(code, MAXIMUM: tl.constexpr, TYPE: tl.constexpr):
    """E4M3 bytes as fp32 or bf16; MAXIMUM: 448, or 240 where the top binade holds infinity and NaN."""
    # in steps that are each one quick instruction for two elements, or for one
    number = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    if MAXIMUM == 240:
        size = (code & 0x7F).to(tl.int32)
        number = tl.where(size == 0x78, tl.where(code > 127, float("-inf"), float("inf")), number)
        number = tl.where(size > 0x78, float("nan"), number)
    return number.to(TYPE)


@triton.jit
def e2m1_pairs(byte, TYPE: tl.constexpr):
    """[..., 2 n] of bytes [..., n] of two E2M1 codes, the even element in the low half, as fp32 or bf16."""
    low, high = byte.to(tl.int16) & 15, byte.to(tl.int16) >> 4
    code = tl.join(low, high)
    # the code's bits make a bf16 number of 2**-126 of its size: conversion instructions are slow where there are such
    number = ((code & 8) << 12 | (code & 7) << 6).to(tl.bfloat16, bitcast=True).to(TYPE)
    number = (number * 8.507059173023462e37).to(TYPE)
    if len(byte.shape) == 1:
        number = tl.reshape(number, (2 * byte.shape[0],))
    else:
        number = tl.reshape(number, (byte.shape[0], 2 * byte.shape[1]))
    return number


@triton.jit
def e8m0_values(byte):
    """fp32 of E8M0 bytes: 0 is 2**-127, 255 is NaN. bf16 holds them all."""
    bits = tl.where(byte == 0, 1 << 22, byte.to(tl.int32) << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def block_scales(byte, FORMAT: tl.constexpr):
    """fp32 of the bytes of block scales: E4M3 in nvfp4, E8M0 in the MX formats."""
    return e4m3_values(byte, 448, tl.float32) if FORMAT == "nvfp4" else e8m0_values(byte)
