"""What a vendor writes: a manifest that is pure data, and the kernel that a factory returns.

A manifest is imported for every selected backend, also on machines that lack the device, so this module and the
module that holds a manifest use the standard library only. Vendor code is named by dotted paths (``"module:attr"``)
and imported at bind, never before.

    MANIFEST = Manifest(
        name="acme", vendor="Acme", api=">=1,<2", priority=100,
        devices=("acme:*",), libraries={"acme-runtime": ">=3,<4"}, probe="m3hal_acme.probe:probe",
        operators={
            "rms_norm": (Impl("m3hal_acme.norm:rms_norm", limits=(one_of("dtype", "bfloat16"),)),),
        },
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from m3hal.shape import Site

#: The backend API this m3hal speaks. A manifest states the range it was written for.
API_VERSION = (1, 0)

Memory = Literal["caller", "self", "graph"]
Phase = Literal["prefill", "decode", "verify"]
Views = Literal["strided", "rows", "contiguous"]


@dataclass(frozen=True)
class Limit:
    """One constraint on an attribute of :class:`m3hal.Site`; a value outside it rejects the implementation.

    Write limits with :func:`one_of`, :func:`at_least`, :func:`at_most` and :func:`multiple_of`.
    """

    attribute: str
    values: tuple[object, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    multiple: int | None = None

    def refusal(self, value: Any) -> str | None:
        """Why ``value`` is outside the limit, as the end of a sentence; None when it is inside."""
        if self.values and value not in self.values:
            return f"{self.attribute} is {value!r}; it takes {', '.join(map(repr, self.values))}"
        if self.minimum is not None and value < self.minimum:
            return f"{self.attribute} is {value}; it takes {self.minimum} or more"
        if self.maximum is not None and value > self.maximum:
            return f"{self.attribute} is {value}; it takes {self.maximum} or less"
        if self.multiple is not None and value % self.multiple:
            return f"{self.attribute} is {value}; it takes multiples of {self.multiple}"
        return None


def one_of(attribute: str, *values: object) -> Limit:
    """The site's attribute must be one of ``values``."""
    return Limit(attribute, values=values)


def at_least(attribute: str, minimum: float) -> Limit:
    """The site's attribute must be ``minimum`` or more."""
    return Limit(attribute, minimum=minimum)


def at_most(attribute: str, maximum: float) -> Limit:
    """The site's attribute must be ``maximum`` or less."""
    return Limit(attribute, maximum=maximum)


def multiple_of(attribute: str, multiple: int) -> Limit:
    """The site's attribute must be a multiple of ``multiple``."""
    return Limit(attribute, multiple=multiple)


@dataclass(frozen=True)
class Rung:
    """One step of an implementation's ladder: the phase and token range in which it runs a variant of itself.

    The ladder is fixed at bind and shown by ``explain``; the implementation's own callable chooses the rung from the
    number of tokens. A ladder must cover every token count from 0 to the site's ``max_tokens``.
    """

    name: str
    phases: tuple[Phase, ...] = ("prefill", "decode", "verify")
    min_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Symbol:
    """A function of a vendor's library that an implementation calls, as it was when the adapter was written.

    Where the library is installed its sources are read, never imported, and what differs rejects the implementation:
    see :mod:`m3hal.dispatch.symbols`.

    path: ``"package.module:function"`` or ``"package.module:Class.method"``; re-exports are followed.
    parameters: as after ``def``, without annotations: ``("input", "weight", "eps=1e-06", "*", "out=None")``. Optional
        ones that the library adds behind them are harmless.
    declares: what else the sources must say: ``"package.module:NAME.attribute"`` -> the value as written there. Through
        a class, a call's keyword or positional argument (by its number) and a dictionary's key, so that the members of
        an enumeration and the axes in a library's own tables can be named.
    source: where this was read. date: when, as 2026-11-30.
    """

    path: str
    parameters: tuple[str, ...]
    source: str
    date: str
    declares: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Impl:
    """One vendor function for one operator.

    path: ``"module:factory"``. The factory takes a :class:`~m3hal.Site` and returns the callable, or a
        :class:`Kernel`.
    limits: the sites it serves, as data. predicate: ``"module:function"``, standard library only, for what limits
        can't say: takes a Site, returns None or the reason for refusing it.
    traits: the numeric freedoms it takes, from the operator's closed vocabulary; one it leaves out is held to exact.
    layouts: for operators of the cache group, the page maps it reads and writes; ``vendor:name`` is a private one.
    devices: patterns that narrow the manifest's, where a library has a kernel for some of its devices only.
    calls: what it calls in its vendor's library.
    memory: who owns scratch memory. ``caller``: the kernel states ``workspace_bytes``, and allocates nothing beside the
        outputs that it wasn't given. ``self``: it allocates, as a closed library or another array runtime does, also
        beside a workspace if it states one.
        ``graph``: an object with a lifetime (symmetric buffers).
    files: package files besides the factory's own module that the implementation consists of; ``impl_id`` hashes them.
    traceable: whether ``torch.compile`` may look inside, as it may where all is torch operators and Triton kernels.
        Anything else, and what branches on the number of tokens, becomes one opaque call where the engine compiles
        what surrounds it.

    What it can't take, so that conformance asks for the rest only (each narrows the contract, and shows in a claim):
    alignment: bytes that the address of every tensor is a multiple of; 1: none asked. views: inputs may have any
        strides; ``rows``: a dense last axis; ``contiguous``. zero_tokens: whether it takes a batch of no tokens.
    buckets: ``tokens``, ``requests``, ``pages``, ``context`` -> the sizes it runs at, for static-shape devices; the
        caller pads.
    """

    path: str
    limits: tuple[Limit, ...] = ()
    traits: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()
    memory: Memory = "caller"
    rungs: tuple[Rung, ...] = ()
    predicate: str | None = None
    files: tuple[str, ...] = ()
    traceable: bool = True
    alignment: int = 1
    views: Views = "strided"
    zero_tokens: bool = True
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    calls: tuple[Symbol, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Manifest:
    """A backend, as data.

    api: range of :data:`API_VERSION` it was written for, e.g. ``">=1,<2"``.
    priority: order under ``backend="auto"``; vendors use 100, portable kernels 50, the reference 0. A negative one
        serves only when asked for by name.
    devices: patterns of what it runs on: ``"cuda:sm_90"``, ``"hip:gfx95*"``, ``"cpu"``.
    libraries: distribution name -> version range, checked before the probe.
    probe: ``"module:function"``; takes a device string, returns None when usable or the reason why not. It must not
        initialise the device (vLLM forks after planning).
    withheld: operator -> why it is not offered although the vendor's library has something like it, as a sentence
        without its full stop; shown where people ask why the backend does not serve more.
    """

    name: str
    vendor: str
    api: str
    devices: tuple[str, ...]
    operators: Mapping[str, tuple[Impl, ...]]
    priority: int = 100
    libraries: Mapping[str, str] = field(default_factory=dict)
    probe: str | None = None
    withheld: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """What a factory returns when the callable alone is not enough.

    run: ``run(*inputs, out=None)`` in the order of the operator's definition. It writes ``out`` (one tensor, or a
        tuple for several outputs) when given, allocates when not, and returns it. With ``workspace_bytes`` > 0 it also
        takes ``workspace=``, a uint8 tensor of at least that size whose contents are undefined: other operators of
        the site write it between calls.
    plan_batch: once per forward and site: takes a :class:`~m3hal.ops.SeqMeta` and a uint8 tensor of ``plan_bytes``
        that belongs to this kernel alone, undefined at first and left alone between steps (counters that must start at
        zero are cleared here); returns an object that ``run`` then gets *in place of* the SeqMeta. Tensors at fixed
        addresses are refilled in place; no host sync; replayable in a graph. A forward has at most ``site.max_tokens``
        query tokens; the host does not say how many. Both tensors start at a multiple of 256 bytes on a GPU, 64 on a
        CPU.
    prepare_weights / update_weights / unpack: :class:`~m3hal.ops.ExpertWeights` -> packed; (packed, first expert,
        weights of the experts from there on) in place, the shared expert too where the weights have one, else it stays;
        packed -> ExpertWeights. Of ``kv_write`` with a private page map
        (``vendor:name`` among the layouts), unpack: a cache -> a new one of the same tokens in hnd pages.
    """

    run: Callable[..., Any]
    workspace_bytes: int = 0
    plan_batch: Callable[[Any, Tensor | None], Any] | None = None
    plan_bytes: int = 0
    prepare_weights: Callable[[Any], Any] | None = None
    update_weights: Callable[[Any, int, Any], None] | None = None
    unpack: Callable[[Any], Any] | None = None


Factory = Callable[["Site"], "Kernel | Callable[..., Any]"]
