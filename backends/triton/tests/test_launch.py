"""The launcher: what it keeps, and when it asks Triton."""

from types import SimpleNamespace

import pytest
import torch
from m3hal_triton import _launch
from m3hal_triton._launch import Launcher, Settings, Tail
from triton.tools.tensor_descriptor import TensorDescriptor


class Function:
    """A kernel of two arrays, the second of any address, two numbers and a constant; notes who launches it and how."""

    arg_names = ("a", "b", "n", "m", "SIZE")
    device_caches = ()

    def __init__(self):
        free = [False, True, False, False, False]
        self.params = [SimpleNamespace(do_not_specialize=False, do_not_specialize_on_alignment=f) for f in free]
        self.asked, self.direct = [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.asked.append((grid, args, options))
            return SimpleNamespace(run=self._run, function=1, packed_metadata=2)

        return launch

    def _run(self, *args):
        self.direct.append(args)


@pytest.fixture
def function(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(_launch, "driver", SimpleNamespace(active=active))
    return Function()


SETTINGS = Settings({"SIZE": 32}, num_warps=2)
A, B = torch.zeros(64), torch.zeros(64)


def test_asks_once_then_launches_itself(function):
    """The second launch passes the addresses, numbers and constants that the first gave Triton, on the stream."""
    launch = Launcher(function)
    for _ in range(2):
        launch((3, 1, 1), (A, Tail(B, 5)), (10, (1, 2)), SETTINGS)
    [(grid, args, options)] = function.asked
    assert grid == (3, 1, 1)
    assert args[1].data_ptr() == B.data_ptr() + 20
    assert options == {"SIZE": 32, "num_warps": 2}
    pointers = A.data_ptr(), B.data_ptr() + 20
    assert function.direct == [(3, 1, 1, 7, 1, 2, None, None, None, *pointers, 10, (1, 2), 32)]


@pytest.mark.parametrize(
    "other",
    [
        ((4, 1, 1), (A, B), (10, 1), SETTINGS),
        ((3, 1, 1), (A, B), (11, 1), SETTINGS),
        ((3, 1, 1), (A, None), (10, 1), SETTINGS),
        ((3, 1, 1), (A, B), (10, 1), Settings({"SIZE": 32})),
        ((3, 1, 1), (A[1:], B), (10, 1), SETTINGS),
    ],
    ids=["grid", "number", "none", "settings", "alignment"],
)
def test_asks_for_what_it_does_not_know(function, other):
    """A launch that could be of another specialisation is Triton's."""
    launch = Launcher(function)
    launch((3, 1, 1), (A, B), (10, 1), SETTINGS)
    launch(*other)
    assert len(function.asked) == 2
    assert not function.direct


def test_hooks_hear_of_every_launch(function, monkeypatch):
    """Where a profiler has a hook, launches go through Triton, which calls it."""
    launch = Launcher(function)
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=None)
    for _ in range(2):
        launch((3, 1, 1), (A, B), (10, 1), SETTINGS)
    monkeypatch.setattr(_launch, "knobs", SimpleNamespace(runtime=hooks))
    launch((3, 1, 1), (A, B), (10, 1), SETTINGS)
    assert len(function.asked) == 2
    assert len(function.direct) == 1


def test_keeps_a_bounded_number(function, monkeypatch):
    """Numbers that grow with a context don't fill memory."""
    monkeypatch.setattr(Launcher, "MOST", 3)
    launch = Launcher(function)
    for n in range(10):
        launch((3, 1, 1), (A, B), (n, 1), SETTINGS)
    assert len(launch._kept) <= 3


def test_again_with_other_addresses(function):
    """A launch that is kept passes what it passed before, but for the tensors that change, and the stream of now."""
    launch = Launcher(function)
    made = launch((3, 1, 1), (A, B), (10, (1, 2)), SETTINGS)
    again = made.again(1)
    assert again(77)
    assert function.direct == [(3, 1, 1, 7, 1, 2, None, None, None, A.data_ptr(), 77, 10, (1, 2), 32)]
    assert len(function.asked) == 1


def test_again_refuses(function, monkeypatch):
    """Nothing is launched at an address of another alignment, on another device, or while a profiler listens."""
    again = Launcher(function)((3, 1, 1), (A, B), (10, 1), SETTINGS).again(0, 1)
    assert not again(A.data_ptr() + 4, B.data_ptr())
    hooks = _launch.knobs
    monkeypatch.setattr(_launch.driver.active, "get_current_device", lambda: 1)
    assert not again(A.data_ptr(), B.data_ptr())
    monkeypatch.setattr(_launch.driver.active, "get_current_device", lambda: 0)
    hook = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=None)
    monkeypatch.setattr(_launch, "knobs", SimpleNamespace(runtime=hook))
    assert not again(A.data_ptr(), B.data_ptr())
    assert not function.direct
    monkeypatch.setattr(_launch, "knobs", hooks)
    assert again(A.data_ptr(), B.data_ptr() + 4)


def test_again_is_none_for_what_triton_is_asked(function):
    """A tensor of an address that made a kernel of its own is never launched again without Triton."""
    assert Launcher(function)((3, 1, 1), (A[1:], B), (10, 1), SETTINGS).again(0) is None


def test_a_descriptor_is_passed_as_it_is(function):
    """A description of an array for the unit that copies tiles goes to the kernel whole, also when it changes."""
    function.params[1].do_not_specialize_on_alignment = True
    first, second = (TensorDescriptor(torch.zeros(8, 16), [8, 16], [16, 1], [4, 16]) for _ in range(2))
    again = Launcher(function)((3, 1, 1), (A, first), (10, 1), SETTINGS).again(0, 1)
    assert again(A.data_ptr(), second)
    assert function.asked[0][1][1] is first
    assert function.direct[0][10] is second
