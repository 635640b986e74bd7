"""The manual agrees with the tree: the generated page is current, links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from m3hal.ops import NAMES

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in ROOT.rglob("*.md") if not {".venv", "build", "dist"} & set(page.parts))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def test_operator_page_is_current() -> None:
    """docs/operators.md is what scripts/operators_page.py writes from the definitions, and has every operator."""
    script = runpy.run_path(str(ROOT / "scripts" / "operators_page.py"))
    written = script["PAGE"].read_text()
    assert written == script["page"](), "docs/operators.md is out of date; run `make docs`"
    assert all(f"\n## {name}\n" in written for name in NAMES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files of the tree, and their anchors headings of the page."""
    for target, anchor in LINK.findall(page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to #{anchor}, which {file.name} has not"
