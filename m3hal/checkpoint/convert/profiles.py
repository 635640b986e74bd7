"""The machines a converted checkpoint is for: which E4M3 numbers each of them can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """The window of E4M3 that a row may use.

    top, bottom: largest and smallest binary exponent of an element divided by its row's scale. An MXFP4 number is
        1 or 1.5 times a power of two, so every exponent from bottom to top is exact.
    ieee: the format keeps exponent field 15 for infinities and NaN (largest number 240), as Gaudi 2 does; the OCP
        format (448) only loses the mantissa 111 to NaN.
    flavor: ``fp8_dtype_flavor`` of the written config, or None for no such key.
    """

    name: str
    top: int
    bottom: int
    ieee: bool
    flavor: str | None

    @property
    def binades(self) -> int:
        """How many powers of two a row may span."""
        return self.top - self.bottom + 1


# Gaudi 2: 1.5 * 2^7 = 192 <= 240, and vllm-gaudi may halve every weight at load, so the smallest exponent stays one
# binade above the smallest normal, 2^-6. vLLM's name for "largest number 240, do not halve" is the fnuz flavor.
GAUDI2 = Profile("gaudi2", top=7, bottom=-5, ieee=True, flavor="float8_e4m3fnuz")
# Hopper and every other OCP E4M3: 1.5 * 2^8 = 384 <= 448, smallest normal 2^-6.
HOPPER = Profile("hopper", top=8, bottom=-6, ieee=False, flavor=None)

PROFILES = {profile.name: profile for profile in (GAUDI2, HOPPER)}
