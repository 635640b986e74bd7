"""Compiles the kernels for GPUs that are not here and reads the machine code: run by test_machine_code.py.

    python machine_code.py [TARGET...]     a JSON line per kernel of a case, compiled where the record lacks it
    python machine_code.py --record        the same, and writes the record

What a case launches is recorded from its real call on CPU tensors, so that the compiled specialisation is the one that
a GPU would run. machine_code.json keeps what was found, under a hash of all that decides the code: the kernel's source
and that of the functions it calls, its arguments' kinds, its constants, launch options, target and compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import m3hal_triton
import triton
from machine_cases import CASES, ONLY
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime import jit

RECORD = Path(__file__).with_suffix(".json")
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
MODULES = [
    importlib.import_module(f"m3hal_triton.{module.name}") for module in pkgutil.iter_modules(m3hal_triton.__path__)
]
#: exit code
TOO_MANY = 3
#: what is recorded of a kernel
FACTS = ("registers", "spilled", "shared", "instructions")
#: kernels after which a record is written again, so that an interrupted run is not lost
SAVED = 25
#: a kernel that a case launches: (case, function's name, hash)
Name = tuple[str, str, str]


def launches(case: Any) -> list[tuple[jit.JITFunction, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one call, without running them."""
    found = []

    def getitem(function: jit.JITFunction, grid: Any) -> Any:
        return lambda *args, **kwargs: found.append((function, args, kwargs))

    shipped = jit.KernelInterface.__getitem__
    jit.KernelInterface.__getitem__ = getitem
    try:
        case()
    finally:
        jit.KernelInterface.__getitem__ = shipped
    return found


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
        value = values.get(parameter.name, parameter.default)
        kind, key = "constexpr", value
        if not parameter.is_constexpr:
            kind, key = jit.native_specialize_impl(_Backend, value, False, True, True)
        signature[parameter.name] = kind
        specialise((index,), kind, key, value)
    made = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    return made(function, signature, constants, attributes), options


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
    matrix = r"HMMA|HGMMA|QMMA|QGMMA|IGMMA|OMMA|UTCHMMA|UTCQMMA|UTCOMMA"
    found = re.findall(rf"\s((?:{matrix}|DMMA|DFMA|DADD|DMUL|DSETP|LDL|STL)\b)", sass)
    found += re.findall(r"kind::\w+\.block_scale", compiled.asm["ptx"])
    return _summary(registers, spilled, compiled, found)


def _summary(registers: int, spilled: int, compiled: Any, found: list[str]) -> dict[str, Any]:
    counts = dict(sorted(Counter(found).items()))
    return {"registers": registers, "spilled": spilled, "shared": compiled.metadata.shared, "instructions": counts}


def sources(target: str, case: str) -> dict[Name, tuple[ASTSource, dict[str, Any]]]:
    """The distinct kernels that the case launches."""
    nvidia = not target.startswith("gfx")
    # what the GPU's callables would launch, though the tensors are on the CPU
    answers = {"multiprocessors": 132, "programmatic": nvidia, "native": nvidia, "converts": nvidia}
    answers |= {"is_hopper": target == "sm_90", "takes_nvfp4": target in ("sm_100", "sm_103")}
    for module in MODULES:
        for name in answers.keys() & vars(module).keys():
            setattr(module, name, lambda *given, answer=answers[name]: answer)
        for value in vars(module).values():
            if isinstance(value, jit.JITFunction):
                value.starting_line_number = 1  # part of its hash; where it stands decides no instruction
    found = {}
    for function, args, kwargs in launches(CASES[case]):
        made, options = source(function, args, dict(kwargs))
        known = (made.fn.cache_key, made.signature, made.constants, made.attrs, options, target, triton.__version__)
        digest = hashlib.sha256(f"{known}".encode()).hexdigest()[:16]
        found[case, function.__name__, digest] = made, options
    return found


def names(target: str, case: str) -> list[Name]:
    return list(sources(target, case))


def compiled(target: str, name: Name) -> dict[str, Any]:
    """What :func:`inspect` finds in a kernel compiled now."""
    made, options = sources(target, name[0])[name]
    return inspect(triton.compile(made, target=TARGETS[target], options=options), target)


def read() -> dict[str, dict[str, Any]]:
    """The record: hash -> its line."""
    lines = RECORD.read_text().splitlines()[1:-1] if RECORD.exists() else []
    entries = [json.loads(line.rstrip(",")) for line in lines]
    return {entry["hash"]: entry for entry in entries}


def write(entries: dict[str, dict[str, Any]]) -> None:
    """A JSON list with a kernel in each line."""
    order = sorted(
        entries.values(), key=lambda e: (list(TARGETS).index(e["target"]), e["kernel"], e["case"], e["hash"])
    )
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, order)) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; all when left out")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--record", action="store_true", help="write what was compiled")
    parser.add_argument("--all", action="store_true", help="compile what is recorded, too")
    parser.add_argument("--sample", type=int, default=0, help="compile so many of what is recorded, too")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--most", type=int, default=10**9, help="exit with 3 when the record lacks more than so many")
    arguments = parser.parse_args()
    record, facts = read(), {}
    tasks = [(t, c) for t in arguments.targets or TARGETS for c in arguments.case or CASES if t in ONLY.get(c, TARGETS)]
    # forked before anything is compiled: compilers of several processes share nothing
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        found = pool.starmap(names, tasks, chunksize=8)
        met = [(target, name) for (target, _), several in zip(tasks, found, strict=True) for name in several]
        first = {name[2]: (target, name) for target, name in reversed(met)}
        todo = chosen(arguments, first, record)
        for digest, entry in zip(todo, pool.imap(described, [first[digest] for digest in todo]), strict=True):
            facts[digest] = entry
            if arguments.record and len(facts) % SAVED == 0:
                write(read() | facts)  # read again: another run may have written meanwhile
    if arguments.record:
        everything = not (arguments.targets or arguments.case)
        kept = read() | record | facts
        write({digest: kept[digest] for digest in first} if everything else kept)
    for target, (case, kernel, digest) in met:
        entry, was = facts.get(digest) or record[digest], record.get(digest)
        told = entry | {"target": target, "case": case, "kernel": kernel, "compiled": digest in facts}
        lied = digest in facts and was is not None and any(was[key] != entry[key] for key in FACTS)
        print(json.dumps(told | ({"recorded": was} if lied else {})), flush=True)


def chosen(arguments: argparse.Namespace, first: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """The hashes of what is compiled now. Exits when that is too much."""
    missing, known = [h for h in first if h not in record], [h for h in first if h in record]
    if len(missing) > arguments.most:
        print(f"{len(missing)} of {len(first)} kernels are not as the record says", file=sys.stderr)
        sys.exit(TOO_MANY)
    sample = random.Random(arguments.seed).sample(known, min(arguments.sample, len(known)))
    return missing + (known if arguments.all else sample)


def described(what: tuple[str, Name]) -> dict[str, Any]:
    """A line of the record."""
    target, (case, kernel, digest) = what
    head = {"target": target, "kernel": kernel, "case": case, "hash": digest, "triton": triton.__version__}
    return head | compiled(*what)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main()
