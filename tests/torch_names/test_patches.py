"""What is replaced in torch: each with a row in docs/patches.md, and left out where it only refuses and is not wanted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "patches.md"
SCRIPT = """
import json, warnings
import torch, shardwise as sw
from torch import nn
from shardwise._torch.patches import MADE
warnings.simplefilter("ignore")
for layout in ("dp_shard=2", "tp=2"):
    with sw.init(layout, backend="fake", device="cpu") as world:
        made = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        sw.parallelize(made, world, example={"input": torch.randn(4, 8)})
print(json.dumps({name: patch.is_guard for name, patch in MADE.items()}))
try:
    nn.DataParallel(sw.parallelize(made(), sw.init(device="cpu")))
except sw.UsageError:
    print("refused")
"""


def made(**environ):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    return json.loads(first), rest


def test_each_has_a_row_and_only_those_that_are_needed_stay_where_guards_are_not_wanted():
    (all_of_them, told), (needed, none) = made(), made(SHARDWISE_PATCHES="needed")
    rows = re.findall(r"^\| (.+) \|.*\|$", PAGE.read_text(), re.MULTILINE)
    words = {word.rpartition(".")[2] for row in rows for word in re.findall(r"`([\w.]+)`", row)}
    for place in all_of_them:
        *_, owner, name = place.split(".")
        assert name in words or owner in words or name.startswith("register_"), place
    assert needed == {name: False for name, is_guard in all_of_them.items() if not is_guard} and len(needed) == 11
    assert told == ["refused"] and none == []


@pytest.mark.parametrize("value", ["", "all"])
def test_another_word_leaves_none_out(value, monkeypatch):
    from shardwise._torch import patches

    class Owner:
        x = 1

    monkeypatch.setattr(patches, "MADE", {})
    monkeypatch.setenv(patches.SWITCH, value)
    patches.patch(Owner, "x", 2, "for this test")
    assert Owner.x == 2
    monkeypatch.setenv(patches.SWITCH, "needed")
    patches.patch(Owner, "x", 3, "for this test")
    assert Owner.x == 2
