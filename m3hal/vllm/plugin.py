"""What vLLM runs in each of its processes before anything else: puts m3hal's model within reach, and changes nothing.

The model gets an architecture name of its own. MiniMax-M3's published names keep meaning vLLM's in-tree classes until
the configuration hook (:mod:`m3hal.vllm.config`), the first place that sees ``additional_config``, finds that m3hal
was asked for and renames the architecture. Workers then resolve the new name like any other.
"""

from __future__ import annotations

import logging

#: The published architectures: text alone, and the vision-language wrapper that checkpoints declare.
PUBLISHED = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
#: m3hal's text model, as vLLM's registry knows it; also the name of the class.
OURS = "M3HalForCausalLM"
#: vLLM versions whose internals were read and run; below the second.
SUPPORTED = ((0, 32), (0, 34))

logger = logging.getLogger("vllm.m3hal")


def register() -> None:
    """Entry point ``vllm.general_plugins``. Idempotent; never raises, as that would end vLLM for every model."""
    try:
        _register()
    except Exception as error:
        logger.warning("m3hal is not available in this vLLM: %s: %s", type(error).__name__, error)


def version_refusal(version: str) -> str | None:
    """Why this vLLM is not supported, as a sentence; None when it is."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        release = (0, 0)
    if SUPPORTED[0] <= release < SUPPORTED[1]:
        return None
    return f"vLLM {version} is outside the supported range >={low},<{high}; install a vLLM of that range."


def _register() -> None:
    import vllm

    from m3hal.vllm import config

    config.install(PUBLISHED)
    if version_refusal(vllm.__version__) is None:  # else the hook says so to whoever asks for m3hal
        from m3hal.vllm import quantization, registry

        quantization.register()
        registry.install(PUBLISHED, OURS, f"m3hal.vllm.model:{OURS}")
