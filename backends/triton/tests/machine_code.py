"""Compiles the kernels for GPUs that are not here and reads the machine code: run by test_machine_code.py.

``python machine_code.py TARGET...`` prints one JSON line per (target, case, kernel). What a case launches is recorded
from its real call on CPU tensors, so that the compiled specialisation is the one that a GPU would run. Results are
cached by the source of the kernel, its arguments' kinds and the compiler: one change compiles one kernel again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from m3hal_triton import _plan, kv_write, paged_attention, qk_norm_rope_insert, select_blocks, sparse_attention
from machine_cases import CASES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import jit

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache" / "machine_code"
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


def record(case: Any) -> list[tuple[jit.JITFunction, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one call, without running them."""
    launches = []

    def getitem(function: jit.JITFunction, grid: Any) -> Any:
        return lambda *args, **kwargs: launches.append((function, args, kwargs))

    shipped = jit.KernelInterface.__getitem__
    jit.KernelInterface.__getitem__ = getitem
    try:
        case()
    finally:
        jit.KernelInterface.__getitem__ = shipped
    return launches


def source(
    function: jit.JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """What triton's launcher would compile for these arguments."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(function.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}

    def specialise(path: tuple[int, ...], kind: Any, key: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for index, inner in enumerate(zip(kind, key, value, strict=True)):
                specialise((*path, index), *inner)
        elif kind == "constexpr":
            constants[path] = value
        elif key and "D" in key:
            attributes[path] = [["tt.divisibility", 16]]

    for index, parameter in enumerate(function.params):
        value = values[parameter.name]
        kind, key = "constexpr", value
        if not parameter.is_constexpr:
            kind, key = jit.native_specialize_impl(_Backend, value, False, True, True)
        signature[parameter.name] = kind
        specialise((index,), kind, key, value)
    return ASTSource(function, signature, constants, attributes), options


class _Backend:
    """Specialises as every GPU backend does."""

    @staticmethod
    def get_int_specialization(arg: int, **_: object) -> str:
        return "D" if arg % 16 == 0 else ""

    @staticmethod
    def get_tensor_specialization(arg: Any, **_: object) -> str:
        return "D" if arg.data_ptr() % 16 == 0 else ""


def inspect(compiled: Any, target: str) -> dict[str, Any]:
    """Registers, spilled bytes or registers, shared memory and matrix instructions of a compiled kernel."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        field = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
        found = re.findall(r"\s(v_(?:mfma\w*|\w+_f64))", text)
        return _summary(field["vgpr_count"], field["vgpr_spill_count"], compiled, found)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tools = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
        usage = subprocess.check_output([tools / "cuobjdump", "--dump-resource-usage", file.name], text=True)
        sass = subprocess.check_output([tools / "nvdisasm", file.name], text=True)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spilled = int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
    found = re.findall(r"\s((?:HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|DMMA|DFMA|DADD|DMUL|DSETP|LDL|STL)\b)", sass)
    return _summary(registers, spilled, compiled, found)


def _summary(registers: int, spilled: int, compiled: Any, found: list[str]) -> dict[str, Any]:
    shared = compiled.metadata.shared
    return {"registers": registers, "spilled": spilled, "shared": shared, "instructions": dict(Counter(found))}


def report(target: str, case: str) -> list[dict[str, Any]]:
    """One entry per distinct kernel that the case launches."""
    entries = []
    # what the GPU's callables would launch, though the tensors are on the CPU
    for module in (select_blocks, sparse_attention, paged_attention, _plan):
        module.multiprocessors = lambda device: 132
        module.programmatic = lambda device: not target.startswith("gfx")
        module.native = lambda *given: not target.startswith("gfx")
    for module in (kv_write, qk_norm_rope_insert):
        module.converts = lambda device: not target.startswith("gfx")
    for function, args, kwargs in record(CASES[case]):
        found = compiled(*source(function, args, dict(kwargs)), target)
        entry = {"target": target, "case": case, "kernel": function.__name__, **found}
        if entry not in entries:
            entries.append(entry)
    return entries


def compiled(made: ASTSource, options: dict[str, Any], target: str) -> dict[str, Any]:
    """What :func:`inspect` finds in a kernel; from the cache where its source and specialisation were met before."""
    known = (made.fn.cache_key, made.signature, made.constants, made.attrs, options, target, triton.__version__)
    cached = CACHE / f"{hashlib.sha256(f'{known}{Path(__file__).read_text()}'.encode()).hexdigest()}.json"
    if not cached.exists():
        found = inspect(triton.compile(made, target=TARGETS[target], options=options), target)
        CACHE.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(found))
    return json.loads(cached.read_text())


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
    names = [name for name in sys.argv[1:] if name in TARGETS] or list(TARGETS)
    cases = [name for name in sys.argv[1:] if name not in TARGETS] or list(CASES)
    # forked before anything is compiled: compilers of several processes share nothing
    with multiprocessing.get_context("fork").Pool() as pool:
        for entries in pool.starmap(report, [(target, case) for target in names for case in cases], chunksize=1):
            for entry in entries:
                print(json.dumps(entry), flush=True)
