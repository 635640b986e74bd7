"""The feed-forward layers of MiniMax-M3 in vLLM: the mixture of experts, and the plain MLP that it shares.

    hidden --gate (fp32)--> logits --route_topk--> weights, ids --moe_experts--> routed
    hidden --shared_experts (an MLP)--> shared                          out = routed + shared, summed over the ranks

To ``torch.compile`` routing and experts are one opaque operator, ``torch.ops.m3hal.moe``, that finds its layer by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from m3hal.vllm import opaque
from m3hal.vllm.experts import StoredExperts, share_of
from m3hal.vllm.operators import SiteOperators


class M3MLP(nn.Module):
    """SwiGLU-OAI MLP. sum_over_ranks: whether the output is complete, or this rank's part of a sum."""

    def __init__(
        self,
        operators: SiteOperators,
        intermediate_size: int,
        vllm_config: Any,
        prefix: str,
        *,
        sum_over_ranks: bool,
    ) -> None:
        super().__init__()
        hidden = operators.site.hidden_size
        kinds = {"bias": False, "quant_config": vllm_config.quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [intermediate_size] * 2, **kinds, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden, **kinds, reduce_results=sum_over_ranks, prefix=f"{prefix}.down_proj"
        )
        operators.serve(self.gate_up_proj, f"{prefix}.gate_up_proj")
        operators.serve(self.down_proj, f"{prefix}.down_proj")
        self.activate = operators.run("swiglu_oai", prefix)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden)
        out: torch.Tensor = self.down_proj(self.activate(gate_up))[0]
        return out


class M3MoE(nn.Module):
    """Each rank holds a slice of every expert, or, with expert parallelism, every row of its own experts."""

    def __init__(self, operators: SiteOperators, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        site, config = operators.site, vllm_config.model_config.hf_text_config
        self.name = f"{prefix}.experts"
        self.route, self.compute = operators.run("route_topk", prefix), operators.run("moe_experts", prefix)

        # The router decides between experts whose scores may be close: it is stored and computed in fp32.
        self.gate = GateLinear(
            site.hidden_size,
            site.num_experts,
            params_dtype=torch.float32,
            out_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(site.num_experts, dtype=torch.float32), requires_grad=False
        )
        share = share_of(site, vllm_config.parallel_config.enable_expert_parallel)
        self.experts = StoredExperts(operators, share, self.name)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = M3MLP(
                operators,
                config.intermediate_size * config.n_shared_experts,
                vllm_config,
                f"{prefix}.shared_experts",
                sum_over_ranks=False,
            )
        vllm_config.compilation_config.static_forward_context[self.name] = self  # where the opaque operator looks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H]."""
        logits, _ = self.gate(hidden)
        out: torch.Tensor = torch.ops.m3hal.moe(hidden, logits, self.name)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden)
        if get_tensor_model_parallel_world_size() > 1:
            out = tensor_model_parallel_all_reduce(out)
        return out

    def routed(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """This rank's part of the routed experts' output."""
        weights, ids = self.route(logits, self.e_score_correction_bias)
        out: torch.Tensor = self.compute(hidden, weights, self._local(ids), self.experts.packed)
        return out

    def _local(self, ids: torch.Tensor) -> torch.Tensor:
        """Experts by this rank's numbers, -1 for another's."""
        share, total = self.experts.share, len(self.e_score_correction_bias)
        if share.experts == total:
            return ids
        local = ids - share.first_expert
        return torch.where((local >= 0) & (local < share.experts), local, -1).to(ids.dtype)


def _moe(hidden: torch.Tensor, logits: torch.Tensor, layer: str) -> torch.Tensor:
    found: M3MoE = get_forward_context().no_compile_layers[layer]
    return found.routed(hidden, logits)


opaque.define(
    "moe(Tensor hidden, Tensor logits, str layer) -> Tensor",
    _moe,
    fake=lambda hidden, logits, layer: torch.empty_like(hidden),
)
