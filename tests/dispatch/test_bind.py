"""From a plan's row to the callable that a layer keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from m3hal.dispatch import Impl, Kernel, M3halError, Policy, plan
from m3hal.shape import ModelShape


@pytest.fixture
def make(alone: None, shape: ModelShape) -> Callable[..., Any]:
    """A plan of acme with the reference behind it."""

    def make(backend: str = "acme,reference", **keywords: Any) -> Any:
        return plan(shape, "cpu", Policy.resolve({"backend": backend}, environ={}), **keywords)

    return make


def test_run_is_the_vendors_own_callable(toy: Any, make: Callable[..., Any]) -> None:
    """No wrapper stands before it, and all layers of a site share one Bound."""

    def run(x: Any, weight: Any, out: Any = None) -> str:
        return "ran"

    toy("acme", rms_norm=lambda site: run)
    made = make()
    bound = made.bind("rms_norm", "moe")
    assert bound.run is run
    assert made.bind("rms_norm", "moe") is bound
    assert bound.backend == "acme"
    assert bound.impl_id == made.choice("rms_norm", "moe").chosen.impl_id
    assert made.bind("rms_norm", "dense_mlp").site.kind == "dense_mlp"


def test_factory_gets_the_site_and_returns_a_kernel(toy: Any, make: Callable[..., Any]) -> None:
    """What a Kernel states arrives in the Bound, with the declared traits."""
    sites = []

    def factory(site: Any) -> Kernel:
        sites.append(site)
        return Kernel(print, workspace_bytes=64, plan_batch=lambda meta, storage: meta, plan_bytes=8, unpack=repr)

    module = toy("acme", sparse_attention=factory)
    impl = Impl(f"{module.__name__}:sparse_attention", layouts=("hnd",), traits={"p_dtype": "bfloat16"})
    toy("acme", operators={"sparse_attention": (impl,)})
    bound = make().bind("sparse_attention", "sparse_attention")
    assert sites == [bound.site]
    assert (bound.run, bound.workspace_bytes, bound.plan_bytes, bound.unpack) == (print, 64, 8, repr)
    assert bound.traits == {"p_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda site: None, "returned None; it must return a callable or a m3hal.Kernel"),
        (lambda site: Kernel(print, workspace_bytes=-1), "its workspace_bytes is -1"),
        (lambda site: Kernel(print, plan_bytes=1.5), "its plan_bytes is 1.5"),  # type: ignore[arg-type]
        (lambda site: Kernel(print, plan_batch=3), "its plan_batch is 3"),  # type: ignore[arg-type]
        (lambda site: [][0], "raised IndexError"),
        (lambda site: (_ for _ in ()).throw(GeneratorExit()).__next__(), "raised GeneratorExit"),
        (lambda site: exit(1), "raised SystemExit: 1"),
        (lambda: print, "raised TypeError"),
    ],
)
def test_factories_that_fail_name_backend_and_operator(
    toy: Any, make: Callable[..., Any], made: Any, message: str
) -> None:
    """Nothing falls back: binding is where a wrong promise is found out."""
    toy("acme", rms_norm=made)
    with pytest.raises(M3halError) as caught:
        make().bind("rms_norm", "moe")
    assert "backend 'acme' (in-process) can't bind rms_norm at moe" in str(caught.value)
    assert message in str(caught.value)


def test_who_allocates_may_have_a_workspace_too(toy: Any, make: Callable[..., Any]) -> None:
    """A closed library beside kernels that take the caller's memory: what is stated is given."""
    module = toy("acme", rms_norm=lambda site: Kernel(print, workspace_bytes=64))
    toy("acme", operators={"rms_norm": (Impl(f"{module.__name__}:rms_norm", memory="self"),)})
    assert make().bind("rms_norm", "moe").workspace_bytes == 64


def test_unserved_operator_of_a_partial_plan(toy: Any, make: Callable[..., Any]) -> None:
    """Binding what nobody serves says so, with the verdicts."""
    toy("acme", rms_norm=lambda site: print)
    with pytest.raises(M3halError, match="topk_blocks at sparse_attention can't be bound"):
        make("acme", partial=True).bind("topk_blocks", "sparse_attention")


def test_interrupted_binding_can_be_tried_again(toy: Any, make: Callable[..., Any]) -> None:
    """A failed bind leaves nothing behind in the plan."""
    attempts = []

    def factory(site: Any) -> Callable[..., None]:
        attempts.append(site)
        if len(attempts) == 1:
            raise OSError("the compiler's cache is full")
        return print

    toy("acme", rms_norm=factory)
    made = make()
    with pytest.raises(M3halError, match="cache is full"):
        made.bind("rms_norm", "moe")
    assert made.bind("rms_norm", "moe").run is print
