"""From vLLM's configuration to m3hal's plan, the same in the front end and on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from m3hal.dispatch import VLLM_HOLDS, M3halError, Plan, Policy, devices, plan
from m3hal.shape import ModelShape
from m3hal.vllm.quantization import computes_projections, expert_format, projection_format
from m3hal.vllm.support import dtype_name, index_format, kv_format

#: page maps that lie in the memory that vLLM's layout LBHNC gives a cache, preferred first
LAYOUTS = ("hnd", "msa_slot", "planar")


def policy_of(vllm_config: Any, environ: Mapping[str, str] = os.environ) -> Policy:
    """What ``additional_config`` and the environment ask for. Raises M3halError."""
    asked = (vllm_config.additional_config or {}).get("m3hal", {})
    if not isinstance(asked, Mapping):
        raise M3halError(f'additional_config["m3hal"] must be an object such as {{"backend": "auto"}}; got {asked!r}.')
    policy = Policy.resolve(engine=asked, environ=environ).on(device_of())
    if environ.get("VLLM_BATCH_INVARIANT", "0") in ("", "0") or BATCH_INVARIANT in policy.require:
        return policy
    return replace(policy, require=(*policy.require, BATCH_INVARIANT))


#: what vLLM's batch-invariant mode asks of an implementation
BATCH_INVARIANT = ("batch_invariant", "yes")


def make_plan(vllm_config: Any, policy: Policy) -> Plan:
    """The plan for this model on this machine.

    In a worker the policy carries the fingerprint that the front end wrote into ``additional_config``; a different
    plan here raises M3halError naming both.
    """
    engine = dict(VLLM_HOLDS)
    if computes_projections(vllm_config.model_config):
        del engine["linear"]
    return plan(shape_of(vllm_config), device_of(), policy, engine=engine, cache_layouts=LAYOUTS)


def shape_of(vllm_config: Any) -> ModelShape:
    """The model on one rank."""
    model, scheduler, parallel = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.parallel_config
    text = model.hf_text_config
    return ModelShape.from_config(
        vars(text),
        dtype=dtype_name(model.dtype),
        kv_format=kv_format(vllm_config),
        index_format=index_format(vllm_config),
        weight_format=expert_format(model),
        projection_format=projection_format(model) or dtype_name(model.dtype),
        page_size=text.sparse_attention_config["sparse_block_size"],  # one sparse block per page
        max_tokens=scheduler.max_num_batched_tokens,
        max_seqs=scheduler.max_num_seqs,
        max_context=model.max_model_len,
        tensor_parallel=parallel.tensor_parallel_size,
        expert_parallel=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
    )


def device_of() -> str:
    """This process's device by m3hal's name, asked without initialising it."""
    from vllm.platforms import current_platform

    kind = "hip" if current_platform.is_rocm() else str(current_platform.device_type)
    return next((found.device for found in devices.detect() if devices.kind(found.device) == kind), kind)
