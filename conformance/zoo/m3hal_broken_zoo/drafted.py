"""Wrong blocks of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal_broken_zoo._zoo import mutant


@dataclass(frozen=True)
class Faults:
    """How the block below differs from the definition. choose: a row of sums -> ids; embed: what stands for tokens."""

    choose: Callable[[Tensor], Tensor] = lambda sums: sums.masked_fill(sums.isnan(), -torch.inf).argmax(-1)
    target: Callable[[Any, Tensor], Tensor] = lambda head, draft: head.target(draft)
    #: of the token chosen last: (head, draft id, target id) -> index of w1
    follows: Callable[[Any, Tensor, Tensor], Tensor] = lambda head, draft, token: token
    sequential: bool = True
    noise: bool = True
    noisy_logits: bool = False
    late_confidence: bool = False
    squashed: bool = True


def _block(faults: Faults) -> Callable[..., Any]:
    def run(base, hidden, head, previous, noise):
        absent, row = previous < 0, previous.clamp(min=0).long()
        tokens, logits = torch.empty(base.shape[:2], dtype=torch.int32), torch.empty(base.shape)
        sure = None if hidden is None or head.confidence is None else torch.empty(base.shape[:2])
        for i in range(base.shape[1]):
            embedding = head.w1[row].float()
            step = base[:, i].float() + embedding @ head.w2.float().T
            sums = step + noise[:, i] if noise is not None and faults.noise else step
            draft = faults.choose(sums)
            token = faults.target(head, draft)
            if faults.sequential:
                row = faults.follows(head, draft, token)
            if sure is not None:
                seen = head.w1[row].float() if faults.late_confidence else embedding
                seen = torch.cat([hidden[:, i].float(), seen], -1)[:, : len(head.confidence)]
                value = seen @ head.confidence
                sure[:, i] = torch.sigmoid(value) if faults.squashed else value
            tokens[:, i], logits[:, i] = token, sums if faults.noisy_logits else step
        tokens[absent], logits[absent] = -1, 0.0
        if sure is not None:
            sure[absent] = 0.0
        return tokens, logits, sure

    return run


@mutant("draft_block_sample", "chained:oracle")
def draft_block_sample_in_parallel(site, right):
    """All tokens follow from the accepted one, as if the block were drawn at once."""
    return _block(Faults(sequential=False))


@mutant("draft_block_sample", "pruned:oracle")
def draft_block_sample_embeds_draft_ids(site, right):
    """The next token's embedding is looked up by the draft's id."""
    return _block(Faults(follows=lambda head, draft, token: draft))


@mutant("draft_block_sample", "pruned:oracle")
def draft_block_sample_absolute_map(site, right):
    """d2t is taken for the target's id, where it is what to add."""
    return _block(Faults(target=lambda head, draft: draft if head.d2t is None else head.d2t[draft]))


@mutant("draft_block_sample", "pruned:oracle")
def draft_block_sample_returns_draft_ids(site, right):
    """The tokens that are returned are the draft's."""

    def run(base, hidden, head, previous, noise):
        tokens, logits, sure = right(base, hidden, head, previous, noise)
        if head.d2t is None:
            return tokens, logits, sure
        ids = torch.arange(len(head.d2t)) + head.d2t
        drafts = torch.searchsorted(ids, tokens.long().clamp(min=0)).int()
        return torch.where(tokens < 0, tokens, drafts), logits, sure

    return run


@mutant("draft_block_sample", "sampled:oracle")
def draft_block_sample_always_greedy(site, right):
    """The noise is ignored."""
    return _block(Faults(noise=False))


@mutant("draft_block_sample", "sampled:oracle")
def draft_block_sample_noisy_logits(site, right):
    """The logits that are returned hold the noise: rejection sampling would compare with another distribution."""
    return _block(Faults(noisy_logits=True))


@mutant("draft_block_sample", "sampled:oracle")
def draft_block_sample_same_noise(site, right):
    """Every position of the block gets the first one's noise."""
    return lambda base, hidden, head, previous, noise: right(
        base, hidden, head, previous, None if noise is None else noise[:, :1].expand_as(noise)
    )


@mutant("draft_block_sample", "broken_logits:oracle", "F28")
def draft_block_sample_nan_wins(site, right):
    """NaN is the largest number of all, as in torch.argmax."""
    return _block(Faults(choose=lambda sums: sums.argmax(-1)))


@mutant("draft_block_sample", "ties:oracle", "F16")
def draft_block_sample_higher_id(site, right):
    """Among equals the higher id wins."""
    last = lambda sums: sums.shape[-1] - 1 - sums.nan_to_num(nan=-torch.inf).flip(-1).argmax(-1)  # noqa: E731
    return _block(Faults(choose=last))


@mutant("draft_block_sample", "padded:oracle", "F29")
def draft_block_sample_drafts_for_nobody(site, right):
    """A padded request gets tokens, of the last row of w1."""
    return lambda base, hidden, head, previous, noise: right(
        base, hidden, head, torch.where(previous < 0, len(head.w1) - 1, previous), noise
    )


@mutant("draft_block_sample", "confident:oracle")
def draft_block_sample_late_confidence(site, right):
    """The confidence of a token is computed from that token, not from the one before it."""
    return _block(Faults(late_confidence=True))


@mutant("draft_block_sample", "confident:oracle")
def draft_block_sample_raw_confidence(site, right):
    """Confidence is returned without the sigmoid."""
    return _block(Faults(squashed=False))


@mutant("draft_block_sample", "confident:oracle", formats=("bfloat16",))
def draft_block_sample_bf16_confidence(site, right):
    """The confidence head runs in bf16; its weights are fp32."""

    def run(base, hidden, head, previous, noise):
        weight = None if head.confidence is None else head.confidence.bfloat16().float()
        return right(base, hidden, replace(head, confidence=weight), previous, noise)

    return run


def _traits(site: Any, **traits: str) -> Callable[..., Any]:
    operator = ops.load("draft_block_sample")
    return lambda *inputs: operator.reference(*inputs, **operator.static_values(site), traits=traits)


@mutant("draft_block_sample", "greedy:oracle")
def draft_block_sample_rounds_the_bias(site, right):
    """The Markov bias is rounded to bf16, without declaring it."""
    return _traits(site, logits_round="bias_bfloat16")


@mutant("draft_block_sample", "greedy:oracle")
def draft_block_sample_rounds_logits(site, right):
    """Logits are rounded to bf16, where many become equal, without declaring it."""
    return _traits(site, logits_round="bfloat16")


@mutant("draft_block_sample", "greedy:oracle")
def draft_block_sample_short_rank(site, right):
    """The last 16 of the rank's columns are left out."""

    def run(base, hidden, head, previous, noise):
        kept = torch.arange(head.w2.shape[1]) < head.w2.shape[1] - 16
        return right(base, hidden, replace(head, w2=torch.where(kept, head.w2, 0)), previous, noise)

    return run


@mutant("draft_block_sample", "greedy:rerun")
def draft_block_sample_own_noise(site, right):
    """It draws its own noise where none is given."""
    generator = torch.Generator().manual_seed(1)

    def run(base, hidden, head, previous, noise):
        uniform = torch.rand(base.shape, generator=generator).clamp(1e-7, 1 - 1e-7)
        return right(base, hidden, head, previous, -torch.log(-torch.log(uniform)) if noise is None else noise)

    return run


@mutant("draft_block_sample", "strided:oracle", "F65")
def draft_block_sample_dense_logits(site, right):
    """Base logits are read from their address on, as if they were contiguous."""
    return lambda base, *rest: right(base.as_strided(base.shape, torch.empty(base.shape).stride()), *rest)


@mutant("draft_block_sample", "unordered:oracle")
def draft_block_sample_unsigned_map(site, right):
    """Offsets from draft to target ids are taken for positive, as they are where draft ids are in order."""

    def run(base, hidden, head, previous, noise):
        return right(base, hidden, replace(head, d2t=None if head.d2t is None else head.d2t.abs()), previous, noise)

    return run


@mutant("draft_block_sample", "unordered:oracle", "F65")
def draft_block_sample_dense_hidden(site, right):
    """Hidden states are taken for contiguous."""

    def run(base, hidden, head, previous, noise):
        if hidden is not None:
            hidden = torch.as_strided(hidden, hidden.shape, torch.empty(hidden.shape, device="meta").stride())
        return right(base, hidden, head, previous, noise)

    return run


@mutant("draft_block_sample", "unordered:oracle", "F29")
def draft_block_sample_minus_one_alone(site, right):
    """-1 is a padded request; after another negative token the block follows token 0."""
    return lambda base, hidden, head, previous, noise: right(
        base, hidden, head, previous.masked_fill(previous < -1, 0), noise
    )


@mutant("draft_block_sample", "vocabulary_70001:oracle", "F15")
def draft_block_sample_sixteen_bits(site, right):
    """Tokens are kept in sixteen bits."""

    def run(base, hidden, head, previous, noise):
        tokens, logits, sure = right(base, hidden, head, previous, noise)
        return torch.where(tokens < 0, tokens, tokens & 0xFFFF), logits, sure

    return run
