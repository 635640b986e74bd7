"""The experts of a layer that are spread over ranks: tokens travel to their experts, and their results back.

    out[t] = sum_j weights[t, j] * mlp(e, x[t]) + mlp(shared, x[t])       e = ids[t, j], wherever it lives

That is ``moe_experts`` over all ranks' experts: dispatch, the experts of each rank, combine; and the shared expert
once, where its token is. Each rank brings its own tokens, as many as it has, none at all included. Kernels that send
tokens in a narrower format declare it as ``activation_format``; shares that come back rounded are ``reduce_dtype``.
Source: vLLM ``deep_gemm_mega_moe``; DeepSeek MegaMoE, which needs buffers that all ranks see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from m3hal._lazy import torch
from m3hal.ops._batch import ExpertWeights
from m3hal.ops._group import Group, ranks
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import EXACT
from m3hal.ops.moe_experts import OPERATOR as MOE_EXPERTS
from m3hal.ops.moe_experts import _Activation, _shared, moe_experts


def mega_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    group: Group | None = None,
    *,
    num_local_experts: int,
    alpha: float,
    beta: float,
    limit: float,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Weighted sum of each token's experts on all ranks, plus the shared expert.

    Args:
        x: [T, H], this rank's tokens; T may differ between ranks.
        weights: fp32 [T, k]; the routed scale is already in them.
        ids: int32 [T, k], experts of the model: expert e is number ``e % num_local_experts`` of rank
            ``e // num_local_experts``. -1 contributes nothing, whatever its weight holds.
        experts: this rank's ``num_local_experts`` experts, as in ``moe_experts``. ``shared`` is the whole shared expert
            on every rank: each adds it to its own tokens, with weight 1.
        group: the ranks that hold the other experts; None: this one holds all.
        alpha, beta, limit: of the activation, as in ``swiglu_oai``.

    Returns:
        [T, H] in x's dtype, rounded once: this rank's tokens.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    run: Callable[..., torch.Tensor] = partial(moe_experts, alpha=alpha, beta=beta, limit=limit, traits=traits)
    if traits.get("reduce_dtype") == "bfloat16":
        run = _then_rounded(run)
    wide, bank = x.to(compute).contiguous(), replace(experts, shared=None)
    total = _routed(run, wide, weights, ids, bank, ranks(group), num_local_experts)
    if experts.shared is not None:
        total = total + _shared(wide, experts.shared, _Activation(alpha, beta, limit), traits)
    return total.to(x.dtype)


def _then_rounded(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rounded(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return run(x, *rest).to(torch.bfloat16).to(x.dtype)

    return rounded


def _routed(
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: Any,
    group: Group,
    num_local_experts: int,
) -> torch.Tensor:
    """[T, H] in fp32 or wider: what the routed experts of all ranks give for this rank's tokens.

    Every rank sees every token and leaves out those that chose none of its experts: no more is needed to define it.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    tokens = [len(x)]
    if group.size > 1:
        tokens = group.all_gather(torch.tensor([len(x)], device=x.device)).flatten().tolist()
        longest = max(tokens)
        x, weights = (group.all_gather(_longer(t, longest, 0)).flatten(0, 1) for t in (x, weights))
        ids = group.all_gather(_longer(ids, longest, -1)).flatten(0, 1)
    first = group.rank * num_local_experts
    here = (ids >= first) & (ids < first + num_local_experts)
    share = run(x, weights, torch.where(here, ids - first, -1), experts).to(compute)
    if group.size == 1:
        return share
    start = group.rank * max(tokens)
    return group.all_reduce(share)[start : start + tokens[group.rank]]


def _longer(rows: torch.Tensor, count: int, fill: int) -> torch.Tensor:
    """The rows, filled up to so many: collectives take the same shape from every rank."""
    return torch.cat([rows, rows.new_full((count - len(rows), *rows.shape[1:]), fill)])


@dataclass(frozen=True)
class _Bank:
    """What a composition makes of the weights. routed: packed for ``moe_experts``. shared: as it came."""

    routed: Any
    shared: ExpertWeights | None


def prepare(pack: Callable[[ExpertWeights], Any]) -> Callable[[ExpertWeights], _Bank]:
    """How a composition packs weights, from how its ``moe_experts`` does."""
    return lambda experts: _Bank(pack(replace(experts, shared=None)), experts.shared)


def compose(
    *,
    moe_experts: Callable[..., Any],
    linear: Callable[..., Any],
    swiglu_oai: Callable[..., Any],
    num_local_experts: int,
    **_: object,
) -> Callable[..., Any]:
    """The operator as a composition; the shared expert is two projections and an activation."""

    def run(
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        experts: ExpertWeights | _Bank,
        group: Group | None = None,
    ) -> Any:
        bank = experts if isinstance(experts, _Bank) else _Bank(replace(experts, shared=None), experts.shared)
        total = _routed(moe_experts, x, weights, ids, bank.routed, ranks(group), num_local_experts)
        if bank.shared is not None:
            hidden = swiglu_oai(linear(x, bank.shared.w13[0]))
            total = total + linear(hidden, bank.shared.w2[0]).to(total.dtype)
        return total.to(x.dtype)

    return run


def fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    group: Group | None = None,
    **_: object,
) -> torch.Tensor:
    """Empty and contiguous, like ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


OPERATOR = Operator(
    name="mega_moe",
    kind="fused",
    reference=mega_moe,
    fake=fake,
    numeric=Numeric("R", "of one device that holds all experts"),
    sites=("moe",),
    group="weight",
    optional=("shared_intermediate_size",),
    traits=(
        Trait(
            "reduce_dtype",
            ("float32", "bfloat16"),
            True,
            "what the ranks' shares of a token are rounded to before they are summed",
        ),
        *MOE_EXPERTS.traits,
    ),
    covers=("moe_experts", "linear", "swiglu_oai"),
    compose=compose,
    prepare=prepare,
    composed_traits={"reduce_dtype": "bfloat16"},
    source="vLLM deep_gemm_mega_moe; operators dispatch, moe_experts, combine",
)
