"""What Intel Gaudi offers to MiniMax-M3, as data."""

from m3hal.dispatch.manifest import Manifest

MANIFEST = Manifest(
    name="gaudi",
    vendor="Intel",
    api=">=1,<2",
    devices=("hpu:gaudi2", "hpu:gaudi3"),
    libraries={"torch": ">=2.9", "habana-torch-plugin": ">=1.24"},
    probe="m3hal_gaudi.probe:probe",
    operators={},  # none in this release: the adapters to torch.ops.hpu follow
)
