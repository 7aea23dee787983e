"""Every relative link of README, CONTRIBUTING and docs leads to a file, and every anchor to a heading of it."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those it names itself."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', prose))
    for title in re.findall(r"^#+ (.+?)\s*$", prose, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(next(name for n in range(1000) if (name := f"{slug}-{n}" if n else slug) not in found))
    return found


def links(page: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.resolve()), f"{page.name} links to {target}"


def test_every_page_can_be_found():
    """From the front page or the index, by links."""
    seen, todo = set(), [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [page.parent / target.partition("#")[0] for target in links(page) if target.partition("#")[0]]
    assert {page for page in PAGES if page.name != "CONTRIBUTING.md"} <= seen
