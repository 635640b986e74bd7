"""The configuration hook: decides, in the front-end process and before the engine starts, who serves MiniMax-M3.

vLLM calls it with the finished ``VllmConfig``. Not asked for, m3hal leaves everything as it is. Asked for, it refuses
what it can't do, plans, logs the plan, writes the plan's fingerprint into ``additional_config`` (vLLM hashes that into
its compile cache, and every worker compares its own plan with it), and renames the architecture to m3hal's model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from m3hal.vllm import metrics, plugin, quantization, registry, stored
from m3hal.vllm.plugin import logger

#: the opaque operator that no graph holds, and the operators that graphs do hold
ATTENTION = "m3hal::attention"
CAPTURED = ("rms_norm", "add_rms_norm", "swiglu_oai", "linear", "route_topk", "moe_experts")

_previous: dict[str, type[Any]] = {}


class ConfigHook(VerifyAndUpdateConfig):
    """What :func:`install` puts into vLLM's table of hooks by architecture; a hook that was there before still runs."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        _before(model_config.architecture).verify_and_update_model_config(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        _before(vllm_config.model_config.architecture).verify_and_update_config(vllm_config)
        configure(vllm_config, os.environ)


def install(architectures: tuple[str, ...]) -> None:
    """Idempotent."""
    for architecture in architectures:
        found = MODELS_CONFIG_MAP.get(architecture)
        if found is not ConfigHook:
            if found is not None:
                _previous[architecture] = found
            MODELS_CONFIG_MAP[architecture] = ConfigHook


def _before(architecture: str) -> Any:
    return _previous.get(architecture, VerifyAndUpdateConfig)


def is_selected(additional_config: Any, environ: Mapping[str, str]) -> bool:
    """Whether the user mentioned m3hal: a key ``m3hal`` in ``--additional-config``, or a set ``M3HAL_`` variable.

    An empty variable is no mention, as it is no value to :class:`m3hal.Policy`.
    """
    asked = isinstance(additional_config, dict) and "m3hal" in additional_config
    return asked or any(value and name.startswith("M3HAL_") for name, value in environ.items())


def configure(vllm_config: Any, environ: Mapping[str, str]) -> None:
    """Lets m3hal's model serve, or leaves the stock model in place. Raises M3halError, one sentence."""
    architecture = vllm_config.model_config.architecture
    foreign = registry.holder(architecture)
    if not is_selected(vllm_config.additional_config, environ):
        if foreign:
            logger.warning("m3hal is installed, but %s of another plugin holds %s.", foreign, architecture)
        _keep_stock(vllm_config.model_config)
        return
    from m3hal.dispatch import pin
    from m3hal.vllm.planning import make_plan, policy_of

    policy = policy_of(vllm_config, environ)
    if policy.in_tree:
        logger.info("vLLM's own model serves %s, as m3hal's backend 'vllm' asks.", architecture)
        _keep_stock(vllm_config.model_config)
        return
    _refuse(vllm_config, foreign)
    plan = make_plan(vllm_config, policy)
    if policy.exported:
        pin.export(plan, policy.exported)
    if plan.in_tree:
        logger.warning("vLLM's own model serves %s instead of m3hal's: %s.", architecture, plan.reason)
        _keep_stock(vllm_config.model_config)
        return
    metrics.publish(plan, str(vllm_config.model_config.served_model_name))
    logger.info("m3hal serves %s, text only: images are refused.\n%s", architecture, plan.table())
    _take_over(vllm_config, plan)


def _refuse(vllm_config: Any, foreign: str | None) -> None:
    import vllm

    from m3hal.dispatch import M3halError
    from m3hal.vllm.support import refusals

    architecture = vllm_config.model_config.architecture
    refused = plugin.version_refusal(vllm.__version__)
    if foreign and not refused:
        refused = (
            f"{architecture} is held by another vLLM plugin, {foreign}; let only one of them in, e.g. with "
            "VLLM_PLUGINS=m3hal."
        )
    refused = refused or next(refusals(vllm_config), None)
    if refused:
        raise M3halError(refused)


def _take_over(vllm_config: Any, plan: Any) -> None:
    """From here on the configuration says that m3hal serves, in this process and in every one that receives it.

    Watched calls are another compiled graph, and vLLM's compile cache knows what stands here only.
    """
    extra = dict(vllm_config.additional_config or {})
    extra["m3hal"] = {**extra.get("m3hal", {}), **plan.policy.watch.to_json(), "fingerprint": plan.fingerprint}
    vllm_config.additional_config = extra
    model_config, cache = vllm_config.model_config, vllm_config.cache_config
    cache.block_size = model_config.hf_text_config.sparse_attention_config["sparse_block_size"]
    cache.user_specified_block_size = True  # so that no platform's default replaces it
    _keep_compilation_default(model_config.architecture)
    keep_out_of_graphs(vllm_config.compilation_config, plan)
    if quantization.holds_stored(model_config):
        model_config.quantization = stored.NAME  # vLLM asks the method of this name next
    _rename(model_config, plugin.OURS)
    model_config.multimodal_config = None  # text only: vLLM then refuses images itself


def _keep_compilation_default(architecture: str) -> None:
    """vLLM turns torch.compile off for some architectures by name, later than this; the new name is not among them."""
    from vllm.config.vllm import default_breakable_cudagraph_architectures

    if architecture in default_breakable_cudagraph_architectures():
        os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")


def keep_out_of_graphs(compilation: Any, plan: Any) -> None:
    """CUDA graphs hold no attention; and nothing at all beside the reference, which asks the host while it computes."""
    from vllm.config import CUDAGraphMode

    if compilation.splitting_ops is None:
        compilation.splitting_ops = [*compilation._attention_ops, ATTENTION]
    elif compilation.splitting_ops and ATTENTION not in compilation.splitting_ops:
        compilation.splitting_ops = [*compilation.splitting_ops, ATTENTION]
    slow = sorted({row.operator for row in plan.choices if row.server == "reference" and row.operator in CAPTURED})
    if slow and plan.device.startswith(("cuda", "hip")) and compilation.cudagraph_mode != CUDAGraphMode.NONE:
        logger.warning("m3hal turns CUDA graphs off: the reference serves %s, and can't be captured.", ", ".join(slow))
        compilation.cudagraph_mode = CUDAGraphMode.NONE


def _rename(model_config: Any, architecture: str) -> None:
    """As vLLM renames a draft model (``SpeculativeConfig.update_arch_``)."""
    model_config.hf_config.architectures = [architecture]
    model_config.model_arch_config.architectures = [architecture]
    info, resolved = model_config.registry.inspect_model_cls([architecture], model_config)
    model_config._model_info, model_config._architecture = info, resolved


def _keep_stock(model_config: Any) -> None:
    """Undoes the one thing that registering changed: a stock class that can't be inspected fails as it always did."""
    if model_config._model_info.architecture != plugin.OURS:
        return
    try:
        registry.stock(model_config.architecture).inspect_model_cls()
    except Exception:
        logger.exception("Error in inspecting model architecture '%s'", model_config.architecture)
    model_config.registry._raise_for_unsupported(model_config.architectures)
