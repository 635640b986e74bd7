"""The formats once more, in numpy with ml_dtypes' codecs, sharing nothing with m3hal."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
#: by maximum: OCP's range and Gaudi 2's, which is that of an IEEE format
E4M3 = {448: ml_dtypes.float8_e4m3fn, 240: ml_dtypes.float8_e4m3}


def all_bf16() -> np.ndarray:
    """fp32: every one of the 65,536 bfloat16 values, NaN and infinities among them."""
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def around_midpoints(values: np.ndarray, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """x [3, n - 1]: the midpoint of each pair of the n values, the number just below, the one just above; and the index
    of the value that each rounds to. (ml_dtypes is no oracle here: it rounds fp64 twice.)"""
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(dtype)
    lower = np.arange(len(middles))
    x = np.stack([middles, np.nextafter(middles, dtype(-np.inf)), np.nextafter(middles, dtype(np.inf))])
    return x, np.stack([lower + lower % 2, lower, lower + 1])


def encode_e4m3(x: np.ndarray, maximum: int) -> np.ndarray:
    """Codes with saturation, which ml_dtypes leaves to its callers; every NaN as 0x7F."""
    codes = np.clip(np.nan_to_num(x, nan=0.0), -maximum, maximum).astype(E4M3[maximum]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def decode_e4m3(codes: np.ndarray, maximum: int = 448) -> np.ndarray:
    return codes.view(E4M3[maximum]).astype(np.float32)


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    return x.astype(E2M1).view(np.uint8)


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
    """Two codes to a byte, the even element in the low half."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return codes.view(E2M1).astype(np.float32)


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[..., ::2] + 16 * codes[..., 1::2]


def nvfp4(x: np.ndarray, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scale bytes by the rule of the fused cache insertion, for finite x; bytes [n/2], [n/16]."""
    blocks = (x.astype(np.float32) * (np.float32(1) / global_scale)).reshape(*x.shape[:-1], -1, 16)
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(1e-12))
    scale = encode_e4m3(np.clip(amax / np.float32(6), np.float32(2**-9), np.float32(448)), 448)
    codes = encode_e2m1(np.clip(blocks / decode_e4m3(scale)[..., None], -6, 6))
    codes = np.where(codes == 8, 0, codes).astype(np.uint8)
    return pack(codes.reshape(x.shape)), scale
