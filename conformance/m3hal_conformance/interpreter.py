"""Cures Triton's CPU interpreter, so that a low-precision kernel can be tested without its device.

As shipped (triton 3.6 to 3.9), ``TRITON_INTERPRET=1`` multiplies the raw bits of bf16 operands in ``tl.dot`` and in
arithmetic, truncates fp32 -> bf16, loses the carry of fp32 -> fp8, never saturates, and reads the NaN codes of e4m3 as
480. :func:`cure` replaces its conversions and products by torch's IEEE ones:

* conversions round to nearest even; fp8 saturates, as GPUs' conversions do; NaN stays NaN;
* ``tl.dot`` takes the exact values of its operands and accumulates in the accumulator's dtype;
* element-wise arithmetic on bf16 and fp8 is computed in fp32 and rounded once;
* ``tl.dot_scaled``, which triton has in its interpreter from 3.8 on, takes E4M3 scales as such, not as E8M0.

Call it before the first kernel runs. ``TRITON_INTERPRET`` must be set before triton itself is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from m3hal_conformance.interpreter_pace import hasten

#: triton scalar type -> torch's type of the same bits
_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
#: types whose values the interpreter stores as unsigned integers
_STORED_AS_BITS = ("bf16", "fp8e4nv", "fp8e5")
_SATURATES_AT = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_INTEGER_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CURED = "_m3hal_cured"
#: the interpreter's function that reads the scales of a product
_SCALES = "_dot_scaled_scale_to_f32"


def convert(data: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    """Values of triton type ``source`` as the bits of ``target``: an unsigned array of the target's width."""
    contiguous = np.ascontiguousarray(data)
    bits = contiguous.view(f"i{contiguous.itemsize}" if contiguous.itemsize > 1 else "u1")
    values = torch.from_numpy(bits.copy()).view(_TORCH[source])
    if target in _SATURATES_AT and values.dtype.itemsize > 1:
        wide = values if values.dtype == torch.float64 else values.float()
        edge = _SATURATES_AT[target]
        values = torch.where(wide.isnan(), wide, wide.clamp(-edge, edge))
    result = values.to(_TORCH[target])
    raw = result.view(_INTEGER_BITS[result.dtype.itemsize]).numpy()
    return raw.view(f"u{result.dtype.itemsize}").reshape(contiguous.shape)


def cure() -> None:
    """Installs the conversions and products in the interpreter; a second call does nothing."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, _CURED, False):
        return
    interpreter._convert_float = _convert_float(interpreter._convert_float)
    builder.cast_impl = _cast(interpreter, builder.cast_impl)
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(builder, f"create_{name}", lambda self, source, target: self.cast_impl(source, target))
    builder.create_dot = _dot(interpreter, builder.create_dot)
    if hasattr(interpreter, _SCALES):
        setattr(interpreter, _SCALES, _scales(getattr(interpreter, _SCALES)))
    builder.binary_op = _binary(interpreter, builder.binary_op)
    builder.unary_op = _unary(interpreter, builder.unary_op)
    hasten(interpreter)
    setattr(builder, _CURED, True)


def _convert_float(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        towards_zero = rounding is not None and "RTZ" in str(rounding)
        if source.name not in _TORCH or target.name not in _TORCH or towards_zero:
            return shipped(data, source, target, rounding)
        return convert(data, source.name, target.name)

    return convert_float


def _cast(interpreter: Any, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        old, new = source.dtype.scalar, target.scalar
        if old.name not in _STORED_AS_BITS and new.name not in _STORED_AS_BITS:
            return shipped(self, source, target)
        dtype = interpreter._get_np_dtype(target)
        if old.name in _TORCH and new.name in _TORCH:
            return interpreter.TensorHandle(convert(source.data, old.name, new.name).view(dtype), new)
        if old.name in _TORCH:
            return interpreter.TensorHandle(_values(source).astype(dtype), new)
        return interpreter.TensorHandle(convert(source.data.astype(np.float32), "fp32", new.name).view(dtype), new)

    return cast_impl


def _dot(interpreter: Any, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        if not any(operand.dtype.scalar.name in _STORED_AS_BITS for operand in (a, b)):
            return shipped(self, a, b, accumulator, *options)
        product = np.matmul(_values(a), _values(b), dtype=accumulator.data.dtype)
        return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    return create_dot


def _scales(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def scale_to_f32(scale: Any, *options: Any) -> Any:
        return _values(scale) if scale.dtype.scalar.name in _STORED_AS_BITS else shipped(scale, *options)

    return scale_to_f32


def _binary(interpreter: Any, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar.name not in _STORED_AS_BITS:
            return shipped(self, lhs, rhs, op)
        return _restore(interpreter, op(_values(lhs), _values(rhs)), lhs.dtype.scalar)

    return binary_op


def _unary(interpreter: Any, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, operand: Any, op: Any) -> Any:
        if operand.dtype.scalar.name not in _STORED_AS_BITS:
            return shipped(self, operand, op)
        return _restore(interpreter, op(_values(operand)), operand.dtype.scalar)

    return unary_op


def _values(handle: Any) -> np.ndarray[Any, Any]:
    """What the elements mean, in fp32 where numpy lacks the type."""
    name = handle.dtype.scalar.name
    if name not in _STORED_AS_BITS:
        return np.asarray(handle.data)
    return convert(handle.data, name, "fp32").view(np.float32)


def _restore(interpreter: Any, values: np.ndarray[Any, Any], scalar: Any) -> Any:
    """A result in the operands' type; comparisons give booleans and stay."""
    if values.dtype == np.bool_:
        return interpreter.TensorHandle(values, scalar)
    return interpreter.TensorHandle(convert(values.astype(np.float32), "fp32", scalar.name), scalar)
