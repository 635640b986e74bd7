"""What AMD GPUs offer to MiniMax-M3 through aiter, as data."""

from m3hal.dispatch.manifest import Impl, Manifest, at_most, multiple_of, one_of
from m3hal_amd.recorded import ADD_NORM, GROUPED_TOPK, NORM

#: In bf16 aiter stores by truncation on gfx942, which has no conversion that rounds; gfx950 rounds to nearest even.
_ROUNDS = ("hip:gfx950",)
_ROW = (one_of("dtype", "bfloat16"), one_of("weight_offset", 0.0, 1.0), at_most("hidden_size", 8192))

MANIFEST = Manifest(
    name="amd",
    vendor="AMD",
    api=">=1,<2",
    devices=("hip:gfx942", "hip:gfx950"),  # MI300, MI350
    libraries={"torch": ">=2.9", "amd-aiter": ">=0.1.18,<0.2"},
    probe="m3hal_amd.probe:probe",
    operators={
        "rms_norm": (
            Impl(
                "m3hal_amd.norms:rms_norm",
                limits=(*_ROW, multiple_of("hidden_size", 8)),
                devices=_ROUNDS,
                calls=(NORM,),
                files=("recorded.py",),
                memory="self",
                traceable=False,
                alignment=16,
                views="rows",
                name="rmsnorm",
            ),
        ),
        "add_rms_norm": (
            Impl(
                "m3hal_amd.norms:add_rms_norm",
                limits=(*_ROW, multiple_of("hidden_size", 8)),
                devices=_ROUNDS,
                calls=(ADD_NORM,),
                files=("recorded.py",),
                memory="self",
                traceable=False,
                alignment=16,
                views="rows",
                name="rmsnorm2d_fwd_with_add",
            ),
        ),
        "route_topk": (
            Impl(
                "m3hal_amd.routing:route_topk",
                limits=(multiple_of("num_experts", 4), at_most("num_experts", 1024), at_most("top_k_experts", 16)),
                calls=(GROUPED_TOPK,),
                files=("recorded.py",),
                memory="self",
                traceable=False,
                alignment=16,
                views="rows",
                name="biased_grouped_topk_hip, then m3hal's weights",
            ),
        ),
    },
    withheld={
        "qk_norm_rope_insert": "aiter's fused_qk_norm_rope_cache_quant has no adapter yet",
        "sparse_attention": "aiter's sparse paged attention has no adapter yet",
        "paged_attention": "aiter's paged attention has no adapter yet",
        "moe_experts": "aiter's fused MoE has no adapter yet",
    },
)
