"""Lossless MXFP4 to FP8: the experts of a MiniMax-M3 checkpoint in a format that more machines read natively."""

from m3hal.checkpoint.convert.errors import ConversionError, InexactError
from m3hal.checkpoint.convert.profiles import GAUDI2, HOPPER, PROFILES, Profile
from m3hal.checkpoint.convert.run import Done, convert

__all__ = ["GAUDI2", "HOPPER", "PROFILES", "ConversionError", "Done", "InexactError", "Profile", "convert"]
