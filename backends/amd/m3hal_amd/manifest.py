"""What AMD GPUs offer to MiniMax-M3, as data."""

from m3hal.dispatch.manifest import Manifest

MANIFEST = Manifest(
    name="amd",
    vendor="AMD",
    api=">=1,<2",
    devices=("hip:gfx942", "hip:gfx950"),  # MI300, MI350
    libraries={"torch": ">=2.9", "amd-aiter": ">=0.1.7"},
    probe="m3hal_amd.probe:probe",
    operators={},  # none in this release: the adapters to aiter follow
)
