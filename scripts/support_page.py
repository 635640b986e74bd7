"""Writes docs/support.md, what runs where, from the claims in the packages and in ``docs/claims``.

    python scripts/support_page.py

Runs nothing. tests/docs/test_support.py fails when the page is not what this writes.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from m3hal_conformance.support import support
from m3hal_conformance.support_page import page as written
from m3hal_conformance.verification import is_whole, unedited

from m3hal.dispatch import levels
from m3hal.dispatch.discovery import discover

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"
#: those of this repository, in the page's order; whatever else is installed is no part of it
DISTRIBUTIONS = ("m3hal", "m3hal-triton", "m3hal-nvidia", "m3hal-amd", "m3hal-gaudi")


def page() -> str:
    """The page's text."""
    usable = [found for found in discover() if found.is_usable and found.distribution in DISTRIBUTIONS]
    backends = sorted(usable, key=lambda found: (DISTRIBUTIONS.index(found.distribution), found.name))
    shipped = filter(is_whole, levels.shipped(backends))
    claims = [*shipped, *map(unedited, sorted((ROOT / "docs" / "claims").glob("*.json")))]
    engines = runpy.run_path(str(ROOT / "scripts" / "engine_runs.py"))["runs"]()
    return written(support(backends, claims, engines))


if __name__ == "__main__":
    PAGE.write_text(page())
