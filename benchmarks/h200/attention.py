# ruff: noqa: B023 (closures run within the iteration that made them)
"""MiniMax-M3's sparse attention half on an H200: m3hal's Triton kernels beside vLLM's, one section a run.

python benchmarks/h200/attention.py SECTION... --peers FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import harness as h
import torch
from m3hal_triton import select_blocks, sparse_attention, topk_blocks

SCALE = 128**-0.5


def prepare(kernel, batches):
    """Workspace, and a plan for each batch."""
    workspace = torch.empty(max(kernel.workspace_bytes, 1), dtype=torch.uint8, device=h.DEVICE)
    plans = [
        kernel.plan_batch(meta, torch.empty(kernel.plan_bytes, dtype=torch.uint8, device=h.DEVICE)) for meta in batches
    ]
    return workspace, plans


def exact_attention(q, kv, meta, ids, tokens):
    """fp64, for sampled tokens of equal requests: [len(tokens), Hq, D]."""
    groups, rows = kv.layout.heads, []
    for token in tokens:
        request, offset = divmod(token, meta.max_q)
        position = meta.max_k - meta.max_q + offset
        heads = []
        for group in range(groups):
            blocks = ids[token, group]
            blocks = blocks[blocks >= 0].long()
            pages = meta.block_table[request, blocks].long()
            k, v = (h.read_pages(kv, part, pages)[group] for part in ("k", "v"))
            at = (blocks[:, None] * 128 + torch.arange(128, device=q.device)).flatten()
            size = q.shape[1] // groups
            s = q[token, group * size : (group + 1) * size].double() @ k.T * SCALE
            heads.append(torch.softmax(s.masked_fill(at > position, float("-inf")), -1) @ v)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def exact_choice(index_q, keys, meta, token):
    """fp64 scores [Hi, blocks] of one token of equal requests, and their 16 best with the newest forced."""
    request, offset = divmod(token, meta.max_q)
    position = meta.max_k - meta.max_q + offset
    blocks = position // 128 + 1
    k = h.read_pages(keys, "k", meta.block_table[request, :blocks].long())[0]
    s = (index_q[token].double() @ k.T).masked_fill(torch.arange(len(k), device=k.device) > position, float("-inf"))
    s = s.view(len(s), blocks, 128).amax(-1)
    ranked = s.clone()
    ranked[:, -1] = float("inf")
    return s, ranked.topk(min(16, blocks), -1).indices.sort(-1).values


def overlap(ids, index_q, keys, meta, tokens):
    """Share of the exact choice that was chosen, over sampled tokens; the ids' form is checked too."""
    hits, total = 0, 0
    for token in tokens:
        _, best = exact_choice(index_q, keys, meta, token)
        for head in range(ids.shape[1]):
            row = ids[token, head]
            row = row[row >= 0]
            assert torch.equal(row, row.unique()), "ids must ascend"
            assert best[head, -1] == row[-1], "the newest block must be chosen"
            hits += len(set(row.tolist()) & set(best[head].tolist()))
            total += best.shape[1]
    return hits / total


def sample(tokens):
    return sorted({0, tokens // 3, tokens - 1})


def rotations(size):
    """How many inputs of ``size`` bytes rotate, so that no call finds its own in the cache of 50 MB."""
    return max(1, min(96, -(-3 * 10**8 // size)))


#: bytes of an index key, and of a key and value, by format
KEY_BYTES = {"bfloat16": 256, "fp8_e4m3": 128, "nvfp4": 72}
FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4")


def select_decode(peer):
    """Score and choice, one token a request; nvfp4 beside ours and the peer's fp8."""
    pages = 32768
    caches = {format: h.cache(pages, 1, False, format) for format in FORMATS}
    for format in FORMATS:
        for tp in (1, 4):
            for requests, context in (
                (1, 8192), (1, 65536), (8, 65536), (64, 8192), (64, 65536), (1, 524288), (8, 524288),
            ):  # fmt: skip
                _select_decode(peer, caches, format, tp, requests, context)


def _select_decode(peer, caches, format, tp, requests, context):
    heads = h.site(tp).num_index_heads
    size = requests * context * KEY_BYTES[format]
    count = rotations(size)
    batches = h.metas(caches[format].buf.shape[0], requests, 1, context, count, seed=1)
    qs = [torch.randn(requests, heads, 128, device=h.DEVICE, dtype=torch.bfloat16) for _ in batches]
    theirs, ours = (torch.full((requests, heads, 16), -7, dtype=torch.int32, device=h.DEVICE) for _ in range(2))
    step = peer.index.minimax_m3_index_decode

    def peer_calls(format):
        keys = caches[format].buf.view(-1, 128, 128)
        keys = keys if format == "bfloat16" else keys.view(torch.float8_e4m3fn)
        queries = [q.to(keys.dtype) for q in qs]  # its fp8 products take fp8 queries
        return [
            lambda i=i: step(
                queries[i], keys, batches[i].block_table, batches[i].seq_lens, context, 16, 0, 1, heads, 1, 1,
                out=theirs.transpose(0, 1),
            )
            for i in range(count)
        ]  # fmt: skip

    def our_calls(format):
        kernel = select_blocks.select_blocks(h.site(tp, format))
        workspace, plans = prepare(kernel, batches)
        return [lambda i=i: kernel.run(qs[i], caches[format], plans[i], ours, workspace) for i in range(count)]

    rival = "fp8_e4m3" if format == "nvfp4" else format
    calls = {"vllm" if format == rival else "vllm fp8": peer_calls(rival)}
    if format != rival:
        calls["fp8 of ours"] = our_calls(rival)
    calls["m3hal"] = our_calls(format)
    calls["m3hal"][0]()
    found = overlap(ours, qs[0], caches[format], batches[0], sample(requests))
    times = h.graphs(calls)
    case = f"TP{tp} B{requests} {context // 1024}K"
    h.row(f"select decode {format}", case, times, floor_us=size / 4.6e6, overlap=found)


def sparse_decode(peer):
    """Attention over 16 blocks, one token a request, and four with equal selections; formats as in select_decode."""
    pages = 16384
    for tp in (1, 4):
        caches = {format: h.cache(pages, h.site(tp).num_kv_heads, True, format) for format in FORMATS}
        for format in FORMATS:
            for requests, q_len in ((1, 1), (8, 1), (64, 1), (1, 4), (8, 4), (64, 4)):
                _sparse_decode(peer, caches, format, tp, requests, q_len)


def _sparse_decode(peer, caches, format, tp, requests, q_len):
    site = h.site(tp, format)
    tokens, context = requests * q_len, 65536
    size = requests * site.num_kv_heads * 16 * 128 * 2 * KEY_BYTES[format]
    count = rotations(size)
    batches = h.metas(caches[format].buf.shape[0], requests, q_len, context, count, seed=2)
    positions = torch.full((requests,), context - q_len, device=h.DEVICE)
    ids = [h.random_ids(positions, site.num_kv_heads, seed=s).repeat_interleave(q_len, 0) for s in range(count)]
    turned = [i.transpose(0, 1).contiguous() for i in ids]
    qs = [torch.randn(tokens, site.num_q_heads, 128, device=h.DEVICE, dtype=torch.bfloat16) for _ in batches]
    theirs, ours = (torch.full_like(qs[0], float("nan")) for _ in range(2))
    step = peer.sparse.minimax_m3_sparse_attn_decode

    def peer_calls(format):
        kv = caches[format]
        buf = kv.buf if format == "bfloat16" else kv.buf.view(torch.float8_e4m3fn)
        return [
            lambda i=i: step(
                qs[i], buf, turned[i], batches[i].block_table, batches[i].seq_lens, site.num_kv_heads, SCALE, theirs,
                q_len, k_scale=kv.k_scale, v_scale=kv.v_scale,
            )
            for i in range(count)
        ]  # fmt: skip

    def our_calls(format):
        kernel = sparse_attention.sparse_attention(h.site(tp, format))
        workspace, plans = prepare(kernel, batches)
        return [lambda i=i: kernel.run(qs[i], caches[format], ids[i], plans[i], ours, workspace) for i in range(count)]

    rival = "fp8_e4m3" if format == "nvfp4" else format
    calls = {"vllm" if format == rival else "vllm fp8": peer_calls(rival)}
    if format != rival:
        calls["fp8 of ours"] = our_calls(rival)
    calls["m3hal"] = our_calls(format)
    exact = exact_attention(qs[0], caches[format], batches[0], ids[0], sample(tokens))
    errors = {}
    for name in {"m3hal", "vllm"} & set(calls):
        calls[name][0]()
        errors[f"error_{name}"] = h.relative((theirs if name == "vllm" else ours)[sample(tokens)], exact)
    times = h.graphs(calls)
    h.row(f"sparse decode {format}", f"TP{tp} B{requests} x{q_len}", times, floor_us=size / 4.6e6, **errors)


def sparse_prefill_fp8(peer):
    """One request's chunk of queries over an fp8 cache, beside the peer's, and over an nvfp4 cache."""
    pages = 1024
    for tp, tokens, context in ((1, 2048, 65536), (1, 8192, 65536), (4, 8192, 65536)):
        groups = h.site(tp).num_kv_heads
        (meta,) = h.metas(pages, 1, tokens, context, 1, seed=3)
        before = torch.tensor([context - tokens], dtype=torch.int32, device=h.DEVICE)
        positions = torch.arange(context - tokens, context, device=h.DEVICE)
        ids = h.random_ids(positions, groups)
        turned = ids.transpose(0, 1).contiguous()
        q = torch.randn(tokens, h.site(tp).num_q_heads, 128, device=h.DEVICE, dtype=torch.bfloat16)
        other = torch.full_like(q, float("nan"))
        calls, outs, caches = {}, {}, {}
        for format in ("fp8_e4m3", "nvfp4"):
            kernel = sparse_attention.sparse_attention(h.site(tp, format))
            workspace, (plan,) = prepare(kernel, [meta])
            out, kv = torch.full_like(q, float("nan")), h.cache(pages, groups, True, format)
            name = "m3hal" if format == "fp8_e4m3" else "nvfp4 of ours"
            outs[name], caches[name] = out, kv
            calls[name] = lambda k=kernel, kv=kv, p=plan, o=out, w=workspace: k.run(q, kv, ids, p, o, w)
        kv = caches["m3hal"]

        def peer_attend(kv=kv, turned=turned, meta=meta, before=before, q=q, other=other, tokens=tokens, groups=groups):
            peer.sparse.minimax_m3_sparse_attn(
                q, kv.buf.view(torch.float8_e4m3fn), turned, meta.block_table, meta.cu_q, meta.seq_lens, before, tokens,
                groups, SCALE, other, k_scale=kv.k_scale, v_scale=kv.v_scale,
            )  # fmt: skip

        calls["vllm"] = peer_attend
        errors = {}
        for name, call in calls.items():
            call()
            kv = caches.get(name, caches["m3hal"])
            exact = exact_attention(q, kv, meta, ids, sample(tokens))
            errors[f"error_{name}"] = h.relative(outs.get(name, other)[sample(tokens)], exact)
        ours = calls.pop("nvfp4 of ours")
        times = h.events(calls)
        case = f"TP{tp} {tokens} @ {context // 1024}K"
        keys_seen = int(((ids >= 0).sum((1, 2)) * 128 - (127 - positions % 128) * groups).sum())
        floor = 4 * 128 * keys_seen * 16 / 752e6
        h.row("sparse prefill fp8_e4m3", case, times, floor_us=floor, **errors)
        h.row("sparse prefill nvfp4", case, h.events({"m3hal": ours}), floor_us=floor)


def prefill(peer):
    """One request's chunk at the end of its context: score, choice and attention."""
    pages = 1024
    for tp in (1, 4):
        site = h.site(tp)
        heads, groups = site.num_index_heads, site.num_kv_heads
        keys, kv = h.cache(pages, 1, False), h.cache(pages, groups, True)
        flat = keys.buf.view(pages, 128, 128)
        for tokens, context in ((2048, 8192), (2048, 65536), (8192, 8192), (8192, 65536)):
            (meta,) = h.metas(pages, 1, tokens, context, 1, seed=3)
            before = torch.tensor([context - tokens], dtype=torch.int32, device=h.DEVICE)
            index_q = torch.randn(tokens, heads, 128, device=h.DEVICE, dtype=torch.bfloat16)
            q = torch.randn(tokens, site.num_q_heads, 128, device=h.DEVICE, dtype=torch.bfloat16)
            case = f"TP{tp} {tokens} @ {context // 1024}K"
            positions = torch.arange(context - tokens, context, device=h.DEVICE)

            # score
            scorer = select_blocks.block_scores(site)
            _, (plan,) = prepare(scorer, [meta])
            mine = torch.full((tokens, heads, -(-context // 128)), float("nan"), device=h.DEVICE)
            arguments = (index_q, flat, meta.block_table, meta.cu_q, meta.seq_lens, before, tokens, context, heads)
            scores = peer.index.minimax_m3_index_score(*arguments)
            scorer.run(index_q, keys, plan, mine)
            flops = 2 * heads * 128 * int((positions + 1).sum())
            candidates = {"vllm": lambda: peer.index.minimax_m3_index_score(*arguments)}
            for target in (264, 2112):
                split = peer.split_score(target)
                candidates[f"vllm split {target}"] = lambda split=split: split(*arguments)
            candidates["m3hal"] = lambda: scorer.run(index_q, keys, plan, mine)
            times = h.events(candidates)
            worst = max(
                float((mine[t, :, : s.shape[1]] - s).abs().max() / s.abs().max())
                for t in sample(tokens)
                for s, _ in [exact_choice(index_q, keys, meta, t)]
            )
            h.row("score prefill", case, times, floor_us=flops / 752e6, error=worst)

            # choice
            theirs = torch.full((tokens, heads, 16), -7, dtype=torch.int32, device=h.DEVICE)
            chosen = torch.full_like(theirs, -7)
            visible = (positions // 128 + 1).int()
            choose = topk_blocks.topk_blocks(site)
            topk = peer.index.minimax_m3_index_topk
            times = h.events({
                "vllm": lambda: topk(scores, meta.cu_q, before, tokens, 16, 0, 1, out=theirs.transpose(0, 1)),
                "m3hal": lambda: choose(mine, visible, out=chosen),
            })  # fmt: skip
            h.row("top-k prefill", case, times, floor_us=mine.numel() * 4 / 4.6e6)

            # both
            both = select_blocks.select_blocks(site)
            workspace, (select_plan,) = prepare(both, [meta])
            ids = torch.full_like(theirs, -7)

            def peer_select(score=peer.index.minimax_m3_index_score):
                topk(score(*arguments), meta.cu_q, before, tokens, 16, 0, 1, out=theirs.transpose(0, 1))

            best = peer.split_score(264)
            times = h.events({
                "vllm": peer_select,
                "vllm split 264": lambda: peer_select(best),
                "m3hal": lambda: both.run(index_q, keys, select_plan, ids, workspace),
            })  # fmt: skip
            assert torch.equal(ids, chosen)
            h.row("select prefill", case, times, overlap=overlap(ids, index_q, keys, meta, sample(tokens)))

            # attention, over random selections and over ones that neighbours share
            attend = sparse_attention.sparse_attention(site)
            workspace, (plan,) = prepare(attend, [meta])
            uniform = h.random_ids(positions, groups)
            kinds = {"uniform": uniform}
            if tokens == 8192 and context == 65536:
                shared = uniform.clone()
                for low in range(0, tokens, 128):
                    shared[low : low + 128] = uniform[low]
                kinds["overlapping"] = shared
            for kind, ids in kinds.items():
                turned = ids.transpose(0, 1).contiguous()
                out, other = (torch.full_like(q, float("nan")) for _ in range(2))

                def peer_attend(turned=turned, other=other):
                    peer.sparse.minimax_m3_sparse_attn(
                        q, kv.buf, turned, meta.block_table, meta.cu_q, meta.seq_lens, before, tokens, groups, SCALE,
                        other,
                    )  # fmt: skip

                def our_attend(ids=ids, out=out):
                    attend.run(q, kv, ids, plan, out, workspace)

                peer_attend()
                our_attend()
                exact = exact_attention(q, kv, meta, ids, sample(tokens))
                errors = {"error_m3hal": h.relative(out[sample(tokens)], exact)}
                errors |= {"error_vllm": h.relative(other[sample(tokens)], exact), "between": h.relative(out, other)}
                times = h.events({"vllm": peer_attend, "m3hal": our_attend})
                keys_seen = int(((ids >= 0).sum((1, 2)) * 128 - (127 - positions % 128) * groups).sum())
                floor = 4 * 128 * keys_seen * (site.num_q_heads // groups) / 752e6
                h.row("sparse prefill", f"{case} {kind}", times, floor_us=floor, **errors)


def host(peer):
    """Microseconds of the host for choice and attention of one decode layer, eager, and the kernels launched."""
    for tp, requests, format in ((1, 1, "bfloat16"), (4, 8, "bfloat16"), (1, 64, "bfloat16"), (1, 8, "fp8_e4m3")):
        site = h.site(tp, format)
        heads, groups, pages = site.num_index_heads, site.num_kv_heads, 2048
        keys, kv = h.cache(pages, 1, False, format), h.cache(pages, groups, True, format)
        (meta,) = h.metas(pages, requests, 1, 65536, 1)
        index_q = torch.randn(requests, heads, 128, device=h.DEVICE, dtype=torch.bfloat16)
        q = torch.randn(requests, site.num_q_heads, 128, device=h.DEVICE, dtype=torch.bfloat16)
        ids = torch.empty(requests, heads, 16, dtype=torch.int32, device=h.DEVICE)
        turned, out, other = (torch.empty_like(x) for x in (ids.transpose(0, 1).contiguous(), q, q))
        select, attend = select_blocks.select_blocks(site), sparse_attention.sparse_attention(site)
        (scratch, (plan,)), (work, (attend_plan,)) = prepare(select, [meta]), prepare(attend, [meta])
        as_peer = (lambda x: x) if format == "bfloat16" else (lambda x: x.view(torch.float8_e4m3fn))
        peer_keys, peer_kv = as_peer(keys.buf).view(-1, 128, 128), as_peer(kv.buf)
        queries = index_q.to(peer_kv.dtype)

        def ours():
            select.run(index_q, keys, plan, ids, scratch)
            attend.run(q, kv, ids, attend_plan, out, work)

        def theirs():
            peer.index.minimax_m3_index_decode(
                queries, peer_keys, meta.block_table, meta.seq_lens, 65536, 16, 0, 1, heads, 1, 1, out=turned
            )
            peer.sparse.minimax_m3_sparse_attn_decode(
                q, peer_kv, turned, meta.block_table, meta.seq_lens, groups, SCALE, other, 1, k_scale=kv.k_scale,
                v_scale=kv.v_scale,
            )  # fmt: skip

        times = h.host({"vllm": theirs, "m3hal": ours})
        launches = {f"launches_{name}": h.launches(call) for name, call in (("m3hal", ours), ("vllm", theirs))}
        h.row(f"host decode {format}", f"TP{tp} B{requests} 64K", times, runs=100, **launches)


SECTIONS = {"select_decode": select_decode, "sparse_decode": sparse_decode, "prefill": prefill}
SECTIONS |= {"sparse_prefill_fp8": sparse_prefill_fp8, "host": host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=list(SECTIONS))
    parser.add_argument("--peers", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    peer = h.peers(options.peers)
    failed = False
    for section in options.sections:
        try:
            SECTIONS[section](peer)
        except Exception:
            traceback.print_exc()
            failed = True
        if not h.WARM:
            options.out.mkdir(parents=True, exist_ok=True)
            h.save(options.out / f"{section}.json", " ".join(["python", *sys.argv]))
            h.ROWS.clear()
    sys.exit(failed)


if __name__ == "__main__":
    main()
