"""What stops a conversion."""

from __future__ import annotations

from m3hal.dispatch.errors import M3halError


class ConversionError(M3halError):
    """A checkpoint that can't be converted, or a disk that can't hold the result; one sentence with the remedy."""


class InexactError(ConversionError):
    """A row whose numbers don't fit one power-of-two scale; there is no option to round them."""
