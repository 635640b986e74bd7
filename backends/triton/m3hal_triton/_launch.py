"""Small host-side helpers that the kernels' callables share."""

from __future__ import annotations

import torch

LOG2_E = 1.4426950408889634
#: fp32 products are IEEE products: an engine in fp32 is compared exactly, so TF32 is no option
DOT_PRECISION = "ieee"


def power_of_two_below(value: int) -> int:
    """The largest power of two that is at most ``value`` (1 for less)."""
    return 1 << max(value.bit_length() - 1, 0)


def power_of_two_above(value: int) -> int:
    """The smallest power of two that is at least ``value``; triton's own can't be followed by torch.compile."""
    return 1 << (value - 1).bit_length()


def common_power_of_two(*values: int) -> int:
    """The largest power of two that divides all the values."""
    bits = 0
    for value in values:
        bits |= value
    return bits & -bits


def multiprocessors(device: torch.device) -> int:
    """How many programs the device runs side by side; a few where the interpreter runs them one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 32


def programmatic(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one it waits for has ended: on NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def after(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that begins with ``gdc_wait``."""
    return {"launch_pdl": True} if early else {}


def converts(device: torch.device) -> bool:
    """Whether fp32 becomes E4M3 by an instruction that saturates and makes every NaN 0x7F: NVIDIA's, from Ada on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
