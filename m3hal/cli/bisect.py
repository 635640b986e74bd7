"""Finds the first layer and operator of a running model that leaves its bound.

    m3hal bisect MODEL PROMPT --backend acme,reference

Runs the model in vLLM: once with every call compared with its definition, then with the first operator that left its
bound taken from the reference. Writes the offending call as a file that `m3hal replay` asks again; the file holds what
the prompt said. MODEL is a checkpoint's folder, or `tiny` for one that is written on the spot; PROMPT is text, or
@FILE. Only prompts of more than top-k blocks (2,048 tokens; 256 of `tiny`) make block selection matter.

Exits with 0 when nothing leaves its bound, 1 when something does, 2 when the request means nothing, 3 when nothing here
can run the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3hal._files import parsed
from m3hal._published import as_published
from m3hal.cli.conform import suite
from m3hal.cli.output import emit
from m3hal.dispatch import VLLM_HOLDS, Plan, Policy, UnsupportedError, devices, plan
from m3hal.dispatch.discovery import REFERENCE
from m3hal.dispatch.errors import ConfigurationError
from m3hal.shape import ModelShape

if TYPE_CHECKING:
    from m3hal_conformance.bisect import Finding

HELP = "find the first layer and operator that leaves its bound"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, what it is told, who serves it, and where files go."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or 'tiny'")
    parser.add_argument("prompt", metavar="PROMPT", help="text, or @FILE")
    parser.add_argument("--backend", help="as in --additional-config; M3HAL_BACKEND when left out")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="tokens to decode (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    parser.add_argument(
        "--engine", metavar="JSON", default="{}", help="""more of vLLM's, e.g. '{"max_model_len": 4096}'"""
    )
    parser.add_argument(
        "--into", metavar="FOLDER", help="an empty folder for captures, reports and logs; default: a new one here"
    )


def run(arguments: argparse.Namespace) -> int:
    """Bisects; progress goes to stderr."""
    bisecting = suite("m3hal_conformance.bisect")
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError("this command runs the model in vLLM, which is not installed; see docs/serving.md.")
    if arguments.steps < 1:
        raise ConfigurationError(f"--steps {arguments.steps} must be 1 or more.")
    engine, prompt = _engine(arguments), _prompt(arguments.prompt)
    asked = {"backend": arguments.backend} if arguments.backend else {}
    policy = Policy.resolve(asked, carrier="the command line").on(devices.detect()[0].device)
    if policy.pinned:
        raise ConfigurationError("'plan' pins every choice, and bisecting swaps some; unset it.")
    folder, is_ours = _folder(arguments.into)
    try:
        model = _model(arguments.model, folder)
        engine = {"dtype": _dtype(model), **engine}
        made = _plan(model, engine, policy)
        question = bisecting.Question(str(model), prompt, arguments.steps, policy, made, engine, folder)
        found: Finding = bisecting.bisect(question, _clock())
    except BaseException:
        if is_ours and not any(folder.rglob("*.log")):
            shutil.rmtree(folder)
        raise
    if not found.run.rows:
        raise UnsupportedError(f"no call was compared, so nothing is known; the engine's log is in {folder}.")
    data = {
        **_data(found),
        "asked": policy.backend,
        "served": _served(found),
        "never_called": _never_called(found, made),
    }
    emit(arguments, data, "\n".join([*_who(found, made), _text(found, policy.backend)]))
    if is_ours and not found.culprit:
        shutil.rmtree(folder)
    return 1 if found.culprit else 0


def _engine(arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        given = parsed(arguments.engine)
    except ValueError as error:
        raise ConfigurationError(f"--engine can't be read as JSON: {error}.") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f"--engine must be an object of vllm.LLM's arguments; got {arguments.engine}.")
    defaults: dict[str, Any] = {"dtype": arguments.dtype} if arguments.dtype else {}
    if devices.detect()[0].device == "cpu":
        defaults["kv_cache_memory_bytes"] = 512 << 20
    return {"max_model_len": 4096, **defaults, **given}


def _prompt(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the prompt's file can't be read: {error}.") from error


def _folder(asked: str | None) -> tuple[Path, bool]:
    """Where files go, and whether it was made here and may go again."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="m3hal-bisect-", dir=".")), True
    folder = Path(asked)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is not an empty folder; choose another for --into.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, False


def _model(asked: str, folder: Path) -> Path:
    if asked == "tiny":
        from m3hal.checkpoint import tiny

        return tiny.write(folder / "tiny-minimax-m3")
    if not (Path(asked) / "config.json").is_file():
        raise ConfigurationError(
            f"{asked} is no checkpoint's folder: it has no config.json. 'tiny' writes a small one."
        )
    return Path(asked)


def _config(model: Path) -> dict[str, Any]:
    try:
        found = parsed((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{model}/config.json can't be read: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{model}/config.json is no configuration: it holds a {type(found).__name__}.")
    return found


def _dtype(model: Path) -> str:
    """The checkpoint's; left to itself, vLLM would run an fp32 one in bf16."""
    config = _config(model)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    return str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")


def _plan(model: Path, engine: dict[str, Any], policy: Policy) -> Plan:
    """What the engine will plan: a slip in a name is told here, in a second, and not by an engine's traceback."""
    config = _config(model)
    try:
        shape = ModelShape.from_config(
            config,
            dtype=str(engine["dtype"]),
            page_size=int(as_published(config)["sparse_attention_config"]["sparse_block_size"]),
            max_tokens=int(engine.get("max_num_batched_tokens", 8192)),
            max_seqs=1,
            max_context=int(engine["max_model_len"]),
            tensor_parallel=int(engine.get("tensor_parallel_size", 1)),
        )
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(f"{model} is not a MiniMax-M3 checkpoint: {error}.") from error
    made = plan(shape, devices.detect()[0].device, policy, engine=VLLM_HOLDS)
    if made.in_tree:
        raise UnsupportedError(f"vLLM's own model would serve, because {made.reason}; name a backend.")
    return made


def _clock() -> Any:
    start = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)


def _data(found: Finding) -> dict[str, Any]:
    return {
        "first": dict(found.first) if found.first else None,
        "operator": found.culprit or None,
        "confirmed": found.cleared,
        "swapped": list(found.swapped),
        "replay_fails": found.replayed,
        "others": [dict(row) for row in found.others],
        "compared": sum(row["compared"] for row in found.run.rows),
        "tokens": list(found.run.tokens),
        "tokens_after": list(found.after.tokens) if found.after else None,
    }


def _served(found: Finding) -> dict[str, list[str]]:
    """Backend -> the operators of which it ran calls."""
    served: dict[str, list[str]] = {}
    for row in found.run.rows:
        mine = served.setdefault(row["backend"], [])
        if row["operator"] not in mine:
            mine.append(row["operator"])
    return served


def _never_called(found: Finding, made: Plan) -> dict[str, list[str]]:
    """Backend -> what it declares and was not called for. Of the reference that is no news: it declares everything."""
    served = _served(found)
    asked = {name.name for name in made.policy.named()} | {c.chosen.backend for c in made.choices if c.chosen}
    manifests = [b.manifest for b in made.backends if b.manifest and b.is_usable and b.name in asked - {REFERENCE}]
    idle = {m.name: [name for name in m.operators if name not in served.get(m.name, ())] for m in manifests}
    return {name: operators for name, operators in idle.items() if operators}


def _who(found: Finding, made: Plan) -> list[str]:
    """Lines: who served what, and what nobody was asked."""
    served = "; ".join(f"{backend}: {', '.join(mine)}" for backend, mine in _served(found).items())
    asked = "backend 'auto' chose" if made.policy.backend == "auto" else "served"
    lines = [f"{asked}: {served or 'nothing, as no call was compared'}"]
    return lines + [f"never called of {name}: {', '.join(rest)}" for name, rest in _never_called(found, made).items()]


def _text(found: Finding, backend: str) -> str:
    compared = sum(row["compared"] for row in found.run.rows)
    said = _tokens(found)
    if not found.culprit:
        worst = max(found.run.rows, key=lambda row: row["worst"])
        return "\n".join([
            f"nothing leaves its bound: {compared} calls of {backend!r} compared",
            f"nearest: {worst['operator']} at {worst['layer']}, {worst['worst']:.2g} of its bound",
            *said,
        ])  # fmt: skip
    if not found.first:
        return "\n".join([
            f"no call leaves its bound, yet the model says something else than with the reference: {_blame(found)}",
            *said,
        ])  # fmt: skip
    row = found.first
    lines = [
        f"first: {row['operator']} of {row['backend']} at {row['layer']}, {row['failed']} of {row['compared']} calls, "
        f"at worst {row['by']}",
        f"  {row['sentence']}",
        f"confirmed: with {found.culprit} from the reference nothing leaves its bound"
        if found.cleared
        else f"with {found.culprit} from the reference other operators still leave their bounds",
        *(f"also: {r['operator']} of {r['backend']} at {r['layer']}, {r['by']}" for r in found.others),
        *said,
    ]
    if row["capture"]:
        again = "fails again" if found.replayed else "does not fail again: the fault hangs on more than its inputs"
        lines.append(f"again: m3hal replay {row['capture']} --backend {found.backend}   ({again})")
    return "\n".join(lines)


def _blame(found: Finding) -> str:
    if not found.cleared:
        return "swapping no single operator helps"
    return f"{found.culprit} does it, as with that from the reference the difference is gone"


def _tokens(found: Finding) -> list[str]:
    if found.after is None:
        return []
    equal = sum(a == b for a, b in zip(found.run.tokens, found.after.tokens, strict=True))
    whom = found.culprit if found.first or found.cleared else "every operator"
    return [f"{equal} of {len(found.run.tokens)} tokens equal those with {whom} from the reference"]
