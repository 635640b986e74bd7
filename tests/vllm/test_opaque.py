"""An implementation that torch.compile must not look inside is one call to it, and still the vendor's own code."""

from __future__ import annotations

import pytest
import torch

from m3hal import MINIMAX_M3, ModelShape, Policy, ops, plan
from m3hal.vllm import opaque
from m3hal.vllm.opaque import TRACED


@pytest.mark.parametrize("name", TRACED)
def test_compiled_call_reaches_the_implementation(name: str) -> None:
    """Traced with no graph break, dynamic sizes and zero tokens included, every call arrives, with the same result."""
    shape = ModelShape.from_config(
        MINIMAX_M3, dtype="float32", page_size=128, max_tokens=64, max_seqs=8, max_context=1024
    )
    reference = plan(shape, "cpu", Policy.resolve(api={"backend": "reference"}, environ={})).bind(name, "dense_mlp")
    arrived: list[int] = []

    def run(*inputs: torch.Tensor) -> object:
        arrived.append(len(inputs[0].numpy()))  # torch.compile can't know a length that NumPy computes
        return reference.run(*inputs)

    call = opaque.call(reference, run)
    compiled = torch.compile(lambda *inputs: call(*inputs), backend="eager", fullgraph=True, dynamic=True)
    width = {"swiglu_oai": 2 * shape.dense_intermediate_size}.get(name, shape.hidden_size)
    for tokens in (3, 5, 0):
        inputs = [torch.randn(tokens, width) for given in ops.load(name).inputs if given != "weight"]
        inputs += [torch.randn(width)] if "weight" in ops.load(name).inputs else []
        torch.testing.assert_close(compiled(*inputs), reference.run(*inputs), rtol=0, atol=0)
    assert arrived == [3, 5, 0]
