"""The feed-forward layers of MiniMax-M3 in vLLM: the mixture of experts, and the plain MLP that it shares.

    hidden --gate (fp32)--> logits --route_topk--> weights, ids --moe_experts--> routed
    hidden --shared_experts (an MLP)--> shared                          out = routed + shared, summed over the ranks

To ``torch.compile`` routing and experts are one opaque operator, ``torch.ops.m3hal.moe``, that finds its layer by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from m3hal.formats import QTensor, spec_of
from m3hal.ops import ExpertWeights
from m3hal.vllm import opaque
from m3hal.vllm.fp8_experts import BYTES, Pairs, device_profile, to_fp8
from m3hal.vllm.operators import SiteOperators
from m3hal.vllm.quantization import expert_format


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
        self.activate = operators.run("swiglu_oai", prefix)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden)
        out: torch.Tensor = self.down_proj(self.activate(gate_up))[0]
        return out


class M3MoE(nn.Module):
    """Every rank holds a slice of every expert: rows of gate and up, columns of down.

    format: how the routed experts are stored; None: in the model's dtype.
    """

    format: str | None = None

    def __init__(self, operators: SiteOperators, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        site, config = operators.site, vllm_config.model_config.hf_text_config
        self.name, self.rows = f"{prefix}.experts", site.intermediate_size
        self.route, self.compute = operators.run("route_topk", prefix), operators.run("moe_experts", prefix)

        # The router decides between experts whose scores may be close: it is stored and computed in fp32.
        self.gate = GateLinear(
            site.hidden_size,
            site.num_experts,
            params_dtype=torch.float32,
            out_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        self.e_score_correction_bias = _weight(site.num_experts, dtype=torch.float32)
        self.format = expert_format(vllm_config.model_config)
        self._pairs = Pairs()
        dtype = None if self.format is None else torch.float8_e4m3fn
        self.w13 = _weight(site.num_local_experts, 2 * self.rows, site.hidden_size, dtype=dtype)
        self.w2 = _weight(site.num_local_experts, site.hidden_size, self.rows, dtype=dtype)
        if self.format is not None:  # one scale per output channel
            self.w13_scale = _weight(site.num_local_experts, 2 * self.rows, 1, dtype=torch.float32)
            self.w2_scale = _weight(site.num_local_experts, site.hidden_size, 1, dtype=torch.float32)
        self.experts: Any = self.stored()  # what moe_experts takes; packed after loading
        self.quant_method = PackExperts(operators)  # vLLM calls it when all weights are loaded, also for dummy weights
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
        out: torch.Tensor = self.compute(hidden, weights, ids, self.experts)
        return out

    def stored(self) -> ExpertWeights:
        """The experts as the parameters hold them."""
        if self.format is None:
            return ExpertWeights(self.w13.data, self.w2.data)
        spec = spec_of(self.format)
        w13, w2 = self.w13.data.view(torch.uint8), self.w2.data.view(torch.uint8)
        return ExpertWeights(
            QTensor(w13, spec, self.w13_scale.data),
            QTensor(w2, spec, self.w2_scale.data),
        )

    def leaves(self) -> tuple[str, ...]:
        """What a checkpoint has of each matrix."""
        return ("weight",) if self.format is None else ("weight", "weight_scale")

    def load_expert(self, expert: int, name: str, leaf: str, tensor: torch.Tensor) -> None:
        """Copies this rank's slice of one published matrix: w1 gate [I, H], w3 up [I, H], w2 down [H, I].

        MXFP4 codes and scales (bytes) wait for each other and become FP8 first.
        """
        if self.format is None or tensor.dtype not in BYTES:
            return self._copy(expert, name, leaf, tensor)
        pair = self._pairs.add((expert, name), leaf == "weight_scale", tensor)
        if pair is not None:
            weight, scale = to_fp8(f"{self.name}.{expert}.{name}", *pair, device_profile())
            self._copy(expert, name, "weight", weight)
            self._copy(expert, name, "weight_scale", scale)

    def _copy(self, expert: int, name: str, leaf: str, tensor: torch.Tensor) -> None:
        first = get_tensor_model_parallel_rank() * self.rows
        mine = slice(first, first + self.rows)
        suffix = "_scale" if leaf == "weight_scale" else ""
        if name == "w2":
            target = getattr(self, "w2" + suffix).data[expert]
            target.copy_(tensor if suffix else tensor[:, mine])
        else:
            gate, up = getattr(self, "w13" + suffix).data[expert].chunk(2)
            (gate if name == "w1" else up).copy_(tensor[mine])


class PackExperts(QuantizeMethodBase):
    """vLLM's hook after loading: hands the experts to the implementation, which may pack them its own way."""

    def __init__(self, operators: SiteOperators) -> None:
        self._pack = operators.bound["moe_experts"].prepare_weights

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("M3MoE creates its own weights")

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("M3MoE computes through the plan")

    def process_weights_after_loading(self, layer: M3MoE) -> None:
        if self._pack is not None:
            layer.experts = self._pack(layer.stored())
            for name in ("w13", "w2", "w13_scale", "w2_scale"):  # the packed form is all that stays
                if hasattr(layer, name):
                    delattr(layer, name)


def _weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An unset weight, in the model's dtype unless told otherwise."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _moe(hidden: torch.Tensor, logits: torch.Tensor, layer: str) -> torch.Tensor:
    found: M3MoE = get_forward_context().no_compile_layers[layer]
    return found.routed(hidden, logits)


opaque.define(
    "moe(Tensor hidden, Tensor logits, str layer) -> Tensor",
    _moe,
    fake=lambda hidden, logits, layer: torch.empty_like(hidden),
)
