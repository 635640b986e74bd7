"""A backend as data: what it runs on, which operators it has, and at which sites it may serve them."""

from m3hal.dispatch.manifest import Impl, Limit, Manifest, at_most, one_of

FP32 = one_of("dtype", "float32")  # NumPy has no bfloat16


def _numpy(kernel: str, *limits: Limit) -> tuple[Impl, ...]:
    return (
        Impl(
            f"m3hal_example_numpy.kernels:{kernel}",
            limits=limits,
            memory="self",  # NumPy allocates its temporaries itself
            files=("edge.py",),  # part of every kernel, so its bytes enter the id
            traceable=False,  # torch.compile would rewrite NumPy to torch, and run something else
        ),
    )


MANIFEST = Manifest(
    name="numpy",
    vendor="m3hal examples",
    api=">=1,<2",
    priority=-1,  # below the reference: an example serves only who asks for it by name
    devices=("cpu",),
    libraries={"numpy": ">=1.26"},
    operators={
        "rms_norm": _numpy("rms_norm", FP32),
        "add_rms_norm": _numpy("add_rms_norm", FP32),
        "rope_partial": _numpy("rope_partial", FP32),
        "swiglu_oai": _numpy("swiglu_oai", FP32),
        "route_topk": _numpy("route_topk", at_most("num_experts", 1024)),
        "topk_blocks": _numpy("topk_blocks"),
    },
)
