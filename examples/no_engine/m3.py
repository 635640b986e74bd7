"""MiniMax-M3 on a plan, without an engine: what vLLM's plugin does, on one screen.

    python examples/no_engine/m3.py --backend reference --device cpu

makes the tiny checkpoint of the demo in memory, plans every operator, reads a prompt in two chunks and continues it;
on a CUDA device the decode step is captured as a graph once and replayed. It is meant to be read, and to see a whole
model run where no engine is installed. One request at a time, greedy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import m3hal
from m3hal.checkpoint import tiny
from m3hal.dispatch import Plan, devices
from m3hal.layouts import KVLayout, PagedCache, page_map
from m3hal.ops import ExpertWeights, QKNorms, SeqMeta
from m3hal.ops.rope_partial import rope_table
from m3hal.shape import ModelShape, Site

#: this program's own; m3hal serves all the rest
HELD = dict.fromkeys(("embedding", "lm_head", "all_reduce"), "torch")
MAX_CONTEXT = 2048
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """One forward's tokens [T], their positions and cache slots, and where the request stands."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    meta: SeqMeta


class Operators:
    """A site's operators, bound once, over one workspace; and how a batch is planned for those that plan it."""

    def __init__(self, plan: Plan, site: Site, device: torch.device) -> None:
        self.site, self.layout = site, plan.layouts.get(site.kind, "")
        self.bound = {c.operator: plan.bind(c.operator, site.kind) for c in plan.choices if c.site == site.kind}
        size = max(bound.workspace_bytes for bound in self.bound.values())
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self._storage = {
            name: torch.empty(bound.plan_bytes, dtype=torch.uint8, device=device)
            for name, bound in self.bound.items()
            if bound.plan_bytes
        }

    def __getitem__(self, name: str) -> Callable[..., Any]:
        bound = self.bound[name]
        return partial(bound.run, workspace=self._workspace) if bound.workspace_bytes else bound.run

    def planned(self, name: str, meta: SeqMeta) -> Any:
        """What ``run`` takes as ``meta``; at fixed addresses, so that a captured graph reads the next step's."""
        plan_batch = self.bound[name].plan_batch
        return plan_batch(meta, self._storage.get(name)) if plan_batch else meta

    def cache(self, format: str, heads: int, dim: int, pages: int, device: torch.device, *, values: bool) -> PagedCache:
        kind = page_map(format, self.layout)
        return KVLayout(kind, format, self.site.page_size, heads, dim, has_values=values).empty(pages, device)


class Attention:
    """qkv -> norms, RoPE, cache -> (blocks ->) attention -> o."""

    def __init__(self, ops: Operators, weights: Weights, pages: int, device: torch.device) -> None:
        site, self.ops, self.is_sparse = ops.site, ops, ops.site.kind == "sparse_attention"
        parts = ("q_proj", "k_proj", "v_proj", *(("index_q_proj", "index_k_proj") if self.is_sparse else ()))
        self.qkv = torch.cat([weights[f"{part}.weight"] for part in parts])
        self.o = weights["o_proj.weight"]
        names = ("q_norm", "k_norm", *(("index_q_norm", "index_k_norm") if self.is_sparse else ()))
        self.norms = QKNorms(*(weights[f"{name}.weight"] for name in names))
        self.kv = ops.cache(site.kv_format, site.num_kv_heads, site.head_dim, pages, device, values=True)
        self.index = None
        if self.is_sparse:
            self.index = ops.cache(site.index_format, 1, site.index_dim, pages, device, values=False)

    def __call__(self, hidden: torch.Tensor, cos_sin: torch.Tensor, batch: Batch, plans: dict[str, Any]) -> Any:
        ops, qkv = self.ops, self.ops["linear"](hidden, self.qkv)
        index_slots = batch.slots if self.is_sparse else None
        rows = (qkv, self.norms, batch.positions, cos_sin, self.kv, self.index, batch.slots, index_slots)
        q, index_q = ops["qk_norm_rope_insert"](*rows)
        if self.is_sparse:
            ids = ops["select_blocks"](index_q, self.index, plans["select_blocks"])
            attended = ops["sparse_attention"](q, self.kv, ids, plans["sparse_attention"])
        else:
            attended = ops["paged_attention"](q, self.kv, plans["paged_attention"])
        return ops["linear"](attended.flatten(1), self.o)


class Experts:
    """Router, routed experts and the shared one, which is one more expert here."""

    def __init__(self, ops: Operators, weights: Weights) -> None:
        self.ops, self.gate, self.bias = ops, weights["gate.weight"], weights["e_score_correction_bias"]
        count = ops.site.num_experts

        def stacked(name: str) -> torch.Tensor:
            return torch.stack([weights[f"experts.{expert}.{name}.weight"] for expert in range(count)])

        shared = {name: weights[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")}
        one = ExpertWeights(torch.cat([shared["gate"], shared["up"]])[None], shared["down"][None])
        experts = ExpertWeights(torch.cat([stacked("w1"), stacked("w3")], dim=1), stacked("w2"), shared=one)
        prepare = ops.bound["moe_experts"].prepare_weights
        self.packed = prepare(experts) if prepare else experts

    def __call__(self, hidden: torch.Tensor) -> Any:
        logits = self.ops["linear"](hidden, self.gate)  # the router's weight is fp32, and so is what comes out
        chosen = self.ops["route_topk"](logits, self.bias)
        return self.ops["moe_experts"](hidden, *chosen, self.packed)


class MLP:
    """gate and up -> SwiGLU-OAI -> down."""

    def __init__(self, ops: Operators, weights: Weights) -> None:
        self.ops, self.down = ops, weights["down_proj.weight"]
        self.gate_up = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])

    def __call__(self, hidden: torch.Tensor) -> Any:
        return self.ops["linear"](self.ops["swiglu_oai"](self.ops["linear"](hidden, self.gate_up)), self.down)


class Model:
    """weights: published names, without ``language_model.``."""

    def __init__(self, plan: Plan, config: Mapping[str, Any], weights: Weights, device: str) -> None:
        self.device, self.plan, shape = torch.device(device), plan, plan.shape
        weights = {name: tensor.to(self.device) for name, tensor in weights.items()}
        self._sites = {site.kind: Operators(plan, site, self.device) for site in shape.sites()}
        self.pages = -(-shape.max_context // shape.page_size)
        self._cos_sin = rope_table(shape.max_context, shape.rotary_dim, shape.rope_theta).to(self.device)
        self._embedding, self._head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        self._norm, self._layers = weights["model.norm.weight"], []
        sparse = config["sparse_attention_config"]["sparse_attention_freq"]
        for layer, (is_sparse, is_moe) in enumerate(zip(sparse, config["moe_layer_freq"], strict=True)):
            own = _below(weights, f"model.layers.{layer}.")
            attention = self._sites["sparse_attention" if is_sparse else "dense_attention"]
            forward = self._sites["moe" if is_moe else "dense_mlp"]
            block = Experts(forward, _below(own, "block_sparse_moe.")) if is_moe else MLP(forward, _below(own, "mlp."))
            norms = (own["input_layernorm.weight"], own["post_attention_layernorm.weight"])
            attend = Attention(attention, _below(own, "self_attn."), self.pages, self.device)
            self._layers.append((norms, attend, block))

    def __call__(self, batch: Batch) -> torch.Tensor:
        """fp32 logits [T, vocabulary]."""
        return self.forward(batch, self.plan_batch(batch.meta))

    def plan_batch(self, meta: SeqMeta) -> dict[str, Any]:
        """Once per forward, for all layers."""
        sparse, dense = self._sites.get("sparse_attention"), self._sites.get("dense_attention")
        found = {name: sparse.planned(name, meta) for name in ("select_blocks", "sparse_attention")} if sparse else {}
        return found | ({"paged_attention": dense.planned("paged_attention", meta)} if dense else {})

    def forward(self, batch: Batch, plans: dict[str, Any]) -> torch.Tensor:
        branch, residual = self._embedding[batch.tokens], None
        for (before, after), attention, block in self._layers:
            if residual is None:
                hidden, residual = attention.ops["rms_norm"](branch, before), branch
            else:
                hidden, residual = attention.ops["add_rms_norm"](branch, residual, before)
            branch = attention(hidden, self._cos_sin, batch, plans)
            hidden, residual = block.ops["add_rms_norm"](branch, residual, after)
            branch = block(hidden)
        hidden, _ = self._layers[-1][2].ops["add_rms_norm"](branch, residual, self._norm)
        logits: torch.Tensor = hidden.float() @ self._head.float().T
        return logits


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


class Request:
    """One request of a model: its pages, and the fixed tensors of a decode step, which a graph may have captured."""

    def __init__(self, model: Model) -> None:
        self._model, self.length = model, 0
        size = model.plan.shape.page_size
        pages = torch.randperm(model.pages, generator=torch.Generator().manual_seed(0))  # anywhere in the cache
        self._table = pages.to(torch.int32)[None].to(model.device)
        self._slots = (pages[:, None] * size + torch.arange(size)).flatten().to(model.device)
        self._graph: Any = None
        self._step: Batch | None = None
        self._logits = torch.empty(0)

    def read(self, tokens: list[int]) -> torch.Tensor:
        """Logits [T, vocabulary] of a chunk of the prompt."""
        batch = self._batch(tokens, self.length + len(tokens))
        self.length += len(tokens)
        return self._model(batch)

    def step(self, token: int) -> torch.Tensor:
        """Logits [1, vocabulary] after one more token."""
        if self._step is None:
            self._step = self._batch([token], self._model.plan.shape.max_context)
        self._set(self._step, token)
        plans = self._model.plan_batch(self._step.meta)
        if self._model.device.type != "cuda":
            return self._model.forward(self._step, plans)
        if self._graph is None:
            self._model.forward(self._step, plans)  # kernels are compiled outside of the capture
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._model.forward(self._step, plans)
        self._graph.replay()
        return self._logits

    def _batch(self, tokens: list[int], longest: int) -> Batch:
        """longest: what the sequence may have become when the batch is run, as graphs are captured once."""
        device, end = self._model.device, self.length + len(tokens)
        positions = torch.arange(self.length, end, device=device)
        meta = SeqMeta(
            cu_q=torch.tensor([0, len(tokens)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            block_table=self._table,
            max_q=len(tokens),
            max_k=longest,
        )
        return Batch(torch.tensor(tokens, device=device), positions, self._slots[positions], meta)

    def _set(self, batch: Batch, token: int) -> None:
        """In place: a graph reads the same addresses."""
        batch.tokens.fill_(token)
        batch.positions.fill_(self.length)
        batch.slots.copy_(self._slots[self.length : self.length + 1])
        self.length += 1
        batch.meta.seq_lens.fill_(self.length)


def generate(
    model: Model, prompt: list[int], count: int, *, chunk: int = 512, given: list[int] | None = None
) -> tuple[list[int], torch.Tensor]:
    """The tokens that follow greedily, and the log-probabilities [count, vocabulary] that each was chosen by.

    given: tokens to go on with instead, whatever is likely, so that models can be compared token by token.
    """
    request, tokens, found = Request(model), [], []
    for first in range(0, len(prompt), chunk):
        logits = request.read(prompt[first : first + chunk])
    for step in range(count):
        found.append(logits[-1].log_softmax(-1).cpu())
        tokens.append(int(found[-1].argmax()))
        logits = request.step(given[step] if given else tokens[-1])
    return tokens, torch.stack(found)


def build(
    backend: str, device: str, *, dtype: str = "float32", max_context: int = MAX_CONTEXT, **formats: Any
) -> Model:
    """The tiny checkpoint on a plan. formats: ``kv_format``, ``index_format``."""
    config = tiny.config(dtype)["text_config"]
    shape = ModelShape.from_config(
        config, dtype=dtype, page_size=128, max_tokens=1024, max_seqs=1, max_context=max_context, **formats
    )
    shape = replace(shape, shared_intermediate_size=config["shared_intermediate_size"], shared_format=dtype)
    policy = m3hal.Policy.resolve(api={"backend": backend})
    plan = m3hal.plan(shape, device, policy, engine=HELD, cache_layouts=("hnd", "msa_slot"))
    weights = _below(tiny.tensors(dtype=dtype), "language_model.")
    kind = devices.kind(device)
    return Model(plan, config, weights, "cuda" if kind == "hip" else kind)


def a_prompt(length: int) -> list[int]:
    """Random tokens."""
    return torch.randint(2, 512, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="reference", help='e.g. "reference", "triton", "triton,reference"')
    parser.add_argument("--device", default=devices.detect()[0].device, help="e.g. cpu, cuda:sm_90 (default: found)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    prompt = a_prompt(700)
    room = MAX_CONTEXT - len(prompt)
    if not 1 <= args.tokens <= room:
        parser.error(f"--tokens is from 1 to {room}")
    try:
        if not devices.is_present(devices.check(args.device)) or devices.kind(args.device) not in devices.KINDS:
            here = ", ".join(found.device for found in devices.detect())
            parser.error(f"this machine has no {args.device}; it has: {here}")
        model = build(args.backend, args.device, dtype=args.dtype)
    except m3hal.M3halError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(model.plan.table())
    start = time.perf_counter()
    tokens, _ = generate(model, prompt, args.tokens)
    print(f"{len(prompt)} tokens of prompt, {len(tokens)} after it in {time.perf_counter() - start:.2f} s: {tokens}")


if __name__ == "__main__":
    main()
