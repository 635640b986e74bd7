"""A stored number is judged by what its code stands for: right rounding is no error, anything else is a large one."""

import pytest
import torch
from m3hal_conformance.inputs import generator
from m3hal_conformance.storage import distance, places, vectors, written

from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache
from m3hal.ops.kv_write import kv_write

FORMATS = [(f, kind) for f in ("fp8_e4m3", "fp8_e4m3_240", "nvfp4", "mxfp4") for kind in CACHE_FORMATS[f]]
SLOTS = torch.tensor([3, -1, 130, 0, 255])


def filled(format, kind, x, traits=None):
    """A cache that the definition wrote, and its bytes."""
    has_values = format != "mxfp4"
    layout = KVLayout(kind, format, 128, 2, 64, has_values)
    scales = (torch.tensor(0.37), torch.tensor(1.9)) if has_values else ()
    cache = PagedCache(torch.zeros(2, *layout.page_shape(), dtype=torch.uint8), layout, *scales)
    kv_write(cache, x, x if has_values else None, SLOTS, traits=traits or {})
    return cache, cache.buf.contiguous().flatten()


def off(cache, x, stored, known, part="k", **traits):
    """The worst distance."""
    return float(distance(vectors(cache, part, SLOTS, x, x.abs(), traits), stored, known).max())


@pytest.fixture
def x():
    return torch.randn(5, 2, 64, generator=generator("storage"))


@pytest.mark.parametrize(("format", "kind"), FORMATS)
def test_the_definition_is_right(format, kind, x):
    """What fp32 arithmetic stores is within a few last places of fp32 of the exact numbers."""
    cache, stored = filled(format, kind, x)
    assert off(cache, x, stored, stored) < 4
    if cache.layout.has_values:
        assert off(cache, x, stored, stored, "v") < 4


@pytest.mark.parametrize(("format", "kind"), FORMATS)
@pytest.mark.parametrize("step", [1, -1])
def test_a_code_too_far_is_wrong(format, kind, x, step):
    """One code up or down is far, though a comparison within one code step lets it pass."""
    cache, known = filled(format, kind, x)
    place = int(places(cache.layout, "k", SLOTS)[0][1, 1, 5])
    stored = known.clone()
    stored[place] = known[place] + step
    assert off(cache, x, stored, known) > 1e3


@pytest.mark.parametrize(("format", "kind"), [pair for pair in FORMATS if pair[0] in ("nvfp4", "mxfp4")])
def test_another_scale_is_wrong(format, kind, x):
    """A neighbouring scale byte is wrong, also where the codes were found with it."""
    cache, known = filled(format, kind, x)
    stored, place = known.clone(), int(places(cache.layout, "k", SLOTS)[1][2, 0, 1])
    stored[place] += 1
    assert off(cache, x, stored, known) > 1e3


def test_between_two_codes_either_is_right():
    """A number a last place from the middle of two codes may be stored as either, and as nothing else."""
    x = torch.full((5, 2, 64), 1.0625 * (1 + 2**-22)).double()  # codes are 1 and 1.125
    layout = KVLayout("hnd", "fp8_e4m3", 128, 2, 64, False)
    cache = PagedCache(torch.zeros(2, *layout.page_shape(), dtype=torch.uint8), layout)
    code = torch.arange(0x36, 0x3C, dtype=torch.uint8)
    found = []
    for byte in code:
        stored = torch.full((cache.buf.numel(),), int(byte), dtype=torch.uint8)
        found.append(off(cache, x, stored, stored))
    assert [distance < 16 for distance in found] == [False, False, True, True, False, False]


def test_declared_rules_have_their_own_numbers(x):
    """Another scale rule, or an ignored global scale, is wrong by definition and right where it is declared."""
    for format, kind, traits in (
        ("mxfp4", "planar", {"mx_scale_rule": "floor"}),
        ("fp8_e4m3", "hnd", {"kv_scale_used": "no"}),
    ):
        cache, _ = filled(format, kind, x)
        if format == "mxfp4":
            from m3hal.formats import quantize, spec_of
            from m3hal.layouts.stored import stored as views

            page, offset = SLOTS[SLOTS >= 0] // 128, SLOTS[SLOTS >= 0] % 128
            views(cache, "k").put(page, offset, quantize(x[SLOTS >= 0], spec_of("mxfp4"), None, traits))
            stored = cache.buf.contiguous().flatten()
        else:
            cache, stored = filled(format, kind, x, traits)
        wrong = torch.zeros_like(stored)  # nothing is excused by being the definition's byte
        assert off(cache, x, stored, wrong) > 1e3
        assert off(cache, x, stored, wrong, **traits) < 4


def test_nvfp4_zero_has_no_sign(x):
    """-0 is no code of the definition's quantiser; a quantiser by reciprocals may give it."""
    cache, known = filled("nvfp4", "planar", torch.zeros_like(x))
    place = int(places(cache.layout, "k", SLOTS)[0][0, 0, 0])
    stored = known.clone()
    stored[place] = 0x80
    assert off(cache, torch.zeros_like(x), stored, known) == float("inf")
    assert off(cache, torch.zeros_like(x), stored, known, nvfp4_quantizer="reciprocal") == 0


def test_not_finite_numbers_need_the_definitions_bytes(x):
    """A NaN has no neighbours."""
    x[3, 1, 7] = float("nan")
    cache, known = filled("fp8_e4m3", "nhd", x)
    assert off(cache, x, known, known) < 4
    stored, place = known.clone(), int(places(cache.layout, "k", SLOTS)[0][2, 1, 7])
    stored[place] = 0
    assert off(cache, x, stored, known) == float("inf")


def test_negative_slots_have_no_place(x):
    """Places are of written slots alone, each once."""
    cache, stored = filled("nvfp4", "msa_slot", x)
    found = vectors(cache, "v", SLOTS, x, x.abs(), {})
    assert len(found.codes) == 4
    everything = written(found.named("kv@v"), "kv@v")
    assert len(everything.unique()) == len(everything) == 4 * 2 * (32 + 4)
    assert everything.max() < stored.numel()
