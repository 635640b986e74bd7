"""What Intel Gaudi offers to MiniMax-M3 through Habana's torch bridge, as data."""

from m3hal.dispatch.manifest import Impl, Manifest, one_of
from m3hal_gaudi.recorded import ROTARY, ROW_NORM

_PLAIN = one_of("dtype", "float32", "bfloat16")
_FILES = ("recorded.py",)

MANIFEST = Manifest(
    name="gaudi",
    vendor="Intel",
    api=">=1,<2",
    devices=("hpu:gaudi2", "hpu:gaudi3"),
    libraries={"torch": ">=2.9", "habana-torch-plugin": ">=1.24,<2"},
    probe="m3hal_gaudi.probe:probe",
    operators={
        "rms_norm": (
            Impl(
                "m3hal_gaudi.norms:rms_norm",
                limits=(_PLAIN,),
                calls=(ROW_NORM,),
                files=_FILES,
                memory="self",
                name="FusedRMSNorm in fp32",
            ),
        ),
        "add_rms_norm": (
            Impl(
                "m3hal_gaudi.norms:add_rms_norm",
                limits=(_PLAIN,),
                calls=(ROW_NORM,),
                files=_FILES,
                memory="self",
                name="add and FusedRMSNorm in fp32",
            ),
        ),
        "rope_partial": (
            Impl(
                "m3hal_gaudi.rope:rope_partial",
                limits=(_PLAIN,),
                calls=(ROTARY,),
                files=_FILES,
                memory="self",
                name="RotaryPosEmbeddingHelperV1 in fp32",
            ),
        ),
    },
    withheld={
        "sparse_attention": "Habana's bridge has no block-sparse attention; dense attention is another function past "
        "top_k_blocks * block_size keys",
        "paged_attention": "FusedSDPA takes contiguous keys and values, and has no adapter yet",
        "moe_experts": "torch.ops.hpu.mixture_of_experts has no adapter yet; its bias_fp8_fused_weights form is in no "
        "public source, so its argument names can't be compared",
    },
)
