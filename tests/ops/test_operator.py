"""Every definition keeps the promises that dispatch, the fakes and torch.compile rely on."""

import inspect
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from m3hal_conformance import tensors
from m3hal_conformance.inputs import attention_inputs, batch, generator, hot_routing, index_inputs

from m3hal import ops
from m3hal.layouts import KVLayout
from m3hal.ops import ExpertWeights, QKNorms
from m3hal.ops.draft_block_sample import MarkovHead
from m3hal.ops.kv_write import kv_write
from m3hal.ops.quantize import quantize
from m3hal.ops.rope_partial import rope_table
from m3hal.ops.sparse_decoder_layer import LayerWeights
from m3hal.shape import Site

PAGE, DIM = 16, 64
ATTENTION = {"scale": 0.125, "return_lse": True}
FORCED = {"top_k_blocks": 4, "init_blocks": 0, "local_blocks": 1}
ACTIVATION = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
NORM = {"eps": 1e-6, "weight_offset": 1.0}

#: the closed vocabulary of numeric freedoms
VOCABULARY = {
    "add_norm_round",
    "norm_rope_round",
    "qkv_round",
    "rope_table",
    "p_dtype",
    "q_dtype",
    "kv_dequant_round",
    "mma_accum",
    "combine_dtype",
    "reduce_dtype",
    "logits_round",
    "activation_format",
    "shared_activation_format",
    "topk_key_bits",
    "mx_scale_rule",
    "nvfp4_quantizer",
    "kv_scale_used",
    "double_rounding",
    "batch_invariant",
}

#: those that only show in quantised formats; the tests of formats, quantised caches and expert formats show them
OF_FORMATS = {
    "activation_format",
    "shared_activation_format",
    "nvfp4_quantizer",
    "kv_scale_used",
    "double_rounding",
    "mx_scale_rule",
    "kv_dequant_round",
}


def arguments(name, tokens, dtype):
    """Inputs and statics of an operator for so many tokens."""
    rng = generator(f"operator/{name}")
    requests = batch([(tokens, 70)] if tokens else [(0, 70)], PAGE, rng)
    meta = requests.meta
    format = str(dtype).removeprefix("torch.")
    kv = KVLayout("hnd", format, PAGE, 2, DIM, True)
    index = KVLayout("nhd", format, PAGE, 1, DIM, False)
    data = attention_inputs(requests, 8, 2, DIM, PAGE, rng)
    index_q, index_keys = index_inputs(requests, 2, DIM, PAGE, rng)
    kv_cache = requests.cache(kv, data.keys, data.values, kv_write)
    index_cache = requests.cache(index, index_keys, None, kv_write)
    x, weight = torch.randn(tokens, DIM, generator=rng).to(dtype), torch.randn(DIM, generator=rng).to(dtype)
    heads, q = torch.randn(tokens, 3, DIM, generator=rng).to(dtype), data.q.to(dtype)
    slots, positions = requests.query_slots(), meta.positions(tokens)
    visible = (positions // PAGE + 1).to(torch.int32)
    ids = torch.arange(4, dtype=torch.int32).expand(tokens, 2, 4)
    table = rope_table(128, 32, 1e4)
    scores = torch.randn(tokens, 2, 5, generator=rng)
    bank = ExpertWeights(
        torch.randn(8, 24, DIM, generator=rng).to(dtype), torch.randn(8, DIM, 12, generator=rng).to(dtype)
    )
    shared = ExpertWeights(bank.w13[:1], bank.w2[:1])
    head = MarkovHead(*(torch.randn(DIM, 16, generator=rng).to(dtype) for _ in range(2)), confidence=torch.ones(23))
    routing = hot_routing(tokens, 8, 4, rng) if tokens else (torch.empty(0, 4), torch.empty(0, 4, dtype=torch.int32))
    row = torch.randn(tokens, 15 * DIM, generator=rng).to(dtype)
    head_counts = {"num_q_heads": 8, "num_kv_heads": 2, "num_index_heads": 2, "head_dim": DIM, "index_dim": DIM}
    whole_layer = LayerWeights(
        input_norm=weight,
        qkv=torch.randn(15 * DIM, DIM, generator=rng).to(dtype),
        norms=QKNorms(weight, weight, weight, weight),
        o=torch.randn(DIM, 8 * DIM, generator=rng).to(dtype),
        post_norm=weight,
        gate=torch.randn(8, DIM, generator=rng),
        bias=torch.zeros(8),
        experts=bank,
    )
    every = {
        "rms_norm": ((x, weight), NORM),
        "add_rms_norm": ((x, x + 1, weight), NORM),
        "linear": ((x, torch.randn(24, DIM, generator=rng).to(dtype)), {}),
        "quantize": ((x,), {"activation_format": "bfloat16"}),
        "dequantize": ((quantize(x, activation_format=format),), {"dtype": "float32"}),
        "rope_partial": ((heads, positions, table), {"rotary_dim": 32}),
        "kv_write": ((kv_cache, heads[:, :2], heads[:, 1:], slots), {}),
        "kv_read": ((kv_cache, slots), {}),
        "kv_copy_blocks": ((kv_cache, kv_cache, torch.tensor([[1, 0]])[:tokens]), {}),
        "block_scores": ((index_q.to(dtype), index_cache, meta), {"block_size": PAGE}),
        "topk_blocks": ((scores, visible), FORCED),
        "merge_topk": ((scores[None, ..., :4].repeat(2, 1, 1, 1), ids.repeat(2, 1, 1, 1), visible), FORCED),
        "sparse_attention": ((q, kv_cache, ids, meta), {**ATTENTION, "block_size": PAGE}),
        "paged_attention": ((q, kv_cache, meta), {**ATTENTION, "causal": True, "window_left": -1}),
        "route_topk": (
            (torch.randn(tokens, 8, generator=rng), torch.zeros(8)),
            {"top_k_experts": 4, "renormalize": True, "routed_scale": 2.0},
        ),
        "swiglu_oai": ((x,), ACTIVATION),
        "moe_experts": ((x, *routing, bank), ACTIVATION),
        "qk_norm_rope_insert": (
            (row, QKNorms(weight, weight, weight, weight), positions, table, kv_cache, index_cache, slots, slots),
            {**head_counts, **NORM, "rotary_dim": 32},
        ),
        "qkv_norm_rope_insert": (
            (
                x,
                torch.randn(15 * DIM, DIM, generator=rng).to(dtype),
                QKNorms(weight, weight, weight, weight),
                positions,
                table,
                kv_cache,
                index_cache,
                slots,
                slots,
            ),
            {**head_counts, **NORM, "rotary_dim": 32},
        ),
        "select_blocks": ((index_q.to(dtype), index_cache, meta), {**FORCED, "block_size": PAGE}),
        "allreduce_add_rms_norm": ((x, x + 1, weight), NORM),
        "mega_moe": ((x, *routing, replace(bank, shared=shared)), {**ACTIVATION, "num_local_experts": 8}),
        "sparse_decoder_layer": (
            (x, x + 1, whole_layer, positions, table, kv_cache, index_cache, slots, slots, meta),
            {
                **head_counts,
                **NORM,
                **FORCED,
                **ACTIVATION,
                "scale": 0.125,
                "block_size": PAGE,
                "rotary_dim": 32,
                "top_k_experts": 4,
                "renormalize": True,
                "routed_scale": 2.0,
                "num_local_experts": 8,
            },
        ),
        "draft_block_sample": (
            (heads, heads[..., :7], head, torch.arange(tokens), torch.rand(heads.shape, generator=rng)),
            {},
        ),
    }
    return every[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("name", ops.NAMES)
def test_the_fake_is_the_definition_without_numbers(name, tokens, dtype):
    """Shape, dtype and strides of every output, also of none at all and of zero tokens; nothing is computed."""
    assert_fake_agrees(name, *arguments(name, tokens, dtype))


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_fake_knows_the_exact_oracle(name):
    """The same when the tensors that arrive per step are fp64."""
    inputs, statics = arguments(name, 5, torch.float32)
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    assert_fake_agrees(name, wide, statics)


def assert_fake_agrees(name, inputs, statics):
    operator = ops.load(name)
    real, fake = operator.reference(*inputs, **statics), operator.fake(*inputs, **statics)
    assert type(real) is type(fake)
    real, fake = dict(tensors(real, "out")), dict(tensors(fake, "out"))
    describe = lambda out: {path: (t.shape, t.dtype, t.stride(), t.device) for path, t in out.items()}  # noqa: E731
    assert describe(fake) == describe(real)


@pytest.mark.parametrize("name", ops.NAMES)
def test_signature(name):
    """Statics are attributes of a site without defaults; only what is optional has one, None; the page is complete."""
    operator = ops.load(name)
    assert operator.name == operator.reference.__name__ == name
    assert operator.kind == ("fused" if name in ops.FUSED else "core")
    assert set(operator.statics) <= {field.name for field in fields(Site)}
    assert set(operator.mutates) <= set(operator.inputs)
    parameters = inspect.signature(operator.reference).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    extra = set(operator.inputs) - set(operator.required)
    assert set(defaults) <= {"traits", *extra}
    assert all(defaults[name] is None for name in extra)
    assert set(operator.optional) <= {field.name for field in fields(Site)}
    assert operator.optional or extra <= {"group"}  # what may be left out is asked only of those that say they take it
    assert operator.source
    assert inspect.getdoc(operator.reference)
    assert inspect.getmodule(operator.reference).__doc__.count("\n") >= 2
    assert (operator.compose is not None) == (operator.kind == "fused") == bool(operator.covers)


@pytest.mark.parametrize("name", ops.NAMES)
def test_traits(name):
    """Names come from the closed vocabulary; the reference takes ``traits`` exactly when it emulates one."""
    operator = ops.load(name)
    assert {trait.name for trait in operator.traits} <= VOCABULARY
    assert all(len(trait.values) >= 2 and trait.meaning for trait in operator.traits)
    assert ("traits" in inspect.signature(operator.reference).parameters) == any(t.emulated for t in operator.traits)


def test_the_vocabulary_is_used():
    """No freedom without an operator that may take it."""
    assert {trait.name for name in ops.NAMES for trait in ops.load(name).traits} == VOCABULARY


@pytest.mark.parametrize(
    ("name", "trait", "value"),
    [
        (name, trait.name, value)
        for name in ops.NAMES
        for trait in ops.load(name).traits
        if trait.emulated
        and trait.name not in OF_FORMATS
        and (name, trait.name) != ("select_blocks", "q_dtype")  # a choice may stay when its scores change
        and (name, trait.name) != ("allreduce_add_rms_norm", "reduce_dtype")  # one rank alone rounds no sum
        for value in trait.values
    ],
)
def test_an_emulated_trait_changes_the_numbers(name, trait, value):
    """Every value but the first, which is the definition itself."""
    operator = ops.load(name)

    def outputs(**options):
        inputs, statics = arguments(name, 5, torch.bfloat16)
        if name in ("sparse_attention", "paged_attention"):
            inputs = (inputs[0].float(), *inputs[1:])  # or the rounding of the output hides that of P
        result = operator.reference(*inputs, **statics, **options)
        return torch.cat([tensor.double().flatten() for _, tensor in tensors(result)])

    same = torch.equal(outputs(traits={trait: value}), outputs())
    exact = next(t.values[0] for t in operator.traits if t.name == trait)
    assert same == (value == exact)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rope_partial", "route_topk", "swiglu_oai", "linear"])
def test_traceable_without_a_break(name):
    """torch.compile takes these whole: they branch on no value."""
    operator = ops.load(name)
    inputs, statics = arguments(name, 5, torch.bfloat16)
    compiled = torch.compile(lambda *given: operator.reference(*given, **statics), backend="eager", fullgraph=True)
    theirs, ours = dict(tensors(compiled(*inputs), "out")), dict(tensors(operator.reference(*inputs, **statics), "out"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[path], ours[path]) for path in ours)


def test_an_unknown_name():
    """Is a KeyError, whether or not a module has it."""
    for name in ("rms", "_softmax", "swiglu"):
        with pytest.raises(KeyError):
            ops.load(name)


def test_arguments_are_frozen():
    """What operators take besides tensors is immutable."""
    for kind in (ops.SeqMeta, ExpertWeights, QKNorms, KVLayout, MarkovHead):
        assert is_dataclass(kind)
        assert kind.__dataclass_params__.frozen
