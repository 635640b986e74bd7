"""A block of draft tokens, judged token by token: each by the logits that follow from the token chosen before it.

Two tokens whose sums are close may change places without fault, and from there on two right blocks are different ones.
So the oracle's tokens are not compared with; its base logits and weights are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3hal_conformance.compare import INF, Bounds, Score, _outputs, _shape, _show, rows
from m3hal_conformance.harness import Named


def drafted(actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    """Tokens by regret, logits and confidence by rows."""
    if set(actual) != _outputs(oracle):
        return [Score(", ".join(sorted(actual)), "bits", INF, 0.0, (), "missing or unexpected output")]
    for name, tensor in actual.items():
        dtype = torch.int32 if name == "tokens" else torch.float32
        if tensor.shape != oracle[name].shape or tensor.dtype != dtype:
            return [_shape(name, tensor, oracle[name].to(dtype))]
    given = {name.partition("@")[2]: value for name, value in oracle.items() if name.startswith("tokens@")}
    tokens, bound = actual["tokens"].long(), bounds("tokens", "regret")
    wanted = {name: torch.zeros_like(oracle[name]) for name in actual if name != "tokens"}
    worst, previous = Score("tokens", "regret", 0.0, bound), given["previous"].long()
    for step in range(tokens.shape[1]):
        logits, confidence = _step(given, previous, step)
        absent = given["previous"] < 0
        wanted["logits"][:, step] = logits.masked_fill(absent[:, None], 0.0)
        if confidence is not None:
            wanted["confidence"][:, step] = confidence.masked_fill(absent, 0.0)
        sought = logits + given["noise"][:, step] if "noise" in given else logits
        for request, token in enumerate(tokens[:, step].tolist()):
            found = _regret(given, sought[request], int(previous[request]), token)
            if found is None:
                shown = f"{token} is no token of the draft's, or not the lowest of equal ones, or a padded request's"
                return [Score("tokens", "regret", INF, bound, (request, step), shown)]
            if found > worst.error:
                shown = _show(tokens[request], oracle["tokens"][request])
                worst = Score("tokens", "regret", found, bound, (request, step), shown)
        previous = torch.where(absent, previous, tokens[:, step])
    return [worst, *(rows(name, actual[name], value, bounds(name, "row")) for name, value in wanted.items())]


def _step(given: Named, previous: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
    """Logits and confidence of one position, in fp64, with the roundings of the oracle."""
    embedding = given["w1"][previous.clamp(min=0)].double()
    bias = embedding @ given["w2"].double().T
    if given["rounding"] > 0:
        bias = bias.bfloat16().double()
    logits = given["base_logits"][:, step].double() + bias
    if given["rounding"] > 1:
        logits = logits.bfloat16().double()
    if "confidence" not in given or "hidden" not in given:
        return logits, None
    seen = given["hidden"][:, step].double()
    if len(given["confidence"]) > seen.shape[1]:
        seen = torch.cat([seen, embedding], -1)
    return logits, torch.sigmoid(seen @ given["confidence"].double())


def _regret(given: Named, sought: Tensor, previous: int, token: int) -> float | None:
    """By how much the best sum exceeds the chosen one, relative to the row's size; None for no choice at all."""
    if previous < 0:
        return 0.0 if token == -1 else None
    ids = torch.arange(len(sought))
    (where,) = (ids + given.get("d2t", 0) == token).nonzero(as_tuple=True)
    if len(where) != 1:
        return None
    row = sought.masked_fill(sought.isnan(), -INF)
    best, chosen = row.max(), row[where[0]]
    if best == chosen:  # a sum that is rounded has other equals than the oracle's
        return 0.0 if given["rounding"] > 0 or int(where[0]) == int(row.argmax()) else None
    finite = row[torch.isfinite(row)].abs()
    return float((best - chosen) / finite.max().clamp(min=1e-30)) if len(finite) else INF
