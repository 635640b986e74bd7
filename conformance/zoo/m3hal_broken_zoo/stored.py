"""Wrong formats: nibbles, scales and page maps of quantised caches, weights and activations."""

from __future__ import annotations

from dataclasses import replace

import torch

from m3hal import formats, ops
from m3hal.formats import PLAIN_FORMATS, QTensor, e4m3, e8m0, spec_of
from m3hal.layouts.stored import quantize_like, stored
from m3hal.ops.kv_write import kv_write
from m3hal_broken_zoo._zoo import mutant
from m3hal_broken_zoo.quantised import towards_zero


def _swapped(packed):
    return (packed >> 4) | (packed << 4)


def _is_four_bits(format):
    return format in ("nvfp4", "mxfp4")


# --- kv_write


def _places(cache, slots):
    return slots // cache.layout.page_size, slots % cache.layout.page_size


def _linear_values(cache):
    """The values of a cache with their scale bytes taken as [token, group], like those of keys."""
    part = stored(cache, "v")
    if part.scales is None:
        return part
    strides = (*part.scales.stride()[:2], 4 * part.scales.shape[-1], part.scales.shape[-1], 1)
    return replace(part, scales=part.scales.as_strided(part.scales.shape, strides, part.scales.storage_offset()))


@mutant("kv_write", "nvfp4_groups:oracle", "F60")
def kv_write_linear_value_scales(site, right):
    """The scales of values are stored like those of keys, not interleaved in quads of tokens."""

    def run(cache, k, v, slots):
        right(cache, k, v, slots)
        if v is not None:
            part, kept = _linear_values(cache), slots >= 0
            part.put(*_places(cache, slots[kept]), quantize_like(part, v[kept]))

    return run


@mutant("kv_write", "nvfp4_page_boundaries:oracle", "F55")
def kv_write_swaps_nibbles(site, right):
    """The even element lies in the high half of its byte."""

    def run(cache, k, v, slots):
        right(cache, k, v, slots)
        if _is_four_bits(cache.layout.format):
            page, offset = _places(cache, slots[slots >= 0])
            codes = stored(cache, "k").codes
            codes[page, :, offset] = _swapped(codes[page, :, offset])

    return run


def _with_scales(right, change):
    def run(cache, k, v, slots):
        scaled = cache.k_scale is not None
        right(change(cache) if scaled else cache, k, v, slots)

    return run


@mutant("kv_write", "fp8_e4m3_page_boundaries:oracle", "F57")
def kv_write_scale_is_a_divisor(site, right):
    """The global scale is taken for its reciprocal."""
    return _with_scales(right, lambda c: replace(c, k_scale=1 / c.k_scale, v_scale=1 / c.v_scale))


@mutant("kv_write", "nvfp4_page_boundaries:oracle")
def kv_write_one_scale_for_both(site, right):
    """Values are divided by the scale of keys."""
    return _with_scales(right, lambda c: replace(c, v_scale=c.k_scale))


@mutant("kv_write", "fp8_e4m3_page_boundaries:oracle")
def kv_write_ignores_the_scale(site, right):
    """Written with scale 1, as the fused CUDA kernel writes FP8, without declaring it."""
    return _with_scales(right, lambda c: replace(c, k_scale=None, v_scale=None))


@mutant("kv_write", "nvfp4_odd_values:oracle", "F56")
def kv_write_keeps_minus_zero(site, right):
    """-0 keeps its sign and a block of zeros gets scale 0: another quantiser, not declared."""

    def run(cache, k, v, slots):
        kv_write(cache, k, v, slots, traits={"nvfp4_quantizer": "reciprocal"})

    return run


@mutant("kv_write", "fp8_e4m3_240_odd_values:oracle", "F56")
def kv_write_ocp_range_on_gaudi(site, right):
    """Numbers beyond 240 get bytes that mean infinity and NaN there."""

    def run(cache, k, v, slots):
        format = cache.layout.format
        ocp = replace(cache.layout, format="fp8_e4m3" if format == "fp8_e4m3_240" else format)
        right(replace(cache, layout=ocp), k, v, slots)

    return run


@mutant("kv_write", "mxfp4_index:oracle")
def kv_write_floors_mx_scales(site, right):
    """The OCP scale rule where the format's own rounds."""

    def run(cache, k, v, slots):
        kv_write(cache, k, v, slots, traits={"mx_scale_rule": "floor"})

    return run


# --- kv_read, attention, scores


@mutant("kv_read", "nvfp4_page_boundaries:oracle", "F60")
def kv_read_linear_value_scales(site, right):
    """Value scales are read as if they lay like those of keys."""

    def run(cache, slots):
        k, v = right(cache, slots)
        if v is not None:
            linear = formats.dequantize(_linear_values(cache).take(*_places(cache, slots.clamp(min=0))))
            v = torch.where((slots < 0)[:, None, None], v, linear)
        return k, v

    return run


@mutant("sparse_attention", "nvfp4_decode:oracle", "F57")
def sparse_attention_forgets_the_value_scale(site, right):
    """The global scale of values is left out."""
    return lambda q, kv, *rest: right(q, replace(kv, v_scale=None), *rest)


@mutant("paged_attention", "nvfp4_decode:oracle")
def paged_attention_rounds_products(site, right):
    """code * scale is rounded to E4M3, as Blackwell does, and this is not declared."""

    def run(q, kv, *rest):
        traits = {} if kv.layout.format in PLAIN_FORMATS else {"traits": {"kv_dequant_round": "e4m3_shift3"}}
        return right(q, kv, *rest, **traits)

    return run


@mutant("block_scores", "nvfp4_needles:oracle")
def block_scores_rounds_queries(site, right):
    """Queries are rounded to E4M3 without declaring it, where the index cache is quantised."""

    def run(q, cache, *rest):
        traits = {} if cache.layout.format in PLAIN_FORMATS else {"traits": {"q_dtype": "e4m3"}}
        return right(q, cache, *rest, **traits)

    return run


# --- weights and activations


def _on_stored(right, change):
    """``linear`` with another weight where it is stored."""
    return lambda x, weight: right(x, change(weight) if isinstance(weight, QTensor) else weight)


@mutant("linear", "mxfp8_k_96:oracle", "F52")
def linear_scale_bytes_are_numbers(site, right):
    """Byte 119 is the number 119."""

    def change(q):
        if q.spec.format not in ("mxfp8", "mxfp4"):
            return q
        numbers = formats.dequantize(q) / _spread(e8m0.decode(q.scale), 32)
        return numbers * _spread(q.scale.float(), 32)

    return _on_stored(right, change)


@mutant("linear", "mxfp4_k_32:oracle", "F55")
def linear_swaps_nibbles(site, right):
    """The even element is taken from the high half."""
    return _on_stored(right, lambda q: replace(q, data=_swapped(q.data)) if _is_four_bits(q.spec.format) else q)


@mutant("linear", "nvfp4_k_416:oracle", "F57")
def linear_global_scale_divides(site, right):
    """The global scale is taken for its reciprocal."""
    return _on_stored(right, lambda q: q if q.global_scale is None else replace(q, global_scale=1 / q.global_scale))


@mutant("moe_experts", "nvfp4_experts:oracle", "F57")
def moe_experts_share_a_global_scale(site, right):
    """Every expert is dequantised with the first one's."""

    def first(q):
        if not isinstance(q, QTensor) or q.global_scale is None:
            return q
        return replace(q, global_scale=q.global_scale[:1].expand_as(q.global_scale))

    return lambda x, w, ids, experts: right(x, w, ids, replace(experts, w13=first(experts.w13), w2=first(experts.w2)))


def _experts(site, **traits):
    """The definition of the experts with freedoms."""
    operator = ops.load("moe_experts")
    return lambda *inputs: operator.reference(*inputs, **operator.static_values(site), traits=traits)


@mutant("moe_experts", "fp8_e4m3_experts:oracle")
def moe_experts_rounds_activations(site, right):
    """Inputs of both products in FP8 where weights are, without declaring it."""
    rounding = _experts(site, activation_format="fp8_e4m3")
    return lambda *inputs: (rounding if isinstance(inputs[3].w13, QTensor) else right)(*inputs)


#: FP8 products of Hopper's matrix unit: the worst row is bounded loosely
SHORT_SUMS = {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16", "mma_accum": "float22"}


@mutant("moe_experts", "fp8_e4m3_experts:oracle", declares={"traits": SHORT_SUMS})
def moe_experts_cuts_tokens_off(site, right):
    """Tokens become E4M3 towards zero, where sums of 14 bits are declared."""
    rounding = _experts(site, **SHORT_SUMS)

    def run(x, w, ids, experts):
        scale = formats.quantize(x.float(), spec_of("fp8_e4m3")).scale if experts.x_scale is None else experts.x_scale
        cut = e4m3.decode(towards_zero(x.float() / scale, e4m3.OCP)) * scale
        return rounding(cut, w, ids, experts).to(x.dtype)

    return run


@mutant("moe_experts", "fp8_e4m3_experts:oracle", declares={"traits": SHORT_SUMS})
def moe_experts_one_scale_for_all_tokens(site, right):
    """The largest token sets every token's scale, where sums of 14 bits are declared."""
    rounding = _experts(site, **SHORT_SUMS)

    def run(x, w, ids, experts):
        scale = x.float().abs().max() / e4m3.OCP if len(x) else None
        return rounding(x, w, ids, experts if experts.x_scale is not None else replace(experts, x_scale=scale))

    return run


@mutant("quantize", "to_mxfp8:oracle")
def quantize_floors_mx_scales(site, right):
    """The OCP scale rule, which saturates, without declaring it."""

    def run(x):
        spec = spec_of(site.activation_format)
        return formats.quantize(x, spec, traits={"mx_scale_rule": "floor"})

    return run


@mutant("quantize", "to_fp8_e4m3:oracle", "F61")
def quantize_one_scale_for_all_tokens(site, right):
    """The batch's largest magnitude sets every token's scale."""

    def run(x):
        q = right(x)
        if not site.activation_format.startswith("fp8") or len(x) == 0:
            return q
        scale = q.scale.amax().expand_as(q.scale).contiguous()
        return replace(q, data=formats.quantize(x, replace(q.spec, group=0), scale).data, scale=scale)

    return run


@mutant("dequantize", "from_mxfp8:oracle", "F52")
def dequantize_scale_bytes_are_numbers(site, right):
    """An E8M0 byte is converted, not decoded."""

    def run(q):
        if q.spec.format not in ("mxfp8", "mxfp4"):
            return right(q)
        plain = formats.dequantize(q) / _spread(e8m0.decode(q.scale), 32) * _spread(q.scale.float(), 32)
        return plain.to(getattr(torch, site.dtype))

    return run


def _spread(scale, group):
    return scale.repeat_interleave(group, dim=-1)
