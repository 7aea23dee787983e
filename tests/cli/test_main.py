"""The command line's shell: what it prints, how it ends, and that it imports nothing heavy to say so."""

import os
import re
import subprocess
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.errors import ConfigError, LayoutError, RankError

HEAVY = ("torch", "numpy")
LIGHT_ONLY = (*HEAVY, "msgspec", "ruamel.yaml", "rich")


def shardwise(*words, **env):
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def said(capsys, *words, status=2):
    assert cli.main(words) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_help_is_a_page_of_commands(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.MULTILINE)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == text


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"shardwise (\d+\.\d+\.\d+.*|\(not installed\))\n", capsys.readouterr().out)


def _goes_on(line: str, after: str) -> bool:
    """Whether ``after`` was broken off ``line``, a word too early."""
    indent = len(after) - len(after.lstrip())
    is_one = line.endswith((",", " then")) and indent == len(line) - len(line.lstrip())
    return is_one and len(f"{line} {after.split()[0]}") <= 80


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_each_command_explains_itself_in_80_columns(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: shardwise {command}" in text and all(len(line) <= 80 for line in text.splitlines())
    # A line that is wrapped is full: it has no room for the first word of the next, of a sentence or a list that goes on.
    lines = text.splitlines()
    short = [line for line, after in pairwise(lines) if _goes_on(line, after)]
    assert not short


def test_the_help_of_train_names_every_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert (
        "train.steps=null\n        optimizer steps; null: those of epochs, else 500 [a whole number >= 1, or null]"
        in text
    )
    assert "parallel.sharding.engine=auto" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["trian"],
            "ConfigError: shardwise trian\n  why: there is no command 'trian'\n"
            "  fix: did you mean 'train'? commands: train, generate, convert, import-config, checkpoint, verify, completion\n",
        ),
        (["--hlep"], "fix: did you mean '--help'? own options: --help, --version"),
        (["train", "--nporc", "2"], "why: there is no option --nporc\n  fix: did you mean --nproc?"),
        (["train", "--nporc=2"], "fix: did you mean --nproc=2?"),
        (["train", "--stpes=5"], "fix: did you mean --train.steps=5?"),
        (["train", "--zzz"], "fix: options: --help, --no-config, --nproc, --fresh, --print-config"),
        (["train", "--print"], "why: there is no option --print\n"),
        (["train", "a.yaml", "b.yaml"], "why: 'b.yaml' is one argument more than shardwise train takes"),
        (["train", "--train.steps", "5"], "fix: write --train.steps=5"),
        (["train", "--train.steps"], "fix: write --train.steps=VALUE"),
        (["train", "--train.step=5"], "fix: did you mean --train.steps=5?"),
        (["train", "--train={stesp: 5}"], "did you mean 'steps'?"),
        (["train", "--nproc"], "why: argument --nproc: expected one argument\n  fix: see shardwise train --help"),
        (["train", "--nproc=two"], "launch.nproc = 'two' (override --launch.nproc)"),
        (["train", "--nproc=2", "--launch.nproc=3"], "override --launch.nproc is given twice, as 3 and 2"),
        (["train", "nope.yaml"], "configuration file nope.yaml\n  why: no such file or directory"),
        (["train", "--parallel.layout=dp_shrad=2"], "LayoutError: axis 'dp_shrad' (override --parallel.layout)"),
        (
            ["train", "--model.build=nope.py:f"],
            "model.build='nope.py:f' (override --model.build)\n  why: there is no file",
        ),
        (["train", "--model.build=nope_mod:f"], "why: there is no module nope_mod"),
        (["train", "--model.build=json:dmups"], "fix: did you mean 'dumps'?"),
        (["train", "--model.hf=nope"], "model.hf='nope' (override --model.hf)\n  why: there is no config.json in it"),
        (["train", "--model.hf=a", "--model.build=json:dumps"], "each of them says which model is built"),
        (
            ["train", "--model.weights=nope"],
            "model.weights='nope' (override --model.weights)\n  why: there is no such file",
        ),
        (["train", "--model.cast=true"], "it says how weights are read, so it would have no effect"),
        (["train", "--model.strict=false"], "it says how weights are read, so it would have no effect"),
        (["train", "--model.rename={a: b}"], "it says how weights are read, so it would have no effect"),
        (["train", "--parallel.init=load"], "why: the model would never get values"),
        (["verify"], "why: the following arguments are required: MODEL"),
        (["verify", "nope.py:f"], "MODEL='nope.py:f'\n  why: there is no file nope.py"),
        (["verify", "json:dumps", "--layout", "zz=2"], "LayoutError: axis 'zz'"),
        (["verify", "json:dumps", "--a.b=c"], "reads keys of parallel only"),
        (
            ["verify", "json:dumps", "--layout", "dp_shard=2", "--nproc", "4"],
            "fix: the layout says how many ranks: --layout",
        ),
        (
            ["verify", "json:dumps", "--nproc=4"],
            "verify --nproc=4\n  why: there is no option --nproc\n  fix: the layout says",
        ),
        (["verify", "json:dumps", "--launch.nproc=4"], "fix: the layout says how many ranks: --layout dp_shard=4"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_with_status_2(capsys, words, text):
    assert text in said(capsys, *words)


def test_print_config_shows_origins_and_does_not_run(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: 7\n")
    words = ["train", "--optim.lr=1e-3", str(file), "data.micro_batch=4", "--print-config", "--nproc=3"]
    assert cli.main(words) == 0
    lines = dict(map(str.strip, line.split("  # ")) for line in capsys.readouterr().out.splitlines())
    assert lines["steps: 7"] == f"{file}:2"
    assert lines["lr: 0.001"] == "override --optim.lr"
    assert lines["micro_batch: 4"] == "override --data.micro_batch"
    assert lines["nproc: 3"] == "override --launch.nproc"


def test_a_rank_leaves_an_error_to_another_that_has_it_and_says_why_where_that_is_not_known(monkeypatch, capsys):
    told = {}
    for who in ("rank 1", "local rank 0"):
        error = ConfigError("--a.b=3", why="there is no key 'a.b'\nat all", fix="c")
        error.shown_by = who
        monkeypatch.setattr(cli, "_run", lambda words, error=error: (_ for _ in ()).throw(error))
        assert cli.main(["train"]) == 2
        told[who] = capsys.readouterr().err
    assert told == {
        "rank 1": "ConfigError: --a.b=3 (shown by rank 1)\n",
        "local rank 0": "ConfigError: --a.b=3: there is no key 'a.b' (shown by local rank 0)\n",
    }


@pytest.mark.parametrize(
    ("code", "told"), [(143, "ended by SIGTERM\n"), (138, "ended by SIGUSR1\n"), (3, ""), (None, "")]
)
def test_a_run_that_is_ended_by_a_signal_says_so(monkeypatch, capsys, code, told):
    monkeypatch.setattr(cli, "_run", lambda words: sys.exit(code))
    with pytest.raises(SystemExit) as end:
        cli.main(["train"])
    assert end.value.code == code and capsys.readouterr().err == told


class Terminal:
    def __init__(self, is_one):
        self.isatty = lambda: is_one


def test_errors_have_colour_only_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    error = ConfigError("a", why="b", fix="c")
    plain = "ConfigError: a\n  why: b\n  fix: c"
    assert cli.error_text(error, Terminal(False)) == plain
    coloured = cli.error_text(error, Terminal(True))
    assert "\033[" in coloured
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.error_text(error, Terminal(True)) == plain


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a", why="b", fix="c"), 2),
        (LayoutError("a", why="b", fix="c"), 2),
        (RankError("a", why="b", fix="c", ranks=(1,)), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_status_tells_a_mistake_from_a_failure(monkeypatch, capsys, error, status):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["train"]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_nobody_foresaw_is_not_hidden(monkeypatch):
    def fail(words):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_the_traceback_is_there_for_the_asking():
    quiet = shardwise("train", "--train.step=4", SHARDWISE_TRACEBACK="0")
    assert (quiet.returncode, quiet.stdout) == (2, "")
    assert quiet.stderr.startswith("ConfigError: override --train.step=4\n  why: ")
    loud = shardwise("train", "--train.step=4", SHARDWISE_TRACEBACK="1")
    assert loud.returncode != 0
    assert "Traceback" in loud.stderr
    assert "shardwise.errors.ConfigError: override --train.step=4" in loud.stderr


@pytest.mark.parametrize(
    ("words", "status", "left_out", "aim_s"),
    [
        (["--help"], 0, LIGHT_ONLY, 0.15),
        (["--version"], 0, LIGHT_ONLY, 0.15),
        (["trian"], 2, LIGHT_ONLY, 0.15),
        (["train", "--help"], 0, (*HEAVY, "ruamel.yaml", "rich"), 0.35),
        (["verify", "--help"], 0, HEAVY, 0.35),
        (["train", "--train.step=4"], 2, HEAVY, 0.35),
        (["train", "--print-config"], 0, HEAVY, 0.35),
        (["train", "--print-config", "--nproc=2", "--parallel.layout=dp_shard=node"], 0, HEAVY, 0.35),
        (["train", "--learning_rate", "2e-5"], 2, HEAVY, 0.35),
        (["completion", "bash"], 0, HEAVY, 0.35),
        (["completion", "bash", "--words", "train", "--optim.name", "="], 0, (*HEAVY, "ruamel.yaml", "rich"), 0.35),
        (["generate", "--help"], 0, HEAVY, 0.35),
        (["generate", "nowhere", "--prompt", "a"], 2, HEAVY, 0.35),
        (["verify", "nope.py:f"], 2, HEAVY, 0.35),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_help_and_mistakes_answer_without_heavy_imports(words, status, left_out, aim_s, record_property):
    # The import is the gate. The time is only reported: a busy machine must not turn the suite red.
    code = (
        "import sys\nfrom shardwise.cli.main import main\n"
        "try:\n    status = main(sys.argv[1:])\nexcept SystemExit as end:\n    status = end.code\n"
        f"heavy = [name for name in {left_out!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    best = float("inf")
    for _ in range(2):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
        best = min(best, time.perf_counter() - begin)
        assert "imported [" not in done.stderr, done.stderr
        assert done.returncode == status, done.stderr
    record_property("best_s", round(best, 3))
    print(f"shardwise {' '.join(words)}: {best:.3f} s (aim {aim_s} s)")


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback():
    interrupted = (
        "import runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'shardwise.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    # As the module and as the script that pip makes of the entry point.
    entry = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["shardwise"]
    module, _, function = entry.partition(":")
    for start in (
        "runpy.run_module('shardwise', run_name='__main__')",
        f"from {module} import {function} as f; sys.exit(f())",
    ):
        done = subprocess.run([sys.executable, "-c", interrupted + start], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("words", [("--help",), ("train", "--print-config")])
def test_an_output_that_cannot_be_written_is_one_sentence(words):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words], stdout=full, stderr=subprocess.PIPE, env=environ, text=True
        )
    assert (done.returncode, done.stderr) == (1, "the output cannot be written: No space left on device\n")
