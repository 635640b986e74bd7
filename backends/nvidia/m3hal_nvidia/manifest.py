"""What NVIDIA GPUs offer to MiniMax-M3, as data."""

from m3hal.dispatch.manifest import Manifest

MANIFEST = Manifest(
    name="nvidia",
    vendor="NVIDIA",
    api=">=1,<2",
    devices=("cuda:sm_90", "cuda:sm_100", "cuda:sm_103"),  # H100/H200, B200, B300
    libraries={"torch": ">=2.9", "flashinfer-python": ">=0.7,<0.8"},
    probe="m3hal_nvidia.probe:probe",
    operators={},  # none in this release: the adapters to FlashInfer and MSA follow
)
