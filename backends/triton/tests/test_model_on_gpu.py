"""A whole model on these kernels: chunked prefill, then decode replayed from one captured graph, without an engine."""

import sys
from pathlib import Path

import pytest
import torch

from m3hal.dispatch import devices

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "no_engine"))
import m3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a model is too much for the interpreter")
PROMPT, COUNT = m3.a_prompt(700), 32


@pytest.fixture(scope="module")
def exact():
    """Tokens and log-probabilities of the reference on the CPU, in fp32."""
    return m3.generate(m3.build("reference", "cpu"), PROMPT, COUNT)


def _on_gpu(**settings):
    device = next(found.device for found in devices.detect() if found.device.startswith(("cuda", "hip")))
    return m3.build("triton", device, **settings)


def test_tokens_in_fp32(exact):
    """The reference's 32 tokens, each chosen by log-probabilities within 1e-4 of its own."""
    tokens, expected = exact
    found, probabilities = m3.generate(_on_gpu(), PROMPT, COUNT)
    assert found == tokens
    assert (probabilities - expected).abs().max() < 1e-4


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3", "nvfp4"])
def test_no_further_from_fp32_than_the_reference(exact, cache):
    """In bf16, with caches of any format, at most a quarter further than the reference is, over the same tokens."""
    tokens, expected = exact
    formats = {"dtype": "bfloat16", "kv_format": cache, "index_format": cache}
    away = []
    for model in (_on_gpu(**formats), m3.build("reference", "cpu", **formats)):
        _, probabilities = m3.generate(model, PROMPT, COUNT, given=tokens)
        away.append((probabilities - expected).abs().gather(1, torch.tensor(tokens)[:, None]).mean())
    assert away[0] <= 1.25 * away[1], away
