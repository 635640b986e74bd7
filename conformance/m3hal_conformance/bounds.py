"""How far an output is from its oracle: per row, so that one wrong row among thousands can't hide in a mean.

A check fails with an AssertionError that names the worst place and shows both values there. Bits that only the oracle
or only the output has (NaN, infinities) are never within a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WorstRow:
    """The row (last axis) of an output that is furthest from its oracle.

    error: ``|actual - oracle| / max(|oracle|, floor)`` in the L2 norm; inf when they differ where either is not finite,
        or when the oracle's row is zero and the output's is not. row: its index; None when there are no rows.
    """

    error: float
    row: tuple[int, ...] | None


def row_errors(actual: Tensor, oracle: Tensor, *, floor: float = 0.0) -> Tensor:
    """fp64 relative L2 error of each row (the last axis); see :class:`WorstRow`.

    floor: smallest norm that a row's difference is compared with. Leave it 0 unless rows cancel to almost nothing: then
    an exact zero of the oracle has to be matched exactly.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"the output's shape is {tuple(actual.shape)}; the oracle's is {tuple(oracle.shape)}")
    actual, oracle = actual.detach().double(), oracle.detach().double()
    finite = torch.isfinite(oracle)
    alike = torch.where(finite, torch.isfinite(actual), (actual == oracle) | (actual.isnan() & oracle.isnan()))
    difference = torch.where(finite & alike, actual - oracle, 0.0).norm(dim=-1)
    size = torch.where(finite, oracle, 0.0).norm(dim=-1).clamp(min=floor)
    error = torch.where(difference == 0, 0.0, difference / size)  # x / 0 is inf
    return error.masked_fill(~alike.all(-1), float("inf"))


def worst_row(actual: Tensor, oracle: Tensor, *, floor: float = 0.0) -> WorstRow:
    """The row with the largest error."""
    errors = row_errors(actual, oracle, floor=floor)
    if errors.numel() == 0:
        return WorstRow(0.0, None)
    index = int(errors.flatten().argmax())
    row = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), errors.shape))
    return WorstRow(float(errors.flatten()[index]), row)


def assert_rows(actual: Tensor, oracle: Tensor, bound: float, *, floor: float = 0.0, what: str = "output") -> None:
    """Every row (last axis) within a relative L2 error of ``bound`` (class R)."""
    worst = worst_row(actual, oracle, floor=floor)
    if worst.error <= bound:
        return
    assert worst.row is not None
    raise AssertionError(
        f"{what}: row {worst.row} is {worst.error:.3e} from the oracle (relative L2); the bound is {bound:.3e}.\n"
        f"  output {_show(actual[worst.row])}\n  oracle {_show(oracle[worst.row])}"
    )


def assert_ulp(
    actual: Tensor, oracle: Tensor, ulps: float = 1.0, *, scale: Tensor | None = None, what: str = "output"
) -> None:
    """Every element within ``ulps`` units in the last place of the output's dtype (class U1).

    oracle: not rounded (fp64, fp32). scale: magnitude whose unit counts where it exceeds the oracle's own, for elements
    that are differences of larger numbers, such as a rotated pair.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{what}: the shape is {tuple(actual.shape)}; the oracle's is {tuple(oracle.shape)}")
    exact = oracle.double()
    size = exact.abs() if scale is None else torch.maximum(exact.abs(), scale.double().abs())
    off = (actual.double() - exact).abs() / _spacing(size, actual.dtype)
    rounded = exact.to(actual.dtype)
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    off = torch.where(same, 0.0, off.nan_to_num(nan=float("inf")))
    if off.numel() and float(off.max()) > ulps:
        place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        raise AssertionError(
            f"{what}: element {place} is {float(off[place]):.2f} units in the last place of {actual.dtype} from the "
            f"oracle; {ulps} are allowed. output {float(actual[place])!r}, oracle {float(exact[place])!r}"
        )


def assert_same_bits(actual: Tensor, oracle: Tensor, *, what: str = "output") -> None:
    """Bit for bit the same (class X), so -0 is not 0, and a NaN equals only itself."""
    if actual.shape != oracle.shape or actual.dtype != oracle.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {tuple(actual.shape)} where {oracle.dtype} {tuple(oracle.shape)} was expected"
        )
    differs = bits(actual) != bits(oracle)
    if differs.any():
        place = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ in their bits, first {place}: "
            f"{actual[place].item()!r} where {oracle[place].item()!r} was expected"
        )


def bits(tensor: Tensor) -> Tensor:
    """The elements' bit patterns as integers of the same size."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _spacing(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbouring numbers of ``dtype`` at a magnitude, fp64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(size.clamp(min=info.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(size, info.eps), exponent)


def _show(row: Tensor) -> str:
    values = ", ".join(f"{value:.6g}" for value in row.flatten()[:6].tolist())
    return f"[{values}{', ...' if row.numel() > 6 else ''}]"
