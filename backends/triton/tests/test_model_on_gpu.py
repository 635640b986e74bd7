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
def test_no_further_from_fp32_than_the_reference(cache):
    """In bf16, with caches of any format: over 1,500 tokens of a prompt, then 400 steps, at most a quarter further."""
    formats = {"dtype": "bfloat16", "kv_format": cache, "index_format": cache}
    on_gpu, reference = _on_gpu(**formats), m3.build("reference", "cpu", **formats)
    for scores in (_read, _steps):
        expected = scores(m3.build("reference", "cpu"))
        away = [(scores(model) - expected).abs().mean() for model in (on_gpu, reference)]
        assert away[0] <= 1.25 * away[1], away


def _read(model):
    """Log-probability of each token of a prompt."""
    prompt, request = m3.a_prompt(1500), m3.Request(model)
    chunks = [request.read(prompt[first : first + 512]) for first in range(0, len(prompt), 512)]
    found = torch.cat(chunks).log_softmax(-1).cpu()[:-1]
    return found.gather(1, torch.tensor(prompt[1:])[:, None])


def _steps(model):
    """Log-probability of each token of another prompt, read by decode steps after its first 300."""
    prompt = m3.a_prompt(700)
    _, found = m3.generate(model, prompt[:300], 400, given=prompt[300:])
    return found.gather(1, torch.tensor(prompt[300:])[:, None])
