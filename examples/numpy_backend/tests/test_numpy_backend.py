"""A backend's whole test file: every operator against its definition, and the plan that takes it."""

import pytest
import torch
from m3hal_conformance import assert_rows, map_tensors, run_guarded, tensors
from m3hal_conformance.inputs import generator, tail_heavy
from m3hal_example_numpy import MANIFEST

from m3hal import MINIMAX_M3, ModelShape, Plan, Policy, plan
from m3hal.ops import load
from m3hal.ops.rope_partial import rope_table


def make_plan(dtype: str) -> Plan:
    shape = ModelShape.from_config(MINIMAX_M3, dtype=dtype, page_size=128, max_tokens=64, max_seqs=8, max_context=4096)
    return plan(shape, "cpu", Policy.resolve(api={"backend": "numpy,reference"}, environ={}))


PLAN = make_plan("float32")


def inputs(name: str, tokens: int) -> dict[str, torch.Tensor]:
    """An operator's inputs by name. Those with a row per token are strided, and in row 3 all but the first is NaN."""
    rng = generator(f"{name} {tokens}")

    def rows(*shape: int) -> torch.Tensor:
        strided = 4 * tail_heavy(tokens, 2, *shape, rng=rng)[:, 0]
        strided[3:4, ..., 1:] = float("nan")
        return strided

    values = {
        "rms_norm": lambda: (rows(6144), torch.randn(6144, generator=rng)),
        "add_rms_norm": lambda: (rows(6144), rows(6144), torch.randn(6144, generator=rng)),
        "rope_partial": lambda: (rows(64, 128), torch.arange(tokens) * 41, rope_table(4096, 64, 5e6)),
        "swiglu_oai": lambda: (rows(6144),),
        "route_topk": lambda: (rows(128), torch.randn(128, generator=rng)),
        "topk_blocks": lambda: (rows(4, 32), torch.arange(tokens, dtype=torch.int32) * 7 % 33),
    }
    return dict(zip(load(name).inputs, values[name](), strict=False))  # without what is optional


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("name", MANIFEST.operators)
def test_is_the_operator(name: str, tokens: int) -> None:
    """Between guard bands it gives what the definition gives in fp64, also for no tokens, strides and NaN."""
    operator, bound = load(name), PLAN.bind(name, PLAN.rows(name)[0].site)
    given, statics = inputs(name, tokens), operator.static_values(bound.site)
    outputs = run_guarded(bound.run, given, operator.fake(*given.values(), **statics))
    exact = map_tensors(given, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    oracle = operator.reference(*exact.values(), **statics)
    for (path, actual), (_, expected) in zip(tensors(outputs), tensors(oracle), strict=True):
        assert_rows(actual, expected, 1e-6, what=f"{name} {path}")


def test_plan_takes_it_where_it_can() -> None:
    """It serves all it has in fp32; why the reference serves the rest stands in the plan, in bf16 its own limit."""
    assert {choice.operator for choice in PLAN.choices if choice.server == "numpy"} == set(MANIFEST.operators)
    assert PLAN.bind("select_blocks", "sparse_attention").backend == "reference+numpy"
    assert "numpy: rejected at limits: dtype is 'bfloat16'" in make_plan("bfloat16").explain("rms_norm")
