"""What operators take besides plain tensors: the sequences of one forward, and weights that belong together."""

from __future__ import annotations

from dataclasses import dataclass

from m3hal._lazy import torch
from m3hal.formats import QTensor


@dataclass(frozen=True)
class SeqMeta:
    """Where each request's tokens lie; one struct for prefill, decode, chunked prefill and multi-token verify.

    cu_q: int32 [B+1], offsets of each request's query tokens in the flat token axis; a request may have none.
    seq_lens: int32 [B], tokens of the request *including* this forward's; 0 marks a padded request.
    block_table: int32 [B, pages], the page that holds tokens [i*page, (i+1)*page) of the request; entries past
        ceil(seq_len / page) are undefined and must not be followed.
    max_q, max_k: host upper bounds of query tokens and of seq_lens (a graph is captured at these).

    Query token i of request b stands at position ``seq_lens[b] - q_len[b] + i``.
    """

    cu_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_q: int
    max_k: int

    def positions(self, tokens: int) -> torch.Tensor:
        """int64 [tokens]: where each query token stands in its request; -1 in a padded request or in none."""
        token = torch.arange(tokens, device=self.cu_q.device)
        if len(self.seq_lens) == 0:
            return torch.full_like(token, -1)
        ends, lengths = self.cu_q[1:].long(), self.seq_lens.long()
        request = torch.searchsorted(ends, token, right=True).clamp(max=len(lengths) - 1)
        position = lengths[request] - (ends[request] - token)
        real = (token < ends[-1]) & (lengths[request] > 0)
        return torch.where(real, position, -1)


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of one layer on this rank, at the interface: ``[gate | up]`` halves, never interleaved.

    w13: [E, 2*I, H], gate rows first, then up rows. w2: [E, H, I]. In a storage format they are QTensors whose last
        axis is that of the reduction; a global scale is [E, 1, 1], or [E, rows, 1] where gate and up differ.
    x_scale, hidden_scale: fp32 scalars, the global scales with which a checkpoint wants the inputs of w13 and of w2
        quantised (``input_scale``); None: the format's own way. Only where activations are quantised.
    shared: one more expert, w13 [1, 2*Is, H] and w2 [1, H, Is], in a storage format of its own, that every token takes
        with weight 1. Of ranks that add up their outputs one holds it, or each holds a slice of its inner dimension.
    """

    w13: torch.Tensor | QTensor
    w2: torch.Tensor | QTensor
    x_scale: torch.Tensor | None = None
    hidden_scale: torch.Tensor | None = None
    shared: ExpertWeights | None = None


@dataclass(frozen=True)
class ExpertLoRA:
    """Low-rank additions to the routed experts of one layer on this rank, by adapter; they are never packed.

    a13: [L, E, r, H], b13: [L, E, 2*I, r] in ``[gate | up]`` halves. a2: [L, E, r, I], b2: [L, E, H, r]. In x's dtype;
        adapters of a smaller rank are filled up with zeros.
    scales: fp32 [L], ``lora_alpha / rank``.
    adapters: int32 [T], each token's adapter; negative: none, its experts as they are.
    """

    a13: torch.Tensor
    b13: torch.Tensor
    a2: torch.Tensor
    b2: torch.Tensor
    scales: torch.Tensor
    adapters: torch.Tensor


@dataclass(frozen=True)
class QKNorms:
    """The weights of one attention layer's head norms, each shared by all heads of its kind.

    q, k: [head_dim]. index_q, index_k: [index_dim]; None on a layer without an indexer.
    """

    q: torch.Tensor
    k: torch.Tensor
    index_q: torch.Tensor | None = None
    index_k: torch.Tensor | None = None
