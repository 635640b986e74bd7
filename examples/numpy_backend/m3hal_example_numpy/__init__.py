"""A backend as data: what it runs on, which operators it has, and at which sites it may serve them."""

from m3hal.dispatch.manifest import Impl, Manifest, at_most, one_of

FP32 = one_of("dtype", "float32")  # NumPy has no bfloat16

MANIFEST = Manifest(
    name="numpy",
    vendor="m3hal examples",
    api=">=1,<2",
    priority=-1,  # below the reference: an example serves only who asks for it by name
    devices=("cpu",),
    libraries={"numpy": ">=1.26"},
    operators={
        "rms_norm": (Impl("m3hal_example_numpy.kernels:rms_norm", limits=(FP32,)),),
        "add_rms_norm": (Impl("m3hal_example_numpy.kernels:add_rms_norm", limits=(FP32,)),),
        "rope_partial": (Impl("m3hal_example_numpy.kernels:rope_partial", limits=(FP32,)),),
        "swiglu_oai": (Impl("m3hal_example_numpy.kernels:swiglu_oai", limits=(FP32,)),),
        "route_topk": (Impl("m3hal_example_numpy.kernels:route_topk", limits=(at_most("num_experts", 1024),)),),
        "topk_blocks": (Impl("m3hal_example_numpy.kernels:topk_blocks"),),
    },
)
