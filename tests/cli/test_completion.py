"""``shardwise completion``: what can follow is offered in bash, zsh and fish, by scripts that these shells read."""

import shutil
import subprocess
import sys

import pytest

from shardwise.cli import main as cli
from shardwise.cli.completion import candidates
from shardwise.config.loader import dotted_keys
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig, load_config

CASES = {
    ("",): "train generate convert import-config checkpoint verify completion --help --version",
    ("co",): "convert completion",
    ("train", "--f"): "--fresh",
    ("train", "--train.st"): "--train.steps=",
    (
        "train",
        "run.yaml",
        "--optim.",
    ): "--optim.name= --optim.build= --optim.args= --optim.lr= --optim.betas= --optim.weight_decay= --optim.decay_on= --optim.groups= --optim.momentum= --optim.fused=",
    ("train", "--optim.name", "="): "adamw sgd adafactor muon",  # as bash breaks words
    ("train", "--optim.name", "=", "s"): "sgd",
    ("train", "--optim.name=s"): "--optim.name=sgd",  # where = is no break
    ("train", "--train.tf32", "="): "true false null",
    ("train", "--checkpoint.background", "=", "f"): "false",
    ("train", "--train.steps", "="): "",
    ("train", "--nproc", ""): "",
    ("train", ""): "",
    ("checkpoint", ""): "ls show verify prune",
    ("checkpoint", "ls", "--j"): "--json",
    ("completion", ""): "bash zsh fish",
    ("convert", "--max"): "--max-shard-bytes",
    ("generate", "--ma"): "--max-tokens",
    ("verify", "--optim"): "",
    ("verify", "--parallel.remat.m"): "--parallel.remat.mode=",
}


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_what_can_follow(words):
    assert " ".join(candidates(words)) == CASES[words]


@pytest.fixture
def script(capsys, tmp_path):
    assert cli.main(["completion", "bash"]) == 0
    file = tmp_path / "shardwise.bash"
    file.write_text(capsys.readouterr().out)
    return file


def test_bash_offers_what_can_follow(script):
    """Some cases in one bash: the words of each, and then what the function offers."""
    cases = {
        words: CASES[words] for words in CASES if words in (("co",), ("train", "--optim.name", "=", "s"), ("train", ""))
    }
    calls = [
        f'COMP_WORDS=(shardwise {" ".join(map(repr, words))}); COMP_CWORD={len(words)}; _shardwise; echo "${{COMPREPLY[*]}}"'
        for words in cases
    ]
    program = f'shardwise() {{ {sys.executable} -m shardwise "$@"; }}'
    lines = ["set -u", f"source {script}", program, "complete -p shardwise", *calls]
    done = subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    registered, *offered = done.stdout.splitlines()
    assert registered.endswith("-F _shardwise shardwise") and "-o default" in registered
    assert dict(zip(cases, offered, strict=True)) == cases


def test_every_command_option_and_key_is_offered(capsys):
    assert [*candidates([""])] == [*cli.COMMANDS, "--help", "--version"]
    offered = [*candidates(["train", "--"])]
    assert {"--nproc", "--fresh", "--no-config"} <= {*offered}
    assert [word for word in offered if word.endswith("=")] == [f"--{key}=" for key in dotted_keys(RunConfig)]
    assert cli.main(["completion", "fish", "--words", "train", "--fre"]) == 0
    assert capsys.readouterr().out.startswith("--fresh\tstart from the beginning")


def test_every_value_that_is_offered_is_taken():
    def taken(override: str) -> bool:
        try:
            load_config(None, [override])
        except ConfigError as error:  # it may need another key next to it
            return not any(text in str(error) for text in ("expected", "there is no key"))
        return True

    offered = {key: candidates(["train", f"--{key}="]) for key in dotted_keys(RunConfig)}
    assert sum(map(bool, offered.values())) > 20
    assert not [word for words in offered.values() for word in words if not taken(word)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_reads_the_script(shell, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    cli.main(["completion", shell])
    done = subprocess.run([shell, "-n"], input=capsys.readouterr().out, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "more"]])
def test_what_is_no_shell_is_refused(words, capsys):
    assert cli.main(["completion", *words]) == 2
    assert "ConfigError: shardwise completion" in capsys.readouterr().err
