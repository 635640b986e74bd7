"""Right by their numbers where tests look, and wrong in the process that they run in, or after many calls."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import torch

from m3hal import ops
from m3hal.reference import write
from m3hal_broken_zoo._zoo import mutant


def spoilt(result: Any) -> Any:
    """The result with its first output zeroed."""
    if isinstance(result, tuple):
        return (torch.zeros_like(result[0]), *result[1:])
    return torch.zeros_like(result)


# --- torch's global state


@mutant("swiglu_oai", "process:global_state")
def swiglu_oai_seeds(site, right):
    """Each call seeds torch's generator: what an engine samples next is always the same."""

    def run(gate_up):
        torch.manual_seed(0)
        return right(gate_up)

    return run


@mutant("add_rms_norm", "process:global_state")
def add_rms_norm_draws(site, right):
    """Each call draws a number: a seeded engine no longer repeats itself."""

    def run(x, residual, weight):
        torch.rand(1)
        return right(x, residual, weight)

    return run


@mutant("quantize", "process:global_state")
def quantize_one_thread(site, right):
    """It sets torch to one thread, for all that runs after it."""

    def run(x):
        torch.set_num_threads(1)
        return right(x)

    return run


@mutant("linear", "process:global_state")
def linear_turns_gradients_off(site, right):
    """Its factory turns the recording of gradients off, for whoever binds it."""
    torch.set_grad_enabled(False)
    return right


@mutant("swiglu_oai", "process:bound_in_bfloat16")
def swiglu_oai_default_dtype(site, right):
    """Its constants become tensors in the factory, of whatever dtype is the default then."""
    values = ops.load("swiglu_oai").static_values(site)
    kept = {name: torch.tensor(float(value)) for name, value in values.items()}
    reference = ops.load("swiglu_oai").reference
    return lambda gate_up: reference(gate_up, **{name: float(value) for name, value in kept.items()})


@mutant("rope_partial", "process:bound_in_bfloat16")
def rope_partial_needs_float32(site, right):
    """A constant of its factory is expected in float32, and is bfloat16 where an engine loads the model in that."""
    one = torch.tensor(1.0)
    return lambda x, positions, cos_sin: (
        right(x, positions, cos_sin) if one.dtype == torch.float32 else spoilt(right(x, positions, cos_sin))
    )


# --- where the call comes from


@mutant("linear", "process:inference_mode")
def linear_reads_versions(site, right):
    """It asks a tensor for its version, which one that was made in inference mode does not have."""

    def run(x, weight):
        assert x._version >= 0
        return right(x, weight)

    return run


@mutant("paged_attention", "process:inference_mode")
def paged_attention_inference_mode(site, right):
    """In inference mode another variant runs, which gives zeros."""

    def run(q, kv, meta):
        result = right(q, kv, meta)
        return spoilt(result) if torch.is_inference_mode_enabled() else result

    return run


@mutant("merge_topk", "process:other_thread")
def merge_topk_one_thread(site, right):
    """Its scratch belongs to the thread that bound it: in another one it selects nothing."""
    mine = threading.get_ident()

    def run(scores, ids, visible_blocks):
        result = right(scores, ids, visible_blocks)
        return result if threading.get_ident() == mine else torch.full_like(result, -1)

    return run


# --- what is kept


@mutant("route_topk", "process:results_kept", raw=True)
def route_topk_ring_of_8(site, right):
    """Without out= its results lie in a ring of eight buffers."""
    rings: dict[Any, Any] = {}
    count = 0

    def run(logits, bias, out=None):
        nonlocal count
        result = right(logits, bias)
        if out is None:
            count += 1
            out = rings.setdefault((result[0].shape, count % 8), tuple(map(torch.empty_like, result)))
        write(out, result)
        return out

    return run


@mutant("rms_norm", "tokens_7:overwritten")
def rms_norm_trusts_versions(site, right):
    """It keeps a copy of the weight for as long as torch counts no write to it; a write past torch is not seen."""
    kept: dict[int, Any] = {}

    def run(x, weight):
        if weight.is_inference():
            return right(x, weight)
        held = kept.get(id(weight))
        if held is None or held[0]() is not weight or held[1] != weight._version:
            kept[id(weight)] = held = (weakref.ref(weight), weight._version, weight.clone())
        return right(x, held[2])

    return run


@mutant("linear", "square:overwritten")
def linear_trusts_versions(site, right):
    """It keeps the weight as it needs it by address and version; a write past torch is not seen."""
    kept: dict[Any, Any] = {}

    def run(x, weight):
        if not isinstance(weight, torch.Tensor) or weight.is_inference():
            return right(x, weight)
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.shape)
        if key not in kept:
            kept[key] = weight.clone()
        return right(x, kept[key])

    return run


@mutant("topk_blocks", "called_often_5000:thousands_of_calls")
def topk_blocks_wears_out(site, right):
    """After 1,000 calls it selects nothing."""
    count = 0

    def run(scores, visible_blocks):
        nonlocal count
        count += 1
        result = right(scores, visible_blocks)
        return result if count <= 1000 else torch.full_like(result, -1)

    return run


@mutant("swiglu_oai", "called_often_5000:thousands_of_calls")
def swiglu_oai_counts_to_4096(site, right):
    """Its ring of 4,096 events is used up, and is not begun again: a call is lost."""
    count = 0

    def run(gate_up):
        nonlocal count
        count += 1
        result = right(gate_up)
        return result if count != 4096 else spoilt(result)

    return run


# --- inputs that are written and put back


@mutant("moe_experts", "process:unwritten_inputs")
def moe_experts_borrows_its_input(site, right):
    """It works in its input, and puts back what stood there: who reads it meanwhile gets zeros."""

    def run(x, weights, ids, experts):
        before = x.clone()
        x.zero_()
        x.copy_(before)
        return right(x, weights, ids, experts)

    return run


@mutant("kv_write", "process:other_writers")
def kv_write_writes_all_back(site, right):
    """It copies the whole cache and writes it back: what a transfer brought into other pages meanwhile is lost."""

    def run(cache, k, v, slots):
        cache.buf.copy_(cache.buf.clone())
        right(cache, k, v, slots)

    return run


@mutant("kv_copy_blocks", "process:other_writers")
def kv_copy_blocks_writes_all_back(site, right):
    """It makes the new cache beside the old one, and writes it back whole."""

    def run(src, dst, pairs):
        made = replace(dst, buf=dst.buf.clone())
        right(made if src is dst else src, made, pairs)
        dst.buf.copy_(made.buf)

    return run
