"""The pictures of the pages are drawn from their figures, and the figures say what the pages say."""

import importlib.util
import json
from pathlib import Path

import pytest
from techniques.tp.pieces import pieces_of_adapters, pieces_of_gpt2

import shardwise as sw

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("draw_pages_script", ROOT / "tools" / "draw_pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)
FIGURES = json.loads(pages.DATA.read_text(encoding="utf-8"))


@pytest.mark.quick("context-parallel", "layout", "units", "weights")
@pytest.mark.parametrize("name", pages.DRAWINGS)
def test_a_picture_is_drawn_from_its_figures(name, tmp_path):
    for path in (tmp_path / "one.svg", tmp_path / "two.svg"):
        pages.draw(name, FIGURES[name], path)
    text = (tmp_path / "one.svg").read_text()
    assert "</svg>" in text and text == (tmp_path / "two.svg").read_text()
    pages_ = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert any(f"({name}.svg)" in page for page in pages_) and (ROOT / "docs" / f"{name}.svg").exists()


def test_the_layouts_figures_are_the_recipes():
    assert pages._layout() == FIGURES["layout"]


def test_the_parts_of_gpt2_are_the_recipes(ranks):
    assert ranks.run(pieces_of_gpt2, 2, "tp=2")[0] == FIGURES["tensor-parallel"]


@pytest.mark.soak
def test_the_parts_of_adapters_are_the_recipes(ranks):
    assert ranks.run(pieces_of_adapters, 4, "dp_shard=2,tp=2")[0] == FIGURES["adapters"]


def test_the_memory_in_recipes_is_what_a_step_leaves():
    """As ``benchmarks/lora.py`` measures it."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64}
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8").splitlines()
    low = {"lora": sw.LoRA(rank=8), "precision": "bf16"}
    for label, options in (
        ("all parameters trained", {}),
        ('`lora=sw.LoRA(rank=8)`, `precision="bf16"`', low),
        ('and `quantize="nf4"`', {**low, "quantize": "nf4"}),
    ):
        row = next(row for row in page if row.startswith(f"| {label} |"))
        measured = [int(cell.replace(",", "")) for cell in row.split("|")[2:5]]
        found = pages.state_bytes(sizes, ["dp_shard=1", "dp_shard=2", "dp_shard=4"], **options)
        assert [held / 1024 for held in found.values()] == pytest.approx(measured, rel=0.01), label


def test_the_moments_of_a_save_are_those_of_the_code_and_one_name_decides():
    from shardwise.state.checkpoint.fault_points import POINTS

    figures = FIGURES["checkpoint"]
    assert tuple(figures) == POINTS and set(pages._PHASES) < set(POINTS)
    renamed, staged, pointed = (POINTS.index(point) for point in ("renamed", "staged", "latest"))
    for number, point in enumerate(POINTS):
        seen = figures[point]
        assert seen["steps"] == ([1, 2] if number >= renamed else [1])
        assert seen["hidden"] == (staged <= number < renamed)
        assert seen["latest"] == (2 if number >= pointed else 1)


def test_the_figures_say_what_the_pages_say():
    blocks = FIGURES["units"]
    assert max(blocks["a unit for each block"]) < max(blocks['units="none"'])
    assert FIGURES["remat"]['remat="full"']["bytes"] < FIGURES["remat"]["none"]["bytes"]
    for row in FIGURES["precision"].values():
        assert max(row.values()) <= 1.02 * row["one plain process"]
    held, peak = FIGURES["init"]["seeded, 2 ranks"]
    assert held <= peak < held + 100
    weights = FIGURES["weights"]
    assert max(weights["load_weights"]) < 0.27 and max(weights["save_weights"]) < 0.05
    assert 0.99 < weights["full_state_dict"][0] < 1.1 and max(weights["full_state_dict"][1:]) < 0.1
