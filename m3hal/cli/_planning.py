"""What the commands that make a plan share: what to plan for, what to ask for, and the plan of both."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m3hal._files import parsed
from m3hal._published import as_published
from m3hal.cli._memory import ALIASES, SCHEMES, cache_format
from m3hal.dispatch import Plan, Policy, admission, devices, plan
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal.dispatch.names import LEVELS
from m3hal.dispatch.planner import VLLM_HOLDS
from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import CACHE_FORMATS, PAGE_MAPS, is_private
from m3hal.shape import MINIMAX_M3, ModelShape


def add_planning(parser: argparse.ArgumentParser) -> None:
    """What to plan for, then what to ask for."""
    target = parser.add_argument_group("what to plan for")
    target.add_argument("--device", help="e.g. cuda:sm_90; default: this machine's first")
    target.add_argument("--model", metavar="PATH", help="a checkpoint's folder or config.json; default: MiniMax-M3")
    target.add_argument("--dtype", default="bfloat16", help="of activations, e.g. bf16 or fp32 (default: %(default)s)")
    target.add_argument("--kv-format", help="of the KV cache, e.g. fp8 or nvfp4; default: the dtype")
    target.add_argument("--index-format", help="of the index cache; default: that of the KV cache")
    target.add_argument("--weights", choices=tuple(SCHEMES), help="how they are stored; default: in the dtype")
    target.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    target.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    target.add_argument("--max-tokens", type=int, default=8192, help="per forward (default: %(default)s)")
    target.add_argument("--max-seqs", type=int, default=256, help="per forward (default: %(default)s)")
    target.add_argument("--max-context", type=int, default=524288, help="per request (default: %(default)s)")
    target.add_argument("--layouts", help="cache layouts the engine allocates; default: the KV format's first")
    target.add_argument("--engine", choices=("vllm", "none"), default="vllm", help="who holds linear and the like")
    asked = parser.add_argument_group("what to ask for; these win over M3HAL_CONFIG and M3HAL_* variables")
    asked.add_argument("--backend", help="auto, a name, names with commas, or vllm")
    asked.add_argument("--operator", dest="overrides", action="append", metavar="OP=BACKEND", help="repeatable")
    asked.add_argument("--require", action="append", metavar="TRAIT[=VALUE]", help="repeatable")
    asked.add_argument("--deny", action="append", metavar="BACKEND", help="repeatable")
    asked.add_argument("--min-level", choices=LEVELS, help="least verification level")
    asked.add_argument("--plan", metavar="FILE", help="the exported plan that must come out")


def planned(arguments: argparse.Namespace) -> Plan:
    """The plan that the options ask for. Raises M3halError."""
    here = arguments.device is None
    device = devices.detect()[0].device if here else devices.check(arguments.device)
    policy = Policy.resolve(_asked(arguments), carrier="the command line").on(device)
    return plan(
        _shape(arguments),
        device if here else _known(device, policy),
        policy,
        engine=VLLM_HOLDS if arguments.engine == "vllm" else {},
        cache_layouts=_layouts(arguments),
    )


def left_in_tree(made: Plan) -> bool:
    """Whether vLLM's own model stays although nobody asked for that."""
    return made.in_tree and not made.policy.in_tree


def _known(device: str, policy: Policy) -> str:
    """The device, if m3hal or the manifest of a backend that the policy admits names its kind."""
    kind = devices.kind(devices.check(device))
    if kind in devices.KINDS:
        return device
    others = admission.further_kinds(policy)
    if devices.matches(kind, others):
        return device
    known = ", ".join(["cpu", "cuda:sm_XX", "hip:gfxXXX", "hpu:gaudi2", *(f"{other}:*" for other in others)])
    meant = devices.meant(device)
    hint = f"Did you mean {meant!r}?" if meant else f"A backend names one in its manifest: devices=({kind + ':*'!r},)."
    raise ConfigurationError(f"{device!r} is of no kind that m3hal or an installed backend knows: {known}. {hint}")


def _dtype(arguments: argparse.Namespace) -> str:
    dtype: str = ALIASES.get(arguments.dtype, arguments.dtype)
    if dtype not in PLAIN_FORMATS:
        hint = did_you_mean(arguments.dtype, PLAIN_FORMATS)
        raise ConfigurationError(f"--dtype {arguments.dtype} is no format of activations.{hint}")
    return dtype


def _layouts(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.layouts is None:
        return CACHE_FORMATS[_cache_formats(arguments)[0]][:1]
    layouts = tuple(arguments.layouts.split(","))
    for layout in layouts:
        if layout not in PAGE_MAPS and not is_private(layout):
            hint = did_you_mean(layout, PAGE_MAPS)
            raise ConfigurationError(f"--layouts {arguments.layouts}: {layout!r} is no layout of pages.{hint}")
    return layouts


def _cache_formats(arguments: argparse.Namespace) -> tuple[str, str]:
    """Of keys and values, and of index keys."""
    kv, index = arguments.kv_format, arguments.index_format
    main = _dtype(arguments) if kv is None else cache_format(kv, "--kv-format")
    return main, main if index is None else cache_format(index, "--index-format")


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command line as a configuration."""
    asked = {key: getattr(arguments, key) for key in ("backend", "require", "deny", "min_level", "plan")}
    if arguments.overrides:
        pairs = [text.partition("=") for text in arguments.overrides]
        bad = next((operator for operator, equals, _ in pairs if not equals), None)
        if bad is not None:
            raise ConfigurationError(f"--operator {bad} must read OP=BACKEND, e.g. rms_norm=reference.")
        asked["operators"] = {operator: backend for operator, _, backend in pairs}
    return {key: value for key, value in asked.items() if value is not None}


def _shape(arguments: argparse.Namespace) -> ModelShape:
    dtype, config = _dtype(arguments), MINIMAX_M3
    kv, index = _cache_formats(arguments)
    for option in ("tp", "ep", "max_tokens", "max_seqs", "max_context"):
        if getattr(arguments, option) < 1:
            told = f"--{option.replace('_', '-')} {getattr(arguments, option)}"
            raise ConfigurationError(f"{told} must be a whole number from 1 on.")
    experts, projections = SCHEMES[arguments.weights] if arguments.weights else (dtype, dtype)
    if arguments.model:
        path = Path(arguments.model)
        config = _read(path / "config.json" if path.is_dir() else path, "a model's config.json")
    try:
        return ModelShape.from_config(
            config,
            dtype=dtype,
            kv_format=kv,
            index_format=index,
            weight_format=experts,
            projection_format=projections,
            # MSA needs pages of exactly one sparse block.
            page_size=int(as_published(config)["sparse_attention_config"]["sparse_block_size"]),
            max_tokens=arguments.max_tokens,
            max_seqs=arguments.max_seqs,
            max_context=arguments.max_context,
            tensor_parallel=arguments.tp,
            expert_parallel=arguments.ep,
        )
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(f"{error}.") from error
    except KeyError as error:
        raise ConfigurationError(f"{arguments.model} is not a MiniMax-M3 configuration: it has no {error}.") from error


def _read(path: Path, what: str) -> Mapping[str, Any]:
    try:
        data = parsed(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} can't be read as {what}: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path} is not {what}: it holds a {type(data).__name__}.")
    return data
