"""What Hugging Face transformers makes of a checkpoint: greedy tokens and log-probabilities to compare an engine with.

    python -m m3hal.checkpoint.oracle CHECKPOINT PROMPTS.json OUT.json [--max-tokens 32] [--dtype bfloat16]

PROMPTS.json is a list of prompts, each a list of token ids. transformers loads the checkpoint by its own mapping of
the published names, so nothing of m3hal stands between the files and the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m3hal._lazy import torch


@dataclass(frozen=True)
class Completion:
    """A greedy continuation. logprobs: of each token when it was chosen. margins: how far the runner-up was behind."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def load(checkpoint: str | Path, dtype: str = "float32") -> Any:
    """The checkpoint as transformers' model, on the CPU, in plain ("eager") code; routers stay fp32 in any dtype."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
        MiniMaxM3SparseForConditionalGeneration,
        MiniMaxM3VLTopKRouter,
    )

    model, info = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: found for kind, found in info.items() if found}
    if problems:
        raise ValueError(f"transformers could not load {checkpoint} completely: {problems}")
    if dtype != "float32":
        routers = [module for module in model.modules() if isinstance(module, MiniMaxM3VLTopKRouter)]
        kept = [{name: tensor.clone() for name, tensor in router.state_dict().items()} for router in routers]
        model = model.to(getattr(torch, dtype))
        for router, state in zip(routers, kept, strict=True):
            router.float().load_state_dict(state)
    return model.eval()


def greedy(model: Any, prompt: Sequence[int], max_tokens: int, cache: Any = None) -> Completion:
    """Decodes with transformers' own cache, or with an empty one of the caller's."""
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    step = torch.tensor([list(prompt)])
    with torch.no_grad():
        while True:
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best, runner_up = torch.log_softmax(out.logits[0, -1].float(), -1).topk(2).values.tolist()
            tokens.append(int(out.logits[0, -1].argmax()))
            logprobs.append(best)
            margins.append(best - runner_up)
            if len(tokens) == max_tokens:
                return Completion(list(prompt), tokens, logprobs, margins)
            step = torch.tensor([tokens[-1:]])


def score(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Log-probability of each token of a given continuation, in one pass without a cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(list(tokens))[:, None])
    return [float(value) for value in chosen[:, 0]]


def main(argv: list[str] | None = None) -> int:
    """``python -m m3hal.checkpoint.oracle``."""
    parser = argparse.ArgumentParser(prog="python -m m3hal.checkpoint.oracle", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    model = load(args.checkpoint, args.dtype)
    found = [asdict(greedy(model, prompt, args.max_tokens)) for prompt in json.loads(args.prompts.read_text())]
    args.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
