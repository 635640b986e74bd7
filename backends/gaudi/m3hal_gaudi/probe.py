"""Whether this machine has the accelerator that a plan is for, read from the PCI bus."""

from __future__ import annotations

from pathlib import Path

PCI = Path("/sys/bus/pci/devices")
HABANA = "0x1da3"
#: PCI device ids of the Linux habanalabs driver
MODELS = {"0x1020": "gaudi2", "0x1060": "gaudi3"}


def probe(device: str) -> str | None:
    """None when an accelerator of the device's model (``hpu:gaudi2``) is usable, else the reason why it is not."""
    cards = [card for card in PCI.glob("*") if _read(card / "vendor") == HABANA]
    if not cards:
        return "no Intel Gaudi card is on the PCI bus; lspci -d 1da3: tells more"
    found = {MODELS.get(_read(card / "device"), f"an unknown model ({_read(card / 'device')})") for card in cards}
    wanted = device.removeprefix("hpu:")
    if wanted not in found:
        return f"this machine has {', '.join(sorted(found))}, not {wanted}"
    if not any((card / "driver").exists() for card in cards):
        return "no driver has taken the Gaudi cards; load it with modprobe habanalabs"
    return None


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
