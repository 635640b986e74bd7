"""Small host-side helpers that the kernels' callables share."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Tiles
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
#: fp32 products are IEEE products: an engine in fp32 is compared exactly, so TF32 is no option
DOT_PRECISION = "ieee"


def power_of_two_below(value: int) -> int:
    """The largest power of two that is at most ``value`` (1 for less)."""
    return 1 << max(value.bit_length() - 1, 0)


def power_of_two_above(value: int) -> int:
    """The smallest power of two that is at least ``value``; triton's own can't be followed by torch.compile."""
    return 1 << (value - 1).bit_length()


def common_power_of_two(*values: int) -> int:
    """The largest power of two that divides all the values."""
    bits = 0
    for value in values:
        bits |= value
    return bits & -bits


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs the device runs side by side; a few where the interpreter runs them one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 32


@cache
def programmatic(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one it waits for has ended: on NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def launched_early(device: torch.device) -> bool:
    """The same, of a kernel in code that torch.compile may trace: what it makes of a launch has no such option."""
    return not torch.compiler.is_compiling() and programmatic(device)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether registers are what limits the programs that share a multiprocessor: sums are held in them."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def after(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that begins with ``gdc_wait``."""
    return {"launch_pdl": True} if early else {}


def converts(device: torch.device) -> bool:
    """Whether fp32 becomes E4M3 by an instruction that saturates and makes every NaN 0x7F: NVIDIA's, from Ada on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


class Tail(NamedTuple):
    """An argument: a flat tensor from ``start`` on, which costs no view where only its address is needed."""

    tensor: torch.Tensor
    start: int


#: what a kernel takes for an array; a descriptor is for the unit that copies tiles
Argument = torch.Tensor | Tail | TensorDescriptor | Tiles | None


class Settings:
    """A kernel's constants and launch options, made once; compared by identity."""

    def __init__(self, constants: dict[str, Any], **options: Any) -> None:
        self.constants = constants
        self.options = options


class Launch(NamedTuple):
    """A launch that was made."""

    launcher: Launcher
    grid: tuple[int, int, int]
    tensors: tuple[Argument, ...]
    numbers: tuple[Any, ...]
    settings: Settings

    def again(self, *changing: int) -> Again | None:
        """The same with other tensors in these places, at most; None where Triton must be asked for every launch."""
        return self.launcher.again(self, changing)


class Launcher:
    """Launches a kernel as ``kernel[grid](...)`` does, at a fraction of the host's time.

    Triton binds, specialises and hashes every argument of every launch. Here all numbers are the key of what it
    compiled, tensors of a site have one dtype each, and only addresses are looked at: a kernel whose specialised
    arguments are all multiples of 16 bytes is kept, for anything else Triton is asked.
    """

    #: kernels kept, as numbers that grow with a context each add one
    MOST = 4096

    def __init__(self, function: Any) -> None:
        self._function = function
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._free: tuple[bool, ...] | None = None
        #: whether this process interprets kernels
        self.interpreted = not hasattr(function, "device_caches")

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Argument, ...],
        numbers: tuple[Any, ...],
        settings: Settings,
    ) -> Launch:
        """tensors and numbers: the first arguments, in the kernel's order; numbers may be tuples of numbers."""
        launch = Launch(self, grid, tensors, numbers, settings)
        pointers, plain = self._addresses(tensors)
        key = (grid, numbers, settings, *(pointer is None for pointer in pointers))
        if plain and self._kept:
            device = driver.active.get_current_device()
            known = self._kept.get((device, *key))
            hooks = knobs.runtime
            if known is not None and not (_has(hooks.launch_enter_hook) or _has(hooks.launch_exit_hook)):
                run, function, metadata, constants = known
                stream = driver.active.get_current_stream(device)
                run(*grid, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)
                return launch
        whole = [t.tensor[t.start :] if type(t) is Tail else t for t in tensors]
        kernel = self._function[grid](*whole, *numbers, **settings.constants, **settings.options)
        if plain and hasattr(kernel, "packed_metadata"):
            if len(self._kept) >= self.MOST:
                self._kept.clear()
            names = self._function.arg_names[len(tensors) + len(numbers) :]
            constants = tuple(settings.constants[name] for name in names)
            device = driver.active.get_current_device()
            self._kept[device, *key] = kernel.run, kernel.function, kernel.packed_metadata, constants
        return launch

    def again(self, launch: Launch, changing: tuple[int, ...]) -> Again | None:
        """See :meth:`Launch.again`."""
        if not self._kept:
            return None
        pointers, plain = self._addresses(launch.tensors)
        device = driver.active.get_current_device()
        key = (launch.grid, launch.numbers, launch.settings, *(pointer is None for pointer in pointers))
        known = self._kept.get((device, *key))
        if not plain or known is None:
            return None
        run, function, metadata, constants = known
        start = (*launch.grid, 0, function, metadata, None, None, None)
        free = self._free or ()
        places = tuple((len(start) + place, 0 if free[place] else 15) for place in changing)
        return Again(run, device, [*start, *pointers, *launch.numbers, *constants], places)

    def _addresses(self, tensors: tuple[Argument, ...]) -> tuple[list[Any], bool]:
        """The addresses of tensors, and whether all that are specialised are multiples of 16."""
        pointers: list[Any] = []
        low, free = 0, self._free or self._free_of(len(tensors))
        for tensor, is_free in zip(tensors, free, strict=True):
            if tensor is None:
                pointers.append(None)
                continue
            if type(tensor) in (TensorDescriptor, Tiles):
                pointers.append(tensor)
                continue
            if type(tensor) is Tail:
                pointer = tensor.tensor.data_ptr() + tensor.start * tensor.tensor.element_size()
            else:
                pointer = tensor.data_ptr()
            pointers.append(pointer)
            if not is_free:
                low |= pointer
        return pointers, not low & 15

    def _free_of(self, count: int) -> tuple[bool, ...]:
        """Which of the first arguments may have any address."""
        if self.interpreted:
            return (True,) * count
        parameters = self._function.params[:count]
        self._free = tuple(p.do_not_specialize or p.do_not_specialize_on_alignment for p in parameters)
        return self._free


class Again:
    """A launch of which only a few addresses change: all else was looked at when it was made the first time.

    Whoever keeps it keeps the tensors whose addresses stay.
    """

    __slots__ = ("_arguments", "_device", "_places", "_run")

    def __init__(self, run: Any, device: int, arguments: list[Any], places: tuple[tuple[int, int], ...]) -> None:
        self._run = run
        self._device = device
        self._arguments = arguments
        self._places = places  # in the arguments, and which bits of an address must be 0

    @property
    def changing(self) -> int:
        """How many addresses change."""
        return len(self._places)

    def __call__(self, *pointers: Any) -> bool:
        """Launches with these addresses in the changing places; False if it can't, and nothing was launched."""
        arguments, active, hooks = self._arguments.copy(), driver.active, knobs.runtime
        for (place, mask), pointer in zip(self._places, pointers, strict=True):
            if mask and pointer & mask:
                return False
            arguments[place] = pointer
        device = self._device
        if active.get_current_device() != device or _has(hooks.launch_enter_hook) or _has(hooks.launch_exit_hook):
            return False
        arguments[STREAM] = active.get_current_stream(device)
        self._run(*arguments)
        return True


#: the stream's place among what a compiled kernel's launcher takes
STREAM = 3


def _has(hook: Any) -> bool:
    """Whether anybody, a profiler, say, wants to know of launches."""
    return bool(getattr(hook, "calls", hook))
