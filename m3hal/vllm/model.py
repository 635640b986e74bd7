"""MiniMax-M3's text model for stock vLLM, also for vision-language checkpoints, whose vision weights it skips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.models.utils import make_layers, maybe_prefix

from m3hal.ops.rope_partial import rope_table
from m3hal.shape import SiteKind
from m3hal.vllm import published
from m3hal.vllm.attention import M3Attention
from m3hal.vllm.moe import M3MLP, M3MoE
from m3hal.vllm.operators import SiteOperators, operators_of
from m3hal.vllm.planning import make_plan, policy_of
from m3hal.vllm.quantization import schemes_of
from m3hal.vllm.weights import load_checkpoint

Operators = dict[SiteKind, SiteOperators]


class M3Norm(nn.Module):
    """Norm of the residual stream: adds a branch's output to it first, except where the stream begins."""

    def __init__(self, operators: SiteOperators, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(operators.site.hidden_size), requires_grad=False)
        self.norm, self.add_norm = operators.run("rms_norm", prefix), operators.run("add_rms_norm", prefix)

    def forward(self, branch: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the normalised stream and the stream."""
        if residual is None:
            return self.norm(branch, self.weight), branch
        normed, residual = self.add_norm(branch, residual, self.weight)
        return normed, residual


class M3DecoderLayer(nn.Module):
    """Attention, then feed-forward; which kind of each, the checkpoint's config says layer by layer."""

    def __init__(self, operators: Operators, cos_sin: torch.Tensor, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        layer = int(prefix.rpartition(".")[2])
        is_sparse = config.sparse_attention_config["sparse_attention_freq"][layer]
        attention = operators["sparse_attention" if is_sparse else "dense_attention"]
        feed_forward = operators["moe" if config.moe_layer_freq[layer] else "dense_mlp"]

        self.input_layernorm = M3Norm(attention, f"{prefix}.input_layernorm")
        self.self_attn = M3Attention(attention, cos_sin, vllm_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = M3Norm(feed_forward, f"{prefix}.post_attention_layernorm")
        self.is_moe = bool(config.moe_layer_freq[layer])
        if self.is_moe:  # the checkpoint names the two kinds differently
            self.block_sparse_moe = M3MoE(feed_forward, vllm_config, f"{prefix}.block_sparse_moe")
        else:
            width = config.dense_intermediate_size
            self.mlp = M3MLP(feed_forward, width, vllm_config, f"{prefix}.mlp", sum_over_ranks=True)

    def forward(
        self, positions: torch.Tensor, branch: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """branch: the previous layer's output, not yet added to the stream."""
        normed, residual = self.input_layernorm(branch, residual)
        branch = self.self_attn(positions, normed)
        normed, residual = self.post_attention_layernorm(branch, residual)
        branch = self.block_sparse_moe(normed) if self.is_moe else self.mlp(normed)
        return branch, residual


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
class M3Model(nn.Module, EagleModelMixin):
    """Embedding, layers, final norm. Makes the plan of this rank and binds it.

    A drafter may ask for the stream as it enters some of the layers (``aux_hidden_state_layers``, vLLM sets it).
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        plan = make_plan(vllm_config, policy_of(vllm_config))
        operators = operators_of(plan)
        table = rope_table(plan.shape.max_context, plan.shape.rotary_dim, plan.shape.rope_theta, device="cpu")
        cos_sin = table.to(torch.get_default_device())  # computed on the CPU, as transformers does
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        _, _, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: M3DecoderLayer(operators, cos_sin, vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = M3Norm(operators["moe" if config.moe_layer_freq[-1] else "dense_mlp"], f"{prefix}.norm")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        branch = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        wanted: tuple[int, ...] = self.aux_hidden_state_layers  # type: ignore[assignment]
        streams = []
        for number, layer in enumerate(self.layers):
            if number in wanted:
                streams.append(branch if residual is None else branch + residual)
            branch, residual = layer(positions, branch, residual)
        hidden: torch.Tensor = self.norm(branch, residual)[0]
        return (hidden, streams) if wanted else hidden


class M3HalForCausalLM(nn.Module, SupportsEagle3):
    """What vLLM's registry resolves to; vLLM finds out what it can do from its methods."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.model = M3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self._published = published.tensors(config, schemes_of(vllm_config.model_config))
        self._has_weights = False

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, H], and the streams that a drafter asked for."""
        found: torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]
        found = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return found

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Also of updates while the engine lives, which may bring some of the tensors only."""
        loaded = load_checkpoint(self, weights, self._published, partial=self._has_weights)
        self._has_weights = True
        return loaded
