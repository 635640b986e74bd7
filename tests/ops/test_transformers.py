"""The definitions against an independent model: transformers' MiniMax-M3, in fp32, operator by operator and as layers.

One dense layer and one sparse layer with experts read 203 tokens, the last three one at a time from transformers' own
cache. The sparse layer keeps 4 blocks of 16 keys, so most of the context is not selected. transformers' modules are
recorded; ours are composed from the definitions over shuffled pages that start as NaN.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from m3hal_conformance import assert_rows, worst_row
from m3hal_conformance.inputs import batch, generator
from m3hal_conformance.ranks import run_ranks

from m3hal.layouts import KVLayout
from m3hal.ops import ExpertWeights, QKNorms, SeqMeta, load
from m3hal.ops.rope_partial import rope_table
from m3hal.ops.sparse_decoder_layer import LayerWeights

m3 = pytest.importorskip(
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
    reason="transformers is not installed; `make setup` installs it with vLLM",
)

TOKENS, STEPS, BLOCK, K = 200, 3, 16, 4
HIDDEN, HEADS, GROUPS, DIM, ROTARY = 128, 8, 2, 64, 32
BOUND = 1e-5  # both sides compute in fp32

NORM = {"eps": 1e-6, "weight_offset": 1.0}
ACTIVATION = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
ROUTING = {"top_k_experts": 4, "renormalize": True, "routed_scale": 2.0}
SELECTION = {"block_size": BLOCK, "top_k_blocks": K, "init_blocks": 0, "local_blocks": 1}
HEAD_COUNTS = {"num_q_heads": HEADS, "num_kv_heads": GROUPS, "head_dim": DIM, "index_dim": DIM, "rotary_dim": ROTARY}


def op(name):
    return load(name).reference


@dataclass
class Recording:
    """transformers' model, and what flowed in and out of its modules, tokens along the first axis."""

    model: Any
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


@pytest.fixture(scope="module")
def hf():
    """The recorded run: 200 tokens at once, then 3 from the cache."""
    config = m3.MiniMaxM3VLTextConfig(
        vocab_size=97,
        hidden_size=HIDDEN,
        intermediate_size=48,
        dense_intermediate_size=160,
        shared_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=DIM,
        max_position_embeddings=512,
        num_local_experts=8,
        num_experts_per_tok=4,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"],
        index_n_heads=GROUPS,
        index_head_dim=DIM,
        index_block_size=BLOCK,
        index_topk_blocks=K,
        index_local_blocks=1,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    model = m3.MiniMaxM3VLTextModel(config).eval()
    rng = generator("transformers/weights")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            size = 1.0 if "embed" in name else 0.3 if "norm" in name or "bias" in name else 0.12
            tensor.data.copy_(size * torch.randn(tensor.shape, generator=rng))
    recording = Recording(model)
    watched = ("layers", "self_attn.o_proj", "indexer", "mlp.gate", "mlp.experts", "input_layernorm")
    hooks = [
        module.register_forward_hook(_recorder(recording, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name.endswith(watched) or name.removeprefix("layers.").isdigit()
    ]
    tokens = torch.randint(2, 97, (1, TOKENS + STEPS), generator=rng)
    cache = None
    with torch.no_grad():
        for part in (tokens[:, :TOKENS], *tokens[:, TOKENS:].split(1, dim=1)):
            cache = model(part, past_key_values=cache, use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    return recording


def _recorder(recording, name):
    def record(module, positional, keyword, output):
        given = positional[0] if positional else keyword["hidden_states"]
        for where, value in ((recording.inputs, given), (recording.outputs, output)):
            for i, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
                if name.endswith("indexer") and where is recording.outputs:
                    tensor = tensor.transpose(1, 2)  # [B, Hi, T, k]
                    tensor = torch.nn.functional.pad(tensor, (0, K - tensor.shape[-1]), value=-1)
                flat = tensor.detach()[0] if tensor.ndim >= 3 else tensor.detach()
                key = f"{name}.{i}" if isinstance(value, tuple) else name
                where[key] = torch.cat([where[key], flat]) if key in where else flat

    return record


class Layer:
    """A decoder layer of the definitions, with the weights of transformers' layer."""

    def __init__(self, theirs, *, dense_attention=False):
        self.attention, self.mlp = theirs.self_attn, theirs.mlp
        self.norms = (theirs.input_layernorm.weight, theirs.post_attention_layernorm.weight)
        indexer = self.attention.indexer
        self.index_heads = GROUPS if indexer else 0
        self.dense_attention = dense_attention or not indexer
        heads = [self.attention.q_proj, self.attention.k_proj, self.attention.v_proj]
        heads += [indexer.q_proj, indexer.k_proj] if indexer else []
        self.qkv = torch.cat([projection.weight for projection in heads])
        head_norms = [self.attention.q_norm, self.attention.k_norm]
        head_norms += [indexer.q_norm, indexer.k_norm] if indexer else []
        self.head_norms = QKNorms(*(norm.weight for norm in head_norms))
        self.requests = batch([(TOKENS + STEPS, TOKENS + STEPS)], BLOCK, generator("transformers/pages"))
        pages = self.requests.pages
        self.kv = KVLayout("hnd", "float32", BLOCK, GROUPS, DIM, True).empty(pages)
        self.index = KVLayout("nhd", "float32", BLOCK, 1, DIM, False).empty(pages) if indexer else None
        for cache in filter(None, (self.kv, self.index)):
            cache.buf.fill_(float("nan"))
        self.seen: dict[str, list[torch.Tensor]] = {"attention": [], "ids": []}

    def attend(self, h, start):
        """Attention output [T, Hq * D] of tokens that stand at ``start`` and after; writes the caches."""
        stop = start + len(h)
        meta = SeqMeta(
            torch.tensor([0, len(h)], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            self.requests.meta.block_table,
            len(h),
            stop,
        )
        slots = self.requests.slots(0)[start:stop]
        q, index_q = op("qk_norm_rope_insert")(
            op("linear")(h, self.qkv),
            self.head_norms,
            torch.arange(start, stop),
            rope_table(512, ROTARY, 5e6),
            self.kv,
            self.index,
            slots,
            slots if self.index else None,
            **HEAD_COUNTS,
            **NORM,
            num_index_heads=self.index_heads,
        )
        static = {"scale": DIM**-0.5, "return_lse": False}
        if self.dense_attention:
            out = op("paged_attention")(q, self.kv, meta, **static, causal=True, window_left=-1)
        else:
            ids = op("select_blocks")(index_q, self.index, meta, **SELECTION)
            self.seen["ids"].append(ids)
            out = op("sparse_attention")(q, self.kv, ids, meta, **static, block_size=BLOCK)
        self.seen["attention"].append(out.flatten(1))
        return out.flatten(1)

    def feed_forward(self, h):
        if isinstance(self.mlp, m3.MiniMaxM3VLDenseMLP):
            return dense_mlp(h, self.mlp)
        gate = self.mlp.gate
        weights, ids = op("route_topk")(op("linear")(h, gate.weight), gate.e_score_correction_bias, **ROUTING)
        bank = ExpertWeights(self.mlp.experts.gate_up_proj, self.mlp.experts.down_proj)
        routed = op("moe_experts")(h, weights, ids, bank, **ACTIVATION)
        return routed + dense_mlp(h, self.mlp.shared_experts)

    @torch.no_grad()
    def __call__(self, x, start):
        h = op("rms_norm")(x, self.norms[0], **NORM)
        attended = op("linear")(self.attend(h, start), self.attention.o_proj.weight)
        h, residual = op("add_rms_norm")(attended, x, self.norms[1], **NORM)
        return residual + self.feed_forward(h)


def dense_mlp(h, mlp):
    return op("linear")(op("swiglu_oai")(op("linear")(h, mlp.gate_up_proj.weight), **ACTIVATION), mlp.down_proj.weight)


def run_layer(hf, index, chunks, **options):
    """Our layer on transformers' input of that layer, in chunks; returns the layer and all its output rows."""
    layer, rows, start = Layer(hf.model.layers[index], **options), [], 0
    for size in chunks:
        rows.append(layer(hf.inputs[f"layers.{index}"][start : start + size], start))
        start += size
    assert start == TOKENS + STEPS
    return layer, torch.cat(rows)


def weights_of(layer, *, rank=0, ranks=1, experts=8):
    """Our layer's weights, or a rank's: heads and inner dimensions in slices; of ``experts`` < 8 its own."""
    mlp, (pre, post) = layer.mlp, layer.norms

    def heads(rows, count):
        """This rank's rows of a projection of so many heads."""
        return rows.unflatten(0, (count, DIM)).chunk(ranks)[rank].flatten(0, 1)

    def bank(w13, w2, slices):
        w13 = w13.unflatten(1, (2, -1)).chunk(slices, 2)[rank % slices].flatten(1, 2)
        return ExpertWeights(w13, w2.chunk(slices, 2)[rank % slices])

    q, k, v, index_q, index_k = layer.qkv.split([HEADS * DIM, *[GROUPS * DIM] * 3, DIM])
    parts = [heads(q, HEADS), heads(k, GROUPS), heads(v, GROUPS), heads(index_q, GROUPS), index_k]
    routed = bank(mlp.experts.gate_up_proj, mlp.experts.down_proj, ranks if experts == 8 else 1)
    if experts < 8:
        routed = ExpertWeights(routed.w13[rank * experts :][:experts], routed.w2[rank * experts :][:experts])
    shared = bank(mlp.shared_experts.gate_up_proj.weight[None], mlp.shared_experts.down_proj.weight[None], ranks)
    return LayerWeights(
        input_norm=pre,
        qkv=torch.cat(parts),
        norms=layer.head_norms,
        o=layer.attention.o_proj.weight.chunk(ranks, 1)[rank],
        post_norm=post,
        gate=mlp.gate.weight,
        bias=mlp.gate.e_score_correction_bias,
        experts=ExpertWeights(routed.w13, routed.w2, shared=shared),
    )


def run_whole(hf, chunks, group=None, experts=8):
    """sparse_decoder_layer on transformers' input, in chunks: every row's share of what it adds, and the residual."""
    rank, ranks = (group.rank, group.size) if group else (0, 1)
    layer, rows, start = Layer(hf.model.layers[1]), [], 0
    weights = weights_of(layer, rank=rank, ranks=ranks, experts=experts)
    kv = KVLayout("hnd", "float32", BLOCK, GROUPS // ranks, DIM, True).empty(layer.requests.pages)
    kv.buf.fill_(float("nan"))
    statics = {**HEAD_COUNTS, **NORM, **SELECTION, **ROUTING, **ACTIVATION, "num_index_heads": GROUPS}
    for name in ("num_q_heads", "num_kv_heads", "num_index_heads"):
        statics[name] //= ranks
    for size in chunks:
        stop, x = start + size, hf.inputs["layers.1"][start : start + size]
        table = layer.requests.meta.block_table
        lengths = torch.tensor([[0, size], [stop, 0]], dtype=torch.int32)
        slots = layer.requests.slots(0)[start:stop]
        with torch.no_grad():
            rows.append(
                op("sparse_decoder_layer")(
                    x / (2 * ranks), x / 2, weights, torch.arange(start, stop), rope_table(512, ROTARY, 5e6), kv,
                    layer.index, slots, slots, SeqMeta(lengths[0], lengths[1, :1], table, size, stop), group,
                    **statics, scale=DIM**-0.5, num_local_experts=experts,
                )
            )  # fmt: skip
        start = stop
    return tuple(torch.cat(part) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("chunks", [(200, 1, 1, 1), (203,), (70, 101, 31, 1)], ids=str)
def test_a_sparse_layer_as_one_operator(hf, chunks):
    """Norms, projections, caches, selection, attention, router, experts and the shared one: every row within 1e-5."""
    out, residual = run_whole(hf, chunks)
    assert_rows(out + residual, hf.outputs["layers.1"], BOUND, what="layer")


@pytest.mark.parametrize("experts", [8, 4], ids=["slices of experts", "some of the experts"])
def test_a_sparse_layer_on_two_ranks(hf, experts):
    """The shares add up to transformers' layer; the residual has the same bits on both."""
    (one, first), (other, second) = run_ranks(2, lambda group: run_whole(hf, (150, 53), group, experts))
    assert torch.equal(first, second)
    assert_rows(one + other + first, hf.outputs["layers.1"], BOUND, what="layer")


CHUNKS = {"as transformers": (200, 1, 1, 1), "whole": (203,), "in chunks": (70, 101, 31, 1)}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("index", [0, 1], ids=["dense", "sparse"])
def test_a_whole_layer(hf, index, chunks):
    """Norms, projections, RoPE, caches, attention, MLP or router and experts, residuals: every row within 1e-5."""
    layer, out = run_layer(hf, index, chunks)
    assert_rows(
        torch.cat(layer.seen["attention"]), hf.inputs[f"layers.{index}.self_attn.o_proj"], BOUND, what="attention"
    )
    assert_rows(out, hf.outputs[f"layers.{index}"], BOUND, what="layer")


def test_the_indexer_chooses_the_same_blocks(hf):
    """Every token, every group: the same set; ours ascending, theirs by score."""
    layer, _ = run_layer(hf, 1, CHUNKS["in chunks"])
    ours, theirs = torch.cat(layer.seen["ids"]), hf.outputs["layers.1.self_attn.indexer"]
    far = torch.where(theirs < 0, 1 << 20, theirs).sort(-1).values
    assert torch.equal(ours.long(), torch.where(far == 1 << 20, -1, far))
    assert (ours >= 0).sum(-1).max() == K
    assert ours[-1, 0].tolist() != ours[-1, 1].tolist()


def test_dense_attention_is_not_msa(hf):
    """The negative control: attending to all 203 tokens is wrong by far where the context exceeds 64."""
    layer, out = run_layer(hf, 1, CHUNKS["whole"], dense_attention=True)
    theirs = hf.inputs["layers.1.self_attn.o_proj"]
    ours = torch.cat(layer.seen["attention"])
    assert_rows(ours[: K * BLOCK], theirs[: K * BLOCK], BOUND)
    assert worst_row(ours[K * BLOCK :], theirs[K * BLOCK :]).error > 0.1
    assert worst_row(out, hf.outputs["layers.1"]).error > 0.01


def test_router(hf):
    """The same experts with the same weights; the scale is in ours, theirs comes later."""
    gate = hf.model.layers[1].mlp.gate
    x, logits = hf.inputs["layers.1.mlp.gate"], hf.outputs["layers.1.mlp.gate.0"]
    weights, ids = op("route_topk")(logits, gate.e_score_correction_bias, **ROUTING)
    theirs = torch.zeros(len(x), 8).scatter(1, hf.outputs["layers.1.mlp.gate.2"], hf.outputs["layers.1.mlp.gate.1"])
    ours = torch.zeros(len(x), 8).scatter(1, ids.long(), weights)
    assert_rows(ours, 2.0 * theirs, BOUND)
    assert len(set(map(tuple, ids.sort(-1).values.tolist()))) > 10  # the rows do differ
    assert_rows(op("linear")(x, gate.weight), logits, BOUND)


def test_experts(hf):
    """Their experts under our routing."""
    experts = hf.model.layers[1].mlp.experts
    x = hf.inputs["layers.1.mlp.experts"]
    weights, ids = op("route_topk")(hf.outputs["layers.1.mlp.gate.0"], torch.zeros(8), **ROUTING)
    bank = ExpertWeights(experts.gate_up_proj, experts.down_proj)
    with torch.no_grad():
        assert_rows(op("moe_experts")(x, weights, ids, bank, **ACTIVATION), experts(x, ids.long(), weights), BOUND)


def test_norm(hf):
    """Hidden states, and the heads' width."""
    norm = hf.model.layers[1].input_layernorm
    assert_rows(
        op("rms_norm")(hf.inputs["layers.1"], norm.weight, **NORM), hf.outputs["layers.1.input_layernorm"], BOUND
    )
    heads = hf.inputs["layers.1.self_attn.o_proj"].unflatten(-1, (HEADS, DIM))
    norm = hf.model.layers[1].self_attn.q_norm
    assert_rows(op("rms_norm")(heads, norm.weight, **NORM), norm(heads), BOUND)


@pytest.mark.parametrize("start", [0, 127, 524_287 - 203])
def test_rope(hf, start):
    """Their table and rotation against ours, at the front and at the far end of the context."""
    x = hf.inputs["layers.1.self_attn.o_proj"].unflatten(-1, (HEADS, DIM))
    positions = torch.arange(start, start + len(x))
    cos, sin = hf.model.rotary_emb(x[None], positions[None])
    theirs, _ = m3.apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    table = rope_table(start + len(x), ROTARY, 5e6)
    assert_rows(op("rope_partial")(x, positions, table, rotary_dim=ROTARY), theirs[0], BOUND)


def test_activation(hf):
    """Their dense MLP on hidden states large enough to reach the limits."""
    mlp = hf.model.layers[0].mlp
    x = 8 * hf.inputs["layers.1.mlp.gate"]
    assert (torch.nn.functional.linear(x, mlp.gate_up_proj.weight).abs() > 7).float().mean() > 0.1
    with torch.no_grad():
        assert_rows(dense_mlp(x, mlp), mlp(x), BOUND)
