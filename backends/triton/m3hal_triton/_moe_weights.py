"""Experts as the kernels read them.

Rows of w13 alternate between gate and up, eight by eight, and stand in the order in which w2's product walks them;
each row is told its factor, and the largest of its block scales. Bytes stay what they are, but for four-bit codes
beside fp16 products: their bits take the places of :data:`_moe_decode.PLACES` in words of eight.

Of a matrix with block scales, 128 rows of 256 columns lie in one piece where it has so many: each load of a tile's
scales, or of its four-bit codes, would else take half a row's 32-byte sector or two from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from m3hal.formats import PLAIN_FORMATS, QSpec, QTensor
from m3hal.ops import ExpertWeights
from m3hal_triton._moe_decode import (
    ALTERNATE,
    DEPTH,
    DOWN_E2M1,
    LIFT_E2M1,
    LIFT_E4M3,
    PLACES,
    TALL,
    columns,
)

Weight = torch.Tensor | QTensor
#: bytes to which a row of scales is filled up, so that loads of a row start at multiples of what they take
SCALE_ROW = 16


@dataclass(frozen=True)
class Matrix:
    """w13 or w2, packed.

    codes: [E, rows, ...]. scale: uint8 [E, rows, groups], filled up. In pieces: [E, rows / 128, size / 256, 128, ...].
    base: int32 [E, rows], the largest scale code of an MX format. factor: fp32 [E, rows], what sums are multiplied by.
    global_scale, spec: as given; spec is None for a plain tensor. order: int64 [rows], the given row of each, and -1
    for one that fills up; None: as given. size: of the reduced axis. is_placed: whether codes' bits have their places.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    base: torch.Tensor | None
    factor: torch.Tensor | None
    global_scale: torch.Tensor | None
    spec: QSpec | None
    order: torch.Tensor | None
    size: int
    is_placed: bool = False

    @property
    def rows(self) -> int:
        return self.codes.shape[1] * (self.codes.shape[3] if self.codes.ndim == 5 else 1)

    @property
    def in_pieces(self) -> bool:
        return self.scale is not None and self.scale.ndim == 5

    def arguments(self, as_numbers: bool = False) -> tuple[Any, ...]:
        """As the kernels take it. as_numbers: E4M3 codes labelled as such, not as bytes."""
        codes = self.codes.view(torch.float8_e4m3fn) if as_numbers else self.codes
        if self.spec is not None and self.spec.format in ("mxfp4", "nvfp4"):
            codes = codes.view(torch.int32)
        return codes, _strides(codes), self.scale, _strides(self.scale), self.base, self.factor


@dataclass(frozen=True)
class Packed:
    """What ``prepare_weights`` returns. shared: of the shared expert, as one expert.

    joined: whether its memory follows the last routed expert's, so that it is a product's expert number E.
    """

    w13: Matrix
    w2: Matrix
    x_scale: torch.Tensor | None = None
    hidden_scale: torch.Tensor | None = None
    shared: Packed | None = None
    joined: bool = False


def format_of(weight: Weight) -> str:
    """Of a weight, by the name of its format."""
    return weight.spec.format if isinstance(weight, QTensor) else str(weight.dtype).removeprefix("torch.")


def prepare(experts: ExpertWeights, *, in_order: bool) -> Packed:
    """Packs the experts. in_order: products walk K as it lies, and take factors whole."""
    order = _row_order(_width(experts.w2), order_of(format_of(experts.w2), in_order=in_order))
    order = order.to(_data(experts.w13).device)
    own, count = experts.shared, len(_data(experts.w13))
    joined = own is not None and _is_alike(experts.w13, own.w13) and _is_alike(experts.w2, own.w2)
    w13 = empty(experts.w13, order, one_more=joined, in_order=in_order)
    w2 = empty(experts.w2, None, one_more=joined, in_order=in_order)
    if own is None or not joined:
        shared = None if own is None else prepare(own, in_order=in_order)
    else:
        first, last = _part(w13, count, count + 1, own.w13), _part(w2, count, count + 1, own.w2)
        shared = Packed(first, last, _own(own.x_scale), _own(own.hidden_scale))
        w13, w2 = _part(w13, 0, count, experts.w13), _part(w2, 0, count, experts.w2)
        _fill(shared.w13, 0, own.w13, in_order)
        _fill(shared.w2, 0, own.w2, in_order)
    packed = Packed(w13, w2, _own(experts.x_scale), _own(experts.hidden_scale), shared, joined)
    _fill(packed.w13, 0, experts.w13, in_order)
    _fill(packed.w2, 0, experts.w2, in_order)
    return packed


def _is_alike(routed: Weight, shared: Weight) -> bool:
    """Whether a shared expert's matrix could be one of the routed experts'."""
    kinds = [w.spec if isinstance(w, QTensor) else w.dtype for w in (routed, shared)]
    return kinds[0] == kinds[1] and _data(routed).shape[1:] == _data(shared).shape[1:]


def _part(matrix: Matrix, first: int, last: int, given: Weight) -> Matrix:
    """Some experts of a matrix, in its memory."""
    parts = [None if t is None else t[first:last] for t in (matrix.codes, matrix.scale, matrix.base, matrix.factor)]
    codes, scale, base, factor = parts
    assert codes is not None
    held = given.global_scale if isinstance(given, QTensor) else None
    held = None if held is None else held.clone()
    return replace(matrix, codes=codes, scale=scale, base=base, factor=factor, global_scale=held)


def update(packed: Packed, first: int, experts: ExpertWeights, *, in_order: bool) -> None:
    """Overwrites experts ``first``, ``first + 1``, ... in place."""
    _fill(packed.w13, first, experts.w13, in_order)
    _fill(packed.w2, first, experts.w2, in_order)
    for old, new in ((packed.x_scale, experts.x_scale), (packed.hidden_scale, experts.hidden_scale)):
        if old is None and new is not None:
            raise ValueError("these experts were prepared without scales of activations; prepare them again")
        if old is not None and new is not None:
            old.copy_(new)
    if packed.shared is not None and experts.shared is not None:
        update(packed.shared, 0, experts.shared, in_order=in_order)


def unpack(packed: Packed) -> ExpertWeights:
    """The experts as they were given, byte by byte."""
    shared = None if packed.shared is None else unpack(packed.shared)
    scales = _own(packed.x_scale), _own(packed.hidden_scale)
    return ExpertWeights(_restore(packed.w13), _restore(packed.w2), *scales, shared)


def _own(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A copy: updates write into it."""
    return None if scale is None else scale.clone()


def placed(codes: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """uint8 [..., n]: each four bytes' eight codes with their bits where kernels expect them; back: where they were.

    Neighbours stand in the two halves of a word.
    """
    words = codes.contiguous().view(torch.int32)
    result = torch.zeros_like(words)
    for element in range(8):
        sign, *_, last = (place + element % 2 * 16 for place in PLACES[element // 2])
        for mask, given, place in ((1, 4 * element + 3, sign), (7, 4 * element, last)):
            start, end = (place, given) if back else (given, place)
            result |= ((words >> start) & mask) << end
    return result.view(torch.uint8)


def padded(size: int, order: str = "") -> int:
    """Numbers that a row of activations has. order: a format in whose order (:func:`columns`) they stand, if any."""
    block = len(columns(order)) if order else ALTERNATE.value * 8
    return -(-size // block) * block


def _row_order(inner: int, order: str) -> torch.Tensor:
    """int64 [2 * padded(inner, order)]: which of w13's rows stands where."""
    feature = torch.arange(padded(inner, order))
    if order:
        permutation = columns(order)
        feature = feature // len(permutation) * len(permutation) + torch.tensor(permutation)[feature % len(permutation)]
    gate = torch.where(feature < inner, feature, -1)
    up = torch.where(feature < inner, feature + inner, -1)
    return torch.stack([gate.view(-1, ALTERNATE.value), up.view(-1, ALTERNATE.value)], 1).flatten()


def order_of(format: str, *, in_order: bool) -> str:
    """In whose order a format's products take activations; empty: as they lie."""
    return "" if in_order or format in PLAIN_FORMATS else format


def _data(weight: Weight) -> torch.Tensor:
    return weight.data if isinstance(weight, QTensor) else weight


def _width(weight: Weight) -> int:
    """Numbers of a row."""
    bits = 4 if format_of(weight) in ("mxfp4", "nvfp4") else 8
    return _data(weight).shape[2] * 8 // bits if isinstance(weight, QTensor) else weight.shape[2]


def empty(weight: Weight, order: torch.Tensor | None, *, one_more: bool, in_order: bool) -> Matrix:
    """Room for a weight's packed form. one_more: for an expert more."""
    data, size = _data(weight), _width(weight)
    rows = data.shape[1] if order is None else len(order)
    experts, device = len(data) + one_more, data.device
    dtype = data.dtype if data.element_size() > 1 else torch.uint8
    if not isinstance(weight, QTensor) or weight.spec.format in PLAIN_FORMATS:
        spec = weight.spec if isinstance(weight, QTensor) else None
        codes = torch.zeros(experts, rows, data.shape[2], dtype=dtype, device=device)
        return Matrix(codes, None, None, None, None, spec, order, size)
    is_packed = weight.spec.format in ("mxfp4", "nvfp4")
    in_pieces = not in_order and weight.spec.group > 0 and rows % TALL.value == 0 and size % DEPTH.value == 0

    def zeros(columns: int, *, in_pieces: bool) -> torch.Tensor:
        pieces = size // DEPTH.value
        shape = (rows // TALL.value, pieces, TALL.value, columns // pieces) if in_pieces else (rows, columns)
        return torch.zeros(experts, *shape, dtype=torch.uint8, device=device)

    codes, scale = zeros(data.shape[2], in_pieces=in_pieces and is_packed), None
    if weight.spec.group > 0:
        groups = -(-size // weight.spec.group // SCALE_ROW) * SCALE_ROW
        scale = zeros(size // weight.spec.group if in_pieces else groups, in_pieces=in_pieces)
    is_mx = weight.spec.format.startswith("mx")
    base = torch.zeros(experts, rows, dtype=torch.int32, device=device) if is_mx else None
    factor = torch.ones(experts, rows, device=device)
    global_scale = None if weight.global_scale is None else weight.global_scale.clone()
    is_placed = is_packed and not in_order
    return Matrix(codes, scale, base, factor, global_scale, weight.spec, order, size, is_placed)


def _strides(data: torch.Tensor | None) -> tuple[int, ...]:
    """Of experts and rows; in pieces of experts, TALL rows, and a row."""
    if data is None:
        return 0, 0
    steps = data.stride()
    return steps[:2] if data.ndim < 5 else (steps[0], steps[1], steps[3])


def _fill(matrix: Matrix, first: int, weight: Weight, in_order: bool) -> None:
    """Expert by expert, so that no second copy of all of them is alive."""
    for number in range(len(_data(weight))):
        one, to = weight[number], first + number
        codes = _data(one)
        codes = codes.view(torch.uint8) if codes.element_size() == 1 else codes
        _put(matrix.codes[to], placed(codes) if matrix.is_placed else codes, matrix.order)
        if isinstance(one, QTensor) and matrix.factor is not None:
            if matrix.scale is not None and one.scale is not None:
                _put(matrix.scale[to], one.scale.view(torch.uint8), matrix.order)
            factor = torch.ones(codes.shape[0], device=codes.device)
            if one.scale is not None and one.scale.dtype == torch.float32:
                factor = factor * one.scale.view(-1)
            if one.global_scale is not None:
                factor = factor * one.global_scale.reshape(-1).to(codes.device)
            _put(matrix.factor[to], factor, matrix.order)
            _relate(matrix, to, in_order)
    if isinstance(weight, QTensor) and matrix.global_scale is not None and weight.global_scale is not None:
        own = matrix.global_scale.ndim == 3
        target = matrix.global_scale[first : first + len(weight.data)] if own else matrix.global_scale
        target.copy_(weight.global_scale)


def _relate(matrix: Matrix, expert: int, in_order: bool) -> None:
    """What fp16 products leave to the factor: an MX row's largest scale, and powers of two that codes carry."""
    assert matrix.factor is not None
    assert matrix.spec is not None
    factor = matrix.factor[expert]
    if in_order or matrix.scale is None:
        return
    if matrix.base is None:
        factor.mul_(2.0**-DOWN_E2M1.value)
        return
    largest = _together(matrix.scale[expert]).amax(-1).int()
    matrix.base[expert] = largest
    lift = LIFT_E4M3.value if matrix.spec.format == "mxfp8" else LIFT_E2M1.value + DOWN_E2M1.value
    power = torch.ldexp(torch.ones_like(factor, dtype=torch.float64), largest - 127 - lift)
    factor.copy_(torch.where(largest == 255, torch.nan, power))


def _put(target: torch.Tensor, given: torch.Tensor, order: torch.Tensor | None) -> None:
    """Rows of one expert: a target [rows, ...] may have more columns, or lie in pieces."""
    if order is not None:
        given = given.index_select(0, order.clamp(min=0))
        given[order < 0] = 0
    if target.ndim == 4:
        high, pieces, tall, wide = target.shape
        target.copy_(given.view(high, tall, pieces, wide).transpose(1, 2))
    elif target.ndim == 2:
        target[:, : given.shape[1]] = given
    else:
        target.copy_(given)


def _together(packed: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] of what may lie in pieces."""
    if packed.ndim < 4:
        return packed
    *_, high, pieces, tall, wide = packed.shape
    return packed.transpose(-3, -2).reshape(*packed.shape[:-4], high * tall, pieces * wide)


def _taken(packed: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """[E, rows, ...] in the order that was given."""
    packed = _together(packed)
    if order is None:
        return packed.clone()
    where = torch.nonzero(order >= 0).view(-1)
    return packed.index_select(1, where[order[where].argsort()])


def _restore(matrix: Matrix) -> Weight:
    codes = _taken(matrix.codes, matrix.order)
    if matrix.is_placed:
        codes = placed(codes, back=True)
    if matrix.spec is None:
        return codes
    if matrix.factor is None:
        return QTensor(codes, matrix.spec)
    scale = None
    if matrix.scale is not None:
        scale = _taken(matrix.scale, matrix.order)[..., : matrix.size // matrix.spec.group].contiguous()
    elif matrix.spec.group != 0:
        scale = _taken(matrix.factor, matrix.order)[..., None]
    return QTensor(codes, matrix.spec, scale, None if matrix.global_scale is None else matrix.global_scale.clone())


def format_of_matrix(matrix: Matrix, x: torch.Tensor) -> str:
    """By its name; of a plain tensor, that of its elements."""
    return matrix.spec.format if matrix.spec is not None else str(x.dtype).removeprefix("torch.")
