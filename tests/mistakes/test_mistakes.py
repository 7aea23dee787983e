"""Every row of docs/mistakes.md: plain torch takes the mistake without a word, Shardwise does not, and the page says what came now."""

from pathlib import Path

import pytest
from mistakes.rows import alike, cells, measure, read_page, row_of, rows

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
NAMES = list(rows())


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_not_silent(ranks, name):
    plain, ours = measure(ranks.run, name)
    assert ours.kind != "silent", ours.text
    told, shown = cells(name, plain, ours), read_page(PAGE.read_text(encoding="utf-8"))[name]
    assert all(alike(a, b) for a, b in zip(told, shown, strict=True)), f"{told} is not {shown}: tools/mistakes_page.py"


def test_the_page_has_every_row_and_counts_them():
    text = PAGE.read_text(encoding="utf-8")
    shown = read_page(text)
    assert list(shown) == NAMES and len(NAMES) >= 45
    kinds = [cell[2].partition(":")[0] for cell in shown.values()]
    assert set(kinds) <= {"refused", "warned", "right"}
    counted = [f"{kind} {kinds.count(kind)}" for kind in ("refused", "warned", "right")]
    assert f"**{len(NAMES)} mistakes: {', '.join(counted)}.**" in text
    for name in NAMES:
        assert (shown[name][2].startswith("right")) == (not row_of(name).says), name
