"""The table of damaged checkpoints is of the kinds there are, and a sample of it is made anew."""

import importlib.util
import re
from pathlib import Path

from state.mutant_checkpoints import KINDS
from state.mutant_dcp import DCP_KINDS, OUTCOMES

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("hostile_table", ROOT / "tools" / "hostile_table.py")
assert _spec is not None and _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def rows() -> dict[str, list[str]]:
    lines = tool.TABLE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {name: rest for name, *rest in cells[2:]}


def test_the_table_has_a_row_of_every_kind_and_says_how_many_were_tried():
    text = tool.TABLE.read_text(encoding="utf-8")
    num, seed = re.search(r"(\d+) of each kind, from seed (\d+)", text).groups()
    assert int(num) >= 40 and int(seed) >= 0
    assert list(rows()) == list(KINDS) and set(DCP_KINDS) < set(KINDS)
    for kind, (ours, *theirs) in rows().items():
        assert ours == f"{num} of {num}", kind
        counts = [0 if cell == "-" else int(cell) for cell in theirs]
        assert sum(counts) == (int(num) if kind in DCP_KINDS else 0), kind
        assert theirs == ["-"] * len(OUTCOMES) or kind in DCP_KINDS


def test_a_sample_of_the_table_comes_out_as_it_says(ranks, tmp_path):
    ours, theirs = tool.measure(ranks.run, 2, 7, tmp_path)
    assert all(found == {"refused": 2} for found in ours.values()), ours
    shown = {kind: dict(zip(OUTCOMES, cells[1:], strict=True)) for kind, cells in rows().items()}
    for kind, found in theirs.items():
        assert found.total() == 2
        for outcome in found:
            assert int(shown[kind][outcome]) > 0, f"{kind}: {outcome}"
    assert tool.table(ours, theirs).count("\n") == len(KINDS) + 2
