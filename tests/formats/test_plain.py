"""Plain formats: names of torch dtypes, and nothing else passes for one."""

import pytest
import torch

from m3hal.formats import FORMATS, PLAIN_FORMATS, QSpec, plain_dtype, spec_of


def test_every_plain_format_is_a_dtype():
    """The name is torch's own."""
    assert [plain_dtype(name) for name in PLAIN_FORMATS] == [torch.float32, torch.bfloat16, torch.float64]
    assert spec_of("bfloat16") == QSpec("bfloat16", group=0)


@pytest.mark.parametrize("name", ["", "fp32", "int32", "nvfp5", "Tensor"])
def test_other_names_are_refused(name):
    """Also those of torch that are no formats; the known ones are listed."""
    for lookup in (spec_of, plain_dtype):
        with pytest.raises(ValueError, match=f"unknown format '{name}'; m3hal knows float32, bfloat16"):
            lookup(name)


def test_a_quantised_format_is_no_dtype():
    """nvfp4 is a format, but no tensor has it as its dtype."""
    assert spec_of("nvfp4") == QSpec("nvfp4", group=16)
    with pytest.raises(ValueError, match="nvfp4 is no plain format; plain formats are float32, bfloat16"):
        plain_dtype("nvfp4")


def test_bytes_of_a_row():
    """Codes and scales of 128 elements; a broken group and half a byte are refused."""
    rows = {name: (spec_of(name).data_bytes(128), spec_of(name).scale_bytes(128)) for name in FORMATS}
    assert rows == {
        "float32": (512, 0),
        "bfloat16": (256, 0),
        "float64": (1024, 0),
        "fp8_e4m3": (128, 4),
        "fp8_e4m3_240": (128, 4),
        "mxfp8": (128, 4),
        "mxfp4": (64, 4),
        "nvfp4": (64, 8),
    }
    assert QSpec("fp8_e4m3").scale_bytes(128) == 0
    with pytest.raises(ValueError, match="nvfp4 shares a scale among 16 neighbours; 24 don't fill groups"):
        spec_of("nvfp4").scale_bytes(24)
    with pytest.raises(ValueError, match="3 elements of nvfp4 don't fill whole bytes"):
        spec_of("nvfp4").data_bytes(3)
