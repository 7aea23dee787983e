"""``shardwise train`` from end to end: what it says, what it leaves behind, how it fails, and under torchrun."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.commands import on_ranks
from safetensors.torch import load_file

from shardwise.cli import main as cli
from shardwise.cli.train import NEXT, next_commands
from shardwise.config.render import dump_config
from shardwise.errors import RankError
from shardwise.run.config import load_config
from shardwise.run.metrics import read_metrics

TINY = (
    "--model.args={dim: 32, num_layers: 2, ffn: 48}",
    "--data.seq_len=32",
    "--data.global_batch=8",
    "--data.micro_batch=2",
    "--train.steps=4",
    "--train.eval_every=2",
    "--log.every=1",
)


def start(folder: Path, *words: str, before: tuple[str, ...] = ("-m", "shardwise"), timeout: int = 100, **env: str):
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *before, *words],
        cwd=folder,
        env={**clean, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A text small enough to be validated in no time."""
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. She sells sea shells by the shore. " * 60)
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """One whole run on two ranks: (folder, what it printed)."""
    folder = tmp_path_factory.mktemp("run")
    done = start(folder, "train", *TINY, f"--data.path={text}")
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done.stdout


def test_it_says_what_it_chose_and_why(finished):
    said = " ".join(finished[1].split())
    assert re.search(r"ranks [12] local process(es)?: (no accelerator in use|one for each visible accelerator)", said)
    assert re.search(r"layout dp_shard=\d: ", said)
    assert re.search(
        r"[\d.]+ KiB of parameters, gradients and optimizer state per rank, [\d.]+ KiB in one process", said
    )
    assert re.search(r"engine (fsdp2: )?dp_shard=2 cuts parameters", said) or "dp_shard=1" in said


def test_it_shows_the_same_prompt_completed_before_and_after(finished):
    rows = [row for row in read_metrics(finished[0] / "runs/latest/metrics.jsonl") if row["kind"] == "sample"]
    assert [row["when"] for row in rows] == ["before", "after"]
    assert rows[0]["prompt"] == rows[1]["prompt"] and rows[0]["text"] != rows[1]["text"]
    for row in rows:
        assert 0 <= row["word_share"] <= 1
        assert f"{100 * row['word_share']:.0f}% real words" in finished[1]


def test_metrics_hold_every_step_and_validation(finished):
    rows = read_metrics(finished[0] / "runs/latest/metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds_left", "memory"} <= steps[0].keys()
    assert all(row["tokens"] == 8 * 32 for row in steps)
    assert [row["step"] for row in rows if row["kind"] == "val"] == [2, 4]
    (memory,) = [row for row in rows if row["kind"] == "memory"]
    assert sum(memory["per_rank"]) == pytest.approx(memory["one_process"], rel=0.02)


def test_it_leaves_config_picture_and_weights(finished):
    folder = finished[0] / "runs/latest"
    loaded = load_config(folder / "config.yaml").config
    assert loaded.train.steps == 4 and loaded.data.seq_len == 32
    assert (folder / "config.yaml").read_text() == dump_config(loaded)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    from safetensors.torch import load_file

    from shardwise.run.build import build_plain

    weights = {
        name: value for file in (folder / "weights").glob("*.safetensors") for name, value in load_file(file).items()
    }
    model = build_plain(loaded)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    assert any((before[name] != value).any() for name, value in weights.items())


def test_the_proof_is_a_number_far_below_rounding_of_fp32(finished):
    line = re.search(r"^proof +(.*)", finished[1], re.MULTILINE).group(1)
    largest = float(re.search(r"(\d\.?\d*e-\d+|0\.0|\b0\b)", line).group(1))
    assert largest < 1e-12, line


def test_it_ends_with_commands_to_try(finished):
    tail = finished[1].splitlines()[-len(NEXT) :]
    for line, (command, shows) in zip(tail, next_commands(Path("runs/latest"), 4), strict=True):
        assert command in line and line.endswith(f"# {shows}")
        assert "runs/latest/config.yaml" in command  # of this run, not of the defaults
    assert "--train.steps=8 --log.dir=runs/long" in finished[1]


TO_TRY = [command for command, _ in next_commands(Path("runs/latest"), 4)]


@pytest.mark.parametrize("command", TO_TRY)
def test_the_commands_to_try_are_understood(finished, monkeypatch, capsys, command):
    monkeypatch.chdir(finished[0])
    assert cli.main([*shlex.split(command)[1:], "--print-config"]) == 0
    assert "--train.steps=8" not in command or "  steps: 8 " in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.parametrize("command", TO_TRY)
def test_the_commands_to_try_run(finished, text, command):
    words = shlex.split(command)[1:]
    done = start(finished[0], *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "validation loss" in done.stdout or "--print-config" in words
    assert "--train.steps=8" not in words or "after 8 steps" in done.stdout


def test_a_run_whose_steps_were_all_skipped_says_so(ranks, tmp_path, text):
    words = (
        f"--data.path={text}",
        "--parallel.precision=fp16",
        "--train.scaler.init_scale=1e30",
        "--log.plot=false",
    )
    said = on_ranks(ranks, "train", *TINY, *words, folder=tmp_path, num_ranks=1)
    assert (
        "skipped 4 of 4 steps, not finite or without a valid label: nothing was trained; a smaller --train.scaler.init_scale"
        in said
    )
    rows = [row for row in read_metrics(tmp_path / "runs/latest/metrics.jsonl") if row["kind"] == "step"]
    assert [row["num_skipped"] for row in rows] == [1, 2, 3, 4]


def test_what_blocks_keep_under_a_budget_is_said_and_proved(ranks, tmp_path, text):
    words = (f"--data.path={text}", "--parallel.remat=96KiB", "--parallel.precision=bf16", "--log.plot=false")
    said = " ".join(on_ranks(ranks, "train", *TINY, *words, folder=tmp_path, num_ranks=2).split())
    (row,) = (row for row in read_metrics(tmp_path / "runs/latest/metrics.jsonl") if row["kind"] == "chosen")
    assert f"remat {row['text']}" in said and row["text"].startswith("kept for backward by ")
    assert (tmp_path / "runs/latest/recipe.txt").read_text().endswith(f"remat: {row['text']}\n")
    assert "proof largest gradient difference" in said  # in float64 everything takes four times as much


def test_an_older_run_in_the_folder_is_kept_beside(ranks, finished, text):
    folder = finished[0] / "runs/latest"
    old = (folder / "metrics.jsonl").read_text()
    weights = (folder / "weights/model.safetensors").read_bytes()
    said = on_ranks(ranks, "train", "runs/latest/config.yaml", folder=finished[0], num_ranks=1)
    assert (folder / "metrics.previous.jsonl").read_text() == old
    assert (folder / "weights.previous/model.safetensors").read_bytes() == weights
    assert "older the weights of the run before stay in runs/latest/weights.previous" in said
    assert "runs/latest/weights.previous (weights of the run before)" in said
    new = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert new == [1, 2, 3, 4]


def test_tokens_and_a_model_of_the_users(ranks, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(2000, dtype=np.uint16) % 300)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(vocab):\n"
        "    return nn.Sequential(nn.Embedding(vocab, 16), nn.Linear(16, vocab))\n"
    )
    words = [
        "--model.build=mine.py:build",
        "--model.args={vocab: 300}",
        "--data.path=tokens.npy",
        "--data.val_fraction=0",
        "--checkpoint.export=null",
        "--log.plot=false",
    ]
    said = on_ranks(ranks, "train", *words, *TINY[1:], folder=tmp_path, num_ranks=1)
    assert "training loss" in said and "nats/token" in said and "no picture: log.plot=false" in said
    kinds = {row["kind"] for row in read_metrics(tmp_path / "runs/latest/metrics.jsonl")}
    assert kinds == {"step", "memory"}
    assert not (tmp_path / "runs/latest/weights").exists()


def test_a_killed_rank_ends_the_others_and_is_named_and_metrics_are_kept(tmp_path, text):
    (tmp_path / "mortal.py").write_text(
        "import os, signal\n"
        "from shardwise.run.reference import ReferenceConfig, ReferenceModel\n"
        "class Mortal(ReferenceModel):\n"
        "    calls = 0\n"
        "    def forward(self, input_ids):\n"
        "        Mortal.calls += self.training\n"
        "        if Mortal.calls == 7 and os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().forward(input_ids)\n"
        "def build(): return Mortal(ReferenceConfig(dim=32, num_layers=1, ffn=48))\n"
    )
    words = ["--model.build=mortal.py:build", f"--data.path={text}", "--nproc", "2", *TINY[1:], "--train.steps=50"]
    words = [word for word in words if word not in ("--train.steps=4", "--train.eval_every=2")] + [
        "--train.eval_every=0"
    ]
    done = start(tmp_path, "train", *words)
    assert done.returncode == 1
    assert "rank 1 was killed by signal 9 (SIGKILL)" in done.stderr
    assert "kept       3 of 50 steps were done\n" in done.stdout
    assert "           runs/latest/metrics.jsonl (metrics up to step 3)\n           no weights\n" in done.stdout
    assert "--checkpoint.every=3 would have kept step 3" in " ".join(done.stdout.split())
    steps = [row["step"] for row in read_metrics(tmp_path / "runs/latest/metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2, 3]  # two micro-batches a step on each rank: the seventh forward is in step 4


def test_an_error_on_a_rank_is_told_once_as_a_sentence(tmp_path, text):
    done = start(tmp_path, "train", *TINY, f"--data.path={text}", "--model.args={dmi: 3}", before=("-m", "shardwise"))
    assert done.returncode == 2
    assert "override --model.args is given twice" in done.stderr
    (tmp_path / "mine.py").write_text("def build(dim): pass\n")
    words = ["--model.build=mine.py:build", "--model.args={dmi: 3}", "--log.dir=a/b", *TINY[1:]]
    done = start(tmp_path, "train", *words, f"--data.path={text}")
    assert done.returncode == 2
    assert done.stderr.count("ConfigError") == 1 and "unexpected keyword argument 'dmi'" in done.stderr
    assert "model.args={'dmi': 3} for" in done.stderr and "did you mean 'dim'?" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout and "kept" not in done.stdout
    assert not (tmp_path / "a").exists()


def test_torchrun_works_as_it_is(tmp_path):
    np.save(
        tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 256
    )  # no text: nothing is written before and after

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")
    node = "--parallel.layout=dp_replicate=-1,dp_shard=node"
    words = (*TINY, node, "--data.path=tokens.npy", "--train.prove=false")
    done = start(tmp_path, "train", *words, before=torchrun, COLLECT_AS_USUAL="")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "layout     dp_shard=2: " in done.stdout
    assert done.stdout.count("ranks      2, as the launcher of this environment started them") == 1
    assert done.stdout.count("\nresult ") == 1
    assert (tmp_path / "runs/latest/loss.png").exists()


def test_a_new_head_is_drawn_where_the_weights_have_none(ranks, tmp_path, text):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))\n"
    )
    torch.save({"0.weight": torch.zeros(256, 16), "old_head.weight": torch.ones(3)}, tmp_path / "body.pt")
    words = [
        "--model.build=mine.py:build",
        f"--data.path={text}",
        "--model.weights=body.pt",
        "--optim.lr=1e-30",  # so that the body is seen in what comes out
        "--optim.weight_decay=0",
        "--log.plot=false",
    ]
    told = on_ranks(ranks, "train", *words, *TINY[1:], folder=tmp_path, status=1)
    assert "--model.strict=false to load what fits and draw the rest" in told
    told = on_ranks(ranks, "train", *words, *TINY[1:], "--model.strict=false", folder=tmp_path)
    assert "missing (2), with their constructor's values: 1.weight, 1.bias" in told
    assert "not in the model (1): old_head.weight" in told
    found = load_file(tmp_path / "runs/latest/weights/model.safetensors")
    assert found["0.weight"].abs().max() < 1e-20 and found["1.weight"].std() > 0.1


WRAPS = """
from torch import nn
class Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base.requires_grad_(False), nn.Linear(16, 2), nn.Linear(2, 256)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
def build():
    return nn.Sequential(nn.Embedding(256, 16), Wrapped(nn.Linear(16, 256)))
"""


def test_the_key_for_wrapped_layers_loads_them(ranks, tmp_path, text):
    """It was strict=false alone, and a run trained on a frozen layer that was drawn at random."""
    (tmp_path / "mine.py").write_text(WRAPS)
    body = {"0.weight": torch.zeros(256, 16), "1.weight": torch.full((256, 16), 3.0), "1.bias": torch.ones(256)}
    torch.save(body, tmp_path / "body.pt")
    words = ["--model.build=mine.py:build", f"--data.path={text}", "--model.weights=body.pt", "--log.plot=false"]
    for more in ((), ("--model.strict=false",)):
        told = on_ranks(ranks, "train", *words, *TINY[1:], *more, folder=tmp_path, status=1)
        fix = told.rpartition("fix: in this run: ")[2].partition(", for layers that were wrapped")[0]
        assert "--model.rename=" in fix and "1.base.weight" in told, told
    told = on_ranks(ranks, "train", *words, *TINY[1:], *shlex.split(fix), folder=tmp_path)
    found = load_file(tmp_path / "runs/latest/weights/model.safetensors")
    assert torch.equal(found["1.base.weight"], body["1.weight"]) and torch.equal(found["1.base.bias"], body["1.bias"])


# ---- told before any process starts ----------------------------------------------------------------------------------


@pytest.fixture
def no_launch(monkeypatch):
    """Starting a rank is a failure of the test."""

    def started(*args, **kwargs):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("shardwise.launch.launch_local", started)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data.path=gone.txt"], "data.path='gone.txt' (override --data.path)\n  why: there is no such file"),
        (["--data.path=."], "why: it is not one that save_to_disk of datasets has written: it is empty"),
        (["--parallel.layout=dp_shard=3", "--nproc", "2"], "layout 'dp_shard=3' on 2 ranks"),
        (["--parallel.layout=pp=2", "--nproc", "2"], "pp=2"),
        (
            ["--model.args={dmi: 3}"],
            "model.args.dmi=3 (override --model.args)\n  why: the reference model takes no 'dmi'",
        ),
        (["--model.args={dmi: 3}"], "fix: did you mean 'dim'? it takes: vocab, dim,"),
        (["--model.args={dim:32,num_layers:1}"], "write 'dim: 32'"),
        (
            ["--model.args={dim: wide}"],
            "model.args.dim='wide' (override --model.args)\n  why: expected a whole number >= 1",
        ),
        (["--model.args={dim: 30}"], "dim=30 with num_heads=4"),
        (["--model.args={max_seq: 8}"], "max_seq=8 (override --model.args) with data.seq_len=128"),
        (["--parallel.sharding={engine:fsdp2}"], "write 'engine: fsdp2'"),
        (["--log.dir=/proc/none"], "log.dir='/proc/none'\n  why: it cannot be written"),
    ],
)
def test_mistakes_are_told_before_a_rank_starts(capsys, monkeypatch, tmp_path, no_launch, words, told):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *words]) in (1, 2)
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_nproc_that_the_launcher_overrules_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    assert cli.main(["train", "--nproc", "4"]) == 2
    assert "launch.nproc=4 (override --launch.nproc) on 2 ranks" in capsys.readouterr().err


def test_the_parent_of_the_ranks_never_imports_torch(tmp_path):
    code = (
        "import sys, json\nfrom shardwise.cli import main\nimport shardwise.launch as launch\n"
        "launch.launch_local = lambda *a, **k: [json.loads(sys.argv[1])]\n"
        "status = main.main(['train', '--launch.device=cpu', '--log.plot=false'])\n"
        "assert status == 0 and 'torch' not in sys.modules, sorted(m for m in sys.modules if 'torch' in m)[:5]\n"
    )
    result = {"val_loss": 1.0, "loss": 1.0, "steps": 1, "num_skipped": 0, "seconds": 1.0, "proof": {"text": "x"}}
    done = start(tmp_path, code, json.dumps(result), before=("-c",))
    assert done.returncode == 0, done.stderr


def ranks_in(folder: Path) -> list[int]:
    """Processes that a run in ``folder`` started: they have its working directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder and (process / "stat").read_text().split()[2] != "Z":
                found.append(int(process.name))
    return found


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "to",  # ranks have sessions of their own, so that in both cases the parent alone hears it
    [pytest.param("the parent", marks=pytest.mark.soak), "the group, as a terminal does"],
)
def test_an_interrupted_run_says_what_is_kept_and_leaves_no_rank(tmp_path, text, to):
    words = [word for word in TINY if not word.startswith(("--train.steps", "--log.every"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "shardwise", "train", *words, f"--data.path={text}", "--train.steps=100000"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            next(line for line in run.stdout if re.search(r"step \d+: validation", line))
            assert len(ranks_in(tmp_path)) >= 2
            (os.kill if to == "the parent" else os.killpg)(run.pid, signal.SIGINT)
            out, err = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 130 and err == "interrupted\n"
    end = re.search(
        r"^kept       (\d+) of 100000 steps were done\n"
        r"           runs/latest/metrics.jsonl \(metrics up to step (\d+)\)\n"
        r"           no weights\n"
        r"resume     not possible, no checkpoint is there: no checkpoint was asked for; --checkpoint.every=\d+ would have\s+kept step \d+\n\Z",
        out,
        re.MULTILINE,
    )
    assert end is not None, out
    rows = [row["step"] for row in read_metrics(tmp_path / "runs/latest/metrics.jsonl") if row["kind"] == "step"]
    assert int(end[1]) >= int(end[2]) == rows[-1]
    assert ranks_in(tmp_path) == []


# ---- what is in the folder is what is told ---------------------------------------------------------------------------

OWN = (
    "import os, shutil, signal, sys, time\n"
    "from pathlib import Path\n"
    "from shardwise.run.reference import ReferenceConfig, ReferenceModel\n"
    "from shardwise.state import weight_files\n"
    "RANK = os.environ['RANK']\n"
    "LAUNCHER = int(Path(f'/proc/{os.getppid()}/stat').read_text().split()[3])  # ranks are forked from its child\n"
    "class Own(ReferenceModel):\n"
    "    calls = 0\n"
    "    def forward(self, input_ids):\n"
    "        Own.calls += self.training\n"
    "        if Own.calls == 3 and RANK == '0': act()\n"
    "        return super().forward(input_ids)\n"
    "def build(): return Own(ReferenceConfig(dim=32, num_layers=1, ffn=48))\n"
)


def own(folder: Path, text: Path, act: str, *words: str) -> tuple[str, ...]:
    """The words of a run whose model does something to it on rank 0, in its second step; to be run on two ranks."""
    (folder / "own.py").write_text(OWN + act)
    given = {word.partition("=")[0] for word in words}
    kept = [word for word in TINY[1:] if word.partition("=")[0] not in given]
    return "train", "--model.build=own.py:build", f"--data.path={text}", *kept, *words


def test_a_folder_that_is_removed_during_the_run_does_not_cost_the_report(ranks, tmp_path, text):
    said = on_ranks(ranks, *own(tmp_path, text, "def act(): shutil.rmtree('runs')\n"), folder=tmp_path)
    assert " result validation loss" in said and " proof " in said
    assert "no picture: the metrics are gone: No such file or directory" in said
    assert " files runs/latest/weights (weights, safetensors, float32) picture " in said


STOP_IN_WRITING = (
    "real = weight_files.WeightFiles.write_own\n"
    "def write_own(self):\n"
    "    real(self)\n"
    "    if RANK == '0': os.kill({whom}, signal.{what}), time.sleep(60)\n"
    "weight_files.WeightFiles.write_own = write_own\n"
    "def act(): pass\n"
)


@pytest.mark.parametrize("older", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.soak
def test_a_rank_killed_while_weights_are_written_leaves_the_older_ones_or_none(tmp_path, text, older):
    weights = tmp_path / "runs/latest/weights"
    if older:
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_bytes(b"older")
    act = STOP_IN_WRITING.format(whom="os.getpid()", what="SIGKILL")
    done = start(tmp_path, *own(tmp_path, text, act), "--nproc=2")
    assert done.returncode == 1 and "rank 0 was killed by signal 9" in done.stderr
    weights_line = "no weights (those in runs/latest/weights are older)\n" if older else "           no weights\n"
    assert f"{weights_line}resume     " in done.stdout
    assert weights.exists() == older
    assert not older or [file.read_bytes() for file in weights.iterdir()] == [b"older"]
    assert not list(weights.parent.glob(".weights*"))


@pytest.mark.soak  # a signal that nothing can catch is seen above
def test_ctrl_c_while_weights_are_written_leaves_no_half_of_them(tmp_path, text):
    act = STOP_IN_WRITING.format(whom="LAUNCHER", what="SIGINT")
    done = start(tmp_path, *own(tmp_path, text, act), "--nproc=2")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert "kept       4 of 4 steps were done\n" in done.stdout and "  no weights\nresume  " in done.stdout
    assert not (tmp_path / "runs/latest/weights").exists()
    assert not list((tmp_path / "runs/latest").glob(".weights*"))


@pytest.mark.soak  # of a start that is interrupted tests/launch/test_forkserver.py sees that no process is left
def test_ctrl_c_at_the_start_leaves_nothing(tmp_path, text):
    act = "os.kill(LAUNCHER, signal.SIGINT), time.sleep(60)\n"
    done = start(tmp_path, *own(tmp_path, text, act), "--nproc=2")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert "kept" not in done.stdout and not (tmp_path / "runs").exists()


def test_an_older_run_is_untouched_by_one_that_never_began(ranks, tmp_path, text):
    folder = tmp_path / "runs/latest"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "metrics.previous.jsonl"):
        (folder / name).write_text(name)
    with pytest.raises(RankError, match="ValueError: bad"):
        # On one rank: of several, those that end after the first one are killed, and may leave their lock file.
        on_ranks(ranks, *own(tmp_path, text, "raise ValueError('bad')\n"), folder=tmp_path, num_ranks=1)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        name: name for name in ("config.yaml", "metrics.jsonl", "metrics.previous.jsonl")
    }


@pytest.mark.parametrize("closed", ["| head -1", pytest.param(">&-", marks=pytest.mark.soak)])
def test_a_reader_that_left_is_no_traceback(tmp_path, text, closed):
    words = ["train", *TINY, f"--data.path={text}", "--nproc", "1"]
    run = shlex.join([sys.executable, "-m", "shardwise", *words])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {run} {closed}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (141 if "head" in closed else 0, "")


@pytest.mark.soak  # that its ranks save then is seen in test_train_resume.py
@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_that_is_ended_says_what_is_kept(tmp_path, text, number):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")
    act = f"os.kill(os.getppid(), signal.{number.name}), time.sleep(0.2)\n"
    words = own(tmp_path, text, f"def act():\n    {act}", "--train.steps=100000", "--train.eval_every=0")
    done = start(tmp_path, *words, before=torchrun)
    assert done.returncode != 0
    assert re.search(r"^kept       \d+ of 100000 steps were done$", done.stdout, re.MULTILINE), (
        done.stdout + done.stderr
    )


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_demo_learns_as_well_as_one_process(tmp_path):
    """0.8 M parameters in 500 steps: 1.32 nats/byte in one plain process; a model that does not learn stays above 3."""
    done = start(tmp_path, "train", "--log.dir=run", timeout=800)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "val"]
    assert losses[-1] < 1.6
    (difference,) = re.findall(r"largest gradient difference (\S+) ", " ".join(done.stdout.split()))
    assert float(difference) < 1e-12
