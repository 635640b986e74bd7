"""One engine whose nine called operators come from the sentinel backend: honest, then with one of them lying."""

from __future__ import annotations

from typing import Any

import sentinels
from _engine import complete, main, start

import m3hal


def run(job: dict[str, Any]) -> dict[str, Any]:
    m3hal.register(sentinels.MANIFEST)
    llm = start(
        job["checkpoint"],
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        additional_config={"m3hal": {"backend": "sentinels,reference"}},
    )
    found = {}
    for lie in ("", *sentinels.LIES, "dense"):
        sentinels.lie = lie
        found[lie or "honest"] = complete(llm, job["prompts"], job["tokens"])
    calls = {name: {**seen, "workspaces": sorted(seen["workspaces"])} for name, seen in sentinels.calls.items()}
    return {"completions": found, "calls": calls}


if __name__ == "__main__":
    main(run)
