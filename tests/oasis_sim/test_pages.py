"""The pages of the documentation: links lead somewhere, and no page or picture is without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def _links(page: Path) -> list[tuple[Path, str]]:
    """(file, heading or "") of a page's links to files; code blocks left out."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    return [((page.parent / file).resolve() if file else page, heading) for file, _, heading in links]


def _headings(page: Path) -> set[str]:
    """Headings as links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for file, heading in _links(page):
        assert file.exists(), f"{page.name} links {file}"
        assert not heading or heading in _headings(file), f"{page.name} links {file.name}#{heading}"


def test_every_page_and_picture_is_linked() -> None:
    linked = {file for page in PAGES for file, _ in _links(page) if file != page}
    pictures = [*(REPOSITORY / "docs" / "images").iterdir(), *(REPOSITORY / "docs" / "traces").glob("*.png")]
    assert [str(file) for file in (*PAGES[1:], *pictures) if file not in linked] == []
