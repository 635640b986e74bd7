"""What a call leaves of its process: what the checks see, and that they put back what they and it changed."""

import sys
from types import SimpleNamespace

import pytest
import torch
from m3hal_conformance.process import _flushes
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch import Impl, Manifest, register, unregister
from m3hal.reference import bind_definition


@pytest.fixture
def asked(monkeypatch):
    """Asks rms_norm's question ``process`` in bf16: name of check -> sentence, of those that fail."""

    def ask(before_each_call, before_binding=lambda: None):
        def factory(site):
            before_binding()
            right = bind_definition(ops.load("rms_norm"), site)

            def run(*inputs, out=None):
                before_each_call()
                return right(*inputs, out=out)

            return run

        monkeypatch.setitem(sys.modules, "m3hal_asked", SimpleNamespace(factory=factory, __spec__=None))
        impl = Impl("m3hal_asked:factory", memory="self")
        register(Manifest("asked", "m3hal tests", ">=1,<2", ("cpu",), {"rms_norm": (impl,)}))
        result = Runner("asked", "cpu").run_case(select(ids=["rms_norm/process/bfloat16"])[0])
        return {check.name: check.sentence for check in result.failed}

    yield ask
    unregister("asked")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: torch.manual_seed(0), "torch's random numbers"),
        (lambda: torch.rand(1), "torch's random numbers"),
        (lambda: torch.set_num_threads(1), "the number of CPU threads (3 before, 1 after)"),
        (lambda: torch.set_flush_denormal(False), "whether denormal numbers are flushed"),
        (lambda: torch.set_grad_enabled(True), "whether gradients are recorded"),
        (lambda: torch.set_float32_matmul_precision("highest"), "the precision of float32 matrix products"),
    ],
)
def test_what_is_set_to_the_usual_value_is_seen(asked, change, told):
    """Also where the value is the one that tests usually run with; binding and calling are asked apart."""
    assert told in asked(change)["global_state"]
    assert asked(lambda: None, change)["global_state"].startswith("binding it changes")


def test_state_is_put_back(asked):
    """After the check torch's state is what it was before, whatever it and the kernel set."""

    def state():
        return (torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(), _flushes(),
                torch.get_float32_matmul_precision(), torch.is_grad_enabled())  # fmt: skip

    before = state()
    assert asked(lambda: None) == {}
    assert state() == before


def test_a_thread_that_raises_is_a_failure(asked):
    """What another thread raises does not end with it."""
    import threading

    def only_here():
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no context in this thread")

    assert "RuntimeError: no context in this thread" in asked(only_here)["other_thread"]
