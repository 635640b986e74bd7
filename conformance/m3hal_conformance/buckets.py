"""Pads inputs to the shapes that a static-shape implementation declares, and takes the padding off its outputs.

Padding follows the contracts: a padded token has slot -1, expert id -1 and sees no blocks; a padded request has length
0; further pages of a cache belong to nobody and hold NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import QTensor
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertLoRA, ExpertWeights, Operator, SeqMeta
from m3hal_conformance.bounds import bits
from m3hal_conformance.harness import Outcome
from m3hal_conformance.ranks import by_rank, gathered

Buckets = Mapping[str, tuple[int, ...]]

#: inputs whose first axis is the token, by operator-independent name; the value is what a padded row holds
_TOKENS: Mapping[str, float] = {
    "x": 0, "residual": 0, "positions": 0, "k": 0, "v": 0, "slots": -1, "index_slots": -1, "q": 0, "index_q": 0,
    "visible_blocks": 0, "block_ids": -1, "logits": 0, "weights": 0, "gate_up": 0, "qkv": 0, "forced_ids": -1,
}  # fmt: skip


def misfit(operator: Operator, inputs: Mapping[str, Any], buckets: Buckets) -> str | None:
    """Why inputs do not fit any bucket, as a reason; None when they do."""
    for name, size in sizes(operator, inputs).items():
        if name in buckets and size > max(buckets[name]):
            return f"the case has {size} {name}; the largest declared bucket has {max(buckets[name])}"
    return None


def sizes(operator: Operator, inputs: Mapping[str, Any]) -> dict[str, int]:
    """tokens, requests, pages, context and resident experts of inputs, where they have them; of ranks, the most."""
    ranks = by_rank(inputs)
    if len(ranks) > 1:
        several = [sizes(operator, own) for own in ranks]
        return {name: max(own[name] for own in several) for name in several[0]}
    found: dict[str, int] = {}
    for name, value in inputs.items():
        if isinstance(value, SeqMeta):
            found |= {"requests": len(value.seq_lens), "context": value.max_k}
        elif isinstance(value, PagedCache):
            found["pages"] = max(found.get("pages", 0), len(value.buf))
        elif isinstance(value, ExpertWeights):
            found["experts"] = (value.w13.data if isinstance(value.w13, QTensor) else value.w13).shape[0]
        elif isinstance(value, Tensor) and _is_token_axis(operator, name):
            found["tokens"] = len(value)
    return found


def padded(operator: Operator, inputs: Mapping[str, Any], buckets: Buckets) -> dict[str, Any]:
    """The inputs, grown to the smallest buckets that hold them; as they are without buckets."""
    if not buckets:
        return dict(inputs)
    ranks = by_rank(inputs)
    if len(ranks) > 1:
        return gathered([padded(operator, own, buckets) for own in ranks])
    sized = sizes(operator, inputs)
    target = {name: min(b for b in buckets[name] if b >= size) for name, size in sized.items() if name in buckets}
    result: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, SeqMeta):
            value = _meta(value, target)
        elif isinstance(value, PagedCache) and "pages" in target:
            value = replace(value, buf=_rows(value.buf, target["pages"], float("nan")))
        elif isinstance(value, ExpertLoRA) and "tokens" in target:
            value = replace(value, adapters=_rows(value.adapters, target["tokens"], -1))
        elif isinstance(value, Tensor) and "tokens" in target and _is_token_axis(operator, name):
            value = _rows(value, target["tokens"], _TOKENS[_key(operator, name)])
        result[name] = value
    return result


def trimmed(operator: Operator, outcome: Outcome, inputs: Mapping[str, Any]) -> Outcome:
    """The outcome without what padding added."""
    ranks = by_rank(inputs)
    if len(ranks) > 1:
        return _trimmed_ranks(outcome, [sizes(operator, own)["tokens"] for own in ranks])
    tokens = sizes(operator, inputs).get("tokens")
    for name, tensor in outcome.outputs.items():
        cache = inputs.get(name.split(".")[0])
        wanted = len(cache.buf) if isinstance(cache, PagedCache) else tokens
        if wanted is not None and len(tensor) > wanted:
            outcome.outputs[name] = tensor[:wanted]
            if name in outcome.unwritten:
                outcome.unwritten[name] = outcome.unwritten[name][:wanted]
    return outcome


def _trimmed_ranks(outcome: Outcome, tokens: Sequence[int]) -> Outcome:
    """Each rank's rows stand in its own bucket, one bucket below the other."""
    for values in (outcome.outputs, outcome.unwritten):
        for name, tensor in values.items():
            if len(tensor) > sum(tokens) and not name.endswith(".buf"):
                buckets = tensor.chunk(len(tokens))  # equal: all ranks are asked in buckets of one size
                values[name] = torch.cat([own[:count] for own, count in zip(buckets, tokens, strict=True)])
    return outcome


def _is_token_axis(operator: Operator, name: str) -> bool:
    return _key(operator, name) in _TOKENS


def _key(operator: Operator, name: str) -> str:
    if name == "weights" and operator.name != "moe_experts":
        return ""
    if name == "ids" and operator.name == "moe_experts":
        return "slots"  # padded with -1
    if name == "scores" and operator.name == "topk_blocks":
        return "x"
    return name


def _rows(tensor: Tensor, count: int, fill: float) -> Tensor:
    if len(tensor) == count:
        return tensor
    grown = torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype)
    if fill != fill:
        bits(grown).fill_(-1)
    else:
        grown.fill_(fill)
    bits(grown)[: len(tensor)] = bits(tensor)
    return grown


def _table_width(context: int) -> int:
    """Columns of a block table that holds a context in pages of 64 tokens, the smallest in use, and one more."""
    return context // 64 + 1


def _meta(meta: SeqMeta, target: Mapping[str, int]) -> SeqMeta:
    requests = target.get("requests", len(meta.seq_lens))
    extra = requests - len(meta.seq_lens)
    max_k = target.get("context", meta.max_k)
    width = meta.block_table.shape[1]
    table = meta.block_table
    if "context" in target and width < _table_width(target["context"]):  # entries past the end are never followed
        table = torch.nn.functional.pad(table, (0, _table_width(target["context"]) - width))
        width = table.shape[1]
    if extra:
        table = torch.cat([table, torch.zeros(extra, width, dtype=table.dtype)])
    return SeqMeta(
        cu_q=torch.cat([meta.cu_q, meta.cu_q[-1:].expand(extra)]),
        seq_lens=torch.cat([meta.seq_lens, torch.zeros(extra, dtype=meta.seq_lens.dtype)]),
        block_table=table,
        max_q=meta.max_q,
        max_k=max_k,
    )
