"""What an engine asks besides numbers: compiled code around a call, graphs, memory as declared."""

import sys
from types import SimpleNamespace

import pytest
import torch
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch import Impl, Kernel, Manifest, register, unregister
from m3hal.reference import bind_definition


@pytest.fixture
def asked(monkeypatch):
    """Asks a question of an implementation: the result of each format."""

    def ask(operator, question, function, **declared):
        def factory(site):
            return function(bind_definition(ops.load(operator), site))

        monkeypatch.setitem(sys.modules, "m3hal_asked", SimpleNamespace(factory=factory, __spec__=None))
        impl = Impl("m3hal_asked:factory", **declared)
        register(Manifest("asked", "m3hal tests", ">=1,<2", ("cpu",), {operator: (impl,)}))
        return Runner("asked", "cpu").run(select(ids=[f"{operator}/{question}"]))

    yield ask
    unregister("asked")


def reads_a_value(right):
    def run(x, weight, out=None):
        return right(x, weight, out=out) if float(x.abs().max()) >= 0 else x

    return run


def branches_on_the_count(right):
    def run(x, weight, out=None):
        return right(x, weight, out=out) if len(x) <= 16 else right(x.clone(), weight, out=out)

    return run


def as_it_stands(right):
    return right


@pytest.mark.parametrize(
    ("function", "sentence"),
    [(reads_a_value, "fullgraph=True) fails"), (branches_on_the_count, "Detected recompile")],
)
def test_what_compiled_code_cannot_hold_is_found(asked, function, sentence):
    """A branch on a value breaks the graph, one on the number of tokens makes it serve one number only."""
    for result in asked("rms_norm", "compiled", function):
        assert result.status == "fail"
        assert sentence in result.sentence
        assert "traceable=False" in result.sentence


@pytest.mark.parametrize("function", [reads_a_value, branches_on_the_count])
def test_opaque_calls_may_branch(asked, function):
    """The same implementations pass where the manifest says that nobody may look inside."""
    assert {r.status for r in asked("rms_norm", "compiled", function, traceable=False)} == {"pass"}


def test_other_strides_than_the_fake_are_found(asked):
    """Compiled code lays views over an opaque operator's outputs as the fake says that they lie."""

    def transposed(right):
        def run(logits, bias, out=None):
            weights, ids = right(logits, bias)
            return weights.T.contiguous().T, ids

        return run

    for result in asked("route_topk", "compiled", transposed):
        assert result.status == "fail"
        assert "view" in result.sentence


def test_undeclared_scratch_memory_is_found(asked):
    """Temporaries of an implementation whose scratch memory is the caller's are a fault; declared, they are a note."""
    for result in asked("rms_norm", "allocation", as_it_stands):
        assert result.status == "fail"
        assert "bytes beside its outputs and the workspace of 0" in result.sentence
    for result in asked("rms_norm", "allocation", as_it_stands, memory="self"):
        assert result.status == "pass"
        assert "bytes beside its outputs" in result.notes[0]


def test_what_stays_within_its_workspace_passes(asked):
    """Outputs and workspace are enough for this one."""

    def frugal(right):
        def run(logits, bias, out=None, workspace=None):
            weights, ids = out
            scratch = workspace[: 4 * logits.numel()].view(torch.float32).view(logits.shape)
            torch.sigmoid(logits, out=scratch)
            weights.copy_(scratch[:, : weights.shape[1]])
            ids.zero_()
            return out

        return Kernel(run, workspace_bytes=4 * 65 * 128)

    assert {r.status for r in asked("route_topk", "allocation", frugal)} == {"pass"}


def test_memory_that_is_kept_is_found(asked):
    """Also where an implementation allocates for itself, a call leaves nothing behind."""
    kept = []

    def hoards(right):
        def run(x, weight, out=None):
            kept.append(x.clone())
            return right(x, weight, out=out)

        return run

    for result in asked("rms_norm", "allocation", hoards, memory="self"):
        assert result.status == "fail"
        assert "each call leaves" in result.sentence


@pytest.mark.parametrize("past", [0, 200, 3000])
def test_a_workspace_that_is_outgrown_is_found(asked, past):
    """Bytes past the declared end are guarded, not only the first."""

    def outgrows(right):
        def run(x, weight, out=None, workspace=None):
            whole = workspace.as_strided((workspace.numel() + past + 1,), (1,))
            whole[-1] = 3
            return right(x, weight, out=out)

        return Kernel(run, workspace_bytes=64)

    for result in asked("rms_norm", "tokens_7", outgrows):
        assert "guards" in {check.name for check in result.failed}
        assert "the workspace was written" in result.sentence


def test_capture_is_unsupported_where_devices_do_not_capture(asked):
    """A CPU passes no question about graphs."""
    for result in asked("rms_norm", "captured", as_it_stands):
        assert result.status == "unsupported"
        assert "captures no graphs" in result.reason


def test_every_operator_is_asked():
    """Each compiles, and says what it allocates; what runs within a step is captured."""
    for name in ops.NAMES:
        questions = {case.id.split("/")[1] for case in select(operators=[name]) if len(case.checks) < 3}
        assert {"compiled", "allocation"} <= questions
        assert ("captured" in questions) == (name not in ("kv_read", "kv_copy_blocks"))
