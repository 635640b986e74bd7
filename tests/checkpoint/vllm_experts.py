"""vLLM's own container of routed experts, built on the CPU for one rank of many, and filled by vLLM's own loader."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from tests.checkpoint.conftest import SMALL


def build(quant_config: Any, *, ranks: int = 1, rank: int = 0, experts: int = SMALL.experts) -> RoutedExperts:
    """One layer's experts. Its method asks for a kernel; the caller has to patch ``select_fp8_moe_backend``."""
    parallel = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=1,
        ep_size=ranks,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=rank,
        sp_size=1,
        use_ep=ranks > 1,
        all2all_backend="naive",
        enable_eplb=False,
    )
    manager = ExpertMapManager(
        max_num_batched_tokens=16,
        top_k=2,
        global_num_experts=experts,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=2,
        hidden_dim=SMALL.hidden,
        intermediate_size=SMALL.inter,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=experts,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        activation=MoEActivation.from_str("swigluoai_uninterleave"),
        device="cpu",
        routing_method=RoutingMethodType.Default,
    )
    with set_current_vllm_config(VllmConfig()):
        layer = RoutedExperts(
            "language_model.model.layers.1.block_sparse_moe.experts",
            torch.bfloat16,
            config,
            quant_config,
            expert_map_manager=manager,
            ckpt_gate_proj_name="w1",
            ckpt_down_proj_name="w2",
            ckpt_up_proj_name="w3",
        )
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)  # NaN in every format here
    return layer


def fill(layer: RoutedExperts, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As vLLM's models do: its mapping from checkpoint names to parameters, then the parameter's loader."""
    parameters = {f"experts.{name}": parameter for name, parameter in layer.named_parameters()}
    mapping = RoutedExperts.make_expert_params_mapping(
        torch.nn.Module(), "w1", "w2", "w3", layer.global_num_experts, routed_experts_prefix=""
    )
    for published, tensor in weights:
        if not re.search(r"layers\.1\.block_sparse_moe\.experts\.", published):
            continue
        for parameter_name, weight_name, expert, shard in mapping:
            if weight_name in published:
                name = published[published.index("experts.") :].replace(weight_name, parameter_name).replace("..", ".")
                parameter = parameters[name]
                parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
                break
        else:
            raise AssertionError(f"vLLM has no place for {published}")
