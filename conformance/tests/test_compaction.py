"""What a capture leaves out of a call decides nothing."""

import pytest
import torch
from m3hal_conformance.bounds import bits
from m3hal_conformance.compaction import take
from m3hal_conformance.harness import cloned, named
from m3hal_conformance.ranks import PerRank
from m3hal_conformance.suite import all_cases
from m3hal_conformance.trees import tensors

from m3hal import ops
from m3hal.ops import ExpertWeights

CASES = [case for case in all_cases() if case.quick and not case.lazy and case.format == "float32"]


def outputs_of(operator, site, inputs):
    returned = operator.reference(*inputs.values(), **operator.static_values(site))
    return named(operator, returned, {})


@pytest.mark.parametrize("operator", [*ops.CORE, "qk_norm_rope_insert", "select_blocks"])
def test_a_compacted_call_is_the_same_call(operator):
    """Of every small case: the definition gives the same bits, and writes the same bytes into the kept pages.

    linear's sums, and those of adapters, are a BLAS library's, whose order depends on strides and addresses: the last
    places may differ. What several ranks compute is captured by each of them, with its own inputs.
    """
    definition = ops.load(operator)
    for case in (case for case in CASES if case.operator == operator):
        live = case.inputs()
        if any(isinstance(value, PerRank) for value in live.values()):
            continue
        taken = take(case.site, live)
        compact = cloned(taken.inputs)
        wanted, found = outputs_of(definition, case.site, live), outputs_of(definition, taken.site, compact)
        caches = {name: live[name] for name in definition.mutates if live[name] is not None}
        wanted |= dict(tensors(taken.after(caches)))
        found |= dict(tensors({name: compact[name] for name in caches}))
        assert set(found) == set(wanted), case.id
        for name, tensor in wanted.items():
            if operator == "linear" or live.get("lora") is not None:
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, equal_nan=True)
                continue
            assert torch.equal(bits(found[name]), bits(tensor)), f"{case.id}: {name}"


def test_unused_pages_rows_and_experts_stay_out():
    """A cache shrinks to the pages of its requests, the RoPE table to the rows, the experts to eight."""
    case = next(case for case in CASES if case.id.startswith("sparse_attention/ragged/"))
    inputs = case.inputs()
    meta = inputs["meta"]
    named_pages = sum(-(-length // case.site.page_size) for length in meta.seq_lens.tolist())
    kept = take(case.site, inputs).inputs["kv"].buf
    assert len(kept) <= named_pages < len(inputs["kv"].buf)
    insert = next(case for case in CASES if case.operator == "qk_norm_rope_insert").inputs()
    rows = take(case.site, insert).inputs["cos_sin"]
    assert len(rows) == len(insert["positions"].unique()) < len(insert["cos_sin"])
    many = ExpertWeights(torch.randn(32, 4, 3), torch.randn(32, 3, 2))
    ids = torch.tensor([[31, -1], [7, 3]], dtype=torch.int32)
    taken = take(case.site, {"x": torch.ones(2, 3), "ids": ids, "experts": many})
    assert (len(taken.inputs["experts"].w13), taken.site.num_local_experts) == (8, 8)
    assert torch.equal(taken.inputs["experts"].w2[taken.inputs["ids"][1].long()], many.w2[ids[1].long()])
    assert taken.inputs["ids"][0, 1] == -1


def test_the_order_of_axes_in_memory_stays():
    """A block-outer cache is still one."""
    case = next(case for case in CASES if case.id.startswith("kv_write/block_outer/"))
    inputs = case.inputs()
    order = sorted(range(inputs["cache"].buf.ndim), key=lambda axis: -inputs["cache"].buf.stride(axis))
    strides = take(case.site, inputs).inputs["cache"].buf.stride()
    assert sorted(strides, reverse=True) == [strides[axis] for axis in order]
