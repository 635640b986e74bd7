"""Choosing, in this process: sites, groups, traits, fused forms, and the sentences of refusals."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from m3hal import ops
from m3hal.dispatch import ConfigurationError, Impl, M3halError, Policy, Rung, UnsupportedError, at_most, one_of, plan
from m3hal.shape import SITE_KINDS, WITHIN, ModelShape


@pytest.fixture
def make(alone: None, shape: ModelShape) -> Callable[..., Any]:
    """A plan with a configuration of this call alone."""

    def make(config: Any = None, device: str = "cpu", **keywords: Any) -> Any:
        return plan(keywords.pop("shape", shape), device, Policy.resolve(config, environ={}), **keywords)

    return make


def kernel(site: Any) -> Callable[..., str]:
    """A factory."""
    return lambda *inputs, out=None: "ran"


def test_reference_serves_a_cpu(make: Callable[..., Any]) -> None:
    """Auto on a CPU takes the reference, everywhere, and vLLM keeps what it holds."""
    made = make()
    assert {choice.server for choice in made.choices} == {"reference", "composed", "engine: vllm"}
    assert not made.in_tree
    assert set(made.sites) <= set(SITE_KINDS)


def test_without_an_engine_linear_is_served_too(make: Callable[..., Any]) -> None:
    """What nobody holds is m3hal's."""
    made = make(engine={})
    here = {name for name in ops.NAMES if not made.sites.keys().isdisjoint(ops.load(name).sites)}
    assert {choice.operator for choice in made.choices} == here > set(ops.CORE)
    assert made.choice("linear", "moe").server == "reference"


def test_operators_run_at_their_sites_only(make: Callable[..., Any]) -> None:
    """Every row is one of the definition's sites; binding elsewhere is refused with the sites it has."""
    made = make()
    for choice in made.choices:
        assert choice.engine or choice.site in ops.load(choice.operator).sites
    with pytest.raises(ConfigurationError, match="moe_experts doesn't run at site 'dense_mlp'; it runs at moe"):
        made.bind("moe_experts", "dense_mlp")
    with pytest.raises(ConfigurationError, match=r"no site 'moee'\. Did you mean 'moe'"):
        made.bind("moe_experts", "moee")
    with pytest.raises(ConfigurationError, match=r"'moe_expert' is not an operator of this plan\. Did you mean"):
        made.bind("moe_expert", "moe")
    with pytest.raises(M3halError, match="the engine vllm holds it"):
        made.bind("linear", "moe")


def test_fused_operators_cover_what_runs_beside_them() -> None:
    """A composition always finds its parts: wherever a fused operator runs, so does what it covers."""
    for name in ops.FUSED:
        operator = ops.load(name)
        for part in operator.covers:
            for site in operator.sites:
                assert {site, *WITHIN.get(site, ())} & set(ops.load(part).sites), (name, part, site)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"backend": "acmee"}, ConfigurationError, r"no backend 'acmee' is installed\. Did you mean 'acme'\?"),
        ({"deny": ["acmee"]}, ConfigurationError, "Did you mean 'acme'"),
        ({"backend": "in-proces:acme"}, ConfigurationError, "Did you mean 'in-process:acme'"),
        ({"backend": "gaudi"}, ConfigurationError, r"pip install 'm3hal\[gaudi\]' .*pip install -e backends/gaudi\."),
        ({"operators": {"linear": "acme"}}, ConfigurationError, "the engine vllm holds it; remove operators.linear"),
        ({"require": ["batch_invariance"]}, ConfigurationError, "no trait.* Did you mean 'batch_invariant'"),
        ({"require": ["p_dtype=fp8"]}, ConfigurationError, "the values of p_dtype are bfloat16, e4m3x448, float32"),
        ({"backend": "other"}, UnsupportedError, "not usable on cpu: in-process: it runs on npu:x1; not on cpu"),
    ],
)
def test_names_that_mean_nothing_here(
    toy: Any, make: Callable[..., Any], config: Any, error: type[Exception], message: str
) -> None:
    """Each is refused before planning, with the nearest name or the way to install it."""
    toy("acme", rms_norm=kernel)
    toy("other", rms_norm=kernel, devices=("npu:x1",))
    with pytest.raises(error, match=message):
        make(config)


def test_unusable_member_of_a_list_leaves_the_others(toy: Any, make: Callable[..., Any]) -> None:
    """``other,reference`` permits the reference wherever ``other`` can't run."""
    toy("other", rms_norm=kernel, devices=("npu:x1",))
    made = make({"backend": "other,reference"})
    assert made.choice("rms_norm", "moe").server == "reference"
    assert "it runs on npu:x1; not on cpu" in made.explain("rms_norm")


def test_required_traits_select_variants(toy: Any, make: Callable[..., Any]) -> None:
    """Variants are separate implementations; a trait that an operator doesn't have doesn't bind it."""
    module = toy("acme", topk_blocks=kernel)
    module.attention = kernel
    path = f"{module.__name__}:attention"
    fast = Impl(path, layouts=("hnd",), name="fast", traits={"p_dtype": "bfloat16"})
    steady = Impl(path, layouts=("hnd",), name="steady", traits={"batch_invariant": "yes"})
    toy("acme", operators={"sparse_attention": (fast, steady)})
    assert make({"backend": "acme,reference"}).choice("sparse_attention", "sparse_attention").chosen.label == "fast"
    required = {"backend": "acme", "require": ["batch_invariant"]}
    made = make(required, operators=["sparse_attention"])
    choice = made.choice("sparse_attention", "sparse_attention")
    assert choice.chosen.label == "steady"
    assert choice.verdicts[0].stage == "traits"
    assert choice.verdicts[0].reason == "the policy requires batch_invariant=yes; it declares no"
    exact = {"backend": "acme", "require": ["p_dtype=float32"]}
    assert make(exact, operators=["sparse_attention"]).choice(*["sparse_attention"] * 2).chosen.label == "steady"


@pytest.mark.parametrize(
    ("operator", "asked"),
    [
        ("moe_experts", {"lora_rank": 32}),
        ("moe_experts", {"shared_intermediate_size": 3072, "shared_format": "bfloat16"}),
        ("route_topk", {"forced_routing": True}),
        ("linear", {"projection_format": "mxfp8"}),
    ],
)
def test_what_limits_do_not_mention_is_not_asked(
    toy: Any, make: Callable[..., Any], shape: ModelShape, operator: str, asked: dict[str, Any]
) -> None:
    """Adapters, a shared expert, replay, projections stored otherwise: for those whose limits speak of them."""
    name, value = next(iter(asked.items()))
    knowing = Impl(f"{__name__}:kernel", limits=(one_of(name, type(value)(), value),), memory="self")
    toy("old", operators={operator: (Impl(f"{__name__}:kernel", memory="self"),)})
    toy("new", operators={operator: (knowing,)})
    usual, more = (
        make({"backend": "old,new,reference"}, engine={}),
        make({"backend": "old,new,reference"}, engine={}, shape=replace(shape, **asked)),
    )
    assert (usual.choice(operator, "moe").server, more.choice(operator, "moe").server) == ("old", "new")
    told = next(verdict.reason for verdict in more.choice(operator, "moe").verdicts if verdict.backend == "old")
    assert told == f"{name} is {value!r}; its limits do not mention {name}, so it takes {type(value)()!r} alone"
    served = make({"backend": "reference"}, engine={}, shape=replace(shape, **asked))
    assert served.choice(operator, "moe").chosen.backend == "reference"


def test_limits_are_held_against_the_declared_maximum(toy: Any, make: Callable[..., Any]) -> None:
    """An implementation for short batches or few tokens is rejected when the plan is made, not when it is hit."""
    module = toy("acme", rms_norm=kernel)
    limited = Impl(f"{module.__name__}:rms_norm", limits=(at_most("max_tokens", 16384), at_most("max_context", 1024)))
    toy("acme", operators={"rms_norm": (limited,)})
    verdict = make({"backend": "acme,reference"}).choice("rms_norm", "moe").verdicts[0]
    assert (verdict.stage, verdict.reason) == ("limits", "max_context is 4096; it takes 1024 or less")


def test_refusal_tells_every_backends_reason(toy: Any, make: Callable[..., Any]) -> None:
    """Both backends that reject an operator are told, with their reasons, the operator and its site, as data too."""
    module = toy("acme", route_topk=kernel)
    path = f"{module.__name__}:route_topk"
    toy("acme", operators={"route_topk": (Impl(path, limits=(at_most("num_experts", 64),)),)})
    toy("zeta", operators={"route_topk": (Impl(path, limits=(one_of("dtype", "float32"),)),)})
    with pytest.raises(M3halError) as caught:
        make({"backend": "acme,zeta"}, operators=["route_topk"])
    assert "acme: rejected at limits: num_experts is 128; it takes 64 or less (route_topk at moe)" in str(caught.value)
    assert "zeta: rejected at limits: dtype is 'bfloat16'; it takes 'float32' (route_topk at moe)" in str(caught.value)
    assert [(v.backend, v.operator, v.site) for v in caught.value.verdicts] == [
        ("acme", "route_topk", "moe"),
        ("zeta", "route_topk", "moe"),
    ]


def test_a_backend_is_passed_over_for_what_came_furthest(toy: Any, make: Callable[..., Any]) -> None:
    """Of two implementations that a backend offers, the plan tells why the nearer one was not taken."""
    module = toy("acme", rms_norm=kernel)
    path = f"{module.__name__}:rms_norm"
    near = Impl(path, limits=(at_most("hidden_size", 64),), name="near")
    far = Impl(path, devices=("cuda:sm_100",), name="far")
    toy("acme", operators={"rms_norm": (near, far)})
    made = make({"backend": "acme,reference"})
    assert made.choice("rms_norm", "moe").reason.startswith("acme: hidden_size is ")


def test_faulty_entry_is_not_called_absent(toy: Any, make: Callable[..., Any]) -> None:
    """A misspelt limit costs the implementation, and the plan says so where the next backend serves."""
    module = toy("acme", rms_norm=kernel)
    toy("acme", operators={"rms_norm": (Impl(f"{module.__name__}:rms_norm", limits=(one_of("dtpye", "bfloat16"),)),)})
    made = make({"backend": "acme,reference"})
    reason = made.choice("rms_norm", "moe").reason
    assert reason.startswith("acme: its manifest is at fault:")
    assert "dtpye" in reason
    assert made.choice("swiglu_oai", "moe").reason == "acme has none"


def test_bare_kind_reaches_its_backend(toy: Any, make: Callable[..., Any]) -> None:
    """Where only the kind is told, as by vLLM's platforms, a backend for all devices of that kind serves."""
    toy("acme", rms_norm=kernel, devices=("acme:*",))
    assert make({"backend": "acme,reference"}, device="acme").choice("rms_norm", "moe").server == "acme"


def test_backend_of_another_device_is_not_called_absent(toy: Any, make: Callable[..., Any]) -> None:
    """A named backend that the device keeps out is why the next one serves, and the plan's first lines warn of it."""
    toy("acme", rms_norm=kernel, devices=("acme:x2",))
    made = make({"backend": "acme,reference"}, device="acme:x1")
    assert made.choice("rms_norm", "moe").reason == "acme: it runs on acme:x2; not on acme:x1"
    warning = "warning: acme, which the policy names, serves nothing here: it runs on acme:x2; not on acme:x1 (device)"
    assert warning in made.table().splitlines()
    assert warning in made.explain("rms_norm").splitlines()
    served = make({"backend": "acme,reference"}, device="acme:x2")
    assert "warning" not in served.table()


def test_misspelt_operator_is_not_called_absent(toy: Any, make: Callable[..., Any]) -> None:
    """The operator that was meant says what its entry is called, in the plan and in the refusal."""
    module = toy("acme", rms_norm=kernel)
    toy("acme", operators={"rms_nrom": (Impl(f"{module.__name__}:rms_norm"),)})
    sentence = "'rms_nrom' is no operator of this m3hal. Did you mean 'rms_norm'?"
    assert sentence in make({"backend": "acme,reference"}).choice("rms_norm", "moe").reason
    with pytest.raises(M3halError, match=re.escape(sentence)):
        make({"backend": "acme"})


def test_limit_that_raises_is_a_verdict(toy: Any, make: Callable[..., Any]) -> None:
    """Comparing a number with a text is the manifest's fault, and only costs this implementation."""
    module = toy("acme", rms_norm=kernel)
    toy("acme", operators={"rms_norm": (Impl(f"{module.__name__}:rms_norm", limits=(at_most("dtype", 8),)),)})
    verdict = make({"backend": "acme,reference"}).choice("rms_norm", "moe").verdicts[0]
    assert verdict.stage == "limits"
    assert "its limit on dtype raised TypeError" in verdict.reason


def test_ladder_with_a_hole_is_rejected_and_a_whole_one_is_shown(toy: Any, make: Callable[..., Any]) -> None:
    """Rungs cover 0..max_tokens or the implementation is out; explain lists them."""
    module = toy("acme", rms_norm=kernel)
    path = f"{module.__name__}:rms_norm"
    toy("acme", operators={"rms_norm": (Impl(path, rungs=(Rung("small", max_tokens=16),)),)})
    verdict = make({"backend": "acme,reference"}).choice("rms_norm", "moe").verdicts[0]
    assert verdict.reason == "its ladder has no prefill rung for 17 to 1024 tokens"
    rungs = (Rung("small", max_tokens=16), Rung("large", min_tokens=17))
    toy("acme", operators={"rms_norm": (Impl(path, rungs=rungs),)})
    made = make({"backend": "acme,reference"})
    assert "rung small: prefill, decode, verify, 0..16 tokens" in made.explain("rms_norm")
    assert made.to_json()["choices"][0]["rungs"] == ["small", "large"]


def test_cache_group_shares_a_layout_that_one_operator_forces(toy: Any, make: Callable[..., Any]) -> None:
    """All operators of a site's cache follow the one that takes nhd only; other sites keep the engine's preference."""
    module = toy("acme", sparse_attention=kernel)
    only = Impl(f"{module.__name__}:sparse_attention", layouts=("nhd",))
    toy("acme", operators={"sparse_attention": (only,)})
    made = make({"backend": "acme,reference"}, cache_layouts=("hnd", "nhd"))
    assert made.layouts == {"dense_attention": "hnd", "sparse_attention": "nhd"}
    assert made.layout("sparse_attention") == "nhd"
    assert made.layout("kv_write", "dense_attention") == "hnd"
    assert made.layout_reasons["sparse_attention"] == "forced by sparse_attention of acme"
    with pytest.raises(M3halError, match="several cache layouts; name a site"):
        made.layout("kv_write")
    with pytest.raises(M3halError, match="rms_norm has no cache layout"):
        made.layout("rms_norm")


def test_layout_that_the_engine_lacks_rejects(toy: Any, make: Callable[..., Any]) -> None:
    """The reason names the cache's layout and the implementation's."""
    module = toy("acme", sparse_attention=kernel)
    only = Impl(f"{module.__name__}:sparse_attention", layouts=("acme:slot",))
    toy("acme", operators={"sparse_attention": (only,)})
    choice = make({"backend": "acme,reference"}).choice("sparse_attention", "sparse_attention")
    assert choice.server == "reference"
    assert choice.verdicts[0].stage == "layout"
    assert choice.verdicts[0].reason == "the cache of sparse_attention is hnd; it takes acme:slot"


def test_private_layout_moves_the_whole_group(toy: Any, make: Callable[..., Any]) -> None:
    """A private page map is chosen only when every operator of the group has it."""
    names = ("kv_write", "kv_read", "kv_copy_blocks", "block_scores", "sparse_attention")
    module = toy("acme")
    for name in names:
        setattr(module, name, kernel)
    private = {name: (Impl(f"{module.__name__}:{name}", layouts=("acme:slot",)),) for name in names}
    toy("acme", operators=private)
    layouts = ("hnd", "acme:slot")
    made = make({"backend": "acme,reference"}, cache_layouts=layouts)
    assert made.layouts == {"dense_attention": "hnd", "sparse_attention": "acme:slot"}
    partly = {name: private[name] for name in names[:-1]}
    toy("acme", operators=partly)
    assert make({"backend": "acme,reference"}, cache_layouts=layouts).layouts["sparse_attention"] == "hnd"


def test_override_of_a_fused_operator_is_the_more_specific(toy: Any, make: Callable[..., Any]) -> None:
    """With both overridden, the fused form serves; the override of the part holds everywhere else."""
    toy("acme", select_blocks=kernel)
    toy("zeta", topk_blocks=kernel)
    config = {"backend": "reference", "operators": {"select_blocks": "acme", "topk_blocks": "zeta"}}
    made = make(config)
    assert made.choice("select_blocks", "sparse_attention").server == "acme"
    assert made.choice("topk_blocks", "sparse_attention").server == "zeta"


def test_override_of_a_fused_operator_is_not_replaced_by_strangers(toy: Any, make: Callable[..., Any]) -> None:
    """Without a fused form, a composition must consist of the backend that was named; the error says what to add."""
    toy("acme", topk_blocks=kernel)
    toy("zeta", rms_norm=kernel)
    config = {"backend": "acme,reference", "operators": {"select_blocks": "reference"}}
    with pytest.raises(M3halError, match="override topk_blocks with 'reference' as well"):
        make(config)
    config["operators"]["topk_blocks"] = "reference"  # type: ignore[index]
    assert make(config).choice("select_blocks", "sparse_attention").server == "composed"


def test_override_that_can_not_serve_is_an_error_under_auto_too(toy: Any, make: Callable[..., Any]) -> None:
    """An override is as explicit as a backend: it isn't dropped when the rest would go to the in-tree model."""
    module = toy("acme", rms_norm=kernel)
    toy("acme", operators={"rms_norm": (Impl(f"{module.__name__}:rms_norm", limits=(one_of("dtype", "float32"),)),)})
    with pytest.raises(M3halError, match="ask for 'acme,reference'"):
        make({"operators": {"rms_norm": "acme"}})
    with pytest.raises(M3halError, match="leaves"):
        make({"operators": {"rms_norm": "reference"}}, device="cuda:sm_90")


def test_the_in_tree_model_can_be_asked_for(toy: Any, make: Callable[..., Any]) -> None:
    """``vllm`` plans nothing and imports nobody."""
    made = make({"backend": "vllm"})
    assert made.in_tree
    assert made.reason == "the policy asks for it: backend 'vllm' (from the API)"
    assert {choice.server for choice in made.choices} == {"engine: vllm"}
    with pytest.raises(M3halError, match="vLLM's in-tree model serves this plan"):
        made.bind("rms_norm", "moe")


def test_formats_that_the_definitions_lack_are_refused_by_name(make: Callable[..., Any], shape: ModelShape) -> None:
    """An unknown weight format on the reference is an error before anything is built, and auto steps aside."""
    odd = replace(shape, weight_format="int3")
    with pytest.raises(M3halError, match="weight_format is 'int3'; it takes 'float32', 'bfloat16'"):
        make({"backend": "reference"}, shape=odd)
    made = make(shape=odd)
    assert made.in_tree
    assert "weight_format is 'int3'" in made.reason


def test_cache_format_and_page_map_must_fit(make: Callable[..., Any], shape: ModelShape) -> None:
    """NVFP4 pages are not hnd; an engine that allocates nothing else is told what would do."""
    nvfp4 = replace(shape, kv_format="nvfp4", index_format="nvfp4")
    with pytest.raises(
        M3halError, match="'nvfp4' lies in pages of layout msa_slot or planar; the engine allocates hnd"
    ):
        make({"backend": "reference"}, shape=nvfp4)
    assert make({"backend": "reference"}, shape=nvfp4, cache_layouts=("hnd", "planar")).layout("kv_write") == "planar"


def test_plan_is_deterministic_and_frozen(toy: Any, make: Callable[..., Any]) -> None:
    """Equal inputs give equal plans and fingerprints; policy and device enter the fingerprint, origins don't."""
    toy("acme", rms_norm=kernel)
    first, second = make({"backend": "acme,reference"}), make({"backend": "acme,reference"})
    assert first == second
    assert first.to_json() == second.to_json()
    assert first.fingerprint != make({"backend": "reference"}).fingerprint
    assert first.fingerprint != make({"backend": "acme,reference"}, device="cuda:sm_90").fingerprint
    # with the same implementations: the policy alone, and the layout alone
    assert make().fingerprint != make({"min_level": "declared"}).fingerprint
    assert make(cache_layouts=("hnd",)).fingerprint != make(cache_layouts=("nhd",)).fingerprint
    with pytest.raises(AttributeError):
        first.device = "cuda:sm_90"
    assert pickle.loads(pickle.dumps(make())).fingerprint == make().fingerprint
