"""The options of ``pytest --pyargs m3hal_conformance``: slips are one sentence, not a failure per case."""

import subprocess
import sys

import pytest


def asked(folder, *options):
    """pytest on the suite's own test file: exit code, output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "m3hal_conformance"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--m3hal-backend=refrence"], "Did you mean 'reference'?"),
        (["--m3hal-backend=reference", "--m3hal-op=rms_nrom"], "'rms_nrom' is no operator. Did you mean 'rms_norm'?"),
        ([], "need its name: --m3hal-backend=NAME."),
    ],
)
def test_slips(tmp_path, options, sentence):
    """A usage error, exit code 4, and no traceback."""
    code, output = asked(tmp_path, *options)
    assert code == 4, output
    assert [line for line in output.splitlines() if line.startswith("ERROR: ") and sentence in line], output
    assert "Traceback" not in output


def test_cases_are_asked(tmp_path):
    """A name that exists asks the cases."""
    code, output = asked(tmp_path, "--m3hal-backend=reference", "--m3hal-op=rms_norm", "-k", "no_token")
    assert code == 0, output
    assert "2 passed" in output
