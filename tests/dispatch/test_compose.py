"""Fused operators composed of the plan's own entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from m3hal_conformance.ranks import run_ranks

from m3hal import ops
from m3hal.dispatch import Kernel, Policy, plan, plans
from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import SeqMeta
from m3hal.shape import ModelShape


@pytest.fixture
def make(alone: None, shape: ModelShape) -> Callable[..., Any]:
    """Acme where it implements, the reference elsewhere."""
    return lambda: plan(shape, "cpu", Policy.resolve({"backend": "acme,reference"}, environ={}))


@pytest.fixture
def inputs() -> tuple[torch.Tensor, PagedCache, SeqMeta]:
    """Two requests of 300 and 140 cached keys, one query each."""
    torch.manual_seed(0)
    layout = KVLayout("hnd", "bfloat16", page_size=128, heads=1, dim=128, has_values=False)
    cache = PagedCache(torch.randn(6, *layout.page_shape()).to(torch.bfloat16), layout)
    meta = SeqMeta(
        cu_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([300, 140], dtype=torch.int32),
        block_table=torch.tensor([[4, 0, 2], [1, 3, 0]], dtype=torch.int32),
        max_q=1,
        max_k=300,
    )
    return torch.randn(2, 4, 128).to(torch.bfloat16), cache, meta


def expected(shape: ModelShape, inputs: Any) -> torch.Tensor:
    """The definition's answer."""
    operator = ops.load("select_blocks")
    site = next(site for site in shape.sites() if site.kind == "sparse_attention")
    ids: torch.Tensor = operator.reference(*inputs, **operator.static_values(site))
    return ids


def scores(site: Any) -> Callable[..., Any]:
    """The definition of block_scores, as acme's kernel."""
    operator = ops.load("block_scores")
    return lambda *given: operator.reference(*given, **operator.static_values(site))


def test_composition_runs_the_plans_parts(toy: Any, make: Any, shape: ModelShape, inputs: Any) -> None:
    """A sentinel part is called; the result is the definition's, into ``out`` when given."""
    calls = []

    def factory(site: Any) -> Callable[..., Any]:
        run = scores(site)
        return lambda *given: (calls.append(len(given)), run(*given))[1]

    toy("acme", block_scores=factory)
    bound = make().bind("select_blocks", "sparse_attention")
    assert torch.equal(bound.run(*inputs), expected(shape, inputs))
    assert calls == [3]
    out = torch.full((2, 4, 16), 77, dtype=torch.int32)
    assert bound.run(*inputs, out=out) is out
    assert torch.equal(out, expected(shape, inputs))
    assert bound.backend == "acme+reference"


def test_workspaces_and_batch_plans_of_parts(toy: Any, make: Any, shape: ModelShape, inputs: Any) -> None:
    """One workspace, as large as the largest; each part gets its own plan and storage, others the SeqMeta."""
    seen: dict[str, Any] = {}

    def scoring(site: Any) -> Kernel:
        run = scores(site)

        def planned(index_q: Any, cache: Any, batch: Any, workspace: Any) -> Any:
            seen["batch"], seen["scores"] = batch, workspace.numel()
            return run(index_q, cache, batch["meta"])

        def plan_batch(meta: Any, storage: Any) -> dict[str, Any]:
            return {"meta": meta, "storage": storage}

        return Kernel(planned, workspace_bytes=512, plan_batch=plan_batch, plan_bytes=300)

    def choosing(site: Any) -> Kernel:
        operator = ops.load("topk_blocks")

        def run(block_scores: Any, visible: Any, workspace: Any) -> Any:
            seen["topk"] = workspace.numel()
            return operator.reference(block_scores, visible, **operator.static_values(site))

        return Kernel(run, workspace_bytes=1024)

    toy("acme", block_scores=scoring, topk_blocks=choosing)
    bound = make().bind("select_blocks", "sparse_attention")
    assert (bound.workspace_bytes, bound.plan_bytes) == (1024, 512)
    index_q, cache, meta = inputs
    batch = bound.plan_batch(meta, torch.empty(bound.plan_bytes, dtype=torch.uint8))
    assert batch.seq_lens is meta.seq_lens, "it still reads as a SeqMeta"
    ids = bound.run(index_q, cache, batch, workspace=torch.empty(1024, dtype=torch.uint8))
    assert torch.equal(ids, expected(shape, inputs))
    assert seen["batch"]["storage"].numel() == 300
    assert seen["scores"] == seen["topk"] == 1024


def test_batch_plans_of_parts_lie_apart(toy: Any, make: Any, inputs: Any) -> None:
    """Two parts that plan get storage of their own: what one writes, the other doesn't see."""

    def planning(mark: int) -> Callable[..., Kernel]:
        def plan_batch(meta: SeqMeta, storage: torch.Tensor) -> torch.Tensor:
            return storage.fill_(mark)

        return lambda site: Kernel(print, plan_batch=plan_batch, plan_bytes=300)

    toy("acme", block_scores=planning(1), topk_blocks=planning(2))
    bound = make().bind("select_blocks", "sparse_attention")
    batch = bound.plan_batch(inputs[2], torch.zeros(bound.plan_bytes, dtype=torch.uint8))
    assert batch.plans["block_scores"].unique().tolist() == [1]
    assert batch.plans["topk_blocks"].unique().tolist() == [2]
    assert {plan.numel() for plan in batch.plans.values()} == {300}


def test_composition_of_references_is_the_definition(make: Any, shape: ModelShape) -> None:
    """qk_norm_rope_insert of the reference rounds once, as defined, not after each part."""
    bound = make_reference(shape).bind("qk_norm_rope_insert", "dense_attention")
    site, operator = bound.site, ops.load("qk_norm_rope_insert")
    torch.manual_seed(1)
    rows = (site.num_q_heads + 2 * site.num_kv_heads) * site.head_dim
    qkv = torch.randn(3, rows).to(torch.bfloat16)
    norms = ops.QKNorms(*[torch.randn(128).to(torch.bfloat16) for _ in range(2)], None, None)
    angles = torch.rand(8, site.rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    layout = KVLayout("hnd", "bfloat16", page_size=128, heads=4, dim=128, has_values=True)
    given = (qkv, norms, torch.arange(3), cos_sin, layout.empty(1), None, torch.arange(3), None)
    q, index_q = bound.run(*given)
    assert index_q is None
    assert torch.equal(q, operator.reference(*given, **operator.static_values(site))[0])
    assert bound.backend == "reference"


def make_reference(shape: ModelShape) -> Any:
    return plan(shape, "cpu", Policy.resolve({"backend": "reference"}, environ={}))


def test_identity_of_a_composition_follows_its_parts(toy: Any, make: Any, shape: ModelShape) -> None:
    """Another implementation of a part is another composition."""
    toy("acme", topk_blocks=lambda site: print)
    made, reference = make(), make_reference(shape)
    ids = {p.impl_id(p.choice("select_blocks", "sparse_attention")) for p in (made, reference)}
    assert len(ids) == 2
    assert reference.bind("select_blocks", "sparse_attention").impl_id in ids


def test_identity_of_a_composition_covers_what_puts_it_together(
    toy: Any, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed definition of the fused operator changes the identity and the fingerprint, with all parts the same."""
    for name in ("block_scores", "topk_blocks"):
        toy(f"acme{name[0]}", **{name: lambda site: print})
    p = plan(shape, "cpu", Policy.resolve({"backend": "acmeb,acmet,reference"}, environ={}))
    again = plan(shape, "cpu", Policy.resolve({"backend": "acmeb,acmet,reference"}, environ={}))
    before = p.impl_id(p.choice("select_blocks", "sparse_attention")), p.fingerprint
    monkeypatch.setattr(plans, "module_hash", lambda module: f"changed {module}")
    after = again.impl_id(again.choice("select_blocks", "sparse_attention")), again.fingerprint
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_composition_declares_that_its_parts_round(toy: Any, make: Any, shape: ModelShape) -> None:
    """The traits of its parts that the fused operator knows, and its own; the definition declares nothing."""
    toy("acme", rms_norm=lambda site: print)
    composed = make().bind("qk_norm_rope_insert", "dense_attention")
    assert composed.traits == {"norm_rope_round": "bfloat16"}
    assert make_reference(shape).bind("qk_norm_rope_insert", "dense_attention").traits == {}


def test_a_fused_operator_may_cover_a_fused_one(toy: Any, make: Any, shape: ModelShape) -> None:
    """A composition runs the plan's fused part where a vendor has it, else that part's own composition."""
    calls: list[str] = []

    def factory(site: Any) -> Callable[..., Any]:
        operator = ops.load("qk_norm_rope_insert")
        run = lambda *given: operator.reference(*given, **operator.static_values(site))  # noqa: E731
        return lambda *given: (calls.append("fused"), run(*given))[1]

    toy("acme", qk_norm_rope_insert=factory)
    planned = plan(shape, "cpu", Policy.resolve({"backend": "acme,reference"}, environ={}), engine={})
    choice = planned.choice("qkv_norm_rope_insert", "dense_attention")
    assert choice.composed == ("linear", "qk_norm_rope_insert")
    bound = planned.bind("qkv_norm_rope_insert", "dense_attention")
    assert bound.backend == "reference+acme"
    assert bound.traits == {"qkv_round": "bfloat16"}
    bound.run(*projected(bound.site))
    assert calls == ["fused"]
    assert "composed (reference, acme)" in planned.explain("qkv_norm_rope_insert")


def test_an_override_deep_inside_disables_a_fused_form(toy: Any, shape: ModelShape) -> None:
    """rms_norm is part of qk_norm_rope_insert, which is part of qkv_norm_rope_insert."""
    toy("acme", qkv_norm_rope_insert=lambda site: print)
    asked = {"backend": "acme,reference", "operators": {"rms_norm": "reference"}}
    planned = plan(shape, "cpu", Policy.resolve(asked, environ={}), engine={})
    choice = planned.choice("qkv_norm_rope_insert", "dense_attention")
    assert choice.composed
    assert choice.reason == "the policy overrides rms_norm"
    (verdict,) = choice.verdicts
    assert "the policy overrides rms_norm, which it covers" in str(verdict)


def test_what_covers_an_operator_of_the_engines_is_not_planned(alone: None, shape: ModelShape) -> None:
    """vLLM holds its projections: a fused form with one inside has no row, and the others' rows are as they were."""
    operators = {choice.operator for choice in make_reference(shape).choices}
    assert "qk_norm_rope_insert" in operators
    assert operators.isdisjoint({"qkv_norm_rope_insert", "sparse_decoder_layer"})


def test_a_whole_layer_is_planned_where_it_is_asked_for(shape: ModelShape) -> None:
    """Its place is none of a model's sites; given as one, everything in it is planned there."""
    whole = replace(shape, given_sites=(shape.sparse_layer(),))
    planned = plan(whole, "cpu", Policy.resolve({"backend": "reference"}, environ={}), engine={})
    assert planned.choice("sparse_decoder_layer", "sparse_layer").composed
    assert {"route_topk", "sparse_attention", "select_blocks"} <= {choice.operator for choice in planned.choices}
    assert planned.bind("sparse_decoder_layer", "sparse_layer").backend == "reference"


def test_a_batch_that_the_composition_made_is_planned(toy: Any, make: Any, shape: ModelShape, inputs: Any) -> None:
    """Among ranks each scores a batch of its own, which nobody planned before: a part that plans gets its plan."""
    planned = []

    def factory(site: Any) -> Kernel:
        run = scores(site)

        def plan_batch(meta: SeqMeta, storage: torch.Tensor) -> SeqMeta:
            planned.append((len(meta.seq_lens), storage.numel()))
            return meta

        return Kernel(run, plan_batch=plan_batch, plan_bytes=64)

    toy("acme", block_scores=factory)
    bound = make().bind("select_blocks", "sparse_attention")
    index_q, cache, meta = inputs
    batch = bound.plan_batch(meta, torch.empty(bound.plan_bytes, dtype=torch.uint8))
    ids = run_ranks(3, lambda group: bound.run(index_q, cache, batch, group))
    assert all(torch.equal(own, expected(shape, inputs)) for own in ids)
    assert planned == [(2, 64)] * 4


def projected(site: Any) -> tuple[Any, ...]:
    """Two tokens of a dense layer."""
    rows = (site.num_q_heads + 2 * site.num_kv_heads) * site.head_dim
    norms = ops.QKNorms(*[torch.zeros(128, dtype=torch.bfloat16) for _ in range(2)])
    x, weight = (torch.randn(n, site.hidden_size).to(torch.bfloat16) for n in (2, rows))
    layout = KVLayout("hnd", "bfloat16", page_size=128, heads=site.num_kv_heads, dim=128, has_values=True)
    table = torch.ones(8, site.rotary_dim)
    return x, weight, norms, torch.arange(2), table, layout.empty(1), None, torch.arange(2), None
