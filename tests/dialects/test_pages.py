"""The pages about other systems are what their tables say, and the tables know each field of the systems' own records."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

spec = importlib.util.spec_from_file_location("dialects_tool", ROOT / "tools" / "dialects.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_the_pages_are_what_the_tables_say():
    stale = [str(path) for path, text in tool.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "make docs"
    assert {path.stem for path in tool.PAGES.iterdir()} == {*tool.names()}


def test_each_field_of_an_installed_record_has_a_row_with_its_default():
    found = list(tool.covered())
    assert {"transformers", "accelerate", "fsdp1", "fabric"} <= {one.record.table for one in found}
    assert sum(one.fields for one in found) > 200
    assert [key for one in found for key in (*one.missing, *one.other)] == []


def test_a_field_without_a_row_and_another_default_are_shown():
    record = tool.Record("trl", "", "trl", "file.py:SFTConfig")
    text = (
        "class SFTConfig:\n    max_length: int = 512\n    packing: bool = field(default=False)\n    new_key: int = 1\n"
    )
    found = tool._coverage(record, "9", tool._fields_in(text, "SFTConfig"))
    assert (found.fields, found.missing, found.other) == (3, ["new_key"], ["max_length: 512 there, 1024 in the table"])


@pytest.mark.parametrize("name", ["trl", "torchtune"])
def test_a_page_says_what_a_key_becomes(name):
    page = tool.page(name)
    keys = {
        "trl": "| `lora_r` | 16 | `parallel.lora.rank` |",
        "torchtune": "| `model.lora_rank` | 8 | `parallel.lora.rank` |",
    }
    assert keys[name] in page
    assert "there is no technique" not in page  # of those that exist
