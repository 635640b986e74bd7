"""Prints where kernels wait for the one ahead, let the next be launched, and read: places in their PTX.

Run by test_stream_order.py, in a process in which kernels are compiled. Of a plan's later layers: what runs ahead may
write any key, and the blocks that two requests of a batch share are complete when it has ended. And of kernels that
read only what the kernel ahead may have written.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import machine_cases
import machine_code
import torch
import triton


def layers(operator: str) -> None:
    """A call over a plan that another layer has used."""
    from m3hal_triton.select_blocks import select_blocks
    from m3hal_triton.sparse_attention import sparse_attention

    site = machine_cases.site("sparse_attention", "bfloat16")
    chooses = operator == "select_blocks"
    heads, groups = (site.num_index_heads, 1) if chooses else (site.num_q_heads, site.num_kv_heads)
    kernel = select_blocks(site) if chooses else sparse_attention(site)
    q = torch.empty(1, heads, 128, dtype=torch.bfloat16)
    ids = torch.empty(1, site.num_index_heads if chooses else groups, site.top_k_blocks, dtype=torch.int32)
    given = (q, machine_cases.cache("bfloat16", groups, not chooses), *(() if chooses else (ids,)))
    plan, room = machine_cases.planned(kernel, machine_cases.batch(1, 1, 4096)), machine_cases.scratch(kernel)
    out = ids if chooses else torch.empty_like(q)
    plan.calls[object()] = None
    kernel.run(*given, plan, out=out, workspace=room)


#: cases whose kernels, but for those that know their experts before they wait, read nothing before it
ROWS = ("rows bf16", "experts 1 bf16", "insert bf16", "insert one nvfp4")


def main() -> None:
    for case in ROWS:
        for (_, kernel, _), (made, options) in machine_code.sources("sm_90", case).items():
            ptx = triton.compile(made, target=machine_code.TARGETS["sm_90"], options=options).asm["ptx"]
            places = {"waits": "griddepcontrol.wait", "next": "griddepcontrol.launch_dependents", "loads": "ld.global"}
            told = {"kernel": kernel, "case": case} | {k: ptx.find(text) for k, text in places.items()}
            print(json.dumps(told), flush=True)
    for operator in ("select_blocks", "sparse_attention"):
        machine_cases.CASES[operator] = lambda operator=operator: layers(operator)
        for (_, kernel, _), (made, options) in machine_code.sources("sm_90", operator).items():
            ptx = triton.compile(made, target=machine_code.TARGETS["sm_90"], options=options).asm["ptx"]
            waits, copies = ptx.find("griddepcontrol.wait"), ptx.find("cp.async.bulk.tensor")
            known = any(made.fn.arg_names[path[0]] == "KNOWN" and value for path, value in made.constants.items())
            print(json.dumps({"kernel": kernel, "known": known, "waits": waits, "copies": copies}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main()
    sys.exit(0)
