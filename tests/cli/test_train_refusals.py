"""What a run refuses before it starts a rank: a folder in use, data too small for one window, a disk without room."""

import fcntl
import shutil
import signal
import subprocess
import sys

import pytest
from cli.commands import on_ranks

from shardwise.cli import main as cli
from shardwise.errors import ConfigError
from shardwise.launch.stop_signals import leave, pass_over

ONE = ["--train.steps=1", "--log.plot=false", "--train.eval_every=1"]
TINY = [*ONE, "--launch.nproc=1"]


def _train(folder, *args):
    command = [sys.executable, "-m", "shardwise", "train", f"--log.dir={folder}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("4711\n")
        held.flush()
        done = _train(folder, *TINY)
    assert done.returncode == 1 and "another run is writing there (process 4711)" in done.stderr
    assert (folder / "metrics.jsonl").read_text() == "{}\n" and not (folder / "config.yaml").exists()


def test_data_too_small_for_a_window_is_refused_before_a_rank_starts(tmp_path):
    (tmp_path / "tiny.txt").write_text("abc")
    done = _train(tmp_path / "run", *TINY, f"--data.path={tmp_path / 'tiny.txt'}")
    assert done.returncode == 2 and "3 bytes" in done.stderr and "seq_len=128 + 1 tokens" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1 << 40, 1 << 40, 1024))
    assert cli.main(["train", *TINY, f"--log.dir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert "with 1.00 KiB free on its disk" in told and "the run will write about 69.47 KiB" in told
    assert not (tmp_path / "run").exists()


ADAPTS = "--parallel.lora.rank=2"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--checkpoint.export=../adapters"], "adapters holds adapters (adapter_config.json)"),
        ([ADAPTS, "--checkpoint.adapter=../chat"], "chat holds the weights of a model (model.safetensors)"),
        ([ADAPTS, "--checkpoint.adapter=../adapters/../link"], "chat holds the weights of a model (model.safetensors)"),
        (
            [ADAPTS, "--checkpoint.adapter=../checkpoint/a"],
            "checkpoint is a checkpoint, which could not be read any more",
        ),
        (["--checkpoint.export=../checkpoint"], "checkpoint holds a checkpoint (manifest.json)"),
        (["--checkpoint.export=../notes.md"], "notes.md is a file, and a folder is needed"),
        (["--log.dir={root}/checkpoint/run"], "checkpoint is a checkpoint, which could not be read any more"),
        ([ADAPTS, "--model.weights={root}/chat", "--checkpoint.export=../chat"], "would be applied twice"),
    ],
)
def test_a_folder_of_another_kind_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys, words, told):
    for name in ("chat/model.safetensors", "adapters/adapter_config.json", "checkpoint/manifest.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"format": "shardwise checkpoint"}')
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "chat")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    given = [word.format(root=tmp_path) for word in words]
    given += [] if "--log.dir" in given[-1] else [f"--log.dir={tmp_path / 'run'}"]
    assert cli.main(["train", *TINY, *given]) in (1, 2)
    err = " ".join(capsys.readouterr().err.split())
    assert told in err and "fix: name another folder: " in err, err
    assert sorted(tmp_path.rglob("*")) == before
    fix = err.partition("name another folder: ")[2].split(";")[0].removeprefix("--").split()[0]
    started = []
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: started.append(1) or sys.exit(9))
    with pytest.raises(SystemExit):
        cli.main(
            ["train", *TINY, *(word for word in given if not word.startswith(f"--{fix.split('=')[0]}=")), f"--{fix}"]
        )
    assert started, "as the error says"


def test_a_request_to_save_ends_nothing_before_the_ranks_start(tmp_path, monkeypatch):
    """Nor after them: while the picture is drawn."""
    seen = []

    def start(*_, **__):
        seen.append(signal.getsignal(signal.SIGUSR1))
        raise ConfigError("no ranks", why="this test", fix="none")

    monkeypatch.setattr("shardwise.launch.launch_local", start)
    words = ["train", *TINY, f"--log.dir={tmp_path / 'run'}"]
    assert cli.main([*words, "--checkpoint.sigusr1=save"]) == cli.main(words) == 2
    assert seen == [pass_over, leave] and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


WAVE = """
import torch
from torch import nn

class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.phase = nn.Embedding(256, 4), nn.Parameter(torch.ones(4, 256, dtype=torch.complex128))
    def forward(self, input_ids):
        return (self.embed(input_ids).to(self.phase.dtype) @ self.phase).real.float()
"""


def test_weights_that_cannot_be_written_are_refused_before_the_first_step(ranks, tmp_path):
    (tmp_path / "wave.py").write_text(WAVE)
    words = (*ONE, f"--log.dir={tmp_path / 'run'}", "--model.build=wave.py:Wave")
    told = on_ranks(ranks, "train", *words, folder=tmp_path, num_ranks=1, status=1)
    assert "phase: weights with a tensor of complex128" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_missing_transform_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    (tmp_path / "mine.py").write_text("def widen(module): pass\n")
    for given, told in (
        ("[nonesuch.place:widen]", "there is no module nonesuch"),
        (f"[{{name: '{tmp_path}/mine.py:widne'}}]", "did you mean 'widen'?"),
    ):
        for words in (["train", *TINY, f"--log.dir={tmp_path / 'run'}"], ["verify", f"{tmp_path}/mine.py:widen"]):
            assert cli.main([*words, f"--parallel.transforms={given}"]) == 2
            error = capsys.readouterr().err
            assert told in error and "parallel.transforms=" in error and "--parallel.transforms" in error


@pytest.mark.parametrize("key", ["schedule.build", "optim.build"])
def test_a_missing_function_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys, key):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    (tmp_path / "mine.py").write_text("def halved(done, steps): pass\n")
    assert cli.main(["train", *TINY, f"--log.dir={tmp_path / 'run'}", f"--{key}={tmp_path}/mine.py:halvd"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'halved'?" in error and f"override --{key}" in error


def test_weights_of_another_model_are_refused_in_the_words_of_the_command_line(ranks, tmp_path):
    import torch

    torch.save({"blocks.0.weight": torch.ones(3)}, tmp_path / "other.pt")
    words = (*ONE, f"--log.dir={tmp_path / 'run'}", "--model.weights=other.pt")
    told = on_ranks(ranks, "train", *words, folder=tmp_path, num_ranks=1, status=1)
    assert "are missing" in told
    assert "fix: in this run: --model.rename={pattern: replacement}, or --model.strict=false" in told
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc=2", "--parallel.layout=pp=2"], "layout 'pp=2': pp=2 (override --parallel.layout)"),
        (["--parallel.layout=pp=2,dp_shard=-1"], "layout 'pp=2,dp_shard=-1': pp=2 (override --parallel.layout)"),
        (["--nproc=2", "--parallel.layout=dp_shard=3"], "layout 'dp_shard=3' on 2 ranks (override --parallel.layout)"),
        (["--nproc=3", "--parallel.layout=tp=2,dp_shard=-1"], "which does not divide 3"),
        (["--parallel.layout=dp_shard=3"], None),  # on how many ranks is not known
        (["--nproc=2", "--parallel.layout=dp_replicate=-1,dp_shard=node"], None),
    ],
)
def test_print_config_refuses_a_layout_that_a_run_refuses(capsys, words, text):
    assert (cli.main(["train", "--no-config", *words, "--print-config"]) == 0) is (text is None)
    told = capsys.readouterr()
    assert told.err == "" if text is None else (text in told.err and told.out == "")


def test_print_config_of_a_rank_checks_the_layout_for_the_ranks_of_its_launcher(capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ["train", "--no-config", "--print-config"]
    assert cli.main([*words, "--parallel.layout=dp_shard=3"]) == cli.main([*words, "--nproc=3"]) == 2
    told = capsys.readouterr().err
    assert (
        "layout 'dp_shard=3' on 2 ranks (override" in told and "launch.nproc=3 (override --launch.nproc) on 2" in told
    )
    assert cli.main([*words, "--parallel.layout=dp_shard=2", "--nproc=2"]) == 0
