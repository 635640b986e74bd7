"""Decode by warps that load their own operands: blocks of 128 keys, heads of 128 elements."""

import pytest
import torch
from attention_cases import BOUND, DEVICE, Batch, double, plan, poisoned, sparse_site, workspace, worst_row
from m3hal_triton.sparse_attention import sparse_attention

from m3hal.ops import load
from m3hal.ops.kv_read import read_sequence

OPERATOR = load("sparse_attention")
#: (format, page map, page size, query heads, programs at most): split, and in one part
CASES = [("fp8_e4m3", "hnd", 128, 4, 1024), ("fp8_e4m3", "nhd", 256, 6, 1)]
CASES += [("nvfp4", "msa_slot", 256, 6, 1024), ("nvfp4", "planar", 128, 4, 1)]
_SITE = {"head_dim": 128, "rotary_dim": 64, "scale": 128**-0.5, "block_size": 128, "max_context": 1024}


@pytest.mark.parametrize(("format", "layout", "page", "heads", "programs"), CASES, ids=["-".join(c[:2]) for c in CASES])
@pytest.mark.parametrize("merged", [8, 0], ids=["merged", "by a launch"])
def test_decode(monkeypatch, format, layout, page, heads, programs, merged):
    """Out and lse within the bound of the definition; what no token selected is NaN in codes and scales."""
    monkeypatch.setattr("m3hal_triton._sparse_decode_run.MERGE_SPLITS", merged)
    monkeypatch.setattr("m3hal_triton._sparse_decode_run.MAX_SPLIT_PROGRAMS", programs)
    site = sparse_site(
        torch.bfloat16, kv_format=format, page_size=page, num_q_heads=heads, num_kv_heads=2, return_lse=True, **_SITE
    )
    batch = Batch(site, [(1, 1), (1, 128), (0, 33), (1, 0), (1, 400)], torch.bfloat16, layout, True, 2)
    q, kv = batch.queries(heads, 128), batch.cache(2, 128, True, format=format)
    ids = batch.block_ids(2)
    batch.erase_unselected(kv, ids)
    kernel = sparse_attention(site)
    assert kernel.run.decode.by_warps(kv)
    out = poisoned(batch.tokens, heads, 128, dtype=torch.bfloat16)
    lse = poisoned(batch.tokens, heads, dtype=torch.float32)
    kernel.run(q, kv, ids, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
    exact, exact_lse = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    assert worst_row(out, exact) <= BOUND[torch.bfloat16]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[torch.bfloat16] / 10, rtol=0)


@pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
def test_a_key_far_above_the_newest_block(monkeypatch, format):
    """A score that outweighs the first block's by more than fp16 holds: the sums are made again from the largest."""
    site = sparse_site(
        torch.bfloat16, kv_format=format, page_size=128, num_q_heads=4, num_kv_heads=2, return_lse=True, **_SITE
    )
    monkeypatch.setattr("m3hal_triton._sparse_decode_run.MAX_SPLIT_PROGRAMS", 1)
    batch = Batch(site, [(1, 400), (1, 300)], torch.bfloat16, "hnd" if format == "fp8_e4m3" else "msa_slot", True, 2)
    kv = batch.cache(2, 128, True, format=format)
    ids = batch.block_ids(2)
    q = torch.zeros(batch.tokens, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    for token, length in enumerate(batch.meta.seq_lens.tolist()):
        keys = read_sequence(kv, batch.meta.block_table[token], length)[0]
        for head in range(4):
            oldest = int(ids[token, head // 2, 0]) * 128
            q[token, head] = (keys[head // 2, oldest + 7] * (1 + 40 * (head % 2))).bfloat16()
    kernel = sparse_attention(site)
    assert kernel.run.decode.by_warps(kv)
    out = poisoned(batch.tokens, 4, 128, dtype=torch.bfloat16)
    lse = poisoned(batch.tokens, 4, dtype=torch.float32)
    kernel.run(q, kv, ids, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
    exact, exact_lse = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    newest = OPERATOR.reference(
        q.double(), double(kv), ids.amax(-1, keepdim=True), batch.meta, **OPERATOR.static_values(site)
    )[1]
    real = len(batch.meta.seq_lens)
    assert (exact_lse - newest)[:real].max() > 21 * 0.6931
    assert worst_row(out, exact) <= BOUND[torch.bfloat16]
    assert torch.allclose(lse[:real].double(), exact_lse[:real], atol=BOUND[torch.bfloat16] / 10, rtol=1e-5)
