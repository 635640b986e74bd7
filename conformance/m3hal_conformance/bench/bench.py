"""What rows are made from: sites, random inputs on the device, the plan's callables, and the definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Literal

import torch

from m3hal import ops
from m3hal.dispatch import Bound
from m3hal.dispatch.verdict import Verdict
from m3hal.formats import QTensor
from m3hal.layouts import KVLayout, PagedCache, page_map
from m3hal.layouts.stored import stored
from m3hal.ops import ExpertWeights, SeqMeta
from m3hal.shape import MINIMAX_M3, ModelShape, Site
from m3hal_conformance.bench.vllm_peer import Peer
from m3hal_conformance.bench.work import Call
from m3hal_conformance.oracle import emulated_traits
from m3hal_conformance.runner import Runner
from m3hal_conformance.trial import Unsupported

PAGE = 128
#: bytes that rotating inputs fill together, so that none is still in the cache when it comes again
BEYOND_CACHE = 3 * 10**8


class Bench:
    """A device, a backend and a peer. small: sizes that a CPU can do. require: traits, of every plan."""

    def __init__(
        self,
        device: str,
        backend: str,
        peer: Peer | None = None,
        small: bool = False,
        require: tuple[str, ...] = (),
    ) -> None:
        self.runner = Runner(backend, device, require=require)
        self.device = self.runner.torch_device
        self.peer, self.small = peer, small
        self._caches: dict[Any, PagedCache] = {}
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._runners: dict[tuple[str, ...], Runner] = {(): self.runner}
        self._seed = 0

    def site(
        self, kind: str = "sparse_attention", tensor_parallel: int = 1, format: str = "bfloat16", **bounds: Any
    ) -> Site:
        """MiniMax-M3's site on one of ``tensor_parallel`` ranks, both caches in the given format."""
        limits = {"max_tokens": 8192, "max_seqs": 64, "max_context": 524288} | bounds
        shape = ModelShape.from_config(
            MINIMAX_M3,
            dtype="bfloat16",
            page_size=PAGE,
            tensor_parallel=tensor_parallel,
            kv_format=format,
            index_format=format,
            **limits,
        )
        return next(site for site in shape.sites() if site.kind == kind)

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=dtype, generator=self.generator)

    def poison(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An output that nobody has written: NaN, or -7 where integers stand."""
        return torch.full(shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=self.device)

    def rotations(self, size: float) -> int:
        """How many inputs of ``size`` bytes rotate."""
        return 2 if self.small else int(max(1, min(96, -(-BEYOND_CACHE // max(size, 1)))))

    def calls(
        self,
        operator: str,
        site: Site,
        inputs: Sequence[tuple[Any, ...]],
        out: Any,
        *,
        require: tuple[str, ...] = (),
        replans: bool = False,
        keep: str = "packed",
    ) -> list[Call]:
        """The plan's callable on each set of inputs; a SeqMeta among them is planned, experts are packed.

        require: traits that a plan for it is asked for. replans: each call plans its batch anew, as the first layer of
        a forward does. keep: packed experts are kept under this name, until others come under it.

        Raises Unsupported, with the reason, where the backend does not serve the site.
        """
        layout = next((x.layout.kind for x in inputs[0] if isinstance(x, PagedCache)), "hnd")
        bound = self.bound(operator, site, layout, require)
        extra = {}
        if bound.workspace_bytes:
            extra["workspace"] = torch.empty(bound.workspace_bytes, dtype=torch.uint8, device=self.device)
        keywords = {} if ops.load(operator).mutates and out is None else {"out": out}
        run = partial(bound.run, **keywords, **extra)
        storages = [torch.empty(bound.plan_bytes, dtype=torch.uint8, device=self.device) for _ in inputs]

        def planned(values: Sequence[Any], storage: torch.Tensor) -> list[Any]:
            plan = bound.plan_batch
            return [plan(v, storage) if isinstance(v, SeqMeta) and plan else v for v in values]

        def replanned(values: Sequence[Any], storage: torch.Tensor) -> object:
            return run(*planned(values, storage))

        found: list[Call] = []
        for values, storage in zip(inputs, storages, strict=True):
            given = [self.packed(bound, v, keep) if isinstance(v, ExpertWeights) else v for v in values]
            found.append(partial(replanned, given, storage) if replans else partial(run, *planned(given, storage)))
        return found

    def rival(
        self,
        name: str,
        operator: str,
        site: Site,
        inputs: Sequence[tuple[Any, ...]],
        out: Any,
        *,
        keep: str = "packed",
    ) -> dict[str, list[Call]]:
        """The plan's callable at another format, as a column of this name; none where the backend doesn't serve it."""
        with suppress(Unsupported):
            return {name: self.calls(operator, site, inputs, out, keep=keep)}
        return {}

    def packed(self, bound: Bound, experts: ExpertWeights, keep: str = "packed") -> Any:
        """Experts as the callable takes them, kept with what they were made from, so that its identity is its own."""
        if bound.prepare_weights is None:
            return experts
        pack, site = bound.prepare_weights, bound.site
        return self.kept((keep, bound.impl_id, site, id(experts)), lambda: (pack(experts), experts))[0]

    def bound(self, operator: str, site: Site, layout: str = "hnd", require: tuple[str, ...] = ()) -> Bound:
        """What the plan binds, also of files that a manifest does not list yet: a tree at work may be timed."""
        if require not in self._runners:
            everything = (*self.runner.require, *require)
            self._runners[require] = Runner(self.runner.backend, self.runner.device, require=everything)
        made = self._runners[require].plan(operator, site, layout)
        choice = made.choice(operator, site.kind)
        if not choice.is_served:
            raise Unsupported(_refusals(choice.verdicts) or f"{self.runner.backend} does not implement {operator}")
        return made.bind(operator, site.kind)

    def exact(self, operator: str, site: Site, *inputs: Any, require: tuple[str, ...] = ()) -> Any:
        """The definition's outputs, with the traits that a plan was asked for; in fp64 where its first input is."""
        definition = ops.load(operator)
        pairs = (text.partition("=") for text in (*self.runner.require, *require))
        traits = emulated_traits(definition, {name: value for name, _, value in pairs})
        return definition.reference(*inputs, **definition.static_values(site), **({"traits": traits} if traits else {}))

    def cache(self, format: str, pages: int, heads: int, has_values: bool) -> PagedCache:
        """Random contents, kept until another kind is asked for; global scales of 1 where the format has them."""
        key = (format, pages, heads, has_values)
        if key not in self._caches:
            if len(self._caches) > 6:
                self._caches.clear()
            self._caches[key] = self._filled(*key)
        return self._caches[key]

    def kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What ``make`` returns, kept until another key of the same kind is asked for."""
        if self._kept.get(key[0], (None,))[0] != key:
            self._kept[key[0]] = None, None  # freed before the next is made
            self._kept[key[0]] = key, make()
        return self._kept[key[0]][1]

    def _filled(self, format: str, pages: int, heads: int, has_values: bool) -> PagedCache:
        made = KVLayout(page_map(format, "hnd"), format, PAGE, heads, 128, has_values).empty(pages, self.device)
        scales = [torch.ones((), device=self.device) for _ in range(2 if has_values and format != "bfloat16" else 0)]
        if format == "bfloat16":
            made.buf.normal_()
        elif format == "fp8_e4m3":
            for part in torch.split(made.buf, 1024):
                part.copy_(torch.randn(part.shape, device=self.device).to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            made.buf.random_(0, 256)
            parts: tuple[Literal["k", "v"], ...] = ("k", "v")
            for name in parts[: made.layout.parts]:  # E4M3 from 1/8 to 15/32: numbers as large as other formats'
                where = stored(made, name).scales
                assert where is not None
                for part in torch.split(where, 1024):
                    part.copy_(torch.randint(0x20, 0x30, part.shape, device=self.device, dtype=torch.uint8))
        return PagedCache(made.buf, made.layout, *scales)

    def batches(self, pages: int, requests: int, q_len: int, seq_len: int, count: int = 1) -> list[SeqMeta]:
        """``count`` batches of equal requests over random pages, distinct ones where there are enough."""
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        width = -(-seq_len // PAGE)
        cu_q = torch.arange(requests + 1, dtype=torch.int32, device=self.device) * q_len
        lens = torch.full((requests,), seq_len, dtype=torch.int32, device=self.device)
        made = []
        for _ in range(count):
            if requests * width <= pages:
                table = torch.randperm(pages, generator=generator)[: requests * width]
            else:
                table = torch.randint(0, pages, (requests * width,), generator=generator)
            made.append(SeqMeta(cu_q, lens, table.view(requests, width).int().to(self.device), q_len, seq_len))
        return made

    def random_ids(self, positions: torch.Tensor, groups: int, k: int, block: int = 128) -> torch.Tensor:
        """int32 [T, groups, k]: the own block and random earlier ones, ascending, -1 in the tail."""
        newest = positions // block
        blocks = int(newest.max()) + 1
        ids = torch.empty(len(positions), groups, k, dtype=torch.int32, device=self.device)
        for low in range(0, len(positions), 1024):
            own = newest[low : low + 1024]
            score = torch.rand(len(own), groups, blocks, generator=self.generator, device=self.device)
            score.masked_fill_(torch.arange(blocks, device=self.device) > own[:, None, None], -1.0)
            score.scatter_(2, own[:, None, None].expand(-1, groups, 1), 2.0)
            value, chosen = score.topk(min(k, blocks), -1)
            chosen = torch.where(value < 0, 2**30, chosen).sort(-1).values
            chosen = torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=2**30)
            ids[low : low + 1024] = torch.where(chosen == 2**30, -1, chosen).int()
        return ids


def _refusals(verdicts: Sequence[Verdict]) -> str:
    """Why nothing serves; each reason with the implementations that gave it, where there are several."""
    reasons: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.accepted:
            reasons.setdefault(verdict.reason, []).append(verdict.impl)
    if len(reasons) < 2:
        return "".join(reasons)
    named = {reason: ", ".join(dict.fromkeys(filter(None, impls))) for reason, impls in reasons.items()}
    return "; ".join(f"{impls}: {reason}" if impls else reason for reason, impls in named.items())


def sample(tokens: int) -> list[int]:
    """The tokens whose outputs are checked."""
    return sorted({0, tokens // 3, tokens - 1})


def alone(meta: SeqMeta, tokens: Sequence[int]) -> SeqMeta:
    """Some tokens of a batch, each the only one of a request that ends with it: what they see is the same."""
    device = meta.cu_q.device
    chosen = torch.tensor(tokens, device=device)
    request = torch.searchsorted(meta.cu_q[1:].long(), chosen, right=True)
    lens = (meta.positions(int(meta.cu_q[-1]))[chosen] + 1).int()
    cu_q = torch.arange(len(tokens) + 1, dtype=torch.int32, device=device)
    return SeqMeta(cu_q, lens, meta.block_table[request], 1, int(lens.max()))


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Worst relative L2 error of a row; infinite where a number is missing."""
    error = (actual.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1).clamp_min(1e-30)
    return float(error.nan_to_num(float("inf")).max())


def nbytes(value: Any) -> int:
    """Bytes of a tensor, of a stored one with its scales, or of experts' weights."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, QTensor):
        return sum(nbytes(part) for part in vars(value).values() if isinstance(part, torch.Tensor))
    if isinstance(value, ExpertWeights):
        return sum(nbytes(part) for part in vars(value).values() if part is not None)
    raise TypeError(f"{type(value).__name__} has no size")
