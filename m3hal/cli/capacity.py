"""How many sequences fit: the memory of the GPUs, the weights of a rank, and the bytes that a layout takes per token.

    m3hal capacity --model MiniMax-M3.1-Flash --gpu B300x4 --kv nvfp4 --parallel dep4 --context 256K
    m3hal capacity --model MiniMax-M3-MXFP8   --gpu B300x4 --kv fp8   --parallel dep4 --context 256K

The model is a checkpoint's folder, a config.json, or one of the published names above. Sequences are counted
with the main cache alone, which gives the published 76 and 28 of these two commands, and with the index cache that a
server holds as well. Exits with 1 when not one sequence fits.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3hal._files import parsed
from m3hal.cli._memory import (
    GPUS,
    SCHEMES,
    Parallel,
    Weights,
    cache_format,
    drafter_caches,
    gpu_memory,
    shape_of,
    weights_of,
)
from m3hal.cli.output import emit
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal.dispatch.table import table
from m3hal.layouts import KVLayout
from m3hal.layouts.sizes import bytes_per_token, index_caches, main_caches
from m3hal.shape import MINIMAX_M3

HELP = "how many sequences fit into the memory of some GPUs"

_VISION = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "patch_size": 14}

#: name -> (scheme of the weights, bytes of the checkpoint as published, 0 when unknown)
PUBLISHED: Mapping[str, tuple[str, int]] = {
    "MiniMax-M3": ("bf16", 0),
    "MiniMax-M3-MXFP8": ("mxfp8", 451_500_000_000),
    "MiniMax-M3.1-Flash": ("nvfp4", 250_100_000_000),
}


@dataclass(frozen=True)
class Answer:
    """Bytes of one GPU, unless said otherwise."""

    gpu: str
    gpus: int
    parallel: Parallel
    context: int
    memory: int
    usable: int
    weights: Weights
    reserve: int
    caches: dict[str, tuple[KVLayout, ...]]
    assumptions: tuple[str, ...]

    @property
    def left(self) -> int:
        """For caches."""
        return max(self.usable - self.weights.total - self.reserve, 0)

    def sequence(self, *names: str) -> int:
        """Bytes of one sequence in the named caches; a page that is begun counts whole."""
        layouts = (layout for name in names for layout in self.caches[name])
        return sum(-(-self.context // layout.page_size) * layout.page_bytes() for layout in layouts)

    def sequences(self, *names: str) -> tuple[int, int]:
        """(per GPU, in all). Under tp and tep the GPUs of a group share each sequence."""
        each = self.left // self.sequence(*names)
        return each, each * self.gpus // self.parallel.tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The machine and the model, then what is assumed."""
    parser.add_argument("--model", default="MiniMax-M3", help=f"a path or one of {', '.join(PUBLISHED)}")
    parser.add_argument("--gpu", required=True, metavar="NAMExN", help=f"one of {', '.join(GPUS)}, times N")
    parser.add_argument("--parallel", help="tpN, tepN or depN (default: dep over all GPUs, tp1 on one)")
    parser.add_argument("--context", default="128K", help="tokens per sequence, e.g. 256K (default: %(default)s)")
    parser.add_argument("--kv", default="bf16", help="format of keys and values (default: %(default)s)")
    parser.add_argument("--index", help="format of index keys (default: that of --kv)")
    parser.add_argument("--weights", choices=tuple(SCHEMES), help="needed for a quantised checkpoint's path")
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument("--memory", type=float, metavar="GB", help="of a GPU, instead of its published size")
    assumed.add_argument(
        "--utilization", type=float, default=0.9, help="part of it that is used (default: %(default)s)"
    )
    assumed.add_argument(
        "--reserve", type=float, default=8.0, metavar="GB", help="activations, graphs, buffers (default: %(default)s)"
    )
    assumed.add_argument("--drafter", metavar="LAYERSxHEADSxDIM:FORMAT", help="also count its caches")


def run(arguments: argparse.Namespace) -> int:
    """Passes when a sequence fits."""
    answer = _answer(arguments)
    emit(arguments, _data(answer), _text(answer))
    return 0 if answer.sequences(*answer.caches)[0] else 1


def _answer(arguments: argparse.Namespace) -> Answer:
    gpu, gpus = _gpus(arguments.gpu)
    named = arguments.parallel or (f"dep{gpus}" if gpus > 1 else "tp1")
    parallel = Parallel.parse(named)
    if gpus % parallel.ranks:
        raise ConfigurationError(f"{gpus} GPUs can't be divided into groups of {parallel.ranks} for {named}.")
    if not 0 < arguments.utilization <= 1:
        raise ConfigurationError(f"--utilization {arguments.utilization} must be above 0 and at most 1.")
    size = gpu_memory(gpu) if arguments.memory is None else _bytes(arguments.memory, "--memory")
    usable, reserve = int(size * arguments.utilization), _bytes(arguments.reserve, "--reserve")
    kv = cache_format(arguments.kv, "--kv")
    index = cache_format(arguments.index, "--index") if arguments.index else kv
    context = _tokens(arguments.context)
    config, scheme, published = _model(arguments)
    try:
        shape = shape_of(config, parallel, kv, index, context)
        weights = weights_of(shape, config, scheme, parallel)
        caches = {"main": main_caches(shape), "index": index_caches(shape)}
        if arguments.drafter:
            caches["drafter"] = drafter_caches(arguments.drafter, shape.page_size)
        whole = weights_of(shape_of(config, _ONE, kv, index, context), config, scheme, _ONE).total
    except (ValueError, TypeError, AttributeError, ArithmeticError, KeyError) as error:
        raise ConfigurationError(f"{arguments.model} on {named} (--parallel): {error}.") from error
    if published:  # what the checkpoint holds besides these matrices is counted on every GPU
        weights = replace(weights, rest=weights.rest + published - whole)
    assumptions = _assumptions(arguments, size, scheme, published, whole)
    if not arguments.parallel:
        assumptions = (*assumptions, f"the model lies over the GPUs as {named} (--parallel)")
    return Answer(gpu, gpus, parallel, context, size, usable, weights, reserve, caches, assumptions)


def _assumptions(arguments: argparse.Namespace, size: int, scheme: str, published: int, whole: int) -> tuple[str, ...]:
    """Everything that the answer rests on besides the layouts, as sentences."""
    lines = [
        f"a GPU has {_gb(size)} ({'as published' if arguments.memory is None else '--memory'}), "
        f"of which {arguments.utilization:.0%} is used (--utilization)",
        f"activations, graphs and communication buffers take {arguments.reserve:g} GB (--reserve)",
        f"weights: {' and '.join(SCHEMES[scheme])} for routed experts and other projections; "
        "embeddings and vision tower in bf16; routers in fp32",
    ]
    if published:
        lines.append(
            f"the published checkpoint of {_gb(published)} differs from these matrices by {_gb(published - whole)}, "
            "which is counted on every GPU"
        )
    if arguments.drafter:
        lines.append("the drafter's weights are not counted, and its caches hold the whole context")
    else:
        lines.append("no drafter (--drafter)")
    return tuple(lines)


_ONE = Parallel("tp", 1)
#: gigabytes; more is a slip
_MOST = 1_000_000


def _gpus(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.+?)(?:x(\d+))?", text, re.IGNORECASE)
    if not found or found[2] == "0":
        raise ConfigurationError(f"--gpu {text} must be a name and a number, e.g. B300x4.")
    return found[1], int(found[2] or 1)


def _bytes(gigabytes: float, option: str) -> int:
    if not 0 <= gigabytes < _MOST:
        raise ConfigurationError(f"{option} {gigabytes:g} must be a number of gigabytes, from 0 to {_MOST:,}.")
    return int(gigabytes * 1e9)


def _tokens(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if not found or int(found[1]) == 0:
        raise ConfigurationError(f"--context {text} must be a number of tokens, e.g. 262144, 256K or 1M.")
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]]


def _model(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], str, int]:
    """(configuration, scheme of the weights, bytes of the published checkpoint or 0)."""
    names = {name.lower(): name for name in PUBLISHED}
    name = names.get(arguments.model.lower().removeprefix("minimaxai/"))
    if name:
        scheme, size = PUBLISHED[name]
        asked = arguments.weights or scheme
        return {"text_config": MINIMAX_M3, "vision_config": _VISION}, asked, size if asked == scheme else 0
    path = Path(arguments.model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = parsed(path.read_text())
    except (OSError, ValueError) as error:
        hint = did_you_mean(arguments.model, PUBLISHED)
        raise ConfigurationError(f"{arguments.model} is neither a published name nor a configuration.{hint}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a configuration: it holds a {type(config).__name__}.")
    if "quantization_config" in config and not arguments.weights:
        raise ConfigurationError(f"{path} is quantised; say how with --weights {'|'.join(SCHEMES)}.")
    return config, arguments.weights or "bf16", 0


def _counts(answer: Answer) -> list[tuple[str, int, int]]:
    """(what is counted, sequences per GPU, in all), growing."""
    names = list(answer.caches)
    return [(" + ".join(names[: i + 1]), *answer.sequences(*names[: i + 1])) for i in range(len(names))]


def _data(answer: Answer) -> dict[str, Any]:
    tokens = {name: bytes_per_token(layouts) for name, layouts in answer.caches.items()}
    return {
        "gpu": answer.gpu,
        "gpus": answer.gpus,
        "parallel": f"{answer.parallel.kind}{answer.parallel.ranks}",
        "context": answer.context,
        "bytes_per_token": tokens,
        "bytes_per_sequence": {name: answer.sequence(name) for name in answer.caches},
        "per_gpu": {
            "memory": answer.memory,
            "usable": answer.usable,
            "weights": {**vars(answer.weights), "total": answer.weights.total},
            "reserve": answer.reserve,
            "caches": answer.left,
        },
        "sequences": [
            {"caches": what.split(" + "), "per_gpu": each, "total": total} for what, each, total in _counts(answer)
        ],
        "assumptions": list(answer.assumptions),
    }


def _text(answer: Answer) -> str:
    weights = answer.weights
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in vars(weights).items())
    memories = [
        ("memory", _gb(answer.memory), answer.gpu),
        ("usable", _gb(answer.usable), ""),
        ("weights", f"-{_gb(weights.total)}", parts),
        ("reserve", f"-{_gb(answer.reserve)}", ""),
        ("left for caches", _gb(answer.left), ""),
    ]
    caches = [
        (f"{name}, {layouts[0].format}", f"{bytes_per_token(layouts):,}", _gb(answer.sequence(name)))
        for name, layouts in answer.caches.items()
        if layouts
    ]
    rows = [(what, each, total) for what, each, total in _counts(answer)]
    shared = "" if answer.parallel.tensor == 1 else f", each shared by {answer.parallel.tensor} GPUs"
    return "\n\n".join(
        (
            table(("per GPU", "bytes", "of which"), memories),
            table(("caches of a GPU", "bytes per token", f"per sequence of {answer.context:,} tokens"), caches),
            table(("caches counted", "sequences per GPU", f"on {answer.gpus} x {answer.gpu}{shared}"), rows),
            "Assumed:\n" + "\n".join(f"- {line}" for line in answer.assumptions),
        )
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
