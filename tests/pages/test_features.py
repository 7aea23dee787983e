"""docs/features.md: every "yes" of ours names something to type that exists."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli.main import COMMANDS
from shardwise.run.config import load_config

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {  # what a key needs to have an effect
    "--data.pack": ["data.path=chat.jsonl", "data.tokenizer=DIRECTORY"],
    "--model.add_tokens": ["model.hf=DIRECTORY", "data.tokenizer=hf"],
    "--data.path": ["data.tokenizer=DIRECTORY"],
}


def rows():
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8").partition("## Lines to change")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    return [row for row in cells if row[-1].startswith("yes")]


def words():
    return [word for row in rows() for word in re.findall(r"`([^`]+)`", row[-1])]


def test_every_yes_says_what_to_type():
    assert len(rows()) > 20
    for row in rows():
        assert len(row) == 7 and "`" in row[-1], row


@pytest.mark.parametrize("word", words())
def test_what_it_says_exists(word):
    if word.startswith("sw."):
        assert callable(getattr(sw, word.removeprefix("sw.")))
    elif word.startswith("--"):
        load_config(None, [*shlex.split(word), *BESIDE.get(word.partition("=")[0], [])])
    else:
        program, command = word.split()[:2]
        assert program == "shardwise" and command in COMMANDS


def test_it_would_notice_a_key_that_is_not_there():
    with pytest.raises((sw.ConfigError, argparse.ArgumentError)):
        load_config(None, ["--optim.grups={}"])
