"""Any format by its name: numbers to codes and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from m3hal._lazy import torch
from m3hal.formats import e2m1, e4m3, e8m0, fp8, mxfp4, mxfp8, nvfp4
from m3hal.formats._codes import grouped, wide
from m3hal.formats.plain import PLAIN_FORMATS, ROW, QSpec, QTensor, plain_dtype

_DECODE: Mapping[str, Callable[[QTensor], torch.Tensor]] = {
    "fp8_e4m3": fp8.decode,
    "fp8_e4m3_240": fp8.decode,
    "mxfp8": lambda q: e4m3.decode(q.data),
    "mxfp4": lambda q: e2m1.decode_packed(q.data),
    "nvfp4": lambda q: e2m1.decode_packed(q.data),
}
#: ``e4m3``: rounded to E4M3, as tensor cores for FP8 take it. ``e4m3_shift3``: with the scale first divided by 8 (and
#: rounded to E4M3 itself), so that no product exceeds 448; multiplied by 8 afterwards.
Product = Literal["exact", "e4m3", "e4m3_shift3"]
_NO_TRAITS: Mapping[str, Any] = {}


def quantize(
    x: torch.Tensor, spec: QSpec, global_scale: torch.Tensor | None = None, traits: Mapping[str, Any] = _NO_TRAITS
) -> QTensor:
    """Rounds ``x`` [..., n] once to a format.

    global_scale: fp32, for nvfp4 and for fp8 of group 0; None means 1.
    traits: may hold ``mx_scale_rule`` and ``nvfp4_quantizer``.

    Raises:
        ValueError: n does not fill groups; a global scale for a format that has none.
    """
    if spec.format in PLAIN_FORMATS:
        _refuse_global(spec, global_scale)
        return QTensor(x.to(plain_dtype(spec.format), copy=True, memory_format=torch.contiguous_format), spec)
    if spec.format == "nvfp4":
        return nvfp4.quantize(x, global_scale, traits.get("nvfp4_quantizer", "division"))
    if spec.group == 0 and spec.format in ("fp8_e4m3", "fp8_e4m3_240"):
        return fp8.quantize_global(x, global_scale, fp8.maximum_of(spec.format))
    _refuse_global(spec, global_scale)
    if spec.group == ROW:
        return fp8.quantize_rows(x, fp8.maximum_of(spec.format))
    rule = traits.get("mx_scale_rule", "own")
    if spec.format == "mxfp8":
        return mxfp8.quantize(x, "ceil" if rule == "own" else rule)
    return mxfp4.quantize(x, "even" if rule == "own" else rule)


def dequantize(q: QTensor, dtype: torch.dtype | None = None, product: Product = "exact") -> torch.Tensor:
    """The numbers of ``q``, in fp32 unless told otherwise.

    product: what becomes of ``code * scale`` of a block format, see :data:`Product`.

    Computed in fp32, or in fp64 when dtype is float64, and rounded once. ``code * scale`` is exact in fp32, unless it
    leaves fp32's range; the product with the global scale is rounded.
    """
    if q.spec.format in PLAIN_FORMATS:
        return wide(q.data) if dtype is None else q.data.to(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = _DECODE[q.spec.format](q).to(compute)
    if q.scale is not None:
        numbers = _scaled(numbers, _scales(q).to(compute), product)
    if q.global_scale is not None:
        numbers = numbers * q.global_scale.to(compute)
    return numbers.to(dtype or compute)


def concatenate(parts: Sequence[QTensor]) -> QTensor:
    """The rows of several tensors of one format, such as what several ranks send; each keeps its own scales.

    Global scales become one per row, as ranks quantise with different ones.
    """
    specs = {part.spec for part in parts}
    if len(specs) != 1:
        raise ValueError(f"rows of one tensor have one format, not {', '.join(str(spec) for spec in specs) or 'none'}")
    scales = [part.scale for part in parts if part.scale is not None]
    rows = [_per_row(part) for part in parts] if any(part.global_scale is not None for part in parts) else []
    return QTensor(
        torch.cat([part.data for part in parts]),
        parts[0].spec,
        torch.cat(scales) if scales else None,
        torch.cat(rows) if rows else None,
    )


def _per_row(q: QTensor) -> torch.Tensor:
    """The global scale as [..., 1], one for each row."""
    one = torch.ones(*q.data.shape[:-1], 1, device=q.data.device)
    return one if q.global_scale is None else one * q.global_scale


def _scaled(codes: torch.Tensor, scale: torch.Tensor, product: Product) -> torch.Tensor:
    groups = grouped(codes, codes.shape[-1] // scale.shape[-1])
    if product == "exact":
        return (groups * scale[..., None]).flatten(-2)
    if product == "e4m3":
        return e4m3.rounded(groups * scale[..., None]).flatten(-2)
    return (e4m3.rounded(groups * e4m3.rounded(scale / 8)[..., None]) * 8).flatten(-2)


def _scales(q: QTensor) -> torch.Tensor:
    """The block scales as numbers."""
    assert q.scale is not None
    if q.spec.format in ("mxfp8", "mxfp4"):
        return e8m0.decode(q.scale)
    return e4m3.decode(q.scale) if q.spec.format == "nvfp4" else q.scale


def _refuse_global(spec: QSpec, global_scale: torch.Tensor | None) -> None:
    if global_scale is not None:
        raise ValueError(f"{spec.format} in groups of {spec.group} has no global scale; pass none")
