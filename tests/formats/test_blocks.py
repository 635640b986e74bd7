"""The block formats: MXFP8, MXFP4, NVFP4 and FP8 by rows, against numpy and ml_dtypes, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from format_oracle import all_bf16, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, nvfp4, pack

from m3hal import formats
from m3hal.formats import QSpec, QTensor, e2m1, e4m3, fp8, mxfp4, mxfp8, spec_of
from m3hal.formats import nvfp4 as m3hal_nvfp4

QUANTISED = ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")


def gaussian(*shape: int, spread: float = 3.0) -> torch.Tensor:
    """Rows of very different magnitude."""
    generator = torch.Generator().manual_seed(7)
    size = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return torch.randn(*shape, generator=generator) * size


@pytest.mark.parametrize("format", QUANTISED)
def test_numbers_of_the_format_come_back_exactly(format: str) -> None:
    """Quantising what dequantisation gave changes nothing: the nearest number to a number is itself."""
    first = formats.quantize(gaussian(64, 128), spec_of(format))
    numbers = formats.dequantize(first)
    again = formats.dequantize(formats.quantize(numbers, spec_of(format)))
    if format.startswith("fp8"):  # its scale is a quotient, rounded in fp32
        assert torch.allclose(again, numbers, rtol=1e-6, atol=0)
    elif format == "nvfp4":  # a block without a 6 gets a smaller scale, and then not every number is there
        full = (e2m1.unpack(first.data).unflatten(-1, (-1, 16)) % 8 == 7).any(-1).repeat_interleave(16, -1)
        assert full.float().mean() > 0.9
        assert torch.equal(again[full], numbers[full])
    else:
        assert torch.equal(again, numbers)


@pytest.mark.parametrize("format", QUANTISED)
def test_the_bound_on_the_error_holds(format: str) -> None:
    """Half a step of the code grid at the block's scale, or of its scale's when that is what was rounded."""
    x = gaussian(256, 128, spread=1.0)
    error = (formats.dequantize(formats.quantize(x, spec_of(format))) - x).abs()
    relative = {"mxfp4": 2.0**-2, "nvfp4": 2.0**-2 + 2.0**-4}.get(format, 2.0**-4)
    group = spec_of(format).group if spec_of(format).group > 0 else 128
    amax = x.unflatten(-1, (-1, group)).abs().amax(-1).repeat_interleave(group, -1)
    smallest = {"mxfp4": 1 / 8, "nvfp4": 1 / 12}.get(format, 1 / 8192)
    assert (error <= torch.maximum(relative * x.abs(), (smallest * amax).clamp(min=2.0**-11)) * 1.0001).all()


def test_mxfp8_equals_the_oracle() -> None:
    """Scales from exact powers of two, codes from ml_dtypes."""
    x = gaussian(128, 96).bfloat16()
    q = mxfp8.quantize(x)
    blocks = x.float().numpy().reshape(128, 3, 32)
    exponent = np.vectorize(lambda amax: math.ceil(math.log2(amax / 448)))(np.abs(blocks).max(-1).astype(float))
    assert (q.scale.numpy() == exponent + 127).all()
    codes = encode_e4m3((blocks / 2.0 ** exponent[..., None]).astype(np.float32), 448)
    assert (q.data.numpy() == codes.reshape(128, 96)).all()


def test_mxfp4_equals_the_oracle() -> None:
    """Scales from the bits of amax, as the peers compute them; codes from ml_dtypes."""
    x = gaussian(128, 96).bfloat16()
    q = mxfp4.quantize(x)
    blocks = x.float().numpy().reshape(128, 3, 32)
    bits = (np.abs(blocks).max(-1).view(np.uint32) + 0x200000) & 0x7F800000
    exponent = (bits >> 23).astype(int) - 127 - 2
    assert (q.scale.numpy() == exponent + 127).all()
    codes = encode_e2m1((blocks / 2.0 ** exponent[..., None]).astype(np.float32))
    assert (q.data.numpy() == pack(codes.reshape(128, 96))).all()


@pytest.mark.parametrize("global_scale", [1.0, 0.25, 0.0123, 37.0])
def test_nvfp4_equals_the_oracle(global_scale: float) -> None:
    """Codes and scale bytes, on random blocks and on blocks that hold each bf16 magnitude as their largest."""
    magnitudes = np.unique(np.abs(all_bf16()[np.isfinite(all_bf16())]))[::3]
    rows = np.concatenate([magnitudes[:, None] * np.linspace(-1, 1, 16), gaussian(512, 16).numpy()])
    x = torch.from_numpy(rows.astype(np.float32)).bfloat16()
    q = m3hal_nvfp4.quantize(x, torch.tensor(global_scale))
    with np.errstate(over="ignore"):
        codes, scale = nvfp4(x.float().numpy(), np.float32(global_scale))
    assert (q.scale.numpy() == scale).all()
    assert (q.data.numpy() == codes).all()


def test_nvfp4_keeps_every_midpoint_even() -> None:
    """A correctly rounded division leaves a tie a tie at every positive E4M3 scale; -0 is written as +0."""
    scales = torch.from_numpy(decode_e4m3(np.arange(1, 0x7F, dtype=np.uint8)))
    block = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0])
    q = m3hal_nvfp4.quantize(scales[:, None] * block)
    assert q.scale.flatten().tolist() == list(range(1, 0x7F))
    expected = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]
    assert (e2m1.decode_packed(q.data) == torch.tensor(expected)).all()
    assert (e2m1.unpack(q.data) != 8).all()


def test_nvfp4_edges() -> None:
    """Zeros; a block too small for its scale; infinity and NaN saturate and leave the rest of the row alone."""
    x = torch.zeros(5, 32)
    x[1, :16] = 2.0**-12
    x[2, 0], x[2, 1] = float("inf"), 3.0
    x[3, 0], x[3, 1] = float("-inf"), 448 * 6
    x[4, 0], x[4, 1] = float("nan"), 6.0
    x[2:, 16:] = 6.0
    q = m3hal_nvfp4.quantize(x)
    y = formats.dequantize(q)
    assert (q.scale[:2] == 1).all()  # 2**-9, the floor
    assert (y[:2] == 0).all()
    assert y[2, :2].tolist() == [448 * 6, 0]
    assert y[3, :2].tolist() == [-448 * 6, 448 * 6]
    assert y[4, :2].tolist() == [6, 6]
    assert (y[2:, 16:] == 6).all()


def test_nvfp4_by_reciprocal_differs_rarely_and_by_one_step() -> None:
    """Same scales; codes differ in well under a percent of elements, each by one step. Its zero block has scale 0."""
    x = gaussian(4096, 64, spread=0.5).bfloat16()
    division = m3hal_nvfp4.quantize(x, torch.tensor(0.37))
    reciprocal = m3hal_nvfp4.quantize(x, torch.tensor(0.37), "reciprocal")
    steps = (e2m1.unpack(division.data).int() % 8 - e2m1.unpack(reciprocal.data).int() % 8).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.005
    zero = m3hal_nvfp4.quantize(torch.tensor([[-0.0] * 16]), quantizer="reciprocal")
    assert zero.scale.tolist() == [[0]]
    assert (e2m1.unpack(zero.data) == 8).all()


def test_nvfp4_token_global_is_independent_of_the_other_rows() -> None:
    """A row of its own has the same bytes as among rows a million times larger; a passed scale is refused."""
    x = gaussian(4, 64, spread=8.0)
    together = m3hal_nvfp4.quantize(x, quantizer="token_global")
    alone = m3hal_nvfp4.quantize(x[2:3], quantizer="token_global")
    assert together.global_scale.shape == (4, 1)
    assert torch.equal(together.data[2:3], alone.data)
    error = (formats.dequantize(together) - x).norm(dim=-1) / x.norm(dim=-1)
    assert (error < 0.15).all()
    with pytest.raises(ValueError, match="token_global makes its own"):
        m3hal_nvfp4.quantize(x, torch.tensor(1.0), "token_global")


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_mx_edges(format: str) -> None:
    """Zeros; NaN makes its own block NaN and no other; the largest fp32 numbers and infinity stay large."""
    x = torch.zeros(4, 64)
    x[1, 3] = float("nan")
    x[1, 32:] = 1.0
    x[2, 0] = 1e38
    x[3, 0], x[3, 32] = float("-inf"), 1.0
    y = formats.dequantize(formats.quantize(x, spec_of(format)))
    assert (y[0] == 0).all()
    assert y[1, :32].isnan().all()
    assert (y[1, 32:] == 1).all()
    assert 0.8e38 < y[2, 0] < 1.2e38
    assert y[3, 0] <= -3e38
    assert y[3, 32] == 1


def test_fp8_rows() -> None:
    """Per row: the largest magnitude becomes the maximum; zeros stay zeros; NaN and infinity spoil their row alone."""
    x = gaussian(6, 32)
    x[1], x[2, 5], x[3, 5] = 0.0, float("nan"), float("inf")
    for maximum in (e4m3.OCP, e4m3.GAUDI2):
        q = fp8.quantize_rows(x, maximum)
        y = formats.dequantize(q)
        assert q.scale.dtype == torch.float32
        for row in (0, 4, 5):
            assert e4m3.decode(q.data[row], maximum).abs().max() == maximum
            assert ((y[row] - x[row]).abs() <= x[row].abs() / 16 + x[row].abs().max() / 2**13).all()
        assert (y[1] == 0).all()
        assert y[2].isnan().all()
        assert y[3].isnan().all()


def test_fp8_global() -> None:
    """Divides by the scale, saturates, keeps NaN; without a scale it is a plain rounding."""
    x = torch.tensor([1.0, 0.1, 1000.0, float("nan"), float("-inf")])
    q = fp8.quantize_global(x, torch.tensor(0.5))
    assert formats.dequantize(q)[:3].tolist() == [1.0, float(e4m3.rounded(torch.tensor(0.2)) / 2), 224.0]
    assert formats.dequantize(q)[3].isnan()
    assert formats.dequantize(q)[4] == -224
    assert torch.equal(fp8.quantize_global(x).data, e4m3.encode(x))
    assert torch.equal(formats.quantize(x, QSpec("fp8_e4m3_240"), torch.tensor(2.0)).data, e4m3.encode(x / 2, 240))


@pytest.mark.parametrize("label", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_byte_is_an_exponent(label: torch.dtype, dtype: torch.dtype) -> None:
    """Byte 119 is 2**-8 whatever dtype it carries, never the number 119."""
    scale = torch.tensor([[119]], dtype=torch.uint8).view(label)
    q = QTensor(torch.full((1, 32), 0x38, dtype=torch.uint8), spec_of("mxfp8"), scale)  # 0x38 is 1.0
    assert (formats.dequantize(q, dtype) == 2.0**-8).all()


def test_global_scales_of_checkpoints_become_multipliers() -> None:
    """3584 stored as divisor [1] and 1/3584 stored as multiplier () are one scale; zero and infinity are refused."""
    divisor = m3hal_nvfp4.as_multiplier(torch.tensor([3584.0]), is_divisor=True)
    multiplier = m3hal_nvfp4.as_multiplier(torch.tensor(1 / 3584), is_divisor=False)
    assert divisor.shape == multiplier.shape == ()
    assert divisor == multiplier
    for bad in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="the checkpoint is damaged or misread"):
            m3hal_nvfp4.as_multiplier(torch.tensor(bad), is_divisor=True)


def test_the_global_scale_uses_the_whole_range() -> None:
    """The largest number lands on the largest code times the largest scale; zeros get 1."""
    x = gaussian(8, 64)
    scale = m3hal_nvfp4.global_scale_of(x)
    q = m3hal_nvfp4.quantize(x, scale)
    assert q.scale.max() == 0x7E
    assert torch.isclose(formats.dequantize(q).abs().max(), x.abs().max(), rtol=1e-6)
    assert m3hal_nvfp4.global_scale_of(torch.zeros(4)) == 1.0


def test_dequantisation_in_fp64_is_the_exact_product() -> None:
    """code * scale * global without any rounding, from codecs that are not m3hal's."""
    x, scale = gaussian(16, 64), torch.tensor(0.0371)
    q = m3hal_nvfp4.quantize(x, scale)
    exact = decode_e2m1(q.data.numpy()).astype(np.float64)
    exact *= np.repeat(decode_e4m3(q.scale.numpy()), 16, axis=-1).astype(np.float64) * float(scale)
    assert (formats.dequantize(q, torch.float64).numpy() == exact).all()
    assert (formats.dequantize(q).numpy() == exact.astype(np.float32)).all()
    assert formats.dequantize(q, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("format", QUANTISED)
def test_no_rows_and_strided_rows(format: str) -> None:
    """Zero tokens give zero tokens; a strided view gives the bytes of its copy."""
    spec = spec_of(format)
    empty = formats.quantize(torch.empty(0, 64), spec)
    assert formats.dequantize(empty).shape == (0, 64)
    x = gaussian(4, 128)
    view = x[:, ::2]
    assert torch.equal(formats.quantize(view, spec).data, formats.quantize(view.contiguous(), spec).data)


def test_what_does_not_fit_is_refused() -> None:
    """A broken group, and a global scale where the format has none."""
    with pytest.raises(ValueError, match="16 neighbours share a scale, and 24 elements don't fill groups"):
        formats.quantize(torch.zeros(2, 24), spec_of("nvfp4"))
    for format in ("mxfp8", "fp8_e4m3", "float32"):
        with pytest.raises(ValueError, match="has no global scale"):
            formats.quantize(torch.zeros(2, 32), spec_of(format), torch.tensor(1.0))


def test_every_product_of_code_and_scale_rounded_to_e4m3() -> None:
    """All codes at all positive scales, as FP8 tensor cores take them; with the shift by 8 too; by ml_dtypes."""
    scale = np.arange(1, 0x7F, dtype=np.uint8)
    packed = np.tile(np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8), (len(scale), 1))
    q = QTensor(torch.from_numpy(packed), spec_of("nvfp4"), torch.from_numpy(scale[:, None]))
    code, factor = decode_e2m1(packed), decode_e4m3(scale)[:, None]
    product = decode_e4m3(encode_e4m3(code * factor, 448))
    eighth = decode_e4m3(encode_e4m3(factor / 8, 448))
    shifted = decode_e4m3(encode_e4m3(code * eighth, 448)) * 8
    assert (formats.dequantize(q, product="e4m3").numpy() == product).all()
    assert (formats.dequantize(q, product="e4m3_shift3").numpy() == shifted).all()
    exact = formats.dequantize(q).numpy()
    reachable = (code > 0) & (exact <= 448)
    assert (reachable.sum(), ((product != exact) & reachable).sum()) == (819, 212)
    assert np.abs(product / np.where(exact == 0, 1, exact) - 1)[reachable & (exact >= 2.0**-6)].max() < 0.0626


@pytest.mark.parametrize("spec", [*map(spec_of, QUANTISED), QSpec("fp8_e4m3")], ids=str)
def test_gathered_rows_keep_their_scales(spec: QSpec) -> None:
    """Two ranks whose largest activations are 1 and 100: what was gathered is what each of them meant."""
    ranks = [gaussian(3, 64, spread=0.0), 100 * gaussian(2, 64, spread=0.0)]
    own = [x.abs().amax() / (448 if spec.group == 0 else 2688) for x in ranks]
    sent = [
        formats.quantize(x, spec, scale if spec.group == 0 or spec.format == "nvfp4" else None)
        for x, scale in zip(ranks, own, strict=True)
    ]
    gathered = formats.concatenate(sent)
    expected = torch.cat([formats.dequantize(q) for q in sent])
    assert torch.equal(formats.dequantize(gathered), expected)
    errors = (expected - torch.cat(ranks)).norm(dim=-1) / torch.cat(ranks).norm(dim=-1)
    assert errors.max() < 0.15
    assert torch.equal(formats.dequantize(gathered[3:]), formats.dequantize(sent[1]))


def test_only_one_format_is_gathered() -> None:
    """Bytes of two formats side by side mean nothing."""
    x = torch.ones(1, 32)
    with pytest.raises(ValueError, match="rows of one tensor have one format"):
        formats.concatenate([formats.quantize(x, spec_of(name)) for name in ("mxfp8", "mxfp4")])
