"""Whether a converted checkpoint says what its source says. Everything is derived from the source's own tensors."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from m3hal.checkpoint.validate import tables
from m3hal.checkpoint.validate.described import config, index, quantization
from m3hal.checkpoint.validate.faults import Broken, Fault, Kind, Verdict
from m3hal.checkpoint.validate.reader import Folder, View

_EXPERT = re.compile(r"\.experts\.\d+\.w[123]$")
_RECORD = "m3hal_conversion.json"
_STEP = 1 << 17  # elements compared at once: their float64 numbers stay in the cache


@dataclass(frozen=True)
class Expected:
    """What the source asks for: modules that become FP8, modules that become BF16, tensors that stay."""

    experts: tuple[str, ...]
    shared: tuple[str, ...]
    copies: tuple[str, ...]

    def unquantised(self, old: Folder) -> tuple[str, ...]:
        """Modules that an engine may take for linear layers and that are not FP8: matrices, but not embeddings."""
        matrices = (name for name in self.copies if name.endswith(".weight") and len(old.tensors[name].shape) == 2)
        kept = (name.removesuffix(".weight") for name in matrices if not name.endswith(".embed_tokens.weight"))
        return (*self.shared, *kept)


def validate(
    target: Path,
    source: Path,
    *,
    sample: int | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Looks at every tensor's name, dtype, shape and index entry, every scale, every unconverted byte and file.

    sample: compare that many expert matrices element by element, chosen by ``seed``; None: all of them.
    progress: called with tensors done and tensors there are.
    """
    new, old = Folder(target), Folder(source, indexed=True)
    try:
        expected = expect(old)
        faults = [*names(new, expected), *index(new)]
        faults += [*config(new, old, expected.experts, expected.unquantised(old)), *files(new, old)]
        ieee = quantization(new.config).get("fp8_dtype_flavor") is not None
        chosen = set(expected.experts)
        if sample is not None and sample < len(chosen):
            chosen = set(random.Random(seed).sample(expected.experts, sample))
        jobs: list[Callable[[], list[Fault]]] = [
            partial(check_expert, new, old, module, ieee, module in chosen) for module in expected.experts
        ]
        jobs += [partial(check_shared, new, old, module) for module in expected.shared]
        jobs += [partial(check_copy, new, old, name) for name in expected.copies]
        with ThreadPoolExecutor(workers) as pool:
            for done, found in enumerate(pool.map(lambda job: job(), jobs), 1):
                faults += found
                progress(done, len(jobs))
    except Broken as broken:
        return Verdict((broken.fault,), 0, 0, 0)
    return Verdict(tuple(faults), len(chosen), len(expected.experts), len(new.tensors))


def expect(old: Folder) -> Expected:
    """A module of the source with a ``weight_scale`` is MXFP4: a routed expert, or else a shared one."""
    scaled = {name.removesuffix(".weight_scale") for name in old.tensors if name.endswith(".weight_scale")}
    for module in sorted(scaled):
        if module + ".weight" not in old.tensors:
            raise Broken(Kind.UNREADABLE, f"the source, {old.path}", f"has scales and no codes of {module}")
        _require_mxfp4(old, module)
    taken = {module + suffix for module in scaled for suffix in (".weight", ".weight_scale")}
    experts = tuple(sorted(module for module in scaled if _EXPERT.search(module)))
    if not experts:
        raise Broken(Kind.UNREADABLE, f"the source, {old.path}", "has no MXFP4 expert; there is nothing to compare")
    return Expected(
        experts,
        tuple(sorted(scaled.difference(experts))),
        tuple(sorted(name for name in old.tensors if name not in taken)),
    )


def _require_mxfp4(old: Folder, module: str) -> None:
    codes, blocks = (old.tensors[module + suffix] for suffix in (".weight", ".weight_scale"))
    columns = codes.shape[1] * 2 if len(codes.shape) == 2 else 0
    if codes.dtype != "U8" or blocks.dtype not in ("U8", "F8_E8M0") or not columns or columns % 32:
        said = f"is {codes.dtype} {list(codes.shape)} with {blocks.dtype} scales, not MXFP4; are the folders swapped?"
    elif blocks.shape != (codes.shape[0], columns // 32):
        said = f"has scales {list(blocks.shape)} for codes {list(codes.shape)}"
    else:
        return
    raise Broken(Kind.UNREADABLE, f"the source, {old.path}", f"{module} {said}")


def names(new: Folder, expected: Expected) -> Iterator[Fault]:
    """Every tensor that is asked for, and no other."""
    wanted = {module + suffix for module in expected.experts for suffix in (".weight", ".weight_scale")}
    wanted |= {module + ".weight" for module in expected.shared} | set(expected.copies)
    for name in sorted(wanted.difference(new.tensors)):
        yield Fault(Kind.MISSING, name, "is not in any shard")
    for name in sorted(set(new.tensors).difference(wanted)):
        yield Fault(Kind.UNEXPECTED, name, "is in no source tensor's place")


def files(new: Folder, old: Folder) -> Iterator[Fault]:
    """Tokenizer, licence and the like are the same."""
    rewritten = {"config.json", "model.safetensors.index.json", "SHA256SUMS", _RECORD}
    for path in sorted(old.path.rglob("*")):
        name = path.relative_to(old.path)
        hidden = any(part.startswith(".") for part in name.parts)
        if hidden or not path.is_file() or str(name) in rewritten or name.suffix == ".safetensors":
            continue
        copy = new.path / name
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            yield Fault(Kind.FILE, str(name), "differs from the source's" if copy.exists() else "is missing")


def check_expert(new: Folder, old: Folder, module: str, ieee: bool, elements: bool) -> list[Fault]:
    """A routed expert's matrix: shape, scales, and, if asked, every byte and every number."""
    weight, scale = (new.tensors.get(module + suffix) for suffix in (".weight", ".weight_scale"))
    if weight is None or scale is None:
        return []  # missing, and said so
    codes, blocks = old.tensors[module + ".weight"], old.tensors[module + ".weight_scale"]
    rows, columns = codes.shape[0], codes.shape[1] * 2
    faults = _shape(module + ".weight", weight, "F8_E4M3", (rows, columns))
    faults += _shape(module + ".weight_scale", scale, "F32", (rows, 1))
    if faults:
        return faults
    scales = np.array(scale.bytes()).view("<f4")
    bad = np.flatnonzero(~tables.is_power_of_two(scales))
    if len(bad):
        return [Fault(Kind.SCALE, module + ".weight_scale", f"row {bad[0]} has {scales[bad[0]]!r}, no power of two")]
    return _elements(module, weight, scales, codes, blocks, ieee) if elements else []


def _elements(
    module: str, weight: View, scales: np.ndarray[Any, Any], codes: View, blocks: View, ieee: bool
) -> list[Fault]:
    number, allowed = tables.e4m3(ieee), tables.allowed(ieee)
    data, source, factors = weight.rows(), codes.rows(), blocks.rows()
    for part in _parts(data.shape):
        fine = np.take(allowed, data[part], mode="clip")
        if not fine.all():
            row, column = np.argwhere(~fine)[0]
            byte = int(data[part][row, column])
            return [Fault(Kind.CODE, module + ".weight", f"row {part.start + row}, column {column} is 0x{byte:02X}")]
        got = np.take(number, data[part], mode="clip")
        got *= scales[part, None]
        want = tables.mxfp4(source[part], factors[part])
        if not np.array_equal(got, want):
            row, column = np.argwhere(got != want)[0]
            said = f"row {part.start + row}, column {column} is {got[row, column]}; the source says {want[row, column]}"
            return [Fault(Kind.VALUE, module + ".weight", said)]
    return []


def check_shared(new: Folder, old: Folder, module: str) -> list[Fault]:
    """A shared expert's matrix, BF16."""
    name = module + ".weight"
    if name not in new.tensors:
        return []
    codes, blocks, weight = old.tensors[name], old.tensors[module + ".weight_scale"], new.tensors[name]
    faults = _shape(name, weight, "BF16", (codes.shape[0], codes.shape[1] * 2))
    if faults:
        return faults
    data, source, factors = weight.rows(), codes.rows(), blocks.rows()
    for part in _parts((codes.shape[0], codes.shape[1] * 2)):
        if not np.array_equal(tables.bf16(data[part]), tables.mxfp4(source[part], factors[part])):
            return [Fault(Kind.SHARED, name, f"differs from the source in rows {part.start} to {part.stop - 1}")]
    return []


def check_copy(new: Folder, old: Folder, name: str) -> list[Fault]:
    """A tensor that is neither."""
    if name not in new.tensors:
        return []
    here, there = new.tensors[name], old.tensors[name]
    faults = _shape(name, here, there.dtype, there.shape)
    if not faults and not np.array_equal(here.bytes(), there.bytes()):
        faults = [Fault(Kind.COPY, name, "is not byte-identical to the source's")]
    return faults


def _shape(name: str, view: View, dtype: str, shape: tuple[int, ...]) -> list[Fault]:
    if (view.dtype, view.shape) == (dtype, shape):
        return []
    return [Fault(Kind.SHAPE, name, f"is {view.dtype} {list(view.shape)}; it should be {dtype} {list(shape)}")]


def _parts(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, _STEP // shape[1])
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
