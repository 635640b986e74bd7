"""Number formats: bit-exact codecs, and the block formats made of them."""

from m3hal.formats.convert import Product, concatenate, dequantize, quantize
from m3hal.formats.plain import FORMATS, PLAIN_FORMATS, ROW, Format, QSpec, QTensor, plain_dtype, spec_of

__all__ = [
    "FORMATS",
    "PLAIN_FORMATS",
    "ROW",
    "Format",
    "Product",
    "QSpec",
    "QTensor",
    "concatenate",
    "dequantize",
    "plain_dtype",
    "quantize",
    "spec_of",
]
