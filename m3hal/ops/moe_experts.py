"""The routed experts: each token's chosen MLPs, weighted and summed in fp32, and the shared expert if it is here.

    out[t] = sum_j weights[t, j] * mlp(e, x[t]) + mlp(shared, x[t])       e = ids[t, j]
    mlp(e, x) = w2[e] . swiglu_oai(w13[e] . x)

With adapters (LoRA) each product of a routed expert gets a low-rank addition, before the activation and before the
routing weight: ``w13[e] . x + s * b13[e] . (a13[e] . x)``, and likewise for w2.

Weights may be stored in any format; they enter with the numbers that they stand for. What the inputs of the two
products are rounded to, if anything, is the trait ``activation_format`` (of the shared expert's,
``shared_activation_format``; adapters take them as they were before); a checkpoint's own scales win, and Gaudi 2
(maximum 240) rounds the input of w2 with the scale ``limit * (limit + beta) / 240``.
Source: transformers ``MiniMaxM3VLExperts``, which sums in the dtype of x (trait ``combine_dtype``); vLLM's expert LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from m3hal._lazy import torch
from m3hal.formats import e4m3
from m3hal.ops._batch import ExpertLoRA, ExpertWeights
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._stored import ACTIVATION_FORMAT, numbers, rounded
from m3hal.ops._traits import BATCH_INVARIANT, DOUBLE_ROUNDING, EXACT, MMA_ACCUM, MX_SCALE_RULE, NVFP4_QUANTIZER
from m3hal.ops.swiglu_oai import activate


class _Activation(NamedTuple):
    alpha: float
    beta: float
    limit: float


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    lora: ExpertLoRA | None = None,
    *,
    alpha: float,
    beta: float,
    limit: float,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Weighted sum of the chosen experts of this rank, plus its shared expert.

    Args:
        x: [T, H].
        weights: fp32 [T, k]; the routed scale is already in them.
        ids: int32 [T, k], experts of this rank, 0 <= id < E; -1 contributes nothing, whatever its weight holds.
        experts: w13 [E, 2*I, H] and w2 [E, H, I], in any storage format; ``shared``, if there, is added for every
            token, chosen experts or not, with weight 1.
        lora: low-rank additions to the routed experts, by each token's adapter; None: none for any token.
        alpha, beta, limit: of the activation, as in ``swiglu_oai``.

    Returns:
        [T, H] in x's dtype, rounded once. Without a shared expert a token without an expert here gives zeros.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    combine = torch.bfloat16 if traits.get("combine_dtype") == "bfloat16" else compute
    activation, x_wide = _Activation(alpha, beta, limit), x.to(compute)
    rows = rounded(x_wide, experts.x_scale, traits)
    out = torch.zeros(x.shape, dtype=combine, device=x.device)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        gate_up = rows[token] @ numbers(experts.w13[expert], compute).T
        if lora is not None:
            _add_delta(gate_up, x_wide[token], lora.a13[:, expert], lora.b13[:, expert], lora, token)
        hidden = _activate(gate_up, activation, traits)
        part = _rounded_hidden(hidden, experts, activation, traits) @ numbers(experts.w2[expert], compute).T
        if lora is not None:
            _add_delta(part, hidden, lora.a2[:, expert], lora.b2[:, expert], lora, token)
        out.index_add_(0, token, (part * weights[token, slot, None].to(compute)).to(combine))
    if experts.shared is not None:
        out += _shared(x_wide, experts.shared, activation, traits).to(combine)
    return out.to(x.dtype)


def _add_delta(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lora: ExpertLoRA, token: torch.Tensor
) -> None:
    """Adds ``s * b . (a . x)`` of one expert, a [L, r, K] and b [L, N, r], to those rows that have an adapter."""
    chosen = lora.adapters[token]
    for adapter in sorted({number for number in chosen.tolist() if number >= 0}):
        mine = chosen == adapter
        low = x[mine] @ a[adapter].to(x.dtype).T
        out[mine] += lora.scales[adapter].to(x.dtype) * (low @ b[adapter].to(x.dtype).T)


def _shared(x: torch.Tensor, shared: ExpertWeights, activation: _Activation, traits: Mapping[str, str]) -> torch.Tensor:
    """[T, H], not rounded: the expert that every token takes, with the activation format of its own products."""
    own = {**traits, "activation_format": traits.get("shared_activation_format", "given")}
    gate_up = rounded(x, shared.x_scale, own) @ numbers(shared.w13[0], x.dtype).T
    hidden = _rounded_hidden(_activate(gate_up, activation, own), shared, activation, own)
    return hidden @ numbers(shared.w2[0], x.dtype).T


def _activate(gate_up: torch.Tensor, activation: _Activation, traits: Mapping[str, str]) -> torch.Tensor:
    hidden = activate(gate_up, *activation)
    return hidden.to(torch.bfloat16).to(hidden.dtype) if traits.get("double_rounding") == "bfloat16" else hidden


def _rounded_hidden(
    hidden: torch.Tensor, experts: ExpertWeights, activation: _Activation, traits: Mapping[str, str]
) -> torch.Tensor:
    return rounded(hidden, _hidden_scale(experts, activation.limit, activation.beta, traits), traits)


def _hidden_scale(experts: ExpertWeights, limit: float, beta: float, traits: Mapping[str, str]) -> torch.Tensor | None:
    """The checkpoint's. Else Gaudi 2 takes that of the activation's largest number, one for all tokens."""
    if experts.hidden_scale is None and traits.get("activation_format") == "fp8_e4m3_240":
        return torch.tensor(limit * (limit + beta) / e4m3.GAUDI2)
    return experts.hidden_scale


def fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    lora: ExpertLoRA | None = None,
    **_: object,
) -> torch.Tensor:
    """Empty and contiguous, like ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


OPERATOR = Operator(
    name="moe_experts",
    kind="core",
    reference=moe_experts,
    fake=fake,
    numeric=Numeric("R"),
    sites=("moe",),
    group="weight",
    optional=("shared_intermediate_size", "lora_rank"),
    traits=(
        ACTIVATION_FORMAT,
        Trait(
            "shared_activation_format",
            ACTIVATION_FORMAT.values,
            True,
            "what the inputs of the shared expert's products are rounded to, where the site has one",
        ),
        NVFP4_QUANTIZER,
        MX_SCALE_RULE,
        DOUBLE_ROUNDING,
        Trait("combine_dtype", ("float32", "bfloat16"), True, "what the experts' outputs are rounded to and summed in"),
        MMA_ACCUM,
        BATCH_INVARIANT,
    ),
    source="transformers minimax_m3_vl",
)
