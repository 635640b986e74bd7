"""Calls at MiniMax-M3's real shapes whose launches are compiled for each GPU; the tensors are small and on the CPU.

To add a kernel: a line in CASES, a call that launches it; and where it multiplies matrices, a line in KERNELS. Then
``python machine_code.py --record``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import expert_cases
import product_cases
import torch

from m3hal.layouts import KVLayout, PagedCache, page_map
from m3hal.ops import QKNorms, SeqMeta
from m3hal.shape import MINIMAX_M3, ModelShape, Site

#: the matrix instructions that CDNA4 added, twice as deep as CDNA3's
_CDNA4 = ("f32_16x16x32", "f32_32x32x16", "f32_16x16x128", "f32_32x32x64", "scale_f32_16x16x128", "scale_f32_32x32x64")
#: machine instructions by which a kernel multiplies; a target that a unit leaves out is not asked for it
UNITS = {
    "any": {
        "sm_90": ("HMMA", "HGMMA", "QGMMA"),
        "sm_100": ("HMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA"),
        "sm_103": ("HMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA"),
        "gfx950": tuple(f"v_mfma_{shape}" for shape in _CDNA4),
    },
    # of tiles that fill the newer unit, whose operands are shared by four warps or lie in memory of its own
    "wide": {
        "sm_90": ("HGMMA", "QGMMA"),
        "sm_100": ("UTCHMMA", "UTCQMMA", "UTCOMMA"),
        "sm_103": ("UTCHMMA", "UTCQMMA", "UTCOMMA"),
        "gfx950": tuple(f"v_mfma_{shape}" for shape in _CDNA4 if "32x32" in shape),
    },
    # block scales applied by the unit itself; UTCQMMA alone may be a product without them, so PTX's names are asked for
    "scaled": {
        "sm_100": ("kind::mxf8f6f4.block_scale", "kind::mxf4.block_scale", "kind::mxf4nvf4.block_scale"),
        "sm_103": ("kind::mxf8f6f4.block_scale", "kind::mxf4.block_scale", "kind::mxf4nvf4.block_scale"),
        "gfx950": ("v_mfma_scale_f32_",),
    },
}
#: what each kernel that multiplies does it by, but in fp32; fp8 and nvfp4 caches meet their queries in fp16
KERNELS = {
    "attend": "any",
    "attend_block": "wide",
    "attend_by_warps": "any",
    "attend_fp8_by_warps": "any",
    "attend_dense": "any",
    "attend_tiles": "wide",
    "attend_union": "wide",
    "score_few": "any",
    "score_few_by_warps": "any",
    "score_many": "wide",
    "score_tiles": "wide",
    "_project": "any",
    "_gate_many": "any",
    "up": "any",
    "down": "any",
    "products": "wide",
    "products_wide": "wide",
    "up_scaled": "scaled",
    "down_scaled": "scaled",
}
#: (kernel, case) -> bytes that triton 3.9 spills at most, by target; tuned on an H200 with 3.6, which spills none;
#: eight warps instead of four spill nothing, and hold one program where two ran
SPILLS: dict[tuple[str, str], dict[str, int]] = {
    ("attend", "sparse verify bf16"): {"sm_90": 8},
    ("attend", "sparse verify fp8"): {"sm_90": 72, "sm_100": 240, "sm_103": 240},
    ("attend", "sparse verify nvfp4"): {"sm_90": 8, "sm_100": 344, "sm_103": 344},
    ("attend_fp8_by_warps", "sparse decode 1 fp8"): {"sm_90": 8},
    # registers for three programs of eight warps a multiprocessor
    ("down", "experts 1 nvfp4"): {"sm_90": 16},
    ("down", "experts 1 mxfp4"): {"sm_90": 24},
    # registers for two programs a multiprocessor, which is what makes it quick; inside the loop few are touched
    ("attend_union", "sparse prefill bf16"): {"sm_90": 184},
    ("attend_union", "sparse prefill fp8"): {"sm_90": 176},
    # most of it numbers of keys, read where a block reaches into a token's future
    ("attend_block", "sparse prefill bf16"): {"sm_90": 144},
    ("attend_block", "sparse prefill fp8"): {"sm_90": 24},
    ("attend_block", "sparse prefill nvfp4"): {"sm_90": 24},
    ("score_few_by_warps", "select decode fp8"): {"sm_100": 32, "sm_103": 32},
    ("score_many", "select prefill fp8"): {"sm_90": 152, "sm_100": 120, "sm_103": 120},
    ("score_many", "select prefill nvfp4"): {"sm_90": 160, "sm_100": 160, "sm_103": 160},
    # none in its loops: what a tile is, while it is multiplied; 3.6 spills 48 and 56
    ("products", "experts 8192 mxfp8"): {"sm_90": 136},
    ("products", "experts 8192 fp8"): {"sm_90": 136},
    # none in its loops; 3.6 spills 8
    ("products_wide", "experts 8192 bf16"): {"sm_90": 24},
    ("products_wide", "experts 8192 fp8 activations"): {"sm_90": 24},
}


def site(kind: str, dtype: str, format: str | None = None) -> Site:
    """A site of MiniMax-M3 on one GPU; format: of its caches, where it is not the dtype."""
    shape = ModelShape.from_config(
        MINIMAX_M3,
        dtype=dtype,
        page_size=128,
        max_tokens=8192,
        max_seqs=64,
        max_context=65536,
        kv_format=format if format != "mxfp4" else None,
        index_format=format,
    )
    return next(site for site in shape.sites() if site.kind == kind)


def batch(requests: int, q_len: int, seq_len: int, page: int = 128) -> SeqMeta:
    """Equal requests over the first pages."""
    cu_q = torch.arange(requests + 1, dtype=torch.int32) * q_len
    table = torch.zeros(requests, seq_len // page, dtype=torch.int32)
    return SeqMeta(cu_q, torch.full((requests,), seq_len, dtype=torch.int32), table, q_len, seq_len)


def scratch(kernel: object) -> torch.Tensor | None:
    return torch.empty(kernel.workspace_bytes, dtype=torch.uint8) if kernel.workspace_bytes else None


def planned(kernel: object, meta: SeqMeta) -> object:
    return kernel.plan_batch(meta, torch.empty(kernel.plan_bytes, dtype=torch.uint8))


def cache(format: str, heads: int, has_values: bool, page: int = 128) -> PagedCache:
    """Four pages, with the global scales that the format has."""
    made = KVLayout(page_map(format, "hnd"), format, page, heads, 128, has_values).empty(4)
    scaled = has_values and format in ("fp8_e4m3", "nvfp4")
    return PagedCache(made.buf, made.layout, torch.ones(()), torch.ones(())) if scaled else made


def _sparse(dtype: str, requests: int, q_len: int, format: str | None = None) -> None:
    from m3hal_triton.sparse_attention import sparse_attention

    where = site("sparse_attention", dtype, format)
    kernel = sparse_attention(where)
    kind = getattr(torch, dtype)
    kv = cache(where.kv_format, where.num_kv_heads, True)
    q = torch.empty(requests * q_len, where.num_q_heads, 128, dtype=kind)
    ids = torch.empty(requests * q_len, where.num_kv_heads, 16, dtype=torch.int32)
    kernel.run(q, kv, ids, planned(kernel, batch(requests, q_len, 4096)), workspace=scratch(kernel))


def _indexer(
    operator: str, dtype: str, requests: int, q_len: int, seq_len: int = 4096, format: str | None = None
) -> None:
    from m3hal_triton import select_blocks

    where = site("sparse_attention", dtype, format)
    kernel = getattr(select_blocks, operator)(where)
    keys = cache(where.index_format, 1, False)
    index_q = torch.empty(requests * q_len, where.num_index_heads, 128, dtype=getattr(torch, dtype))
    plan = planned(kernel, batch(requests, q_len, seq_len))
    extra = {"workspace": scratch(kernel)} if kernel.workspace_bytes else {}
    kernel.run(index_q, keys, plan, **extra)


def _merge(shards: int) -> None:
    from m3hal_triton.topk_blocks import merge_topk

    scores = torch.empty(shards, 8, 4, 16)
    merge_topk(site("sparse_attention", "bfloat16"))(scores, scores.int(), torch.empty(8, dtype=torch.int32))


def _insert(dtype: str, kv_format: str = "", index_format: str = "", tokens: int = 8192) -> None:
    from m3hal_triton.qk_norm_rope_insert import qk_norm_rope_insert

    where, kind = site("sparse_attention", dtype), getattr(torch, dtype)
    width = (where.num_q_heads + 2 * where.num_kv_heads + where.num_index_heads + 1) * 128
    kv, keys = _cache(kv_format or dtype, where.num_kv_heads, True), _cache(index_format or dtype, 1, False)
    norms = QKNorms(*(torch.empty(128, dtype=kind) for _ in range(4)))
    numbers = torch.zeros(tokens, dtype=torch.int64)
    row = torch.empty(tokens, width, dtype=kind)
    qk_norm_rope_insert(where)(row, norms, numbers, torch.empty(4096, 64), kv, keys, numbers, numbers)


def _cache(format: str, heads: int, values: bool) -> PagedCache:
    layout = KVLayout(page_map(format, "msa_slot"), format, 128, heads, 128, values)
    scales = [torch.ones(()), torch.ones(())] if values and format in ("fp8_e4m3", "nvfp4") else []
    return PagedCache(layout.empty(4).buf, layout, *scales)


def _write(format: str, heads: int = 4, values: bool = True) -> None:
    from m3hal_triton.kv_write import kv_write

    where = site("sparse_attention", "bfloat16")
    x = torch.empty(8, heads, 128, dtype=torch.bfloat16)
    kv_write(where)(_cache(format, heads, values), x, x if values else None, torch.zeros(8, dtype=torch.int64))


def _read(format: str) -> None:
    from m3hal_triton.kv_read import kv_read

    kv_read(site("sparse_attention", "bfloat16"))(_cache(format, 4, True), torch.zeros(8, dtype=torch.int64))


def _copy() -> None:
    from m3hal_triton.kv_copy_blocks import kv_copy_blocks

    pages = [_cache("nvfp4", 4, True) for _ in range(2)]
    kv_copy_blocks(site("sparse_attention", "bfloat16"))(*pages, torch.zeros(2, 2, dtype=torch.int64))


def _rope(dtype: str) -> None:
    from m3hal_triton.rope_partial import rope_partial

    x, positions = torch.empty(8, 64, 128, dtype=getattr(torch, dtype)), torch.zeros(8, dtype=torch.int64)
    rope_partial(site("sparse_attention", dtype))(x, positions, torch.empty(4096, 64))


def _dense(dtype: str, requests: int, q_len: int, format: str | None = None, alone: int = 0) -> None:
    """alone: requests of one query token beside them."""
    from m3hal_triton.paged_attention import paged_attention

    where = site("dense_attention", dtype, format)
    kernel = paged_attention(where)
    kv = cache(where.kv_format, where.num_kv_heads, True)
    tokens = requests * q_len + alone
    meta = batch(requests + alone, 1, 4096)
    meta = replace(meta, cu_q=(meta.cu_q + (meta.cu_q.clamp(max=requests) * (q_len - 1))).int(), max_q=q_len)
    q = torch.empty(tokens, where.num_q_heads, 128, dtype=getattr(torch, dtype))
    kernel.run(q, kv, planned(kernel, meta), workspace=scratch(kernel))


def _rows(dtype: str) -> None:
    from m3hal_triton.rms_norm import add_rms_norm
    from m3hal_triton.swiglu_oai import swiglu_oai

    x = torch.empty(8, 6144, dtype=getattr(torch, dtype))
    add_rms_norm(site("moe", dtype))(x, x, x[0])
    swiglu_oai(site("moe", dtype))(x)


CASES: dict[str, Callable[[], None]] = {
    "sparse decode 1 bf16": partial(_sparse, "bfloat16", 1, 1),
    "sparse decode 64 bf16": partial(_sparse, "bfloat16", 64, 1),
    "sparse prefill bf16": partial(_sparse, "bfloat16", 1, 2048),
    "sparse prefill fp32": partial(_sparse, "float32", 1, 64),
    "sparse verify bf16": partial(_sparse, "bfloat16", 64, 4),
    "select decode bf16": partial(_indexer, "select_blocks", "bfloat16", 64, 1, 65536),
    "select verify bf16": partial(_indexer, "select_blocks", "bfloat16", 64, 4, 65536),
    "select decode 512K bf16": partial(_indexer, "select_blocks", "bfloat16", 1, 1, 524288),
    "select prefill bf16": partial(_indexer, "select_blocks", "bfloat16", 1, 2048, 65536),
    "select decode fp32": partial(_indexer, "select_blocks", "float32", 8, 1),
    "select prefill fp32": partial(_indexer, "select_blocks", "float32", 1, 64),
    "scores decode bf16": partial(_indexer, "block_scores", "bfloat16", 8, 1),
    "scores prefill bf16": partial(_indexer, "block_scores", "bfloat16", 1, 64),
    "merge 8": partial(_merge, 8),
    "merge 32": partial(_merge, 32),
    "sparse decode 1 fp32": partial(_sparse, "float32", 1, 1),
    "insert bf16": partial(_insert, "bfloat16"),
    "insert fp32": partial(_insert, "float32"),
    "insert fp8": partial(_insert, "bfloat16", "fp8_e4m3", "fp8_e4m3"),
    "insert nvfp4": partial(_insert, "bfloat16", "nvfp4", "nvfp4"),
    "insert mxfp4 index": partial(_insert, "bfloat16", "nvfp4", "mxfp4"),
    "insert 64 nvfp4": partial(_insert, "bfloat16", "nvfp4", "nvfp4", tokens=64),
    "insert one bf16": partial(_insert, "bfloat16", tokens=1),
    "insert one fp8": partial(_insert, "bfloat16", "fp8_e4m3", "fp8_e4m3", tokens=1),
    "insert one nvfp4": partial(_insert, "bfloat16", "nvfp4", "nvfp4", tokens=1),
    "insert one mxfp4 index": partial(_insert, "bfloat16", "nvfp4", "mxfp4", tokens=1),
    "write bf16": partial(_write, "bfloat16"),
    "write fp8": partial(_write, "fp8_e4m3"),
    "write nvfp4": partial(_write, "nvfp4"),
    "read fp8": partial(_read, "fp8_e4m3"),
    "read nvfp4": partial(_read, "nvfp4"),
    "copy pages": _copy,
    "rope bf16": partial(_rope, "bfloat16"),
    "write mxfp4 index": partial(_write, "mxfp4", 1, False),
    "dense decode bf16": partial(_dense, "bfloat16", 8, 1),
    "dense prefill bf16": partial(_dense, "bfloat16", 1, 512),
    "dense mixed bf16": partial(_dense, "bfloat16", 1, 512, alone=63),
    "dense prefill fp32": partial(_dense, "float32", 1, 512),
    "rows bf16": partial(_rows, "bfloat16"),
}
for _format, _short in (("fp8_e4m3", "fp8"), ("nvfp4", "nvfp4")):
    CASES |= {
        f"sparse decode 1 {_short}": partial(_sparse, "bfloat16", 1, 1, _format),
        f"sparse decode 64 {_short}": partial(_sparse, "bfloat16", 64, 1, _format),
        f"sparse verify {_short}": partial(_sparse, "bfloat16", 64, 4, _format),
        f"sparse prefill {_short}": partial(_sparse, "bfloat16", 1, 2048, _format),
        f"select decode {_short}": partial(_indexer, "select_blocks", "bfloat16", 64, 1, 65536, _format),
        f"select prefill {_short}": partial(_indexer, "select_blocks", "bfloat16", 1, 2048, 65536, _format),
        f"dense decode {_short}": partial(_dense, "bfloat16", 8, 1, _format),
        f"dense prefill {_short}": partial(_dense, "bfloat16", 1, 512, _format),
    }
CASES["select decode mxfp4"] = partial(_indexer, "select_blocks", "bfloat16", 64, 1, 65536, "mxfp4")
CASES |= product_cases.cases(lambda: site("moe", "bfloat16"))
CASES |= expert_cases.cases(lambda: site("moe", "bfloat16"))
#: case -> its targets; one that is left out has all
ONLY: dict[str, tuple[str, ...]] = expert_cases.only()
