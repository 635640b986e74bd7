"""Functions of vendors' libraries, compared with what was recorded of them: in sources alone, on toy packages."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from m3hal.dispatch import Impl, Manifest, Symbol, plan, symbols
from m3hal.dispatch.check import problem_of, problem_of_impl, unknown_operators
from m3hal.dispatch.policy import Policy
from m3hal.ops import load

NORM = ("input", "weight", "eps=1e-06", "*", "out=None")
Library = Callable[..., str]
_counter = itertools.count()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Makes an importable package of the given files, of which none can be imported; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**files: str) -> str:
        name = f"toy_library_{next(_counter)}"
        for path, text in {"__init__": "", **files}.items():
            target = tmp_path / name / f"{path.replace('__in__', '/')}.py"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("raise SystemExit('imported')\n" + textwrap.dedent(text))
        return name

    return make


def difference(path: str, parameters: tuple[str, ...] = NORM, **declares: str) -> str | None:
    return symbols.difference(Symbol(path, parameters, "https://example.org", "2026-11-30", declares))


@pytest.mark.parametrize(
    ("signature", "told"),
    [
        ("input, weight, eps=1e-6, *, out=None", None),
        ("input: Tensor, weight: Tensor, eps: float = 0.000001, *, out: Tensor | None = None", None),
        ("input, weight, eps=1e-6, fast=False, *, out=None, pdl=None, **more", None),
        ("x, weight, eps=1e-6, *, out=None", "'input' is gone, 'x' is new and required"),
        ("input, weight, scale, eps=1e-6, *, out=None", "'scale' is new and required"),
        ("input, weight, eps=1e-6", "'out' is gone"),
        ("input, weight, eps=1e-5, *, out=None", "'eps' is 1e-05 unless given, not 1e-06"),
        ("input, weight, eps, *, out=None", "'eps' is new"),
        ("weight, input, eps=1e-6, *, out=None", "no longer begin with input, weight, eps"),
        ("input, *, weight, eps=1e-6, out=None", "no longer begin with input, weight, eps"),
        ("input, fast=False, weight=None, eps=1e-6, *, out=None", "no longer begin with input, weight, eps"),
        ("input, weight, eps=1e-6, /, *, out=None", "'input' can't be given by name any more"),
        ("*args, **kwargs", "'input' is gone, 'weight' is gone"),
    ],
)
def test_what_a_signature_may_do(library: Library, signature: str, told: str | None) -> None:
    """Optional additions are harmless; what is renamed, required, moved or has another default is told by name."""
    found = difference(f"{library(norms=f'def norm({signature}): ...')}.norms:norm")
    if told is None:
        assert found is None
    elif told == "'eps' is new":
        assert found is not None
        assert "'eps' is required by now" in found
    else:
        assert found is not None
        assert told in found
        assert "2026-11-30" in found


def test_re_exports_aliases_and_guards_are_followed(library: Library) -> None:
    """The public name counts, wherever it is defined: in a submodule, under an older name, under if and try."""
    name = library(
        __init__="from .public import norm, renamed as other",
        public="from ._impl import norm, new as renamed",
        _impl="""
            if FAST:
                @decorated(1)
                def norm(input, weight, eps=1e-6, *, out=None): ...
            try:
                def new(input, weight, eps=1e-6, *, out=None): ...
                old = new
            except ImportError:
                def new(): ...
        """,
    )
    assert [difference(f"{name}:{function}") for function in ("norm", "other")] == [None, None]
    assert difference(f"{name}._impl:old") is None


def test_the_definition_that_holds_is_compared(library: Library) -> None:
    """The last one, in a class too; where a condition decides between different ones, that is told."""
    old, new = "def norm(x): ...", "def norm(input, weight, eps=1e-6, *, out=None): ..."
    name = library(
        replaced=f"{old}\n{new}\n",
        either=f"if FAST:\n    {new}\nelse:\n    {old}\n",
        same=f"if FAST:\n    {new}\nelse:\n    {new}\n",
        later=f"if FAST:\n    {old}\n{new}\n",
        wrapped=f"{new}\nif FAST:\n    norm = faster(norm)\n",
        within=f"class Norm:\n    {old}\n    {new}\n",
        coroutine=f"async {new}\n",
    )
    told = {file: difference(f"{name}.{file}:norm") for file in ("replaced", "same", "later")}
    assert told == {"replaced": None, "same": None, "later": None}
    assert difference(f"{name}.within:Norm.norm") is None
    assert f"{name}.either defines norm in 2 ways" in str(difference(f"{name}.either:norm"))
    assert f"{name}.wrapped defines norm in 2 ways" in str(difference(f"{name}.wrapped:norm"))
    assert "is a coroutine by now" in str(difference(f"{name}.coroutine:norm"))


def test_methods_and_declared_values(library: Library) -> None:
    """A class's method is compared like a function; enumerations and a library's own tables of axes count as well."""
    name = library(
        kernels="""
            class Mode(Enum):
                HALVES = 0
            class Rotate(Function):
                @staticmethod
                def forward(ctx, p, cos, sin): ...
        """,
        tables="""
            table = Template(outputs={"score": Tensor(["heads", "blocks", "tokens"], dtype="float32")})
        """,
    )
    rotate, axes = f"{name}.kernels:Rotate.forward", f"{name}.tables:table.outputs.score.0"
    recorded = ("ctx", "p", "cos", "sin")
    assert difference(rotate, recorded, **{f"{name}.kernels:Mode.HALVES": "0"}) is None
    assert difference(rotate, recorded, **{axes: '["heads", "blocks", "tokens"]'}) is None
    other = difference(rotate, recorded, **{axes: "['tokens', 'heads', 'blocks']"})
    assert other == f"{axes} is ['heads', 'blocks', 'tokens']; on 2026-11-30 it was ['tokens', 'heads', 'blocks']"
    assert "has no FULL" in str(difference(rotate, recorded, **{f"{name}.kernels:Mode.FULL": "1"}))


def test_what_is_gone_or_unreadable_is_a_sentence(library: Library, tmp_path: Path) -> None:
    """No function, no module, no source, no Python: each is told, none raises."""
    name = library(norms="norm = 3", broken="def norm(:")
    (tmp_path / name / "compiled.cpython-311-x86_64-linux-gnu.so").touch()
    (tmp_path / name / "circle.py").write_text("from .circle import norm\n")
    told = {path: difference(f"{name}.{path}") for path in ("norms:norm", "norms:other", "absent:norm", "broken:norm")}
    assert "is no function" in str(told["norms:norm"])
    assert "has no other" in str(told["norms:other"])
    assert "there is no module" in str(told["absent:norm"])
    assert "can't be read as Python source" in str(told["broken:norm"])
    assert "has no norm" in str(difference(f"{name}.circle:norm"))
    (tmp_path / name / "deep.py").write_text("norm = " + "(" * 5000 + ")" * 5000)
    (tmp_path / name / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\ndef norm(x): ...\n")
    (tmp_path / name / "binary.py").write_bytes(bytes(range(256)))
    assert "can't be read as Python source" in str(difference(f"{name}.deep:norm"))
    assert "can't be read as Python source" in str(difference(f"{name}.binary:norm"))
    assert "'input' is gone" in str(difference(f"{name}.latin:norm")), "Python's own encodings are read"
    if sys.implementation.cache_tag == "cpython-311" and sys.platform == "linux":
        assert "without its source" in str(difference(f"{name}.compiled:norm"))


def test_a_difference_rejects_the_implementation_alone(
    toy: Callable[..., object], library: Library, shape: object
) -> None:
    """The verdict names the stage, the difference and the remedy; what calls other functions still serves."""
    name = library(norms="def norm(x, weight): ...")
    old = Symbol(f"{name}.norms:norm", ("input", "weight"), "https://example.org", "2026-11-30")
    new = Symbol(f"{name}.norms:norm", ("x", "weight"), "https://example.org", "2026-11-30")
    absent = Symbol("no_such_library.norms:norm", ("x",), "https://example.org", "2026-11-30")
    impls = {op: (Impl("m3hal.reference:rms_norm", calls=(s,)),) for op, s in (("rms_norm", old), ("linear", new))}
    toy("acme", operators=impls | {"rope_partial": (Impl("m3hal.reference:rope_partial", calls=(absent,)),)})
    policy = Policy.resolve({"backend": "acme"}, environ={})
    made = plan(shape, "cpu", policy, engine={}, partial=True)  # type: ignore[arg-type]
    verdict = made.choice("rms_norm", "moe").verdicts[0]
    assert (verdict.stage, verdict.accepted) == ("library", False)
    assert "'input' is gone, 'x' is new and required" in verdict.reason
    assert "install another version of the library or a newer in-process" in verdict.reason
    assert made.choice("linear", "moe").server == "acme"
    assert made.choice("rope_partial", "sparse_attention").server == "acme", "a library that is absent is assumed"


def test_an_implementation_may_be_for_some_devices(toy: Callable[..., object], shape: object) -> None:
    """Its devices narrow the manifest's; elsewhere the verdict says where it runs."""
    toy("acme", operators={"rms_norm": (Impl("m3hal.reference:rms_norm", devices=("cuda:sm_10*",)),)})
    policy = Policy.resolve({"backend": "acme"}, environ={})

    def verdict(device: str) -> object:
        made = plan(shape, device, policy, engine={}, partial=True)  # type: ignore[arg-type]
        return made.choice("rms_norm", "moe").verdicts[0]

    assert verdict("cuda:sm_103").accepted  # type: ignore[attr-defined]
    assert str(verdict("cuda:sm_90")).endswith("rejected at device: it runs on cuda:sm_10*; not on cuda:sm_90")


@pytest.mark.parametrize(("wrong", "told"), [({"devices": "cuda"}, "devices"), ({"calls": ("x",)}, "m3hal.Symbol")])
def test_misspelt_entries_are_faults(wrong: dict[str, object], told: str) -> None:
    """What can't be devices or symbols is found without running anything."""
    assert told in str(problem_of_impl(Impl("a:b", **wrong), load("rms_norm")))  # type: ignore[arg-type]


def test_what_is_withheld_has_an_operator_and_a_reason() -> None:
    """A reason that is no text can't be registered; one for what is no operator is a fault of the manifest."""
    manifest = Manifest("acme", "toy", ">=1,<2", ("*",), {}, withheld={"moe_experts": "it has no adapter yet"})
    assert problem_of(manifest) is None
    assert "its withheld must map" in str(problem_of(replace(manifest, withheld={"rms_norm": 3})))  # type: ignore[dict-item]
    assert next(unknown_operators(replace(manifest, withheld={"rms_nrom": "why"})))[0]
