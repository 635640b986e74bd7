"""Wrong quantised caches: codes, scales and page maps, written or read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import QTensor, e4m3
from m3hal.layouts import KVLayout, PagedCache
from m3hal.layouts.stored import Stored, quantize_like, stored
from m3hal_broken_zoo._zoo import mutant

BLOCKED = ("nvfp4", "mxfp4")
FP8 = ("fp8_e4m3", "fp8_e4m3_240")


def parts(cache: PagedCache) -> tuple[Stored, ...]:
    """Keys, and values where there are any."""
    return tuple(stored(cache, name) for name in (("k", "v") if cache.layout.has_values else ("k",)))


def places(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Pages and offsets of the slots that are written."""
    kept = slots[slots >= 0]
    return kept // cache.layout.page_size, kept % cache.layout.page_size


def after(edit: Callable[[Stored, Tensor, Tensor], None], kinds: tuple[str, ...]) -> Any:
    """``kv_write`` whose stored vectors are edited afterwards, in caches of some formats."""

    def make(site, right):
        def run(cache, k, v, slots):
            right(cache, k, v, slots)
            if cache.layout.format in kinds:
                for part in parts(cache):
                    edit(part, *places(cache, slots))

        return run

    return make


def instead(encode: Callable[[Stored, Tensor], QTensor], kinds: tuple[str, ...]) -> Any:
    """``kv_write`` with another quantiser in caches of some formats."""

    def make(site, right):
        def run(cache, k, v, slots):
            if cache.layout.format not in kinds:
                right(cache, k, v, slots)
                return
            for part, vectors in zip(parts(cache), (k, v), strict=False):
                part.put(*places(cache, slots), encode(part, vectors[slots >= 0]))

        return run

    return make


def reading(view: Callable[[PagedCache], PagedCache]) -> Any:
    """``kv_read`` of a cache that is taken for another."""
    return lambda site, right: lambda cache, slots: right(view(cache), slots)


def attending(view: Callable[[PagedCache], PagedCache]) -> Any:
    """Attention over a cache that is taken for another."""
    return lambda site, right: lambda q, kv, *rest: right(q, view(kv), *rest)


def with_bytes(cache: PagedCache, edit: Callable[[PagedCache], None]) -> PagedCache:
    """A copy of a quantised cache whose bytes are edited; a plain one as it is."""
    if cache.buf.element_size() != 1:
        return cache
    copied = replace(cache, buf=cache.buf.clone(memory_format=torch.contiguous_format))
    edit(copied)
    return copied


def other_map(cache: PagedCache) -> PagedCache:
    """msa_slot pages taken for planar ones, and the other way round; both have the same bytes."""
    if cache.layout.format not in BLOCKED:
        return cache
    kind = "planar" if cache.layout.kind == "msa_slot" else "msa_slot"
    layout: KVLayout = replace(cache.layout, kind=kind)
    return replace(cache, buf=cache.buf.reshape(len(cache.buf), *layout.page_shape()), layout=layout)


def swap_nibbles(part: Stored, page: Tensor, offset: Tensor) -> None:
    codes = part.codes[page, :, offset]
    part.codes[page, :, offset] = (codes >> 4) | (codes << 4)


def plain_fp8(part: Stored, vectors: Tensor) -> Tensor:
    """Vectors over the global scale, fp32."""
    return vectors.float() if part.global_scale is None else vectors.float() / part.global_scale


def towards_zero(x: Tensor, maximum: float) -> Tensor:
    """Rounded to E4M3 towards zero, saturating."""
    codes = e4m3.encode(x, maximum)
    too_far = e4m3.decode(codes, maximum).abs() > x.abs().clamp(max=maximum)
    return torch.where(too_far, codes - 1, codes).to(torch.uint8)


# --- kv_write


@mutant("kv_write", "nvfp4_groups:oracle", "F61")
def kv_write_neighbours_scale(site, right):
    """Each group's scale is stored in the place of the next one."""

    def edit(part, page, offset):
        scale = part.scales[page, :, offset // 4, offset % 4]
        part.scales[page, :, offset // 4, offset % 4] = scale.roll(1, -1)

    return after(edit, ("nvfp4",))(site, right)


@mutant("kv_write", "fp8_e4m3_odd_values:oracle", "F56")
def kv_write_saturates_at_240(site, right):
    """Numbers stop at 240, Gaudi 2's largest, where the format reaches 448."""

    def encode(part, vectors):
        return QTensor(
            e4m3.encode(plain_fp8(part, vectors).clamp(-240, 240)), part.layout.spec, None, part.global_scale
        )

    return instead(encode, ("fp8_e4m3",))(site, right)


@mutant("kv_write", "fp8_e4m3_odd_values:oracle", "F56")
def kv_write_does_not_saturate(site, right):
    """What exceeds 448 becomes NaN, as IEEE conversions have it."""

    def encode(part, vectors):
        x = plain_fp8(part, vectors)
        codes = torch.where(x.abs() > 464, 0x7F, e4m3.encode(x)).to(torch.uint8)
        return QTensor(codes, part.layout.spec, None, part.global_scale)

    return instead(encode, ("fp8_e4m3",))(site, right)


@mutant("kv_write", "fp8_e4m3_page_boundaries:oracle", "F73")
def kv_write_fp8_towards_zero(site, right):
    """E4M3 codes are rounded towards zero."""

    def encode(part, vectors):
        limit = 448 if part.layout.format == "fp8_e4m3" else 240
        codes = towards_zero(plain_fp8(part, vectors), limit)
        return QTensor(codes, part.layout.spec, None, part.global_scale)

    return instead(encode, FP8)(site, right)


@mutant("kv_write", "nvfp4_exact_ties:oracle", "F73")
def kv_write_ties_away_from_zero(site, right):
    """Ties of four-bit codes are rounded away from zero, not to even."""

    def encode(part, vectors):
        return quantize_like(part, vectors.float() * (1 + 2**-18))

    return instead(encode, ("nvfp4",))(site, right)


@mutant("kv_write", "nvfp4_page_boundaries:oracle", "F60")
def kv_write_other_page_map(site, right):
    """Pages of msa_slot are written as planar ones, and the other way round; the vendor's reader agrees."""

    def run(cache, k, v, slots):
        if cache.layout.format not in BLOCKED:
            right(cache, k, v, slots)
            return
        twin = other_map(cache)
        right(twin, k, v, slots)
        cache.buf.copy_(twin.buf.reshape(cache.buf.shape))

    return run


@mutant("kv_write", "nvfp4_page_boundaries:oracle", "F34")
def kv_write_stale_scale_in_last_quad(site, right):
    """The last quad of a page is quantised with the scales that stand there already."""

    def run(cache, k, v, slots):
        before = None if cache.layout.format != "nvfp4" else cache.buf.clone()
        right(cache, k, v, slots)
        if before is None:
            return
        page, offset = places(cache, slots)
        late = offset >= cache.layout.page_size - 4
        old = parts(replace(cache, buf=before))
        for part, stale in zip(parts(cache), old, strict=True):
            kept = stale.scales[page[late], :, offset[late] // 4, offset[late] % 4]
            part.scales[page[late], :, offset[late] // 4, offset[late] % 4] = kept

    return run


@mutant("kv_write", "nvfp4_page_boundaries:oracle", "F57")
def kv_write_values_take_the_keys_scales(site, right):
    """One scale is found for a group of keys and used for the values' as well."""

    def run(cache, k, v, slots):
        right(cache, k, v, slots)
        if cache.layout.format == "nvfp4" and v is not None:
            keys, values = parts(cache)
            page, offset = places(cache, slots)
            scale = keys.scales[page, :, offset // 4, offset % 4]
            values.scales[page, :, offset // 4, offset % 4] = scale

    return run


# --- kv_read


@mutant("kv_read", "nvfp4_page_boundaries:oracle", "F55")
def kv_read_swaps_nibbles(site, right):
    """The even element is taken from the high half of its byte."""

    def edit(cache):
        for part in parts(cache) if cache.layout.format in BLOCKED else ():
            part.codes.copy_((part.codes >> 4) | (part.codes << 4))

    return reading(lambda cache: with_bytes(cache, edit))(site, right)


@mutant("kv_read", "nvfp4_page_boundaries:oracle", "F61")
def kv_read_neighbours_scale(site, right):
    """Each group is scaled by its neighbour's scale."""

    def edit(cache):
        for part in parts(cache) if cache.layout.format in BLOCKED else ():
            part.scales.copy_(part.scales.roll(1, -1).clone())

    return reading(lambda cache: with_bytes(cache, edit))(site, right)


@mutant("kv_read", "fp8_e4m3_page_boundaries:oracle", "F57")
def kv_read_drops_the_key_scale(site, right):
    """The global scale of keys is left out."""
    return reading(lambda cache: replace(cache, k_scale=None) if cache.layout.has_values else cache)(site, right)


@mutant("kv_read", "fp8_e4m3_page_boundaries:oracle", "F57")
def kv_read_divides_by_the_scale(site, right):
    """The global scale is taken for its reciprocal; a writer that does the same agrees with it."""

    def view(cache):
        if cache.k_scale is None:
            return cache
        return replace(cache, k_scale=1 / cache.k_scale, v_scale=1 / cache.v_scale)

    return reading(view)(site, right)


@mutant("kv_read", "nvfp4_page_boundaries:oracle", "F60")
def kv_read_other_page_map(site, right):
    """Pages of msa_slot are read as planar ones, and the other way round."""
    return reading(other_map)(site, right)


@mutant("kv_read", "fp8_e4m3_240_all_codes:oracle", "F56")
def kv_read_ocp_codes_on_gaudi(site, right):
    """Gaudi 2's codes are read as OCP's: its infinity is 256, its NaNs are numbers up to 448."""

    def view(cache):
        gaudi = cache.layout.format == "fp8_e4m3_240"
        return replace(cache, layout=replace(cache.layout, format="fp8_e4m3")) if gaudi else cache

    return reading(view)(site, right)


# --- attention and scores


def _from_keys(cache: PagedCache) -> None:
    if cache.layout.format == "nvfp4":
        keys, values = parts(cache)
        values.scales.copy_(keys.scales.clone())


@mutant("sparse_attention", "nvfp4_decode:oracle", "F57")
def sparse_attention_values_take_the_keys_scales(site, right):
    """Values are dequantised with the scales of keys."""
    return attending(lambda cache: with_bytes(cache, _from_keys))(site, right)


@mutant("sparse_attention", "nvfp4_decode:oracle", "F60")
def sparse_attention_other_page_map(site, right):
    """Pages of msa_slot are read as planar ones, and the other way round."""
    return attending(other_map)(site, right)


@mutant("paged_attention", "nvfp4_decode:oracle", "F57")
def paged_attention_values_take_the_keys_scales(site, right):
    """Values are dequantised with the scales of keys."""
    return attending(lambda cache: with_bytes(cache, _from_keys))(site, right)


@mutant("paged_attention", "fp8_e4m3_decode:oracle", "F57")
def paged_attention_drops_the_key_scale(site, right):
    """The global scale of keys is left out of the scores."""
    return attending(lambda cache: replace(cache, k_scale=None))(site, right)


@mutant("block_scores", "mxfp4_needles:oracle", "F55")
def block_scores_swaps_nibbles(site, right):
    """The even element is taken from the high half of its byte."""

    def edit(cache):
        if cache.layout.format in BLOCKED:
            codes = stored(cache, "k").codes
            codes.copy_((codes >> 4) | (codes << 4))

    return lambda q, cache, meta: right(q, with_bytes(cache, edit), meta)


# --- fused insertion


def _inserting(right, change):
    """``qk_norm_rope_insert`` into caches that are taken for others."""

    def run(qkv, norms, positions, cos_sin, kv, index_cache, *slots):
        return right(qkv, norms, positions, cos_sin, change(kv), index_cache, *slots)

    return run


@mutant("qk_norm_rope_insert", "fp8_e4m3_page_boundaries:oracle", "F57")
def qk_norm_rope_insert_one_scale_for_both(site, right):
    """Values are divided by the scale of keys."""
    return _inserting(right, lambda kv: kv if kv.k_scale is None else replace(kv, v_scale=kv.k_scale))


# --- conversions


@mutant("quantize", "to_fp8_e4m3:oracle", "F73")
def quantize_fp8_towards_zero(site, right):
    """E4M3 codes are rounded towards zero."""

    def run(x):
        q = right(x)
        if not site.activation_format.startswith("fp8") or not len(x):
            return q
        limit = 448 if site.activation_format == "fp8_e4m3" else 240
        return replace(q, data=towards_zero(x.float() / q.scale, limit))

    return run


@mutant("quantize", "to_fp8_e4m3_broken_rows:oracle")
def quantize_loses_signs_of_zeros(site, right):
    """-0 becomes 0, as where a quotient is corrected by what it leaves."""
    return lambda x: right(x + 0.0)


@mutant("quantize", "to_mxfp4:oracle", "F55")
def quantize_swaps_nibbles(site, right):
    """The even element lies in the high half of its byte."""

    def run(x):
        q = right(x)
        return replace(q, data=(q.data >> 4) | (q.data << 4)) if site.activation_format in BLOCKED else q

    return run


@mutant("dequantize", "from_nvfp4:oracle", "F61")
def dequantize_neighbours_scale(site, right):
    """Each group is scaled by its neighbour's scale."""

    def run(q):
        blocked = q.spec.format in ("nvfp4", "mxfp4", "mxfp8")
        return right(replace(q, scale=q.scale.roll(1, -1)) if blocked else q)

    return run


@mutant("dequantize", "from_nvfp4:oracle", "F70")
def dequantize_group_compiled_in(site, right):
    """Groups have 32 elements whatever the format says: every second scale of nvfp4 is not read."""

    def run(q):
        if q.spec.format != "nvfp4":
            return right(q)
        every_other = q.scale[..., ::2].repeat_interleave(2, -1)[..., : q.scale.shape[-1]]
        return right(replace(q, scale=every_other))

    return run


@mutant("kv_write", "fp8_e4m3_labelled:oracle", "F62")
def kv_write_labelled_bytes_are_numbers(site, right):
    """A cache labelled with torch's float is written without its scale; one of bytes is right."""

    def run(cache, k, v, slots):
        labelled = cache.buf.dtype == torch.float8_e4m3fn
        right(replace(cache, k_scale=None, v_scale=None) if labelled else cache, k, v, slots)

    return run
