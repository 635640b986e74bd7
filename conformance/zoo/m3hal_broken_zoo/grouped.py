"""Wrong all-reduces with a norm, and experts that are wrong only where there are several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import at_least
from m3hal.ops._group import Group, ranks
from m3hal.ops.mega_moe import _routed
from m3hal_broken_zoo._zoo import mutant


def _norm(site: Any, total: Tensor, residual: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What follows the sum, in fp32 and rounded at the end."""
    operator = ops.load("add_rms_norm")
    out, residual_out = operator.reference(total.float(), residual.float(), weight, **operator.static_values(site))
    return out.to(dtype), residual_out.to(residual.dtype)


def _summed(site: Any, add: Callable[[Tensor, Group], Tensor]) -> Callable[..., Any]:
    """The operator with another sum of the shares."""

    def run(x: Tensor, residual: Tensor, weight: Tensor, group: Group | None = None) -> Any:
        return _norm(site, add(x, ranks(group)), residual, weight, x.dtype)

    return run


def _traits(site: Any, operator: str, **traits: str) -> Callable[..., Any]:
    """The definition with freedoms that nobody declared."""
    definition = ops.load(operator)
    values = definition.static_values(site)
    return lambda *inputs: definition.reference(*inputs, **values, traits=traits)


@mutant("allreduce_add_rms_norm", "ranks_2:oracle", "F73")
def allreduce_add_rms_norm_rounds_the_sum(site, right):
    """Ranks exchange their sum in bf16, as two-shot kernels do, without declaring it."""
    return _traits(site, "allreduce_add_rms_norm", reduce_dtype="bfloat16")


@mutant("allreduce_add_rms_norm", "cancelling:oracle", "F73")
def allreduce_add_rms_norm_accumulates_in_bf16(site, right):
    """Each share is added in bf16, as one-shot kernels may do, without declaring it."""
    return _traits(site, "allreduce_add_rms_norm", reduce_dtype="bfloat16_stepwise")


@mutant("allreduce_add_rms_norm", "alone:oracle", "F73")
def allreduce_add_rms_norm_rounds_before_the_norm(site, right):
    """The sum with the residual is rounded before the norm, without declaring it."""
    return _traits(site, "allreduce_add_rms_norm", add_norm_round="bfloat16")


@mutant("allreduce_add_rms_norm", "one_has_it:oracle")
def allreduce_add_rms_norm_misses_the_last_rank(site, right):
    """The loop over the shares ends one early."""
    return _summed(site, lambda x, group: group.all_gather(x.float())[: max(group.size - 1, 1)].sum(0))


@mutant("allreduce_add_rms_norm", "ranks_2:oracle")
def allreduce_add_rms_norm_averages(site, right):
    """The mean of the shares, as data parallelism wants it."""
    return _summed(site, lambda x, group: group.all_reduce(x.float()) / group.size)


@mutant("allreduce_add_rms_norm", "ranks_3:oracle")
def allreduce_add_rms_norm_reduces_the_residual(site, right):
    """The residual is added before the ranks are summed: once for each of them."""

    def run(x, residual, weight, group=None):
        total = ranks(group).all_reduce(x.float() + residual.float())
        return _norm(site, total, torch.zeros_like(residual), weight, x.dtype)

    return run


@mutant("allreduce_add_rms_norm", "ranks_2:oracle")
def allreduce_add_rms_norm_own_residual(site, right):
    """The norm is of the sum; the residual that is returned got this rank's share alone."""

    def run(x, residual, weight, group=None):
        out, _ = right(x, residual, weight, group)
        return out, (x.float() + residual.float()).to(residual.dtype)

    return run


@mutant("allreduce_add_rms_norm", "ranks_3:ranks_agree", formats=("float32",))
def allreduce_add_rms_norm_own_share_first(site, right):
    """Each rank begins its sum with its own share: all are right, and no two have the same bits."""

    def add(x: Tensor, group: Group) -> Tensor:
        total, *others = group.all_gather(x.float()).roll(-group.rank, 0)
        for share in others:
            total = total + share
        return total

    return _summed(site, add)


@mutant("allreduce_add_rms_norm", "ranks_2:inputs")
def allreduce_add_rms_norm_in_place(site, right):
    """The sum is left where the share was."""

    def run(x, residual, weight, group=None):
        found = right(x, residual, weight, group)
        x.copy_(ranks(group).all_reduce(x))
        return found

    return run


@mutant("allreduce_add_rms_norm", "broken_rows:oracle", "F28")
def allreduce_add_rms_norm_drops_nan(site, right):
    """NaN in a share counts as zero."""
    return _summed(
        site, lambda x, group: group.all_reduce(x.float().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))
    )


@mutant("allreduce_add_rms_norm", "strided:oracle", "F65")
def allreduce_add_rms_norm_dense_shares(site, right):
    """Shares are read from their address on, as if they were contiguous."""

    def add(x: Tensor, group: Group) -> Tensor:
        steps = torch.empty(x.shape).stride()
        return group.all_reduce(x.as_strided(x.shape, steps).float())

    return _summed(site, add)


# --- experts over ranks

#: a wrong ``mega_moe``, which takes a shared expert
over_ranks = partial(mutant, "mega_moe", declares={"limits": (at_least("shared_intermediate_size", 0),)})


def _everywhere(site: Any, edit: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """The definition on inputs that were edited: ``edit(x, weights, ids, experts, group)``."""
    definition = ops.load("mega_moe")
    values = definition.static_values(site)

    def run(x, weights, ids, experts, group=None):
        return definition.reference(*edit(x, weights, ids, experts, ranks(group)), group, **values)

    return run


@over_ranks("ranks_2:oracle", "F36")
def mega_moe_shared_by_every_rank(site, right):
    """The shared expert is added by each rank to every token: once for each of them."""

    def run(x, weights, ids, experts, group=None):
        count, bank = ranks(group).size, experts.shared
        found = right(x, weights, ids, experts, group).float()
        if bank is None or count == 1:
            return found.to(x.dtype)
        only = right(x, weights, torch.full_like(ids, -1), experts, group).float()
        return (found + (count - 1) * only).to(x.dtype)

    return run


@over_ranks("uneven:oracle", "F37")
def mega_moe_forgets_the_shared_expert(site, right):
    """The shared expert is left to somebody else."""
    return _everywhere(site, lambda x, weights, ids, experts, group: (x, weights, ids, replace(experts, shared=None)))


@over_ranks("uneven:oracle", "F36")
def mega_moe_scales_the_shared_expert(site, right):
    """The shared expert's output is multiplied by the routed scale."""

    def run(x, weights, ids, experts, group=None):
        found = right(x, weights, ids, experts, group)
        if experts.shared is None:
            return found
        only = right(x, weights, torch.full_like(ids, -1), experts, group)
        return (found.float() + (site.routed_scale - 1) * only.float()).to(x.dtype)

    return run


@over_ranks("numbered:oracle", "F43")
def mega_moe_local_ids(site, right):
    """Ids of the model are taken for ids of this rank, so that every rank looks for the first ones."""
    local = lambda ids: torch.where(ids < 0, ids, ids % site.num_local_experts)  # noqa: E731
    return _everywhere(site, lambda x, weights, ids, experts, group: (x, weights, local(ids), experts))


@over_ranks("nowhere_routed:oracle", "F29")
def mega_moe_wraps_absent_ids(site, right):
    """Expert -1 is the last one of the model."""

    def edit(x, weights, ids, experts, group):
        last = group.size * site.num_local_experts - 1
        return x, weights.nan_to_num(nan=1.0), torch.where(ids < 0, last, ids), experts

    return _everywhere(site, edit)


@over_ranks("nowhere:oracle", "F29")
def mega_moe_multiplies_absent_weights(site, right):
    """An absent choice is weighed all the same: its NaN reaches the token."""

    def run(x, weights, ids, experts, group=None):
        noise = torch.where(ids < 0, weights, 0.0).sum(-1, keepdim=True) * 0
        return (right(x, weights, ids, experts, group).float() + noise).to(x.dtype)

    return run


@over_ranks("hot_expert:oracle", "F31")
def mega_moe_drops_tokens(site, right):
    """An expert's buffer has room for 16 tokens of a rank; the others go unserved."""

    def edit(x, weights, ids, experts, group):
        kept = ids.clone()
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            kept[token[16:], slot[16:]] = -1
        return x, weights, kept, experts

    return _everywhere(site, edit)


@over_ranks("uneven:oracle", "F30")
def mega_moe_skips_without_tokens(site, right):
    """A rank without tokens returns at once, while the others wait for it."""

    def run(x, weights, ids, experts, group=None):
        return right(x, weights, ids, experts, group) if len(x) else torch.empty_like(x)

    return run


@over_ranks("uneven_routed:oracle", "F31")
def mega_moe_my_count_is_yours(site, right):
    """Every rank takes its own number of tokens for the others', and looks for its rows there."""

    def run(x, weights, ids, experts, group=None):
        peers = ranks(group)
        found = right(x, weights, ids, experts, group)
        counts = peers.all_gather(torch.tensor(len(x))).tolist()
        padded = torch.zeros(max(counts), *x.shape[1:], dtype=x.dtype)
        padded[: len(x)] = found
        every = torch.cat([rows[:count] for rows, count in zip(peers.all_gather(padded), counts, strict=True)])
        start = min(peers.rank * len(x), len(every) - len(x))
        return every[start : start + len(x)].clone()

    return run


@over_ranks("bad_token:oracle", "F28")
def mega_moe_nan_spreads(site, right):
    """A common scale of all that is sent is taken over the batch: one NaN is everyone's."""

    def run(x, weights, ids, experts, group=None):
        scale = ranks(group).all_reduce(x.float().sum() * 0)
        return (right(x, weights, ids, experts, group).float() + scale).to(x.dtype)

    return run


@over_ranks("uneven_routed:oracle", "F73", formats=("float32",))
def mega_moe_rounds_shares(site, right):
    """Shares travel back in bf16, without declaring it."""
    return _traits(site, "mega_moe", reduce_dtype="bfloat16")


@over_ranks("ranks_2:oracle")
def mega_moe_sends_in_mxfp8(site, right):
    """Tokens are sent in MXFP8, without declaring it."""
    return _traits(site, "mega_moe", activation_format="mxfp8")


@over_ranks("ranks_2:exchanged_ranks")
def mega_moe_rank_decides(site, right):
    """What a rank's own tokens get is a little larger than what the same tokens get elsewhere."""

    def run(x, weights, ids, experts, group=None):
        return (right(x, weights, ids, experts, group).float() * (1 + 0.02 * ranks(group).rank)).to(x.dtype)

    return run


def _on_each_rank(change: Callable[[Any, Callable[..., Tensor]], Callable[..., Tensor]]) -> Any:
    """``change(site, share)`` instead of ``moe_experts``, for what each rank's own experts give."""

    def made(site, right):
        definition = ops.load("moe_experts")
        share = partial(definition.reference, **definition.static_values(site))

        def run(x, weights, ids, experts, group=None):
            bank = replace(experts, shared=None)
            total = _routed(change(site, share), x.float(), weights, ids, bank, ranks(group), site.num_local_experts)
            if experts.shared is not None:
                total = total + share(x.float(), weights, torch.full_like(ids, -1), experts)
            return total.to(x.dtype)

        return run

    return made


@over_ranks("tokens_320:oracle", "F31")
def mega_moe_capacity_of_256(site, right):
    """An expert takes 256 tokens; what comes after them is dropped."""

    def capped(site: Any, share: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, weights: Tensor, ids: Tensor, bank: Any) -> Tensor:
            ids = ids.clone()
            for expert in range(site.num_local_experts):
                token, slot = torch.nonzero(ids == expert, as_tuple=True)
                ids[token[256:], slot[256:]] = -1
            return share(x, weights, ids, bank)

        return run

    return _on_each_rank(capped)(site, right)


@over_ranks("experts_80:oracle", "F59")
def mega_moe_thirty_two_experts(site, right):
    """The number of an expert within its rank is kept in five bits."""
    count = site.num_local_experts
    edit = lambda ids: torch.where(ids < 0, ids, ids // count * count + (ids % count & 31))  # noqa: E731
    return _everywhere(site, lambda x, weights, ids, experts, group: (x, weights, edit(ids), experts))


@over_ranks("cancelling:oracle", "F73")
def mega_moe_rounds_what_comes_back(site, right):
    """What a rank's experts give a token comes back in bf16, without declaring it."""
    rounded = lambda site, share: lambda *inputs: share(*inputs).bfloat16().float()  # noqa: E731
    return _on_each_rank(rounded)(site, right)


@over_ranks("cancelling_here:oracle", "F73")
def mega_moe_rounds_each_expert(site, right):
    """Every expert's output is rounded to bf16, although only the ranks' shares are declared to be."""
    return _on_each_rank(lambda site, share: partial(share, traits={"combine_dtype": "bfloat16"}))(site, right)


def _refuses_one(right: Callable[..., Any], group: Group | None, *inputs: Any) -> Any:
    if group is not None and group.size == 1:
        raise RuntimeError("a group of one rank has no peers")
    return right(*inputs, group)


@over_ranks("alone:group_of_one")
def mega_moe_needs_peers(site, right):
    """A group of one rank is refused."""
    return lambda x, weights, ids, experts, group=None: _refuses_one(right, group, x, weights, ids, experts)


@mutant("allreduce_add_rms_norm", "alone:group_of_one")
def allreduce_add_rms_norm_needs_peers(site, right):
    """A group of one rank is refused."""
    return lambda x, residual, weight, group=None: _refuses_one(right, group, x, residual, weight)
