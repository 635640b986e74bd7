"""What a case is: one operator at one site, with inputs that its name alone decides, and the checks it must pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from m3hal.shape import MINIMAX_M3, ModelShape
from m3hal.shape import Site as Site  # what suites import with the rest
from m3hal_conformance.inputs import generator

#: formats of activations in which the suite asks every question
DTYPES = ("float32", "bfloat16")
#: a case on the CPU stays within these, and its site says so
MAX_TOKENS, MAX_SEQS, MAX_CONTEXT = 4096, 64, 4096

Inputs = dict[str, Any]


class Rng:
    """The random numbers of one case, and the knobs that must not change any output.

    pages: another number places the same requests in other pages. stale: what every byte holds that no visible token
    occupies, and what hidden values such as the score of an absent block are.
    """

    def __init__(self, case: str, seed: int = 0, *, pages: int = 0, stale: float = float("nan")) -> None:
        self.generator = generator(case if seed == 0 else f"{case}#{seed}")
        self.page_generator = generator(f"{case}#{seed}#pages{pages}")
        self.stale = stale

    def normal(self, *shape: int) -> Tensor:
        """fp32 normal numbers with all their bits: in fp32 a kernel that rounds its inputs must be seen."""
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """fp32 uniform numbers."""
        return low + (high - low) * torch.rand(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64, low <= n < high."""
        return torch.randint(low, high, shape, generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)


#: a case's inputs from its random numbers and its site; and from the page map of its caches
Make = Callable[[Rng, Site], Inputs]
MakeIn = Callable[[Rng, Site, str], Inputs]


@dataclass(frozen=True)
class Case:
    """One question to an implementation.

    id: ``operator/name/format``; the inputs follow from it. site: every static value. make: the inputs by name, in the
    definition's order, on the CPU. checks: names in :mod:`m3hal_conformance.checks`. input_class: inputs of one class
    share a bound. layout: of caches. bugs: cases of :mod:`m3hal_conformance.bugs` that this one reproduces. golden:
    output name -> numbers that were computed elsewhere. quick: part of ``--quick``. lazy: inputs too large to copy;
    they are passed as they are, without guard bands. sizes: the name in :mod:`m3hal_conformance.sizes` of the smallest
    device that is asked. is_captured: recorded where a model ran, so that no calibrated
    class of inputs need fit it.
    """

    id: str
    operator: str
    site: Site
    make: Make
    checks: tuple[str, ...]
    input_class: str = "plain"
    layout: str = "hnd"
    bugs: tuple[str, ...] = ()
    golden: Callable[[Inputs], Mapping[str, Tensor]] | None = None
    quick: bool = False
    lazy: tuple[str, ...] = ()
    sizes: str = "cpu"
    is_captured: bool = False

    @property
    def format(self) -> str:
        return self.site.dtype

    def inputs(self, seed: int = 0, *, pages: int = 0, stale: float = float("nan")) -> Inputs:
        """The case's inputs; ``seed`` 0 is the published set."""
        return self.make(Rng(self.id, seed, pages=pages, stale=stale), self.site)


def shape_of(site: Site) -> ModelShape:
    """A model shape whose only site is ``site``, so that a plan can be asked for static values that M3 itself lacks."""
    return replace(_shape(site.dtype, 1), given_sites=(site,))


def make_site(kind: str, dtype: str, *, tensor_parallel: int = 1, **overrides: Any) -> Site:
    """A site of MiniMax-M3 as published, on one of ``tensor_parallel`` ranks, with values replaced."""
    sites: dict[str, Site] = {site.kind: site for site in _shape(dtype, tensor_parallel).sites()}
    if kind == "drafter":  # M3.1's drafter: plain norm weights, not causal, a sliding window
        dense = sites["dense_attention"]
        return replace(dense, kind="drafter", causal=False, window_left=1024, weight_offset=0.0, **overrides)
    if kind == "sparse_layer":
        return replace(_shape(dtype, tensor_parallel).sparse_layer(), **overrides)
    return replace(sites[kind], **overrides)


@cache
def _shape(dtype: str, tensor_parallel: int) -> ModelShape:
    return ModelShape.from_config(
        MINIMAX_M3,
        dtype=dtype,
        page_size=128,
        max_tokens=MAX_TOKENS,
        max_seqs=MAX_SEQS,
        max_context=MAX_CONTEXT,
        tensor_parallel=tensor_parallel,
    )


def dtype_of(site: Site) -> torch.dtype:
    """The torch dtype of a site's activations."""
    found: torch.dtype = getattr(torch, site.dtype)
    return found


def case_set_hash(cases: Sequence[Case]) -> str:
    """16 hexadecimal digits over what the cases ask: ids, sites, checks, layouts."""
    text = "\n".join(f"{c.id} {_asked(c.site)} {c.checks} {c.layout} {c.input_class} {c.sizes}" for c in cases)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _asked(site: Site) -> str:
    """The site without the defaults of what only some engines ask: adding such an attribute changes no other case."""
    values = {field.name: (getattr(site, field.name), field.default) for field in fields(site)}
    return f"Site({', '.join(f'{name}={value!r}' for name, (value, usual) in values.items() if value != usual)})"
