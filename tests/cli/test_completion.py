"""``shardwise completion``: the script of bash is run in bash, and all three offer what the command line takes."""

import re
import shutil
import subprocess

import pytest

from shardwise.cli import main as cli
from shardwise.cli.completion import offers
from shardwise.config.loader import dotted_keys
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig, load_config


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["completion", "bash"]) == 0
    file = tmp_path_factory.mktemp("completion") / "shardwise.bash"
    file.write_text(out.getvalue())
    return file


CASES = {
    ("",): "train generate convert checkpoint verify completion --help --version",
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


def test_bash_offers_what_can_follow(script):
    """All cases in one bash: the words of each, and then what the function offers."""
    calls = [
        f'COMP_WORDS=(shardwise {" ".join(map(repr, words))}); COMP_CWORD={len(words)}; _shardwise; echo "${{COMPREPLY[*]}}"'
        for words in CASES
    ]
    lines = ["set -u", f"source {script}", "complete -p shardwise", *calls]
    done = subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and not done.stderr, done.stderr
    registered, *offered = done.stdout.splitlines()
    assert registered.endswith("-F _shardwise shardwise") and "-o default" in registered
    assert dict(zip(CASES, offered, strict=True)) == CASES


def test_every_command_option_key_and_value_is_offered_by_all_shells(capsys):
    found = {offer.name: offer for offer in offers()}
    assert [*found] == [*cli.COMMANDS]
    assert [*found["train"].keys] == [f"--{key}" for key in dotted_keys(RunConfig)]
    assert {"--nproc", "--fresh", "--no-config"} <= found["train"].flags.keys() and found["train"].valued == (
        "--nproc",
    )
    texts = {}
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        texts[shell] = capsys.readouterr().out
    for key in found["train"].keys:
        assert all(f"{key}=" in text for text in texts.values())
    for text in texts.values():
        assert all(re.search(rf"\b{name}\b", text) for name in cli.COMMANDS)


def test_every_value_that_is_offered_is_taken():
    def taken(key: str, value: str) -> bool:
        try:
            load_config(None, [f"{key}={value}"])
        except ConfigError as error:  # it may need another key next to it
            return not any(text in str(error) for text in ("expected", "there is no key"))
        return True

    keys = next(offer.keys for offer in offers() if offer.name == "train")
    assert sum(map(bool, keys.values())) > 20
    assert not [(key, value) for key, values in keys.items() for value in values if not taken(key, value)]


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
