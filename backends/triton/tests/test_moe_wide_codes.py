"""Products of 8-bit codes for many tokens: when they are taken, and, on a Hopper GPU, what they come to."""

from types import SimpleNamespace

import pytest
import torch
from attention_cases import DEVICE, poisoned, worst_row
from m3hal_triton import _moe_wide_codes as wide
from m3hal_triton import moe_experts as module
from m3hal_triton._launch import is_hopper
from test_moe_experts import BOUND, _exact, _experts, _inputs, _site

HOPPER = pytest.mark.skipif(
    not is_hopper(torch.device(DEVICE)), reason="kernels in Gluon, which nothing interprets, for Hopper"
)
HIDDEN, INNER = 512, 256


def _batch(**values):
    """Of 8192 tokens, four experts each."""
    tuning = SimpleNamespace(tokens=256, extra=32)
    given = {"format": "mxfp8", "lift": True, "items": 0, "is_hopper": True, "tuning": tuning, "powers": 0, "count": 2}
    given |= {"hidden": torch.empty(32768, 3072, device="meta"), "given": torch.empty(8192, 6144, device="meta")}
    return SimpleNamespace(**(given | values))


def _matrix(rows=6144, size=3072):
    return SimpleNamespace(rows=rows, size=size)


def test_taken():
    """Tiles of 256 tokens and 32, codes of 8 bits beside fp16, whole pieces of 128 rows and 256 columns."""
    assert wide.takes(_batch(), _matrix())
    assert wide.takes_down(_batch(format="fp8_e4m3"), _matrix())


@pytest.mark.parametrize(
    "values",
    [
        {"format": "mxfp4"},
        {"lift": False},
        {"items": None},
        {"is_hopper": False},
        {"tuning": SimpleNamespace(tokens=64, extra=0)},
        {"hidden": torch.empty(2**19, 4096, device="meta")},
    ],
    ids=["four bits", "bf16", "no items", "another GPU", "few tokens", "64-bit offsets"],
)
def test_not_taken(values):
    """What stays with the other kernels."""
    assert not wide.takes(_batch(**values), _matrix())


@pytest.mark.parametrize("matrix", [_matrix(rows=6144 + 64), _matrix(size=3072 + 128)], ids=["rows", "columns"])
def test_parts_of_pieces_are_not_taken(matrix):
    """Rows and columns that fill no piece."""
    assert not wide.takes(_batch(), matrix)


def test_sums_in_fp32_are_not_taken():
    """w2 without powers of two, as beside adapters; w13 is taken."""
    assert wide.takes(_batch(powers=None), _matrix())
    assert not wide.takes_down(_batch(powers=None), _matrix())


@HOPPER
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8"])
@pytest.mark.parametrize("counts", [(330, 289, 256, 70), (1, 600, 0, 257), (0, 0, 0, 0)], ids=str)
def test_many_tokens(format, counts, monkeypatch):
    """Items of every width, of one token and of none; ids of -1; a row that is far smaller than the others."""
    tokens = 600
    site = _site("bfloat16", format, tokens, num_local_experts=4, hidden_size=HIDDEN, intermediate_size=INNER)
    experts = _experts(format, experts=4, hidden=HIDDEN, inner=INNER)
    x, weights, _ = _inputs(tokens, torch.bfloat16, HIDDEN)
    x[7] *= 2.0**-20
    place = torch.arange(tokens, device=DEVICE)[:, None]
    ids = torch.where(place < torch.tensor(counts, device=DEVICE), torch.arange(4, device=DEVICE), -1).int()
    kernel, taken = module.moe_experts(site), []
    for name in ("up", "down"):
        own = getattr(wide, name)
        monkeypatch.setattr(wide, name, lambda *given, own=own, name=name: (taken.append(name), own(*given)))
    packed, weights = kernel.prepare_weights(experts), weights.nan_to_num(0.3)
    slab = torch.full((kernel.workspace_bytes + 512,), 0xFF, dtype=torch.uint8, device=DEVICE)
    outs = [poisoned(*x.shape, dtype=x.dtype) for _ in range(3)]
    for out in outs:
        slab[256:-256].fill_(0x7F)
        kernel.run(x, weights, ids, packed, out=out, workspace=slab[256:-256])
    assert taken == ["up", "down"] * 3
    assert worst_row(outs[0], _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]
    assert all(torch.equal(outs[0], out) for out in outs)
    assert bool((slab[:256] == 0xFF).all() and (slab[-256:] == 0xFF).all())
