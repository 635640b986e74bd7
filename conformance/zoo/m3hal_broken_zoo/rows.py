"""Wrong norms, projections, conversions, RoPE and activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m3hal.formats.plain import QTensor
from m3hal_broken_zoo._zoo import mutant

NAN = float("nan")


def dense(tensor: Tensor) -> Tensor:
    """The memory from the tensor's address on, read as if the tensor were contiguous."""
    steps, step = [], 1
    for size in reversed(tensor.shape):
        steps.append(step)
        step *= max(size, 1)
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided(tensor.shape, steps[::-1]) if step <= room else tensor


def norm(x: Tensor, weight: Tensor, site: Any, width: int | None = None) -> Tensor:
    wide = x.float()
    square = wide[..., :width].square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(square + site.eps) * (site.weight_offset + weight.float())).to(x.dtype)


# --- rms_norm


@mutant("rms_norm", "every_chunk:oracle")
def rms_norm_short_reduction(site, right):
    """The variance leaves the last 128 columns out."""
    return lambda x, weight: norm(x, weight, site, x.shape[-1] - 128 if x.shape[-1] > 128 else None)


@mutant("rms_norm", "last_columns:oracle")
def rms_norm_misses_last_column(site, right):
    """The variance leaves the last column out: an off-by-one at the end."""
    return lambda x, weight: norm(x, weight, site, -1)


@mutant("rms_norm", "odd_rows:oracle", "F28")
def rms_norm_nan_spreads(site, right):
    """One NaN row makes every row NaN: a common scale is taken over the batch."""

    def run(x, weight):
        return right(x, weight) + (x.float().sum() * 0).to(x.dtype)

    return run


@mutant("rms_norm", "weight_zero:oracle", "F71")
def rms_norm_plain_weight(site, right):
    """w where 1 + w belongs."""
    return lambda x, weight: right(x, weight - 1 if site.weight_offset else weight)


@mutant("rms_norm", "plain_weight:oracle", "F72")
def rms_norm_offset_always(site, right):
    """1 + w also where the weights are plain: the offset is compiled in."""
    return lambda x, weight: right(x, weight if site.weight_offset else weight + 1)


@mutant("rms_norm", "heads:oracle", "F73")
def rms_norm_bf16_inside(site, right):
    """Everything after the sum is computed in bf16."""

    def run(x, weight):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + site.eps).bfloat16()
        return ((x.bfloat16() * scale) * (weight.bfloat16() + site.weight_offset)).to(x.dtype)

    return run


@mutant("rms_norm", "tokens_7:written", raw=True)
def rms_norm_last_rows_unwritten(site, right):
    """Rows past the last whole tile of 16 are not written."""

    def run(x, weight, out=None):
        whole = len(x) // 16 * 16
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        right(x[:whole], weight, out=result[:whole])
        return result

    return run


@mutant("rms_norm", "tokens_7:inputs", "F85")
def rms_norm_overwrites_input(site, right):
    """The result is left in x as well."""

    def run(x, weight):
        x.copy_(right(x, weight))
        return x.clone(memory_format=torch.contiguous_format)

    return run


@mutant("rms_norm", "no_token:oracle", "F30")
def rms_norm_divides_by_tokens(site, right):
    """The grid is computed by a division by the number of tokens."""
    return lambda x, weight: right(x, weight) if 1024 // len(x) >= 0 else None


@mutant("rms_norm", "heads_in_fused_row:oracle", "F65")
def rms_norm_assumes_contiguous(site, right):
    """Rows are read as if x were contiguous."""
    return lambda x, weight: right(dense(x), weight)


@mutant("rms_norm", "tokens_7:rerun")
def rms_norm_noise(site, right):
    """Atomics in another order each time: noise in the last bits."""

    def run(x, weight):
        y = right(x, weight)
        return (y.float() * (1 + 4e-3 * torch.rand(y.shape))).to(y.dtype)

    return run


@mutant("rms_norm", "tokens_7:overwritten", "F34")
def rms_norm_remembers_pointer(site, right):
    """The result is kept by the input's address and shape."""
    seen: dict[Any, Tensor] = {}

    def run(x, weight):
        key = (x.data_ptr(), x.shape)
        if key not in seen:
            seen.clear()
            seen[key] = right(x, weight)
        return seen[key].clone()

    return run


@mutant("rms_norm", "odd_rows:oracle")
def rms_norm_no_eps(site, right):
    """eps is left out: a row of zeros gives NaN."""

    def run(x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True)) * (site.weight_offset + weight.float())).to(
            x.dtype
        )

    return run


@mutant("rms_norm", "large_eps:oracle")
def rms_norm_eps_compiled_in(site, right):
    """eps is 1e-6 whatever the model says."""

    def run(x, weight):
        wide = x.float()
        square = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(square + 1e-6) * (site.weight_offset + weight.float())).to(x.dtype)

    return run


_LAST: dict[str, Any] = {}


@mutant("rms_norm", "tokens_7:two_sites", "F34")
def rms_norm_last_site_wins(site, right):
    """Constants lie in a variable of the module, so that the site bound last decides for all."""
    _LAST["right"] = right
    return lambda x, weight: _LAST["right"](x, weight)


@mutant("rms_norm", "tokens_7:oracle")
def rms_norm_zeros(site, right):
    """Zeros."""
    return lambda x, weight: torch.zeros_like(x, memory_format=torch.contiguous_format)


@mutant("rms_norm", "heads:oracle", "F75")
def rms_norm_over_all_heads(site, right):
    """Heads are normalised together."""

    def run(x, weight):
        if x.ndim < 3:
            return right(x, weight)
        wide = x.float()
        square = wide.square().mean((-2, -1), keepdim=True)
        return (wide * torch.rsqrt(square + site.eps) * (site.weight_offset + weight.float())).to(x.dtype)

    return run


@mutant("rms_norm", "tokens_7:guards", raw=True)
def rms_norm_writes_past_the_end(site, right):
    """Rows are stored in vectors of 16 elements more than there are."""

    def run(x, weight, out=None):
        result = right(x, weight) if out is None else right(x, weight, out=out)
        if out is not None and x.shape[-1] % 6144 == 0:
            out.as_strided((16,), (1,), out.storage_offset() + out.numel()).zero_()
        return result

    return run


# --- add_rms_norm


@mutant("add_rms_norm", "tokens_7:oracle", "F73")
def add_rms_norm_rounds_sum_first(site, right):
    """The norm is taken of the rounded sum, and nobody declares it."""

    def run(x, residual, weight):
        total = (x.float() + residual.float()).bfloat16()
        return norm(total.float(), weight, site).to(x.dtype), (x.float() + residual.float()).to(residual.dtype)

    return run


@mutant("add_rms_norm", "tokens_7:inputs", "F85")
def add_rms_norm_in_place(site, right):
    """The residual is updated in place, as peers do, and returned."""

    def run(x, residual, weight):
        out, total = right(x, residual, weight)
        residual.copy_(total)
        return out, total

    return run


@mutant("add_rms_norm", "every_chunk:oracle")
def add_rms_norm_short_reduction(site, right):
    """The variance leaves the last 64 columns out."""

    def run(x, residual, weight):
        total = x.float() + residual.float()
        return norm(total, weight, site, -64).to(x.dtype), total.to(residual.dtype)

    return run


@mutant("add_rms_norm", "cancelling:oracle")
def add_rms_norm_narrow_sum(site, right):
    """x is rounded to eight bits of the residual's size before it is added."""

    def run(x, residual, weight):
        step = residual.float().abs().clamp(min=1e-20) * 2**-7
        return right((torch.round(x.float() / step) * step).to(x.dtype), residual, weight)

    return run


@mutant("add_rms_norm", "tokens_7:oracle")
def add_rms_norm_old_residual(site, right):
    """The residual that comes back is the old one."""
    return lambda x, residual, weight: (
        right(x, residual, weight)[0],
        residual.clone(memory_format=torch.contiguous_format),
    )


@mutant("add_rms_norm", "tokens_7:written", raw=True)
def add_rms_norm_residual_unwritten(site, right):
    """Under out=, the residual's last columns are left as they were."""

    def run(x, residual, weight, out=None):
        result = right(x, residual, weight)
        if out is None:
            return result
        out[0].copy_(result[0])
        out[1][..., :-8].copy_(result[1][..., :-8])
        return out

    return run


# --- linear


def plain(wrong: Any, right: Any) -> Any:
    """``wrong`` for a plain weight, the definition for one in a storage format."""
    return lambda x, weight: (wrong if isinstance(weight, Tensor) else right)(x, weight)


@mutant("linear", "growing_sum:oracle")
def linear_bf16_accumulation(site, right):
    """Partial sums over steps of 64 are kept in bf16."""

    def run(x, weight):
        total = torch.zeros(len(x), len(weight), dtype=torch.bfloat16)
        for start in range(0, x.shape[1], 64):
            part = x[:, start : start + 64].float() @ weight[:, start : start + 64].float().T
            total = (total.float() + part).bfloat16()
        return total.to(x.dtype)

    return plain(run, right)


@mutant("linear", "k_416:oracle", "F59")
def linear_drops_tail_of_k(site, right):
    """K is cut to whole tiles of 128, when there is one."""

    def run(x, weight):
        whole = x.shape[1] // 128 * 128 or x.shape[1]
        return right(x[:, :whole], weight[:, :whole])

    return plain(run, right)


@mutant("linear", "rows_alone:oracle")
def linear_swaps_rows(site, right):
    """Rows 64 and 65 of a second tile are exchanged."""

    def run(x, weight):
        y = right(x, weight)
        if len(y) > 65:
            y[[64, 65]] = y[[65, 64]]
        return y

    return run


@mutant("linear", "k_416:written", raw=True)
def linear_last_columns_unwritten(site, right):
    """The last columns of N are not written when N is no multiple of 16."""

    def run(x, weight, out=None):
        if not isinstance(weight, Tensor):
            return right(x, weight, out=out)
        result = torch.empty(len(x), len(weight), dtype=x.dtype) if out is None else out
        whole = len(weight) // 16 * 16
        result[:, :whole] = right(x, weight[:whole])
        return result

    return run


@mutant("linear", "one_token:oracle", "F32")
def linear_one_token_path(site, right):
    """The path for one token stops one tile of 64 early."""

    def run(x, weight):
        return right(x[:, :-64], weight[:, :-64]) if len(x) == 1 and x.shape[1] > 64 else right(x, weight)

    return plain(run, right)


@mutant("linear", "square:oracle")
def linear_transposed_when_square(site, right):
    """A square weight is taken for its transpose."""
    return plain(lambda x, weight: right(x, weight.T if weight.shape[0] == weight.shape[1] else weight), right)


@mutant("linear", "one_bad_row:oracle", "F28")
def linear_nan_spreads(site, right):
    """A NaN row reaches its neighbours in the tile."""

    def run(x, weight):
        y = right(x, weight)
        bad = y.isnan().any(-1)
        return y.masked_fill((bad | bad.roll(1))[:, None], NAN)

    return run


@mutant("linear", "strided:oracle", "F65")
def linear_assumes_contiguous(site, right):
    """x is read as if it were contiguous."""
    return lambda x, weight: right(dense(x), weight)


@mutant("linear", "transposed:oracle", "F65")
def linear_assumes_dense_weight(site, right):
    """The weight is read as if it were contiguous."""
    return plain(lambda x, weight: right(x, dense(weight)), right)


@mutant("linear", "k_384:oracle")
def linear_rounds_operands(site, right):
    """Operands are rounded to fp16's eleven bits before the product; harmless in bf16, TF32 in fp32."""

    def run(x, weight):
        wide = right(x.bfloat16().to(x.dtype), weight)
        return wide if x.dtype == torch.float32 else (wide.float() * (1 + 2**-7)).to(x.dtype)

    return run


@mutant("linear", "router_9:oracle")
def linear_router_in_bf16(site, right):
    """The router's logits are right, and rounded to bf16 on their way."""
    return lambda x, weight: right(x, weight).bfloat16().to(right(x[:0], weight).dtype)


@mutant("linear", "router_9:oracle")
def linear_router_weight_in_tf32(site, right):
    """A wide weight loses the bits that TF32 has not."""

    def run(x, weight):
        if isinstance(weight, Tensor) and weight.dtype == torch.float32 and x.dtype != torch.float32:
            weight = (weight.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return right(x, weight)

    return run


@mutant("linear", "no_token:oracle", "F30")
def linear_no_token(site, right):
    """No tokens: an empty tensor of the wrong width."""
    return lambda x, weight: right(x, weight) if len(x) else torch.empty(0, x.shape[1] + 1, dtype=x.dtype)


# --- quantize, dequantize


def _truncated(x: Tensor) -> Tensor:
    return (x.float().view(torch.int32) & -65536).view(torch.float32)


def column_major(tensor: Tensor) -> Tensor:
    """The same numbers, their last axis strided where there is another."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _requantized(right, edit):
    def run(x):
        return right(edit(x))

    return run


@mutant("quantize", "to_bfloat16:oracle", formats=("float32",))  # bf16 numbers lose nothing
def quantize_truncates(site, right):
    """fp32 becomes bf16 by dropping its lower half."""
    return lambda x: right(_truncated(x) if site.activation_format == "bfloat16" else x + 0.0)


@mutant("quantize", "to_bfloat16:oracle", "F56")
def quantize_loses_minus_zero(site, right):
    """-0 becomes +0."""
    return _requantized(right, lambda x: torch.where(x == 0, 0.0, x))


@mutant("quantize", "to_float32:oracle")
def quantize_nan_to_zero(site, right):
    """NaN becomes 0."""
    return _requantized(right, lambda x: x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")))


@mutant("quantize", "to_bfloat16:oracle")
def quantize_saturates(site, right):
    """Infinity becomes the largest number."""
    return _requantized(right, lambda x: x.clamp(-3.38e38, 3.38e38))


@mutant("quantize", "to_float32:oracle")
def quantize_flushes_subnormals(site, right):
    """Subnormal numbers become 0."""
    return _requantized(right, lambda x: torch.where(x.abs() < 1.1754944e-38, torch.zeros_like(x).copysign(x), x))


@mutant("quantize", "to_bfloat16_strided:oracle", "F65")
def quantize_assumes_contiguous(site, right):
    """x is read as if it were contiguous."""
    return _requantized(right, dense)


@mutant("quantize", "to_float32:allocates", "F84")
def quantize_aliases_input(site, right):
    """Without out= the codes are a view of the input where nothing has to be converted."""

    def run(x):
        made = right(x)
        if made.data.dtype != x.dtype:
            return QTensor(column_major(made.data), made.spec)
        return QTensor(column_major(x), made.spec)

    return run


def _dequantized(right, edit):
    def run(q):
        return edit(right(q), q)

    return run


@mutant("dequantize", "from_float32:oracle", "F56")
def dequantize_loses_minus_zero(site, right):
    """-0 becomes +0."""
    return _dequantized(right, lambda y, q: torch.where(y == 0, torch.zeros_like(y), y))


@mutant("dequantize", "from_float32:oracle")
def dequantize_through_fp16(site, right):
    """Numbers go through fp16: large ones become infinite, small ones vanish."""
    return _dequantized(right, lambda y, q: q.data.half().to(y.dtype))


@mutant("dequantize", "from_bfloat16:oracle")
def dequantize_nan_to_zero(site, right):
    """NaN becomes 0."""
    return _dequantized(right, lambda y, q: torch.where(y.isnan(), torch.zeros_like(y), y))


@mutant("dequantize", "from_float32_strided:oracle", "F65")
def dequantize_assumes_contiguous(site, right):
    """Codes are read as if they were contiguous."""
    return lambda q: right(QTensor(dense(q.data), q.spec))


@mutant("dequantize", "from_float32:inputs", "F85")
def dequantize_clears_codes(site, right):
    """The codes are cleared afterwards."""

    def run(q):
        y = right(q)
        q.data.zero_()
        return y

    return run


# --- rope_partial


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    first, second = x[..., :rotary_dim].float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., rotary_dim:]], -1)


@mutant("rope_partial", "pairs_apart:oracle", "F74")
def rope_partial_interleaved(site, right):
    """Neighbours form a pair, instead of halves."""

    def run(x, positions, cos_sin):
        rotary = x[..., : site.rotary_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        y = right(torch.cat([rotary, x[..., site.rotary_dim :]], -1), positions, cos_sin)
        back = y[..., : site.rotary_dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat([back, y[..., site.rotary_dim :]], -1)

    return run


@mutant("rope_partial", "context_1m:oracle", "F63")
def rope_partial_16_bit_positions(site, right):
    """Positions are kept in 16 bits."""
    return lambda x, positions, cos_sin: right(x, positions % 65536, cos_sin)


@mutant("rope_partial", "context_1m:oracle", "F15")
def rope_partial_short_table(site, right):
    """Positions stop at 524,287, the configuration's default."""
    return lambda x, positions, cos_sin: right(x, positions.clamp(max=524287), cos_sin)


@mutant("rope_partial", "tokens_equal_heads:oracle")
def rope_partial_positions_by_head(site, right):
    """With as many tokens as heads, angles are spread along the heads."""

    def run(x, positions, cos_sin):
        if x.shape[0] != x.shape[1]:
            return right(x, positions, cos_sin)
        cos, sin = cos_sin[positions][None].chunk(2, -1)
        return rotate(x, cos, sin, site.rotary_dim)

    return run


@mutant("rope_partial", "random_64_heads:oracle")
def rope_partial_bf16_table(site, right):
    """The table is rounded to bf16, and nobody declares it."""
    return lambda x, positions, cos_sin: right(x, positions, cos_sin.bfloat16().float())


@mutant("rope_partial", "odd_values:oracle")
def rope_partial_multiplies_the_rest(site, right):
    """The part that passes is multiplied by one and added zero: -0 and NaN change."""

    def run(x, positions, cos_sin):
        y = right(x, positions, cos_sin)
        y[..., site.rotary_dim :] = y[..., site.rotary_dim :].nan_to_num(nan=0.0)
        return y

    return run


@mutant("rope_partial", "tokens_129:oracle", "F68")
def rope_partial_first_head_only(site, right):
    """Above 64 tokens a variant runs that turns all but the last head."""

    def run(x, positions, cos_sin):
        y = right(x, positions, cos_sin)
        if len(x) > 64:
            y[:, -1] = x[:, -1]
        return y

    return run


@mutant("rope_partial", "fused_row:oracle", "F65")
def rope_partial_assumes_contiguous(site, right):
    """x is read as if it were contiguous."""
    return lambda x, positions, cos_sin: right(dense(x), positions, cos_sin)


# --- swiglu_oai


def gated(gate: Tensor, up: Tensor, alpha: float, beta: float) -> Tensor:
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglu(edit):
    def make(site, right):
        def run(x):
            gate, up = x.float().chunk(2, -1)
            return edit(gate, up, site).to(x.dtype)

        return run

    return make


@mutant("swiglu_oai", "published_numbers:oracle", "F01")
def swiglu_oai_no_limit(site, right):
    """The limit is dropped."""
    return _swiglu(lambda g, u, s: gated(g, u, s.alpha, s.beta))(site, right)


@mutant("swiglu_oai", "published_numbers:oracle", "F02")
def swiglu_oai_plain_silu(site, right):
    """alpha 1 and beta 0: what a missing parameter is replaced by."""
    return _swiglu(lambda g, u, s: gated(g.clamp(max=s.limit), u.clamp(-s.limit, s.limit), 1.0, 0.0))(site, right)


@mutant("swiglu_oai", "other_constants:oracle", "F04")
def swiglu_oai_alpha_compiled_in(site, right):
    """alpha is 1.702 whatever the model says."""
    return _swiglu(lambda g, u, s: gated(g.clamp(max=s.limit), u.clamp(-s.limit, s.limit), 1.702, s.beta))(site, right)


@mutant("swiglu_oai", "around_the_limits:oracle", "F03")
def swiglu_oai_gate_clamped_below(site, right):
    """The gate is clamped on both sides."""
    return _swiglu(lambda g, u, s: gated(g.clamp(-s.limit, s.limit), u.clamp(-s.limit, s.limit), s.alpha, s.beta))(
        site, right
    )


@mutant("swiglu_oai", "around_the_limits:oracle", "F03")
def swiglu_oai_up_not_clamped_below(site, right):
    """The up projection is clamped from above only."""
    return _swiglu(lambda g, u, s: gated(g.clamp(max=s.limit), u.clamp(max=s.limit), s.alpha, s.beta))(site, right)


@mutant("swiglu_oai", "halves:oracle", "F05")
def swiglu_oai_interleaved(site, right):
    """Even columns are the gate, odd ones the up projection."""
    return lambda x: right(torch.cat([x[..., ::2], x[..., 1::2]], -1))


@mutant("swiglu_oai", "broken_values:oracle", "F28")
def swiglu_oai_minimum_hides_nan(site, right):
    """A minimum that prefers numbers turns a NaN gate into the limit."""
    return lambda x: right(torch.where(x.isnan(), torch.full_like(x, site.limit), x))


@mutant("swiglu_oai", "odd_width:oracle")
def swiglu_oai_drops_odd_tail(site, right):
    """The last column is zero when the width is odd: vectors of two."""

    def run(x):
        y = right(x)
        if y.shape[-1] % 2:
            y[..., -1] = 0
        return y

    return run


@mutant("swiglu_oai", "no_token:oracle", "F30")
def swiglu_oai_no_token(site, right):
    """An assertion that there is a first element."""
    return lambda x: right(x) if float(x.flatten()[0]) < float("inf") or True else x


@mutant("swiglu_oai", "three_axes:oracle")
def swiglu_oai_two_axes(site, right):
    """The second axis is taken for the last one."""
    return lambda x: right(x) if x.ndim == 2 else right(x.transpose(0, 1)).transpose(0, 1).flip(1).contiguous()


@mutant("swiglu_oai", "strided:oracle", "F65")
def swiglu_oai_assumes_contiguous(site, right):
    """Rows are read as if x were contiguous."""
    return lambda x: right(dense(x))
