"""Traces the operators that compiled code meets, on tensors of a GPU that need not be here, and prints their graphs.

A process of its own: the tests of this folder interpret kernels, and torch traces only what would be compiled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensorMode

from m3hal import ops
from m3hal.shape import MINIMAX_M3, ModelShape

torch.utils._triton.has_triton = lambda: True  # without a GPU torch would take a kernel for a Python function

from m3hal_triton import rms_norm, swiglu_oai  # noqa: E402

FACTORIES = {"rms_norm": rms_norm.rms_norm, "add_rms_norm": rms_norm.add_rms_norm, "swiglu_oai": swiglu_oai.swiglu_oai}
SHAPES = {"rms_norm": [(7, 6144), (6144,)], "add_rms_norm": [(7, 6144), (7, 6144), (6144,)], "swiglu_oai": [(7, 768)]}


def main() -> None:
    """A line per operator: the targets of the graph's calls, and how often it was compiled for two token counts."""
    shape = ModelShape.from_config(
        MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=64, max_seqs=4, max_context=4096
    )
    for name, factory in FACTORIES.items():
        site = next(site for site in shape.sites() if site.kind in ops.load(name).sites)
        run, graphs = factory(site), []

        def keep(graph: torch.fx.GraphModule, example: Any, graphs: list[list[str]] = graphs) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        layer = torch.compile(lambda *given, run=run: run(*given), backend=keep, fullgraph=True)
        with FakeTensorMode():
            for tokens in (7, 40):
                given = [
                    torch.empty((tokens, *size[1:]) if len(size) > 1 else size, dtype=torch.bfloat16, device="cuda")
                    for size in SHAPES[name]
                ]
                for tensor in given:
                    if tensor.ndim > 1:
                        torch._dynamo.mark_dynamic(tensor, 0)
                layer(*given)
        print(json.dumps({"operator": name, "calls": graphs[0], "graphs": len(graphs)}), flush=True)


if __name__ == "__main__":
    main()
