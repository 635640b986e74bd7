"""Writes docs/operators.md from the definitions in m3hal/ops/: `make docs`."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from m3hal.ops import CORE, FUSED, ExpertLoRA, ExpertWeights, Operator, QKNorms, SeqMeta, load
from m3hal.ops.sparse_decoder_layer import LayerWeights

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"

HEAD = """<!-- Written by scripts/operators_page.py from m3hal/ops/. Change the definitions, then run `make docs`. -->
# Operators

Each operator has one definition: a file in `m3hal/ops/` with its signature, its contract and a reference that computes
in fp32 (in fp64 for fp64 inputs) and rounds once. Positional arguments arrive with every step; those that default to
`None` only where the site asks for them. Keyword-only arguments are static: they are known when the model is built and
are attributes of `m3hal.Site` by the same name.

How an implementation is compared with the definition: **X** bit-exact; **U1** within one unit in the last place of
bf16 (fp32: a row bound); **C1** within one code step; **R** worst-row relative L2 error within a derived bound;
**S** a selection, by score regret.
"""


#: what a trait does that is neither emulated nor a tolerance
_NOT_EMULATED = {"batch_invariant": "a promise, held to bit by bit"}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in (("Core operators", CORE), ("Fused operators", FUSED)):
        rows = "\n".join(_row(load(name)) for name in names)
        parts.append(f"## {title}\n\n| operator | what it does | compared |\n|---|---|---|\n{rows}\n")
    parts.extend(_section(load(name)) for name in CORE + FUSED)
    parts.append("## What operators take besides tensors\n")
    parts.extend(_structure(kind) for kind in (SeqMeta, ExpertWeights, ExpertLoRA, QKNorms, LayerWeights))
    return "\n".join(parts)


def _structure(kind: type) -> str:
    """A dataclass of arguments, as its docstring tells it."""
    return f"### {kind.__name__}\n\n```text\n{inspect.getdoc(kind)}\n```\n"


def _row(op: Operator) -> str:
    first = re.split(r"(?<=\.)\s|:\s|;\s|\n\n", _module_doc(op), maxsplit=1)[0].replace("\n", " ")
    summary = _markdown(first).rstrip(".:;").replace("|", "\\|")  # a bar ends a table's cell, also inside backticks
    return f"| [`{op.name}`](#{op.name}) | {summary} | {op.numeric.kind} |"


def _section(op: Operator) -> str:
    facts = [
        f"Definition: [`m3hal/ops/{op.name}.py`](../m3hal/ops/{op.name}.py)",
        f"Runs at: {', '.join(op.sites)}",
        f"Compared: {op.numeric.kind}" + (f" ({op.numeric.note})" if op.numeric.note else ""),
    ]
    if op.mutates:
        facts.append(f"Writes in place: {', '.join(f'`{name}`' for name in op.mutates)}")
    if op.group:
        facts.append(f"Chosen together with the {op.group} group")
    if op.optional:
        named = ", ".join(f"`{name}`" for name in op.optional)
        facts.append(f"Asked beyond the usual only of implementations whose limits mention it: {named}")
    if op.covers:
        facts.append(f"Composed of: {', '.join(f'[`{name}`](#{name})' for name in op.covers)}")
    for trait in op.traits:
        how = "emulated by the reference" if trait.emulated else _NOT_EMULATED.get(trait.name, "widens the tolerance")
        facts.append(f"Trait `{trait.name}`: {' | '.join(trait.values)}; {trait.meaning} ({how})")
    listed = "\n".join(f"* {fact}" for fact in facts)
    signature = f"{op.name}{_signature(op)}\n\n{inspect.cleandoc(op.reference.__doc__ or '')}"
    return f"## {op.name}\n\n{_markdown(_module_doc(op))}\n\n```text\n{signature}\n```\n\n{listed}\n"


def _signature(op: Operator) -> str:
    """The reference's signature, one parameter a line when it is long."""
    found = inspect.signature(op.reference)
    parameters = [p for p in found.parameters.values() if p.name != "traits"]
    text = str(found.replace(parameters=parameters)).replace("'", "").replace("torch.", "")
    if len(text) <= 100:
        return text
    lines, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        lines.append(str(parameter))
    body = ",\n    ".join(lines)
    return f"(\n    {body},\n) -> {found.return_annotation}".replace("'", "").replace("torch.", "")


def _module_doc(op: Operator) -> str:
    return inspect.getdoc(sys.modules[op.reference.__module__]) or ""


def _markdown(text: str) -> str:
    """Docstrings are written for readers of code; their few marks of reStructuredText become Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
