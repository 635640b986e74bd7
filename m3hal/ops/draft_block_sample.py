"""Draws a block of draft tokens from logits that a drafter computed at once: each depends on the one before it.

    logits[i] = base_logits[i] + w2 . w1[token[i - 1]]           token[-1] is the last accepted token
    draft[i]  = argmax(logits[i] + noise[i])                     greedy without noise
    token[i]  = draft[i] + d2t[draft[i]]                         the target's id, where the draft vocabulary is pruned
    confidence[i] = sigmoid(c . [hidden[i] | w1[token[i - 1]]])  in fp32

With noise ``temperature * Gumbel`` a draw from softmax(logits / temperature) is made; that noise decides it, bit for
bit, makes a draw repeatable, and leaves random numbers to the engine. A drafter that corrects only its k best tokens
has the others' base logits at -inf.
Source: vLLM's DSpark speculator and its Markov and confidence heads (``qwen3_dspark``), which round the bias and its
sum with the base logits to bf16 (trait ``logits_round``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import EXACT, MMA_ACCUM
from m3hal.ops.linear import linear


@dataclass(frozen=True)
class MarkovHead:
    """The weights that tie one draft token to the next.

    w1: [V, r], by the target's ids. w2: [D, r], by the draft's ids; D = V unless the vocabulary is pruned.
    d2t: int64 [D], what to add to a draft id to get the target's; None: they are the same.
    confidence: fp32 [H + r], or [H] where the head does not see the token before; None: there is no such head.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    d2t: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    def target(self, draft: torch.Tensor) -> torch.Tensor:
        """The target's ids."""
        return draft if self.d2t is None else draft + self.d2t[draft]


def draft_block_sample(
    base_logits: torch.Tensor,
    hidden: torch.Tensor | None,
    head: MarkovHead,
    previous: torch.Tensor,
    noise: torch.Tensor | None,
    *,
    traits: Mapping[str, str] = EXACT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A block of N tokens for each of R requests, one after the other.

    Args:
        base_logits: [R, N, D], the drafter's.
        hidden: [R, N, H], what the confidence head looks at; None without one.
        head: the Markov head, and the confidence head if there is one.
        previous: int32 or int64 [R], each request's last accepted token, a target's id; negative: a padded request.
        noise: fp32 [R, N, D], added where the largest is sought; None: greedy.

    Returns:
        tokens int32 [R, N], the target's ids: the largest sum, the lower draft id among equals, NaN last; the first id
        where no sum is above -inf. logits fp32 [R, N, D], without the noise, as rejection sampling needs them.
        confidence fp32 [R, N]; None without that head, or without hidden. A padded request has tokens -1, the rest 0.
    """
    compute = torch.promote_types(base_logits.dtype, torch.float32)
    how = traits.get("logits_round", "float32")

    def bias(embedding: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        product = linear(embedding.to(compute), w2)
        return product if how == "float32" else product.to(torch.bfloat16)

    rounding = torch.bfloat16 if how == "bfloat16" else compute
    return _sample(bias, base_logits, hidden, head, previous, noise, rounding)


def _sample(
    bias: Callable[..., torch.Tensor],
    base_logits: torch.Tensor,
    hidden: torch.Tensor | None,
    head: MarkovHead,
    previous: torch.Tensor,
    noise: torch.Tensor | None,
    rounding: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The block, with the given ``bias(w1[token], w2)``; rounding: of its sum with the base logits."""
    compute = torch.promote_types(base_logits.dtype, torch.float32)
    tokens, logits, sure = fake(base_logits, hidden, head, previous, noise)
    absent = previous < 0
    for i in range(tokens.shape[1]):
        embedding = head.w1[previous.clamp(min=0).long()]
        if sure is not None and hidden is not None and head.confidence is not None:
            sure[:, i] = _confidence(hidden[:, i], embedding, head.confidence, compute).masked_fill(absent, 0.0)
        step = base_logits[:, i].to(compute) + bias(embedding, head.w2).to(compute)
        step = step.to(rounding).to(compute)
        logits[:, i] = step.masked_fill(absent[:, None], 0.0)
        sought = step if noise is None else step + noise[:, i].to(compute)
        previous = head.target(sought.masked_fill(sought.isnan(), -torch.inf).argmax(-1))  # the first of equals
        tokens[:, i] = previous.masked_fill(absent, -1)
    return tokens, logits, sure


def _confidence(
    hidden: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """[R]: how likely the target is to accept each request's next token."""
    seen = hidden.to(compute)
    if len(weight) > seen.shape[1]:
        seen = torch.cat([seen, embedding.to(compute)], -1)
    return torch.sigmoid(seen @ weight.to(compute))


def compose(*, linear: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """The operator as a composition; the given ``linear`` rounds the Markov bias to the dtype of w1."""

    def run(
        base_logits: torch.Tensor,
        hidden: torch.Tensor | None,
        head: MarkovHead,
        previous: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> Any:
        rounding = torch.promote_types(base_logits.dtype, torch.float32)
        return _sample(linear, base_logits, hidden, head, previous, noise, rounding)

    return run


def fake(
    base_logits: torch.Tensor,
    hidden: torch.Tensor | None,
    head: MarkovHead,
    previous: torch.Tensor,
    noise: torch.Tensor | None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Empty and contiguous: int32 [R, N], fp32 [R, N, D], and fp32 [R, N] or None."""
    compute, device = torch.promote_types(base_logits.dtype, torch.float32), base_logits.device
    shape = base_logits.shape
    tokens = torch.empty(shape[:2], dtype=torch.int32, device=device)
    logits = torch.empty(shape, dtype=compute, device=device)
    is_sure = hidden is not None and head.confidence is not None
    return tokens, logits, torch.empty(shape[:2], dtype=compute, device=device) if is_sure else None


OPERATOR = Operator(
    name="draft_block_sample",
    kind="fused",
    reference=draft_block_sample,
    fake=fake,
    numeric=Numeric("S", "tokens by regret of logits + noise that follow from its own tokens; logits within R"),
    sites=("drafter",),
    traits=(
        Trait(
            "logits_round",
            ("float32", "bias_bfloat16", "bfloat16"),
            True,
            "what is rounded to bf16: nothing; the Markov bias; the bias, and its sum with the base logits",
        ),
        MMA_ACCUM,
    ),
    covers=("linear",),
    compose=compose,
    composed_traits={"logits_round": "bias_bfloat16"},
    source="vLLM qwen3_dspark, dspark speculator",
)
