"""Number formats."""

from m3hal.formats.plain import PLAIN_FORMATS, QSpec, QTensor, plain_dtype, spec_of

__all__ = ["PLAIN_FORMATS", "QSpec", "QTensor", "plain_dtype", "spec_of"]
