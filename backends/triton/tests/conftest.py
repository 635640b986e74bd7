"""Runs the kernels on the GPU where there is one, else through Triton's interpreter, cured and held to its arguments.

Triton decides at import whether its functions are interpreted, so the environment variable is set around the import
of triton and of the kernels, before any test module of the session, and otherwise only during this folder's tests.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    import m3hal_triton

    for module in pkgutil.iter_modules(m3hal_triton.__path__):
        importlib.import_module(f"m3hal_triton.{module.name}")
    importlib.import_module("cure_kernels")
    from m3hal_conformance.interpreter import cure
    from m3hal_conformance.interpreter_bounds import bound

    cure()
    bound()
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=INTERPRETED)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
