"""The reference backend: definitions in the calling convention of implementations."""

from __future__ import annotations

import pytest
import torch

import m3hal
from m3hal import ops, reference
from m3hal.formats import QTensor, spec_of

SHAPE = m3hal.ModelShape.from_config(
    m3hal.MINIMAX_M3, dtype="float32", page_size=128, max_tokens=64, max_seqs=4, max_context=1024
)
SITES = {site.kind: site for site in SHAPE.sites()}


def test_lists_every_core_operator() -> None:
    """A reference that lacks one would leave the last resort of a list incomplete."""
    assert set(reference.MANIFEST.operators) == set(ops.CORE)


def test_out_is_written_and_returned() -> None:
    """One tensor, or a tuple of them."""
    site = SITES["moe"]
    x, weight = torch.randn(3, 8), torch.randn(8)
    run = reference.bind_definition(ops.load("rms_norm"), site)
    out = torch.full((3, 8), float("nan"))
    assert run(x, weight, out=out) is out
    assert torch.equal(out, run(x, weight))
    run = reference.bind_definition(ops.load("add_rms_norm"), site)
    outs = torch.empty(3, 8), torch.empty(3, 8)
    assert run(x, x, weight, out=outs) is outs
    assert torch.equal(outs[1], x + x)


def test_out_of_a_quantised_tensor() -> None:
    """Codes and scales are written where the format has them."""
    run = reference.bind_definition(ops.load("quantize"), SITES["moe"])
    x = torch.randn(2, 4)
    out = QTensor(torch.empty(2, 4), spec_of("float32"))
    assert run(x, out=out) is out
    assert torch.equal(out.data, x)


def test_factories_are_attributes_by_name() -> None:
    """``m3hal.reference:rms_norm`` resolves; what is no core operator doesn't."""
    assert callable(reference.rms_norm(SITES["moe"]))
    with pytest.raises(AttributeError, match="select_blocks"):
        reference.select_blocks  # noqa: B018
