"""Wrong cache writes, reads and copies."""

from __future__ import annotations

from dataclasses import replace

import torch

from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.rows import dense

# --- kv_write


def _through(right, edit):
    def run(cache, k, v, slots):
        right(*edit(cache, k, v, slots))

    return run


@mutant("kv_write", "page_boundaries:oracle", "F29")
def kv_write_negative_slot(site, right):
    """Slot -1 is the last slot, as in Python."""

    def edit(cache, k, v, slots):
        total = len(cache.buf) * cache.layout.page_size
        return cache, k, v, torch.where(slots < 0, slots + total, slots)

    return _through(right, edit)


@mutant("kv_write", "page_boundaries:oracle")
def kv_write_late_page_turn(site, right):
    """The page turns one token late."""

    def edit(cache, k, v, slots):
        page = cache.layout.page_size
        return cache, k, v, torch.where((slots % page == 0) & (slots > 0), slots - 1, slots)

    return _through(right, edit)


@mutant("kv_write", "block_outer:oracle", "F64")
def kv_write_assumes_contiguous(site, right):
    """Only the address of the cache is taken over; its strides are assumed."""
    return _through(right, lambda cache, k, v, slots: (replace(cache, buf=dense(cache.buf)), k, v, slots))


@mutant("kv_write", "fused_row:oracle", "F65")
def kv_write_assumes_dense_keys(site, right):
    """k and v are read as if they were contiguous."""
    return _through(right, lambda cache, k, v, slots: (cache, dense(k), v if v is None else dense(v), slots))


@mutant("kv_write", "page_boundaries:oracle", "F60")
def kv_write_wrong_page_map(site, right):
    """nhd is written as hnd where a page has as many bytes either way."""

    def edit(cache, k, v, slots):
        layout = cache.layout
        if layout.kind != "nhd" or layout.heads == 1:
            return cache, k, v, slots
        other = replace(layout, kind="hnd")
        return replace(cache, buf=cache.buf.view(-1, *other.page_shape()), layout=other), k, v, slots

    return _through(right, edit)


@mutant("kv_write", "odd_values:oracle", "F56")
def kv_write_loses_minus_zero(site, right):
    """-0 is stored as +0."""
    return _through(right, lambda cache, k, v, slots: (cache, k + 0.0, v if v is None else v + 0.0, slots))


@mutant("kv_write", "rounds_once:oracle")
def kv_write_truncates(site, right):
    """fp32 is stored in bf16 without its lower half."""

    def cut(t):
        return (
            t
            if t is None or t.dtype != torch.float32
            else (t.contiguous().view(torch.int32) & -65536).view(torch.float32)
        )

    return _through(right, lambda cache, k, v, slots: (cache, cut(k), cut(v), slots))


@mutant("kv_write", "beyond_31_bits:huge_pages", "F63")
def kv_write_int32_offsets(site, right):
    """page * stride is computed in 32 bits."""

    def edit(cache, k, v, slots):
        stride, size = cache.buf.stride(0), cache.layout.page_size
        page = slots.clamp(min=0) // size
        wrapped = (page * stride).to(torch.int32).long() // stride
        moved = wrapped % len(cache.buf) * size + slots % size
        return cache, k, v, torch.where(slots < 0, slots, moved)

    return _through(right, edit)


@mutant("kv_write", "page_boundaries:oracle")
def kv_write_head_order(site, right):
    """Heads are stored in reverse; a read of the same vendor reverses them again."""

    def flip(t):
        return t if t is None else t.flip(1)

    return _through(right, lambda cache, k, v, slots: (cache, flip(k), flip(v), slots))


@mutant("kv_write", "page_boundaries:oracle", "F60")
def kv_write_v_swizzled(site, right):
    """The values' pairs of 8 dimensions are exchanged, for a reader of another architecture."""

    def edit(cache, k, v, slots):
        return cache, k, v if v is None else v.unflatten(-1, (-1, 2, 8)).flip(-2).flatten(-3), slots

    return _through(right, edit)


@mutant("kv_write", "page_boundaries:oracle")
def kv_write_clears_page(site, right):
    """The rest of a page that is begun is cleared."""

    def run(cache, k, v, slots):
        right(cache, k, v, slots)
        for slot in slots.tolist():
            if slot >= 0 and slot % cache.layout.page_size == 0:
                cache.k[slot // cache.layout.page_size, :, 1:] = 0

    return run


@mutant("kv_write", "tokens_200:oracle", "F68")
def kv_write_128_tokens(site, right):
    """A grid of 128 threads: tokens from the 129th on are not written."""
    return _through(right, lambda cache, k, v, slots: (cache, k[:128], v if v is None else v[:128], slots[:128]))


@mutant("kv_read", "tokens_200:oracle", "F68")
def kv_read_128_tokens(site, right):
    """Tokens from the 129th on read what the one 128 before them reads."""
    return lambda cache, slots: right(cache, torch.cat([slots[:128], slots[: max(len(slots) - 128, 0)]]))


@mutant("kv_write", "no_token:oracle", "F30")
def kv_write_no_token(site, right):
    """The first slot is looked at before the number of tokens."""
    return _through(right, lambda cache, k, v, slots: (cache, k, v, slots) if int(slots[0]) >= -1 else None)


# --- kv_read


@mutant("kv_read", "all_absent:oracle", "F13")
def kv_read_negative_slot(site, right):
    """Slot -1 reads the last slot."""

    def run(cache, slots):
        return right(cache, torch.where(slots < 0, slots + len(cache.buf) * cache.layout.page_size, slots))

    return run


@mutant("kv_read", "page_boundaries:oracle", "F73")
def kv_read_rounds_to_bf16(site, right):
    """What is read goes through bf16."""

    def run(cache, slots):
        k, v = right(cache, slots)
        return k.bfloat16().float(), v if v is None else v.bfloat16().float()

    # A bf16 cache holds nothing that bf16 can't: there, one bit less.
    def narrow(cache, slots):
        k, v = right(cache, slots)
        return k.half().float(), v if v is None else v.to(torch.float8_e5m2).float()

    return run if site.kv_format == "float32" else narrow


@mutant("kv_read", "block_outer:oracle", "F64")
def kv_read_assumes_contiguous(site, right):
    """The cache's strides are assumed."""
    return lambda cache, slots: right(replace(cache, buf=dense(cache.buf)), slots)


@mutant("kv_read", "page_boundaries:oracle", "F60")
def kv_read_wrong_page_map(site, right):
    """nhd is read as hnd."""

    def run(cache, slots):
        if cache.layout.kind != "nhd" or cache.layout.heads == 1:
            return right(cache, slots)
        other = replace(cache.layout, kind="hnd")
        return right(replace(cache, buf=cache.buf.reshape(-1, *other.page_shape()), layout=other), slots)

    return run


@mutant("kv_read", "page_boundaries:stale")
def kv_read_leaks_stale(site, right):
    """A negative slot reads slot 0 times zero."""

    def run(cache, slots):
        k, v = right(cache, slots.clamp(min=0))
        keep = (slots >= 0).to(k.dtype)[:, None, None]
        last, _ = right(cache, torch.full_like(slots, 5 * cache.layout.page_size - 3 if len(cache.buf) > 4 else 0))
        k = k * keep + last * (1 - keep) * 0
        return k, v if v is None else v * keep

    return run


# --- kv_copy_blocks


@mutant("kv_copy_blocks", "swap_within_one_cache:oracle")
def kv_copy_blocks_one_by_one(site, right):
    """Pages are copied one after the other, so that a swap within a cache loses a page."""

    def run(src, dst, pairs):
        for pair in pairs:
            right(src, dst, pair[None])

    return run


@mutant("kv_copy_blocks", "some_pages:oracle", "F13")
def kv_copy_blocks_negative(site, right):
    """A negative id is the last page."""
    return lambda src, dst, pairs: right(src, dst, torch.where(pairs < 0, pairs + 6, pairs))


@mutant("kv_copy_blocks", "some_pages:oracle")
def kv_copy_blocks_last_pair(site, right):
    """The last pair is left out."""
    return lambda src, dst, pairs: right(src, dst, pairs[:-1] if len(pairs) > 1 else pairs)


@mutant("kv_copy_blocks", "some_pages:oracle", "F56")
def kv_copy_blocks_through_numbers(site, right):
    """Bytes are copied as numbers: -0 and NaN do not survive."""

    def run(src, dst, pairs):
        right(replace(src, buf=src.buf.nan_to_num(nan=0.0) + 0.0), dst, pairs)

    return run


@mutant("kv_copy_blocks", "index_pages:oracle", "F24")
def kv_copy_blocks_forgets_index(site, right):
    """A cache without values is not copied."""
    return lambda src, dst, pairs: right(src, dst, pairs) if src.layout.has_values else None


@mutant("kv_copy_blocks", "into_block_outer:oracle", "F64")
def kv_copy_blocks_assumes_contiguous(site, right):
    """The target's strides are assumed."""
    return lambda src, dst, pairs: right(src, replace(dst, buf=dense(dst.buf)), pairs)


@mutant("kv_copy_blocks", "strided_pairs:oracle", "F08")
def kv_copy_blocks_dense_pairs(site, right):
    """The pairs are read as if they were contiguous."""

    def run(src, dst, pairs):
        flat = dense(pairs)
        right(src, dst, torch.where((flat < len(dst.buf)) & (flat < len(src.buf)), flat, -1))

    return run
