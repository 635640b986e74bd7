"""The codecs give the same bytes on every device of this machine as on its CPU."""

from __future__ import annotations

import pytest
import torch

from m3hal import formats
from m3hal.formats import FORMATS, QTensor, e2m1, e4m3, e8m0, nvfp4, spec_of
from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache, convert
from m3hal.ops.kv_read import kv_read
from m3hal.ops.kv_write import kv_write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the CPU is the only device here")
DEVICE = "cuda"


def every_bf16() -> torch.Tensor:
    """fp32: all bf16 values, and the fp32 numbers beside each, where midpoints are decided."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    beside = (x.view(torch.int32) + torch.tensor([[-1], [0], [1]], dtype=torch.int32)).view(torch.float32)
    return beside.flatten()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, NaN for NaN."""
    one, other = one.cpu(), other.cpu()
    if one.is_floating_point():
        return bool(
            ((one == other) & (torch.signbit(one) == torch.signbit(other)) | (one.isnan() & other.isnan())).all()
        )
    return torch.equal(one, other)


def test_codecs() -> None:
    """Every bf16 value and its fp32 neighbours, subnormal ones too; every code."""
    x = every_bf16()
    codes = torch.arange(256).to(torch.uint8)
    for maximum in (e4m3.OCP, e4m3.GAUDI2):
        assert same(e4m3.encode(x, maximum), e4m3.encode(x.to(DEVICE), maximum))
        assert same(e4m3.decode(codes, maximum), e4m3.decode(codes.to(DEVICE), maximum))
    assert same(e2m1.encode(x), e2m1.encode(x.to(DEVICE)))
    assert same(e2m1.decode_packed(codes), e2m1.decode_packed(codes.to(DEVICE)))
    assert same(e8m0.decode(codes), e8m0.decode(codes.to(DEVICE)))
    rules: tuple[e8m0.Rule, ...] = ("ceil", "floor", "even")
    for rule in rules:
        assert same(e8m0.from_amax(x.abs(), 448, rule), e8m0.from_amax(x.abs().to(DEVICE), 448, rule))


@pytest.mark.parametrize("format", FORMATS)
def test_block_formats(format: str) -> None:
    """Codes, scales and numbers of rows from 2**-40 to 2**40, and of every bf16 value."""
    generator = torch.Generator().manual_seed(2)
    size = 2.0 ** torch.linspace(-40, 40, 512)[:, None]
    for x in (torch.randn(512, 128, generator=generator) * size, every_bf16().view(-1, 32).nan_to_num(0, 0, 0)):
        mine, theirs = (formats.quantize(t, spec_of(format)) for t in (x, x.to(DEVICE)))
        assert _same_tensors(mine, theirs)
        assert same(formats.dequantize(mine), formats.dequantize(theirs))
    if format == "nvfp4":
        for quantizer in ("reciprocal", "token_global"):
            assert _same_tensors(*(nvfp4.quantize(t, None, quantizer) for t in (x, x.to(DEVICE))))  # type: ignore[arg-type]
        scale = torch.tensor(0.0371)
        assert _same_tensors(nvfp4.quantize(x, scale), nvfp4.quantize(x.to(DEVICE), scale.to(DEVICE)))


def _same_tensors(one: QTensor, other: QTensor) -> bool:
    pairs = ((one.data, other.data), (one.scale, other.scale), (one.global_scale, other.global_scale))
    return all(a is b is None or (a is not None and b is not None and same(a, b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("kind", "format"), [(kind, format) for format, kinds in CACHE_FORMATS.items() for kind in kinds]
)
def test_caches(kind: str, format: str) -> None:
    """The same bytes written, the same numbers read, the same bytes converted."""
    layout = KVLayout(kind, format, 128, 1 if format == "mxfp4" else 4, 128, format != "mxfp4")
    generator = torch.Generator().manual_seed(4)
    vectors = [torch.randn(200, layout.heads, 128, generator=generator) for _ in range(2)]
    slots = torch.randperm(384, generator=generator)[:200]
    caches = []
    for device in ("cpu", DEVICE):
        cache = layout.empty(3, device)
        cache.buf.view(torch.uint8).zero_()
        k, v = (t.to(device) for t in vectors)
        kv_write(cache, k, v if layout.has_values else None, slots.to(device))
        caches.append(cache)
    assert torch.equal(*(cache.buf.view(torch.uint8).cpu() for cache in caches))
    for one, other in zip(*(kv_read(cache, slots.to(cache.buf.device)) for cache in caches), strict=True):
        assert one is other is None or same(one, other)
    for other_kind in CACHE_FORMATS[format]:
        moved = [convert(cache, other_kind) for cache in caches]
        assert torch.equal(*(_bytes(cache) for cache in moved))


def _bytes(cache: PagedCache) -> torch.Tensor:
    return cache.buf.view(torch.uint8).cpu()
