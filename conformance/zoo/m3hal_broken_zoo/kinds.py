"""Faults that any kernel may have, and mutants that have them."""

from __future__ import annotations

from collections.abc import Mapping

#: kind -> "operator name" of mutants
KINDS: Mapping[str, tuple[str, ...]] = {
    "all-zero output": ("rms_norm zeros",),
    "shuffled rows": ("linear swaps_rows", "topk_blocks second_tile"),
    "dropped last tile": ("linear drops_tail_of_k", "rms_norm short_reduction", "moe_experts short_hidden"),
    "bf16 accumulation": ("linear bf16_accumulation",),
    "off-by-one block": ("sparse_attention drops_a_block", "paged_attention 31_pages", "sparse_attention next_block"),
    "wrong scale group": ("kv_write neighbours_scale", "kv_read neighbours_scale", "dequantize neighbours_scale"),
    "unmasked tail": ("sparse_attention unmasked_tail", "paged_attention unmasked_tail", "block_scores unmasked_tail"),
    "stale page": ("sparse_attention keeps_tables", "kv_read leaks_stale", "sparse_attention cleans_nan"),
    "wrong GQA mapping": ("sparse_attention heads_round_robin", "paged_attention heads_round_robin"),
    "int32 offset overflow": (
        "kv_write int32_offsets",
        "kv_read int32_offsets",
        "block_scores int32_offsets",
        "sparse_attention int32_offsets",
        "paged_attention int32_offsets",
    ),
    "output partly unwritten": (
        "rms_norm last_rows_unwritten",
        "linear last_columns_unwritten",
        "sparse_attention padded_unwritten",
    ),
    "input overwritten": ("rms_norm overwrites_input", "add_rms_norm in_place", "qk_norm_rope_insert works_in_place"),
    "run-to-run noise": ("rms_norm noise", "sparse_attention noise", "paged_attention races_past_one_page"),
    "state kept across calls": (
        "rms_norm remembers_pointer",
        "moe_experts accumulates",
        "sparse_attention plans_once",
        "paged_attention uses_up_its_plan",
        "route_topk counter_overflows",
    ),
    "torch's global state changed": (
        "swiglu_oai seeds",
        "add_rms_norm draws",
        "quantize one_thread",
        "linear turns_gradients_off",
    ),
    "a place of the call that matters": (
        "paged_attention inference_mode",
        "linear reads_versions",
        "merge_topk one_thread",
        "rope_partial needs_float32",
        "swiglu_oai default_dtype",
    ),
    "memory of others rewritten": (
        "route_topk ring_of_8",
        "moe_experts borrows_its_input",
        "kv_write writes_all_back",
        "kv_copy_blocks writes_all_back",
    ),
    "many calls": ("topk_blocks wears_out", "swiglu_oai counts_to_4096"),
    "weights cached by version": ("rms_norm trusts_versions", "linear trusts_versions"),
    "one NaN row spreading": ("rms_norm nan_spreads", "linear nan_spreads", "moe_experts nan_spreads"),
    "paired write and read errors": (
        "kv_write linear_value_scales",
        "kv_read linear_value_scales",
        "kv_write scale_is_a_divisor",
        "kv_read divides_by_the_scale",
        "kv_write other_page_map",
        "kv_read other_page_map",
    ),
}
