"""Products with weights in every format, against the definition in fp64."""

import pytest
import torch
from attention_cases import DEVICE, poisoned, sparse_site
from m3hal_triton.linear import batch_invariant, linear, linear_fp8

from m3hal import formats
from m3hal.formats import PLAIN_FORMATS, QTensor, nvfp4, spec_of
from m3hal.ops import load

FORMATS = ("float32", "bfloat16", "fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")
#: of a row: the rounding of the output, or of sums in fp32
BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
TOKENS = pytest.mark.parametrize("tokens", [1, 17, 70])


def _stored(weight, format):
    if format in PLAIN_FORMATS:
        return weight.to(getattr(torch, format))
    if format == "nvfp4":
        return nvfp4.quantize(weight, nvfp4.global_scale_of(weight))
    return formats.quantize(weight, spec_of(format))


def _double(weight):
    return formats.dequantize(weight, torch.float64) if isinstance(weight, QTensor) else weight.double()


def _worst_row(actual, exact):
    return float(((actual.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@TOKENS
@pytest.mark.parametrize("width", [96, 416])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_format(dtype, format, width, tokens):
    """Odd numbers of tokens and rows, a last step of K that is not whole; an fp32 weight gives fp32."""
    x = torch.randn(tokens, width, device=DEVICE).to(dtype)
    weight = _stored(torch.randn(136, width, device=DEVICE), format)
    wide = torch.float32 if format == "float32" else dtype
    out = linear(sparse_site(dtype))(x, weight, out=poisoned(tokens, 136, dtype=wide))
    assert _worst_row(out, x.double() @ _double(weight).T) <= BOUND[wide]


@TOKENS
def test_fp8_by_fp8(tokens):
    """What the definition gives for activations rounded to FP8, a scale for each token."""
    x = torch.randn(tokens, 416, device=DEVICE).bfloat16() * torch.logspace(-3, 3, tokens, device=DEVICE)[:, None]
    x, weight = x.bfloat16(), _stored(torch.randn(136, 416, device=DEVICE), "fp8_e4m3")
    out = linear_fp8(sparse_site(torch.bfloat16))(x, weight, out=poisoned(tokens, 136, dtype=torch.bfloat16))
    exact = load("linear").reference(x.double(), weight, traits={"activation_format": "fp8_e4m3"})
    assert _worst_row(out, exact) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["float32", "bfloat16", "nvfp4"])
def test_views(format):
    """Rows within wider ones and every other row; the weight column by column."""
    x = torch.full((18, 103), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    x[::2, 3:99] = torch.randn(9, 96, device=DEVICE).bfloat16()
    x = x[::2, 3:99]
    weight = _stored(torch.randn(40, 96, device=DEVICE), format)
    if isinstance(weight, QTensor):
        turned = QTensor(weight.data.T.contiguous().T, weight.spec, weight.scale.T.contiguous().T, weight.global_scale)
    else:
        turned = weight.T.contiguous().T
    wide = torch.float32 if format == "float32" else torch.bfloat16
    out = linear(sparse_site(torch.bfloat16))(x, turned, out=poisoned(40, 9, dtype=wide).T)
    assert _worst_row(out, x.double() @ _double(weight).T) <= BOUND[wide]


@TOKENS
def test_the_routers_digits(tokens):
    """An fp32 weight keeps all its digits: bf16 would lose sixteen of them, tf32 thirteen, and two bf16 parts eight."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 256, device=DEVICE).bfloat16()
    base = torch.randn(16, 1, 256, device=DEVICE)
    # neighbours of the same weight, a few last places apart: what distinguishes their logits lies in the last bits
    weight = (base * (1 + 2.0**-22 * torch.arange(8, device=DEVICE)[:, None])).flatten(0, 1)
    out = linear(sparse_site(torch.bfloat16))(x, weight)
    assert out.dtype == torch.float32
    assert _worst_row(out, x.double() @ weight.double().T) <= 6e-7


@pytest.mark.parametrize("format", ["float32", "bfloat16", "nvfp4"])
def test_batch_invariant(format):
    """A row has the same bits alone, among a few and among many, and they are right."""
    run = batch_invariant(sparse_site(torch.bfloat16))
    x, weight = torch.randn(150, 416, device=DEVICE).bfloat16(), _stored(torch.randn(72, 416, device=DEVICE), format)
    out = run(x, weight)
    assert _worst_row(out, x.double() @ _double(weight).T) <= (1e-6 if format == "float32" else 4e-3)
    for rows in (slice(0, 1), slice(3, 12), slice(140, 141), slice(5, 100)):
        assert torch.equal(run(x[rows], weight), out[rows])


def test_a_bad_token_stays_alone():
    """A NaN makes its own row NaN, in the router's product too, and no other."""
    for weight in (torch.randn(136, 96, device=DEVICE), _stored(torch.randn(136, 96, device=DEVICE), "mxfp8")):
        for tokens in (5, 20):
            x = torch.randn(tokens, 96, device=DEVICE).bfloat16()
            x[3, 7] = float("nan")
            bad = linear(sparse_site(torch.bfloat16))(x, weight).isnan()
            assert bad[3].all()
            assert not bad[torch.arange(tokens, device=DEVICE) != 3].any()


def test_no_tokens():
    """Zero tokens give an empty result of the right dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(40, 96, device=DEVICE, dtype=dtype)
        out = linear(sparse_site(torch.bfloat16))(torch.empty(0, 96, dtype=torch.bfloat16, device=DEVICE), weight)
        assert out.shape == (0, 40)
        assert out.dtype == dtype
