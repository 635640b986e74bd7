"""The example that runs a whole model without an engine, against transformers on the same files."""

import sys
from pathlib import Path

import pytest

from m3hal.checkpoint import oracle, tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "no_engine"))
import m3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--backend", "nosuch", "--device", "cpu"], "m3.py: no backend 'nosuch' is installed"),
        (["--backend", "triton", "--device", "cuda:sm_999"], "this machine has no cuda:sm_999; it has: "),
        (["--device", "gpu"], "this machine has no gpu; it has: "),
        (["--tokens", "0"], "--tokens is from 1 to 1348"),
    ],
)
def test_what_cannot_run_is_one_sentence(arguments, told, monkeypatch, capsys):
    """No traceback, and no model made first."""
    monkeypatch.setattr(sys, "argv", ["m3.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        m3.main()
    assert ended.value.code in (1, 2)
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_tokens_equal_transformers(tmp_path):
    """24 tokens after a prompt of 700, read in two chunks; MSA keeps 256 of its keys."""
    reason = "transformers is not installed; `make setup` does it"
    pytest.importorskip("transformers.models.minimax_m3_vl", reason=reason)
    prompt = m3.a_prompt(700)
    expected = oracle.greedy(oracle.load(tiny.write(tmp_path)), prompt, 24)
    tokens, found = m3.generate(m3.build("reference", "cpu"), prompt, 24)
    assert tokens == expected.tokens
    assert max(abs(float(row.max()) - theirs) for row, theirs in zip(found, expected.logprobs, strict=True)) < 1e-4
