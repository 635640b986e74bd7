"""Relations: inputs changed in ways that must not change the outputs, or must change them in a known way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertLoRA, ExpertWeights, SeqMeta
from m3hal_conformance import oracle as oracles
from m3hal_conformance.buckets import _is_token_axis
from m3hal_conformance.checks import _same, check
from m3hal_conformance.compare import Score
from m3hal_conformance.decoder import Page, Part, decode_slot
from m3hal_conformance.trees import map_tensors, tensors
from m3hal_conformance.trial import CheckFailed, Trial

#: rows that are tried alone: ends, and the neighbours of powers of two that kernels tile by
_PROBED = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, -1)


@check
def row_alone(trial: Trial) -> list[Score]:
    """What a batch gives for a token, or a request, is right for it alone, and bit-equal when declared invariant."""
    scores: list[Score] = []
    for inputs, rows in _alone(trial):
        actual = trial.call(inputs).outputs
        scores += trial.require(actual, f"rows {rows.tolist()[:4]} alone", rows)
        if trial.bound.traits.get("batch_invariant") == "yes":
            whole = {name: tensor[rows] for name, tensor in trial.first.outputs.items()}
            _same(whole, actual, "it declares batch_invariant, but alone a row's bits differ")
    return scores


@check
def permuted_rows(trial: Trial) -> list[Score]:
    """Tokens in another order give the same rows in that order."""
    order = torch.arange(_tokens(trial)).flip(0).roll(1)
    rows = None if trial.operator.name == "kv_write" else order  # a cache has slots, not rows
    return trial.require(trial.call(_take(trial, trial.inputs, order)).outputs, "with its tokens reordered", rows)


@check
def permuted_requests(trial: Trial) -> list[Score]:
    """Requests in another order give the same rows in that order."""
    meta: SeqMeta = trial.inputs["meta"]
    order = list(range(len(meta.seq_lens)))[::-1]
    inputs, rows = _requests(trial, order)
    return trial.require(trial.call(inputs).outputs, "with its requests reordered", rows)


@check
def permuted_pages(trial: Trial) -> None:
    """The same tokens in other pages give the same bits."""
    other = trial.case.inputs(trial.seed, pages=1)
    _same(trial.first.outputs, trial.call(other).outputs, "with the same tokens in other pages, the result differs")


@check
def stale(trial: Trial) -> None:
    """What unselected pages, pages past the end and hidden values hold changes no bit: NaN, 1e4, 0."""
    for fill in (1e4, 0.0, -3e38):
        other = trial.call(trial.case.inputs(trial.seed, stale=fill))
        what = f"with {fill:g} instead of NaN in bytes that no visible token occupies, the result differs"
        _same(trial.first.outputs, other.outputs, what)


@check
def chunked(trial: Trial) -> list[Score]:
    """A prompt in chunks gives the rows of the whole prompt."""
    scores = []
    meta: SeqMeta = trial.inputs["meta"]
    for request in range(len(meta.seq_lens)):
        first, last = meta.cu_q[request : request + 2].tolist()
        for start, stop in _cuts(first, last):
            inputs = _chunk(trial, request, start, stop)
            rows = torch.arange(start, stop)
            scores += trial.require(trial.call(inputs).outputs, f"tokens {start}..{stop} as a chunk", rows)
    return scores


@check
def dense(trial: Trial) -> list[Score]:
    """With no more than top-k blocks of context, block-sparse attention is dense attention."""
    inputs = {name: trial.inputs[name] for name in ("q", "kv", "meta")}
    site = replace(trial.case.site, causal=True, window_left=-1)
    trial_dense = oracles.exact(ops.load("paged_attention"), site, inputs)
    for name, tensor in trial_dense.items():
        error = (tensor - trial.exact[name].double()).nan_to_num().abs().max()
        if error > 1e-9:
            raise AssertionError(f"the case is not dense: its own oracle's {name} differs from dense attention's")
    return trial.require(trial.first.outputs, "against dense attention")


@check
def bytes_decoded(trial: Trial) -> None:
    """The bytes of a public layout, read by a decoder that shares no code with m3hal, hold what was written."""
    cache, slots = trial.inputs["cache"], trial.inputs["slots"].tolist()
    unscaled = trial.traits.get("kv_scale_used") == "no"
    raw = trial.first.outputs["cache.buf"].view(torch.uint8).flatten().numpy()
    parts: tuple[tuple[Part, Any, Any], ...] = (
        ("k", trial.inputs["k"], cache.k_scale),
        ("v", trial.inputs["v"], cache.v_scale),
    )
    for name, given, scale in parts:
        for token, slot in enumerate(slots if given is not None else ()):
            if slot < 0:
                continue
            found = decode_slot(
                raw, Page.of(cache.layout), slot, name, 1.0 if unscaled or scale is None else float(scale)
            )
            if not _holds(torch.from_numpy(found), given[token], cache):
                raise CheckFailed(f"token {token} in slot {slot}: its {name} reads back as other bytes")


#: relative L2 error of a stored vector, well above what rounding costs and well below what a wrong scale does
_STORED = {"fp8_e4m3": 0.05, "fp8_e4m3_240": 0.05, "nvfp4": 0.2, "mxfp4": 0.25}


def _holds(found: Tensor, given: Tensor, cache: PagedCache) -> bool:
    """Whether stored vectors are the given ones, rounded."""
    if cache.layout.format not in _STORED:
        wanted = given.to(cache.buf.dtype).double()
        return torch.equal(found.nan_to_num(nan=123.0), wanted.nan_to_num(nan=123.0))
    error = (found - given.double()).norm(dim=-1) / given.double().norm(dim=-1)
    return bool((error < _STORED[cache.layout.format]).all())


@check
def permuted_experts(trial: Trial) -> list[Score]:
    """Experts in another order, ids renamed to match, give the same rows."""
    experts: ExpertWeights = trial.inputs["experts"]
    assert isinstance(experts.w13, Tensor)
    order = torch.arange(len(experts.w13)).flip(0).roll(1)
    ids = trial.inputs["ids"]
    renamed = torch.where(ids < 0, ids, order.argsort()[ids.clamp(min=0).long()].int())
    inputs = {**_of_experts(trial.inputs, order), "ids": renamed}
    return trial.require(trial.call(inputs).outputs, "with its experts renumbered")


def _of_experts(inputs: Mapping[str, Any], which: Tensor) -> dict[str, Any]:
    """The inputs with some experts, in an order, and what their adapters add to them."""
    experts, lora = inputs["experts"], inputs.get("lora")
    found = {**inputs, "experts": replace(experts, w13=experts.w13[which], w2=experts.w2[which])}
    if lora is not None:
        found["lora"] = replace(lora, **{name: getattr(lora, name)[:, which] for name in ("a13", "b13", "a2", "b2")})
    return found


@check
def expert_slices(trial: Trial) -> list[Score]:
    """Each rank of expert parallelism computes its own share: local ids from 0, -1 for what lies elsewhere.

    The first rank holds the shared expert.
    """
    experts, ids = trial.inputs["experts"], trial.inputs["ids"]
    half = len(experts.w13) // 2
    scores = []
    total = torch.zeros(trial.exact["out"].shape, dtype=torch.float64)
    for rank in range(2):
        mine = (ids >= rank * half) & (ids < (rank + 1) * half)
        local = torch.where(mine, ids - rank * half, -1)
        inputs = {**_of_experts(trial.inputs, torch.arange(rank * half, (rank + 1) * half)), "ids": local}
        if rank:
            inputs["experts"] = replace(inputs["experts"], shared=None)
        oracle = oracles.exact(trial.operator, trial.case.site, inputs)
        total += oracle["out"]
        sub = replace_exact(trial, oracle)
        scores += sub.require(trial.call(inputs).outputs, f"rank {rank} of 2")
    if (total - trial.exact["out"]).abs().max() > 1e-9 * total.abs().max().clamp(min=1.0):
        raise AssertionError("the slices' own oracles do not add up to the whole")
    return scores


@check
def packed_once(trial: Trial) -> None:
    """Packing refuses what is already packed, or leaves it alone; unpacking gives the weights back, bit for bit."""
    bound, experts = trial.bound, trial.inputs["experts"]
    if bound.prepare_weights is None:
        return
    packed = bound.prepare_weights(_on(experts, trial.device))
    if bound.unpack is not None:
        back = dict(tensors(bound.unpack(packed)))
        for name, tensor in tensors(experts):
            if name not in back or not torch.equal(back[name].cpu(), tensor):
                raise CheckFailed(f"unpack(prepare_weights(w)) has another {name} than w")
    try:
        twice = bound.prepare_weights(packed)
    except Exception:
        return
    arguments = [*_on({n: v for n, v in trial.inputs.items() if n != "experts"}, trial.device).values(), twice]
    workspace = torch.zeros(bound.workspace_bytes, dtype=torch.uint8, device=trial.device)
    options = {"workspace": workspace} if bound.workspace_bytes else {}
    out = bound.run(*arguments, **options)
    trial.require({"out": out.cpu()}, "after prepare_weights was called on packed weights without complaint")


@check
def updated_weights(trial: Trial) -> list[Score] | None:
    """Experts replaced inside the packed weights, in place, give what packing them anew gives; others stay.

    Two in the middle, then the last one alone, then the first three, then one with the shared expert, if there is one.
    """
    bound, inputs = trial.bound, trial.inputs
    if bound.prepare_weights is None or bound.update_weights is None:
        return None
    fresh = _on(trial.other["experts"], trial.device)
    packed = bound.prepare_weights(_on(inputs["experts"], trial.device))
    mixed = map_tensors(inputs["experts"], Tensor.clone)
    arguments = [*_on({n: v for n, v in inputs.items() if n != "experts"}, trial.device).values(), packed]
    options = {}
    if bound.workspace_bytes:
        options["workspace"] = torch.zeros(bound.workspace_bytes, dtype=torch.uint8, device=trial.device)
    scores: list[Score] = []
    for first, count in ((2, 2), (len(mixed.w13) - 1, 1), (0, 3), *([(1, 1)] if fresh.shared else [])):
        part = map_tensors(replace(fresh, shared=None), partial(_rows_of, first, count))
        for (_, target), (_, source) in zip(tensors(replace(mixed, shared=None)), tensors(part), strict=True):
            target[first : first + count] = source.cpu()
        if (first, count) == (1, 1):
            part, mixed = (
                replace(part, shared=fresh.shared),
                replace(mixed, shared=_on(fresh.shared, torch.device("cpu"))),
            )
        bound.update_weights(packed, first, part)
        oracle = oracles.exact(trial.operator, trial.case.site, {**inputs, "experts": mixed})
        out = bound.run(*arguments, **options)
        what = f"after experts {first} to {first + count - 1} were updated in place"
        scores += replace_exact(trial, oracle).require({"out": out.cpu()}, what)
    return scores


@check
def without_lora(trial: Trial) -> None:
    """Where no token has an adapter, the bits are those of a call without adapters, given or left out."""
    plain = trial.call({**trial.inputs, "lora": None}).outputs
    _same(plain, trial.first.outputs, "with adapters that no token takes, the result differs from one without any")
    left_out = trial.call({name: value for name, value in trial.inputs.items() if name != "lora"}).outputs
    _same(plain, left_out, "with lora left out, the result differs from one with None")


@check
def unforced(trial: Trial) -> None:
    """Where no row is forced, the bits are those of a call without forced ids, given or left out."""
    plain = trial.call({**trial.inputs, "forced_ids": None}).outputs
    _same(plain, trial.first.outputs, "with forced_ids of -1 alone, the result differs from one without any")
    left_out = trial.call({name: value for name, value in trial.inputs.items() if name != "forced_ids"}).outputs
    _same(plain, left_out, "with forced_ids left out, the result differs from one with None")


@check
def host_bound(trial: Trial) -> list[Score] | None:
    """A host bound below a live length is refused, or does no harm; it never writes past what it sized.

    Scores that have a column are right; where the bound sizes no output, what lies beyond it may be lost.
    """
    meta: SeqMeta = trial.inputs["meta"]
    low = {**trial.inputs, "meta": replace(meta, max_k=meta.max_k // 2)}
    try:
        outcome = trial.call(low)
    except Exception:
        return None
    if outcome.touched:
        raise CheckFailed(f"with max_k below a length, {', '.join(outcome.touched)} was written")
    if trial.operator.name != "block_scores":
        return None
    width = outcome.outputs["out"].shape[-1]
    wanted = {name: t if name != "out" else t[..., :width] for name, t in trial.exact.items()}
    return replace_exact(trial, wanted).require(outcome.outputs, "with max_k below a length, and no error")


@check
def huge_pages(trial: Trial) -> None:
    """Pages whose byte or element offset exceeds 31 bits are written where they belong, and nowhere else."""
    carved = trial.carved(trial.inputs)
    trial.harness.run(carved)
    cache: PagedCache = carved.inputs["cache"]  # on the device: the host has no copy of so much
    slots = carved.inputs["slots"]
    page, offset = slots // cache.layout.page_size, slots % cache.layout.page_size
    for name, given in (("k", trial.inputs["k"]), ("v", trial.inputs["v"])):
        if given is not None and not torch.equal(
            getattr(cache, name)[page, :, offset].cpu(), given.to(cache.buf.dtype)
        ):
            raise CheckFailed(f"the {name} written to pages {page.tolist()} do not stand there")


@check
def huge_pages_read(trial: Trial) -> list[Score]:
    """Pages whose offset exceeds 31 bits are read: the result has the bits of the same pages close together."""
    inputs = trial.inputs
    (name,) = trial.case.lazy
    cache, meta = inputs[name], inputs["meta"]
    pages, where = meta.block_table.unique(return_inverse=True)
    near = replace(cache, buf=cache.buf[pages.long()].clone())
    close = {**inputs, name: near, "meta": replace(meta, block_table=where.to(meta.block_table.dtype))}
    together = trial.call(close).outputs
    _same(together, trial.call(inputs).outputs, "with pages past 31 bits of offset, the result differs")
    sub = replace_exact(trial, oracles.exact(trial.operator, trial.case.site, close))
    return sub.require(together, "against the oracle")


def _rows_of(first: int, count: int, tensor: Tensor) -> Tensor:
    return tensor[first : first + count].clone()


def replace_exact(trial: Trial, oracle: dict[str, Tensor]) -> Trial:
    """The same trial, judged by another oracle; for parts of its inputs."""
    sub = Trial(trial.case, trial.bound, trial.device, trial.impl, trial.seed)
    sub.__dict__["exact"] = oracle
    sub.__dict__["declared"] = None
    return sub


def _on(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda t: t.to(device))


def _tokens(trial: Trial) -> int:
    return next(len(v) for n, v in trial.inputs.items() if isinstance(v, Tensor) and _is_token_axis(trial.operator, n))


def _take(trial: Trial, inputs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The given token rows of every input that has them."""

    def pick(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and trial.operator.name == "merge_topk" and name in ("scores", "ids"):
            return value[:, rows]
        if isinstance(value, ExpertLoRA):
            return replace(value, adapters=value.adapters[rows])
        return value[rows] if isinstance(value, Tensor) and _is_token_axis(trial.operator, name) else value

    return {name: pick(name, value) for name, value in inputs.items()}


def _alone(trial: Trial) -> Iterator[tuple[dict[str, Any], Tensor]]:
    meta = trial.inputs.get("meta")
    if isinstance(meta, SeqMeta):
        for request in range(len(meta.seq_lens)):
            inputs, rows = _requests(trial, [request])
            if len(rows):
                yield inputs, rows
        return
    count = _tokens(trial)
    for row in dict.fromkeys(r % count for r in _PROBED if -count <= r < count):
        rows = torch.tensor([row])
        yield _take(trial, trial.inputs, rows), rows
    for size in (2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129):
        if size < count:
            yield _take(trial, trial.inputs, torch.arange(size)), torch.arange(size)


def _requests(trial: Trial, order: Sequence[int]) -> tuple[dict[str, Any], Tensor]:
    """The given requests, in this order, and which token rows they are."""
    meta: SeqMeta = trial.inputs["meta"]
    bounds = [meta.cu_q[b : b + 2].tolist() for b in order]
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(first, last) for first, last in bounds)])
    counts = torch.tensor([0, *(last - first for first, last in bounds)], dtype=torch.int32)
    part = replace(
        meta,
        cu_q=counts.cumsum(0).to(torch.int32),
        seq_lens=meta.seq_lens[list(order)],
        block_table=meta.block_table[list(order)],
    )
    return {**_take(trial, trial.inputs, rows), "meta": part}, rows


def _chunk(trial: Trial, request: int, start: int, stop: int) -> dict[str, Any]:
    """Tokens start..stop of one request, with the context that they had."""
    meta: SeqMeta = trial.inputs["meta"]
    last = int(meta.cu_q[request + 1])
    length = int(meta.seq_lens[request]) - (last - stop)
    part = replace(
        meta,
        cu_q=torch.tensor([0, stop - start], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=meta.block_table[request : request + 1],
    )
    return {**_take(trial, trial.inputs, torch.arange(start, stop)), "meta": part}


def _cuts(first: int, last: int) -> list[tuple[int, int]]:
    """A request's tokens in two unequal chunks, and its last token alone."""
    if last - first < 2:
        return []
    middle = first + (last - first) * 2 // 3
    return [(first, middle), (middle, last), (last - 1, last)]
