"""MiniMax-M3 in stock vLLM, every operator from the plan. vLLM finds :func:`register` by its plugin entry point."""

from m3hal.vllm.plugin import register

__all__ = ["register"]
