"""Legitimate low-precision evaluations: what a good kernel computes, written apart from the definitions.

Sums run in fp32 in another order than the definition's (lanes, split K, tiles of keys with an online softmax),
exponents are base 2, matrix operands are rounded to the activation's format where a matrix unit would round them.
Their error against the exact oracle is what bounds are derived from (:mod:`m3hal_conformance.calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from m3hal import formats
from m3hal.formats import QTensor
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertLoRA, ExpertWeights, QKNorms, SeqMeta
from m3hal.ops._stored import rounded
from m3hal.ops._traits import as_queries
from m3hal.ops.kv_read import read_sequence
from m3hal.ops.kv_write import kv_write
from m3hal.ops.moe_experts import _hidden_scale
from m3hal.shape import Site

LOG2_E = math.log2(math.e)
#: elements of one step of a matrix unit, and keys of one tile of attention
MMA_K, TILE = 32, 64
#: significant bits of a float22
SHORT = 14
#: products that are looked at one by one
AT_ONCE = 1 << 20

Traits = Mapping[str, str]


def rms_norm(site: Site, traits: Traits, x: Tensor, weight: Tensor) -> Tensor:
    return _norm(x.float(), weight, site).to(x.dtype)


def add_rms_norm(site: Site, traits: Traits, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    rounded = total.to(residual.dtype)
    if traits.get("add_norm_round") == "bfloat16":
        total = total.bfloat16().float()
    return _norm(total, weight, site).to(x.dtype), rounded


def _norm(x: Tensor, weight: Tensor, site: Site) -> Tensor:
    """32 lanes sum the squares of a row, then one another."""
    width = x.shape[-1]
    lanes = torch.zeros(*x.shape[:-1], 32)
    for start in range(0, width, 32):
        part = x[..., start : start + 32].square()
        lanes[..., : part.shape[-1]] += part
    for _ in range(5):
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    inverse = 1.0 / torch.sqrt(lanes / width + site.eps)
    return x * inverse * (weight.float() + site.weight_offset)


def linear(site: Site, traits: Traits, x: Tensor, weight: Tensor | QTensor) -> Tensor:
    given = x.dtype if isinstance(weight, QTensor) else torch.promote_types(x.dtype, weight.dtype)
    return _matmul(_rounded(x, None, traits), _numbers(weight), traits).to(given)


def _rounded(x: Tensor, global_scale: Tensor | None, traits: Traits) -> Tensor:
    """x as a kernel quantises it. Reciprocals are the hardware's: exact ones stand for theirs, which are not fp32's."""
    if traits.get("nvfp4_quantizer") != "reciprocal":
        return rounded(x.float(), global_scale, traits)
    return formats.dequantize(formats.quantize(x.double(), formats.spec_of("nvfp4"), global_scale, traits)).float()


def _numbers(weight: Tensor | QTensor) -> Tensor:
    """What a stored weight stands for; a kernel decodes it exactly."""
    return formats.dequantize(weight) if isinstance(weight, QTensor) else weight


def _matmul(x: Tensor, weight: Tensor, traits: Traits) -> Tensor:
    """x @ weight^T, accumulated over steps of K; fp32, or what ``mma_accum`` says."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], MMA_K):
        left, right = (t[:, start : start + MMA_K].float() for t in (x, weight))
        if traits.get("mma_accum") == "float22":
            pieces = 1 + len(left) * right.numel() // AT_ONCE
            rows = zip(total.chunk(pieces), left.chunk(pieces), strict=True)
            total = torch.cat([_step(*some, right) for some in rows])
        else:
            total = _kept(total + left @ right.T, traits)
    return total


def _step(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right^T as Hopper's unit adds FP8 products up: each cut off where the largest addend ends."""
    addends = torch.cat([left[:, None].double() * right, total[..., None].double()], -1)
    return _short(_aligned(addends).sum(-1)).float()


def _kept(sums: Tensor, traits: Traits) -> Tensor:
    """What an accumulator keeps of fp32 sums."""
    kind = traits.get("mma_accum", "float32")
    return _short(sums) if kind == "float22" else sums.to(getattr(torch, kind)).float()


def _short(sums: Tensor) -> Tensor:
    return _aligned(sums[..., None])[..., 0]


def _aligned(rows: Tensor) -> Tensor:
    """Numbers [.., n] cut off, not rounded, at the last bit of a float22 of the size of their row's largest."""
    size = rows.double().abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - SHORT)
    return (torch.trunc(rows / unit) * unit).to(rows.dtype)


def rope_partial(site: Site, traits: Traits, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    return _rope(x.float(), positions, cos_sin, site.rotary_dim, traits).to(x.dtype)


def _rope(x: Tensor, positions: Tensor, cos_sin: Tensor, rotary_dim: int, traits: Traits) -> Tensor:
    table = cos_sin.bfloat16().float() if traits.get("rope_table") == "bfloat16" else cos_sin
    cos, sin = table[positions][:, None].chunk(2, -1)
    first, second = x[..., :rotary_dim].chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, x[..., rotary_dim:]], -1)


def swiglu_oai(site: Site, traits: Traits, gate_up: Tensor) -> Tensor:
    return _activate(gate_up.float(), site).to(gate_up.dtype)


def _activate(gate_up: Tensor, site: Site) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=site.limit), up.clamp(-site.limit, site.limit)
    return (up + site.beta) * (gate / (1.0 + torch.exp2(-site.alpha * LOG2_E * gate)))


def block_scores(site: Site, traits: Traits, index_q: Tensor, index_cache: PagedCache, meta: SeqMeta) -> Tensor:
    blocks = -(-meta.max_k // site.block_size)
    scores = torch.full((*index_q.shape[:2], blocks), -math.inf)
    for request, first, last, seq_len in _requests(meta):
        (keys,), _ = read_sequence(index_cache, meta.block_table[request], seq_len, traits)
        query = as_queries(index_q[first:last], torch.float32, traits)
        dots = _matmul(query.flatten(0, 1), keys, traits).view(*query.shape[:2], seq_len)
        position = torch.arange(seq_len - (last - first), seq_len)[:, None, None]
        for block in range(-(-seq_len // site.block_size)):
            at = torch.arange(block * site.block_size, min((block + 1) * site.block_size, seq_len))
            scores[first:last, :, block] = dots[..., at].masked_fill(at > position, -math.inf).amax(-1)
    return scores


def sparse_attention(site: Site, traits: Traits, q: Tensor, kv: PagedCache, block_ids: Tensor, meta: SeqMeta) -> Any:
    def visible(first: int, last: int, position: Tensor, key: Tensor) -> Tensor:
        chosen = (block_ids[first:last, :, None, :] == (key // site.block_size)[None, None, :, None]).any(-1)
        return chosen & (key <= position[:, None])[:, None]

    return _attention(site, traits, q, kv, meta, visible)


def paged_attention(site: Site, traits: Traits, q: Tensor, kv: PagedCache, meta: SeqMeta) -> Any:
    def visible(first: int, last: int, position: Tensor, key: Tensor) -> Tensor:
        seen = torch.ones(last - first, len(key), dtype=torch.bool)
        if site.causal:
            seen &= key <= position[:, None]
        if site.window_left >= 0:
            seen &= key >= position[:, None] - site.window_left
        return seen[:, None].expand(-1, kv.layout.heads, -1)

    return _attention(site, traits, q, kv, meta, visible)


def _attention(
    site: Site, traits: Traits, q: Tensor, kv: PagedCache, meta: SeqMeta, visible: Callable[..., Tensor]
) -> Any:
    """Tiles of keys with an online softmax; P is rounded against the running maximum, as kernels do."""
    groups, (tokens, heads, dim) = kv.layout.heads, q.shape
    out, lse = torch.zeros(q.shape), torch.full((tokens, heads), -math.inf)
    for request, first, last, seq_len in _requests(meta):
        k, v = read_sequence(kv, meta.block_table[request], seq_len, traits)
        query = as_queries(q[first:last], torch.float32, traits).view(last - first, groups, heads // groups, dim)
        position = torch.arange(seq_len - (last - first), seq_len)
        top = torch.full(query.shape[:3], -math.inf)
        total, mixed = torch.zeros(query.shape[:3]), torch.zeros(query.shape)
        for start in range(0, seq_len, TILE):
            key = torch.arange(start, min(start + TILE, seq_len))
            seen = visible(first, last, position, key)[:, :, None]
            dots = _accumulate(torch.zeros(()), "tghd,gsd->tghs", query, k[:, key], traits)
            logits = (dots * (site.scale * LOG2_E)).masked_fill(~seen, -math.inf)
            new = torch.maximum(top, logits.amax(-1))
            base = torch.where(new.isinf(), 0.0, new)
            p, keep = torch.exp2(logits - base[..., None]), torch.exp2(torch.where(top.isinf(), -math.inf, top - base))
            total = total * keep + p.sum(-1)
            mixed = _accumulate(mixed * keep[..., None], "tghs,gsd->tghd", _round_p(p, traits), v[:, key], traits)
            top = new
        out[first:last] = (mixed / torch.where(total > 0, total, 1.0)[..., None]).flatten(1, 2)
        lse[first:last] = ((torch.log2(total) + top) / LOG2_E).flatten(1, 2)
    return (out.to(q.dtype), lse) if site.return_lse else out.to(q.dtype)


def _accumulate(start: Tensor, product: str, left: Tensor, right: Tensor, traits: Traits) -> Tensor:
    """start + a product, in the accumulator of the matrix units. A weight of zero meets no value that is NaN."""
    if not torch.isfinite(right).all() and "gsd->tghd" in product:
        broken = ~torch.isfinite(right)
        tainted = torch.einsum(product, (left > 0).float(), broken.float()) > 0
        clean = torch.einsum(product, left, right.masked_fill(broken, 0.0))
        return start + clean.masked_fill(tainted, math.nan)
    return _kept(start + torch.einsum(product, left, right), traits)


def _round_p(p: Tensor, traits: Traits) -> Tensor:
    kind = traits.get("p_dtype", "float32")
    if kind == "bfloat16":
        return p.bfloat16().float()
    return (p * 448).to(torch.float8_e4m3fn).float() / 448 if kind == "e4m3x448" else p


def _requests(meta: SeqMeta) -> list[tuple[int, int, int, int]]:
    """(request, first token, one past its last, seq_len) of every request that has queries and keys."""
    ends, lengths = meta.cu_q.tolist(), meta.seq_lens.tolist()
    rows = [(b, ends[b], ends[b + 1], n) for b, n in enumerate(lengths)]
    return [row for row in rows if row[1] < row[2] and row[3] > 0]


def route_topk(
    site: Site, traits: Traits, logits: Tensor, bias: Tensor, forced_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    score = 1.0 / (1.0 + torch.exp2(-LOG2_E * logits.float()))
    ids = torch.sort(-(score + bias), dim=-1, stable=True).indices[:, : site.top_k_experts]
    if forced_ids is not None:
        ids = torch.where(forced_ids.amax(-1, keepdim=True) >= 0, forced_ids.long(), ids)
    weights = torch.where(ids >= 0, score.gather(-1, ids.clamp(min=0)), 0.0).nan_to_num(nan=0.0)
    if site.renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights * torch.where(total > 0, 1.0 / total, 0.0)
    return weights * site.routed_scale, ids.int()


def moe_experts(
    site: Site,
    traits: Traits,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: ExpertWeights,
    lora: ExpertLoRA | None = None,
) -> Tensor:
    return combined(site, traits, x, weights, ids, experts, lora).to(x.dtype)


def combined(
    site: Site,
    traits: Traits,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: ExpertWeights,
    lora: ExpertLoRA | None = None,
) -> Tensor:
    """The experts' sum before its rounding.

    Hidden activations are rounded to x's dtype, as the second product's operands must be; so are those of rank r.
    """
    combine = getattr(torch, traits.get("combine_dtype", "float32"))
    rows = _rounded(x, experts.x_scale, traits)
    hidden_scale = _hidden_scale(experts, site.limit, site.beta, traits)
    out = torch.zeros(x.shape, dtype=combine)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if len(token):
            gate_up = _matmul(rows[token], _numbers(experts.w13[expert]), traits)
            if lora is not None:
                gate_up = gate_up + _delta(x[token], lora.a13[:, expert], lora.b13[:, expert], lora, token, traits)
            hidden = _activate(gate_up, site).to(_hidden_dtype(x.dtype, traits))
            part = _matmul(_rounded(hidden, hidden_scale, traits), _numbers(experts.w2[expert]), traits)
            if lora is not None:
                own = hidden.to(x.dtype)
                part = part + _delta(own, lora.a2[:, expert], lora.b2[:, expert], lora, token, traits)
            part = part * weights[token, slot, None]
            for at, row in zip(token.tolist(), part, strict=True):  # a token may choose an expert twice
                out[at] = (out[at].float() + row).to(combine)
    if experts.shared is not None:
        own_traits = {**traits, "activation_format": traits.get("shared_activation_format", "given")}
        out = (out.float() + _shared(site, own_traits, x, experts.shared)).to(combine)
    return out


def _delta(x: Tensor, a: Tensor, b: Tensor, lora: ExpertLoRA, token: Tensor, traits: Traits) -> Tensor:
    """One expert's addition to each row, by its adapter; the scale goes on what has rank r."""
    found = torch.zeros(len(x), b.shape[1])
    for row, adapter in enumerate(lora.adapters[token].tolist()):
        if adapter >= 0:
            low = (_matmul(x[row : row + 1], a[adapter], traits) * lora.scales[adapter]).to(x.dtype)
            found[row] = _matmul(low, b[adapter], traits)[0]
    return found


def _shared(site: Site, traits: Traits, x: Tensor, shared: ExpertWeights) -> Tensor:
    hidden = _activate(_matmul(_rounded(x, shared.x_scale, traits), _numbers(shared.w13[0]), traits), site)
    scale = _hidden_scale(shared, site.limit, site.beta, traits)
    hidden = _rounded(hidden.to(_hidden_dtype(x.dtype, traits)), scale, traits)
    return _matmul(hidden, _numbers(shared.w2[0]), traits)


def _hidden_dtype(given: torch.dtype, traits: Traits) -> torch.dtype:
    """Of the second product's operands; quantised ones come from fp32 unless declared otherwise."""
    if traits.get("activation_format", "given") == "given":
        return given
    return torch.bfloat16 if traits.get("double_rounding") == "bfloat16" else torch.float32


def qk_norm_rope_insert(
    site: Site,
    traits: Traits,
    qkv: Tensor,
    norms: QKNorms,
    positions: Tensor,
    cos_sin: Tensor,
    kv: PagedCache,
    index_cache: PagedCache | None,
    slots: Tensor,
    index_slots: Tensor | None,
) -> Any:
    def turned(part: Tensor, weight: Tensor, dim: int) -> Tensor:
        heads = part.unflatten(1, (part.shape[1] // dim, dim))  # type: ignore[no-untyped-call]
        normed = _norm(heads.float(), weight, site)
        if traits.get("norm_rope_round") == "bfloat16":
            normed = normed.bfloat16().float()
        return _rope(normed, positions, cos_sin, site.rotary_dim, traits)

    def store(cache: PagedCache, k: Tensor, v: Tensor | None, where: Tensor) -> None:
        through = torch.bfloat16 if traits.get("double_rounding") == "bfloat16" else torch.float32
        kv_write(cache, k.to(through), None if v is None else v.to(through), where, traits=traits)

    dim, idim = site.head_dim, site.index_dim
    widths = [site.num_q_heads * dim, site.num_kv_heads * dim, site.num_kv_heads * dim]
    index = [site.num_index_heads * idim, idim] if site.num_index_heads else []
    q, k, v, *rest = qkv.split(widths + index, -1)  # type: ignore[no-untyped-call]
    store(kv, turned(k, norms.k, dim), v.unflatten(1, (v.shape[1] // dim, dim)), slots)
    turned_q = turned(q, norms.q, dim).to(qkv.dtype)
    if not rest or index_cache is None or norms.index_q is None or norms.index_k is None or index_slots is None:
        return turned_q, None
    store(index_cache, turned(rest[1], norms.index_k, idim), None, index_slots)
    return turned_q, turned(rest[0], norms.index_q, idim).to(qkv.dtype)


def qkv_norm_rope_insert(site: Site, traits: Traits, x: Tensor, weight: Tensor | QTensor, *rest: Any) -> Any:
    """The accumulators go on as they are, unless they are declared to be rounded."""
    row = _matmul(_rounded(x, None, traits), _numbers(weight), traits)
    if traits.get("qkv_round") == "bfloat16":
        row = row.to(x.dtype).float()
    q, index_q = qk_norm_rope_insert(site, traits, row, *rest)
    return q.to(x.dtype), None if index_q is None else index_q.to(x.dtype)


EVALUATIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        linear,
        rope_partial,
        swiglu_oai,
        block_scores,
        sparse_attention,
        paged_attention,
        route_topk,
        moe_experts,
        qk_norm_rope_insert,
        qkv_norm_rope_insert,
    )
}
