"""The files of a new backend's distribution, as templates; ``NAME`` and ``Name`` stand for its name."""

from __future__ import annotations

from collections.abc import Mapping

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "m3hal-NAME"
version = "0.1.0"
description = "MiniMax-M3 operators of Name for m3hal"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["m3hal>=0.1,<0.2", "torch>=2.9"]

[project.optional-dependencies]
test = ["m3hal-conformance>=0.1,<0.2"]

[project.entry-points."m3hal.backends"]
NAME = "m3hal_NAME:MANIFEST"

[tool.hatch.build.targets.wheel]
packages = ["m3hal_NAME"]
"""

MANIFEST = '''\
"""What Name offers to MiniMax-M3, as data: importing only the standard library and m3hal."""

from m3hal import Impl, Manifest, one_of

MANIFEST = Manifest(
    name="NAME",
    vendor="Name",
    api=">=1,<2",
    priority=-1,  # serves only who asks for it by name; 100 once you want it under "auto"
    devices=("cpu",),  # e.g. ("NAME:*",), where torch calls the kind "NAME"
    libraries={"torch": ">=2.9"},  # your runtime's distribution and versions
    probe="m3hal_NAME.probe:probe",
    operators={
        "rms_norm": (
            Impl(
                "m3hal_NAME.norm:rms_norm",
                limits=(one_of("dtype", "float32", "bfloat16"),),
                memory="self",  # torch makes temporaries; take this out once your kernel writes nothing but out
            ),
        ),
    },
)
'''

PROBE = '''\
"""Whether this machine's software can use the device. It must not initialise the device: vLLM forks after planning.

m3hal looks for CPUs, CUDA, ROCm and Gaudi devices itself; whether one of another kind is there is asked here alone.
"""


def probe(device: str) -> str | None:
    """None, or the reason why not, as a sentence with the remedy."""
    return None
'''

NORM = '''\
"""``rms_norm``: replace the body of ``run`` by a call of your kernel. Its contract: ``m3hal ops rms_norm``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from m3hal import Site


def rms_norm(site: Site) -> Callable[..., torch.Tensor]:
    """Called once per site; what it returns is called for every layer."""
    eps, offset = site.eps, site.weight_offset

    def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        return result.copy_(wide * scale * (weight.float() + offset))

    return run
'''

TEST = '''\
"""The whole test file: every case of the operators that the manifest lists."""

import pytest
from m3hal_conformance.vendor import ask, cases

from m3hal_NAME import MANIFEST

DEVICE = "cpu"  # where it is asked: one that the manifest's devices match, e.g. "NAME:x1"


@pytest.mark.parametrize("case", cases(operators=MANIFEST.operators), ids=str)
def test_conformance(case):
    """The backend computes the operator."""
    ask("NAME", case, device=DEVICE)
'''

WORKFLOW = """\
name: conformance
on: [push, pull_request]  # only push once runs-on is your own machine: it runs what it checks out
jobs:
  conform:
    runs-on: ubuntu-latest  # [self-hosted, NAME] for your own machine
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12"}
      - run: pip install -e '.[test]'
      # asks every case that `pytest` asks, and writes what came of it
      - run: >-
          m3hal conform --backend NAME --device cpu --waivers waivers.toml
          --json claim.json --html report.html --junit junit.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: claim, path: "*.json\\n*.html\\n*.xml"}
"""

WAIVERS = """\
# Known failures, each with an issue and a last day. It fails when it passes again, so that no waiver outlives its bug.
#
# [[waiver]]
# case = "rms_norm/tokens_7/*"
# check = "rerun"       # all checks when left out
# issue = "https://github.com/NAME/m3hal-NAME/issues/1"
# until = 2027-01-31
# device = "cuda:sm_90" # all devices when left out
"""

README = """\
# m3hal-NAME

MiniMax-M3 operators of Name.

    pip install -e '.[test]'
    m3hal explain rms_norm --backend NAME,reference
    pytest -q
    m3hal conform --backend NAME --quick

`m3hal_NAME/__init__.py` lists the operators, `m3hal_NAME/norm.py` has the first. Add one: write its factory, list it,
run `m3hal conform --backend NAME --op OPERATOR`. Say as limits and declarations what it can't take; everything else is
a promise that the suite holds you to.
"""

FILES: Mapping[str, str] = {
    "pyproject.toml": PYPROJECT,
    "README.md": README,
    "m3hal_NAME/__init__.py": MANIFEST,
    "m3hal_NAME/probe.py": PROBE,
    "m3hal_NAME/norm.py": NORM,
    "tests/test_conformance.py": TEST,
    "waivers.toml": WAIVERS,
    ".github/workflows/conformance.yml": WORKFLOW,
}
