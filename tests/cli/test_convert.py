"""``shardwise convert``: what is said, and what is refused before torch is imported."""

import subprocess
import sys

import pytest
import torch
from state.sources import loaded

from shardwise.cli.main import main
from shardwise.config.keymap import load_map, map_names, rules_of
from shardwise.errors import ConfigError
from shardwise.state.source import open_source


def test_what_was_done_is_said(tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(3, 2), "b": torch.zeros(2)}, "step": 3}, tmp_path / "a.pt")
    assert (
        main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--dtype", "bf16", "--keep", "^b$", "--verify"])
        == 0
    )
    out = capsys.readouterr().out
    assert "a torch file" in out and "2 tensors" in out and "1 file" in out
    assert "every tensor compared with the source: equal" in out
    assert "left out: step: it stands beside 'model', which has the weights" in out
    assert "no config.json" in out
    found = loaded(open_source(tmp_path / "out"))
    assert (found["w"].dtype, found["b"].dtype) == (torch.bfloat16, torch.float32)


def test_the_kind_follows_the_name(tmp_path, capsys):
    torch.save({"w": torch.ones(3, 2)}, tmp_path / "a.pt")
    for dest, kind in (
        ("b.safetensors", "a safetensors file"),
        ("b.pth", "a torch file"),
        ("b", "a Hugging Face directory"),
    ):
        assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / dest)]) == 0
        assert open_source(tmp_path / dest).kind == kind
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "d"), "--to", "dcp"]) == 0
    assert open_source(tmp_path / "d").kind == "a DCP directory"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a", "b", "--keep", "x"], "--dtype"),
        (["a", "b", "--config", "c.json"], "--map"),
        (["a", "b.pt", "--max-shard-bytes", "5GB"], "torch is one file"),
        (["a", "b", "--max-shard-bytes", "much"], "that is no size"),
        (["a", "b", "--dtype", "bfloat"], "did you mean 'bfloat16'"),
        (["a", "b", "--dtype", "bf16", "--keep", "("], "not a valid regular expression"),
        (["a", "b", "--map", "lama-to-meta"], "did you mean 'llama-to-meta'"),
        (["a", "b.pt", "--to", "hf"], "use --to torch"),
        (["a", "b", "--to", "safetensors"], "use b.safetensors"),
        (["a", "b", "--to", "gguf"], "not written in that kind"),
        (["a", "b.gguf"], "for GGUF, which is not written here"),
        (["a", "b.safetensor"], "did you mean b.safetensors?"),
        (["a"], "DST"),
    ],
)
def test_mistakes_are_told_without_torch(words, expected):
    code = "import sys; from shardwise.cli.main import main; status = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(status)"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path, monkeypatch):
    from shardwise.state import block_copy

    def interrupted(*_):
        raise KeyboardInterrupt

    torch.save({"w": torch.ones(3, 2)}, tmp_path / "a.pt")
    with monkeypatch.context() as patch:
        patch.setattr(block_copy, "write_at", interrupted)
        assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.pt", "b.pt"]


def test_a_missing_source_is_told(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b")]) == 1
    assert "there is no such file" in capsys.readouterr().err


def test_every_map_of_the_package_is_whole():
    assert len(map_names()) == 4
    for name in map_names():
        there, _, back = name.partition("-to-")
        assert len(load_map(name)) == len(load_map(f"{back}-to-{there}"))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"from": "("}], "not a valid regular expression"),
        ([{"from": "a", "to": r"\2"}], "not a valid regular expression"),
        ([{"from": "a"}], "either renamed or left out"),
        ([{"from": "a", "to": "b", "drop": True}], "either renamed or left out"),
        ([{"from": "a", "to": "b", "permute": "halves-to-pairs"}], "both are needed"),
        ([{"from": "a", "to": "b", "permute": "odd", "heads": 2}], "expected"),
        ([{"from": "a", "too": "b"}], "did you mean 'to'"),
        ([{"to": "b"}], "from"),
        (["a"], "a rule is a mapping"),
        ({}, "a map is a list of rules"),
        ([], "a map is a list of rules"),
        ("text", "a map is a list of rules"),
    ],
)
def test_rules_that_cannot_be_are_told(rules, words):
    with pytest.raises(ConfigError) as caught:
        rules_of(rules, "my.yaml")
    assert words in str(caught.value)
