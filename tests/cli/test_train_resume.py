"""``shardwise train`` killed at any moment and started again ends as the run that nobody killed, to the last bit."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.commands import on_ranks

WORDS = (
    "--data.global_batch=4", "--data.micro_batch=2", "--data.seq_len=32", "--train.eval_every=0", "--log.plot=false",
    "--data.val_fraction=0.001", "--log.every=1", "--model.args={dim: 32, num_layers: 2, ffn: 48, num_heads: 4}",
    "--train.prove=false",
)  # fmt: skip


def start(
    folder: Path, *words: str, steps: int = 14, every: int | str = 2, before: tuple[str, ...] = ()
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *before, "-m", "shardwise", *words_of(folder, steps, every), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )


def words_of(folder: Path, steps: int, every: int | str) -> tuple[str, ...]:
    return ("train", *WORDS, f"--log.dir={folder}", f"--train.steps={steps}", f"--checkpoint.every={every}")


def finish(ranks, folder: Path, *words: str, steps: int = 14, every: int | str = 2, **options) -> str:
    """The same run to its end, by the ranks that are there: the numbers do not ask who started them."""
    return on_ranks(ranks, *words_of(folder, steps, every), *words, folder=folder.parent, **options)


def weights(folder: Path) -> bytes:
    return (folder / "weights" / "model.safetensors").read_bytes()


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "step"]


def family(pid: int) -> list[int]:
    """The process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(found for child in children for found in family(int(child)))]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(ranks, folder)
    return folder


def kill_and_go_on(ranks, tmp_path: Path, whole: Path, num_kills: int, seed: int, **length) -> int:
    """Kills one process of a run at a random moment, ``num_kills`` times or until the run is done: how often it was killed."""
    print(f"seed {seed}")
    chosen, folder, kills = random.Random(seed), tmp_path / "run", 0
    while kills < num_kills:
        process = start(folder, **length)
        began = time.monotonic()
        # From before the first step to behind the last: the first checkpoint takes some seconds to come.
        while time.monotonic() - began < 30 and process.poll() is None and not list(folder.glob("checkpoints/step-*")):
            time.sleep(0.02)
        time.sleep(chosen.uniform(0.0, 3.0) if kills else 0.0)
        alive = family(process.pid)
        if process.poll() is not None or not alive:
            process.communicate()
            break  # it was quicker: the run is done
        victim = chosen.choice(alive)
        os.kill(victim, signal.SIGKILL)
        kills += 1
        output = process.communicate(timeout=60)[0]
        if victim == process.pid:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode != 0 or "result" in output, output
    output = finish(ranks, folder, **length)
    assert kills == 0 or "resumed" in output
    assert weights(folder) == weights(whole)
    assert losses(folder) == losses(whole)
    return kills


@pytest.mark.timeout(180)
def test_a_killed_run_goes_on_to_the_same_weights(ranks, tmp_path, whole):
    process = start(tmp_path)
    while process.poll() is None and not list(tmp_path.glob("checkpoints/step-*")):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    output = finish(ranks, tmp_path)
    assert "of 14 steps are left" in output, output
    assert weights(tmp_path) == weights(whole)
    assert losses(tmp_path) == losses(whole)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_is_killed_again_and_again_goes_on_to_the_same_weights(ranks, tmp_path, whole, seed):
    kill_and_go_on(ranks, tmp_path, whole, 5, seed)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_thirty_times_in_a_row_goes_on_to_the_same_weights(ranks, tmp_path):
    length = {"steps": 400, "every": 1}
    finish(ranks, tmp_path / "whole", **length)
    assert kill_and_go_on(ranks, tmp_path, tmp_path / "whole", 30, 30, **length) == 30


def wait_for(process: subprocess.Popen, folder: Path, pattern: str = "checkpoints/step-*") -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and not list(folder.glob(pattern)) and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.soak)])
def test_a_run_that_is_asked_to_stop_saves_and_says_so(ranks, tmp_path, whole, number):
    process = start(tmp_path, every=1000)  # so that what is there was saved for the stop
    wait_for(process, tmp_path, "metrics.jsonl")
    process.send_signal(number)
    output = " ".join(process.communicate(timeout=60)[0].split())
    assert process.returncode == 75, output
    assert f"stopped {number.name}; the same command resumes" in output and "(newest checkpoint)" in output
    step = int(max(path.name for path in tmp_path.glob("checkpoints/step-*")).partition("-")[2])
    command = output.partition("resume ")[2].partition(" # ")
    assert shlex.split(command[0])[-len(words_of(tmp_path, 14, 1000)) :] == [*words_of(tmp_path, 14, 1000)]
    assert command[2].startswith(f"continues after step {step} of 14")
    assert "of 14 steps are left" in finish(ranks, tmp_path)
    assert weights(tmp_path) == weights(whole)
    assert losses(tmp_path) == losses(whole)


def test_a_run_that_is_asked_to_stop_while_it_loads_is_started_again(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    process = start(tmp_path / "run", steps=20)
    assert process.stdout is not None and "ranks" in process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    output = " ".join(process.communicate(timeout=60)[0].split())
    assert process.returncode == 75, output
    assert "stopped SIGUSR1; the same command resumes" in output and "continues after step 14 of 20" in output
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_run_that_is_asked_for_a_checkpoint_saves_and_goes_on_to_its_end(ranks, tmp_path, whole):
    process = start(tmp_path, "--checkpoint.sigusr1=save", every=1000)
    while "loading torch" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)  # while torch is loaded: it is kept for the first step
    output = " ".join(process.communicate(timeout=120)[0].split())
    assert process.returncode == 0, output
    assert "saved SIGUSR1: a checkpoint of step 1," in output and "stopped" not in output
    assert weights(tmp_path) == weights(whole)


@pytest.mark.timeout(180)
@pytest.mark.soak
def test_a_run_that_is_over_its_time_goes_on_when_it_is_started_again(ranks, tmp_path):
    # A limit that is over at once: one step each, and then there is nothing left but the end.
    over = "--checkpoint.stop_after_s=0.001"
    for status in (75, 75, 0):
        finish(ranks, tmp_path / "run", over, steps=2, every="null", status=status)
    finish(ranks, tmp_path / "whole", steps=2)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_torchrun_that_is_ended_lets_the_ranks_save(ranks, tmp_path, whole):
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(tmp_path, every=1000, before=before)
    wait_for(process, tmp_path, "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    output = " ".join(process.communicate(timeout=60)[0].split())
    assert process.returncode != 0 and "stopped SIGTERM; the same command resumes" in output, output
    finish(ranks, tmp_path)
    assert weights(tmp_path) == weights(whole)


def test_a_run_is_gone_on_with_under_another_layout_and_fresh_moves_it_aside(ranks, tmp_path):
    finish(ranks, tmp_path, steps=4)
    output = finish(ranks, tmp_path, steps=6, num_ranks=1)
    assert "from step 4" in output and "2 of 6 steps are left" in output
    assert "from here on: train.steps 4 -> 6" in output
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    output = finish(ranks, tmp_path, "--fresh", steps=2)
    assert "resumed" not in output and [step for step, _ in losses(tmp_path)] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "checkpoints.previous-1").glob("step-*"))[-1] == "step-00000006"
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_run_is_not_gone_on_with_under_settings_that_would_have_no_effect(ranks, tmp_path):
    finish(ranks, tmp_path, steps=4)
    before = contents(tmp_path)
    changed = ("--optim.lr=1e-5", "--train.seed=7", "--model.args.dim=64")
    output = finish(ranks, tmp_path, *changed, steps=6, status=2)
    assert "optim.lr is 1e-05, and was 0.003" in output and "train.seed is 7, and was 0" in output
    assert "model.args.dim is 64, and was 32: the checkpoint holds the weights" in output
    assert "--model.args.dim=32, --optim.lr=0.003, --train.seed=0; or start from the beginning: --fresh" in output
    assert contents(tmp_path) == before
