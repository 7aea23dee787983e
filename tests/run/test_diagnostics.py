"""A trace of some steps, a snapshot of the device's memory, and how arithmetic is done."""

import errno
import gzip
import json
import types
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.run import diagnostics
from shardwise.run.config import Train
from shardwise.run.diagnostics import Diagnostics, arithmetic

CPU, CUDA = (types.SimpleNamespace(device=torch.device(kind), rank=0, is_main=True) for kind in ("cpu", "cuda"))


def run(train: Train, folder: Path, steps: int, world=CPU, first: int = 1) -> list[str]:
    told: list[str] = []
    looks = Diagnostics(train, world, folder, told.append, told.append)
    for step in range(first, steps + 1):
        looks.begin(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        looks.end(step)
    looks.close()
    return told


def steps_in(path: str) -> list[str]:
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step ")})


def test_a_trace_of_the_steps_asked_for(tmp_path):
    (path,) = run(Train(profile="3:5"), tmp_path, 7)
    assert path == str(tmp_path / "profile/steps-3-4-rank-0.json.gz") and steps_in(path) == ["step 3", "step 4"]


def test_a_run_that_ends_within_the_window_leaves_what_there_was(tmp_path):
    (path,) = run(Train(profile="3:9"), tmp_path, 4)
    assert path.endswith("steps-3-4-rank-0.json.gz") and steps_in(path) == ["step 3", "step 4"]


def test_a_run_that_is_resumed_within_the_window_traces_the_rest(tmp_path):
    (path,) = run(Train(profile="3:7"), tmp_path, 9, first=5)
    assert path.endswith("steps-5-6-rank-0.json.gz") and steps_in(path) == ["step 5", "step 6"]
    assert run(Train(profile="3:7"), tmp_path, 9, first=7) == []


@pytest.mark.parametrize(("done", "told"), [(2, False), (6, False), (7, True), (20, True)])
def test_a_window_before_the_resumed_steps_is_told(tmp_path, done, told):
    troubles: list[str] = []
    looks = Diagnostics(Train(profile="3:8"), CPU, tmp_path, print, troubles.append)
    looks.tell_missed(done)
    assert (
        troubles
        == [f"train.profile records nothing: its steps are before step {done + 1}, with which this run goes on"] * told
    )


def test_a_trace_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path):
        Path(path).touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: full(path))
    monkeypatch.setattr(diagnostics, "record_history", lambda on: None)
    monkeypatch.setattr(diagnostics, "dump_history", full)
    for train, world in ((Train(profile=2), CPU), (Train(memory_snapshot=2), CUDA)):
        (said,) = run(train, tmp_path, 4, world)
        assert "No space left on device; training goes on without it" in said
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_trace_of_one_step(tmp_path):
    (path,) = run(Train(profile=2), tmp_path, 4)
    assert path.endswith("steps-2-2-rank-0.json.gz") and steps_in(path) == ["step 2"]


def test_without_the_option_nothing_is_written(tmp_path):
    assert run(Train(), tmp_path, 3) == [] and list(tmp_path.iterdir()) == []


def test_other_ranks_are_profiled_when_all_are_asked_for(tmp_path):
    other = types.SimpleNamespace(device=torch.device("cpu"), rank=3, is_main=False)
    assert run(Train(profile="1:2"), tmp_path, 2, other) == []
    assert run(Train(profile="1:2", profile_ranks="all"), tmp_path, 2, other)[0].endswith("rank-3.json.gz")


def test_a_snapshot_is_of_one_step(tmp_path, monkeypatch):
    """The allocator's history on cuda; here two functions stand in for it."""
    calls: list[object] = []
    monkeypatch.setattr(diagnostics, "record_history", calls.append)
    monkeypatch.setattr(diagnostics, "dump_history", lambda path: calls.append(Path(path).name))
    told = run(Train(memory_snapshot=3), tmp_path, 5, CUDA)
    assert calls == [True, "memory-step-3-rank-0.pickle", False]
    assert told == [str(tmp_path / "profile/memory-step-3-rank-0.pickle")]


def test_what_needs_cuda_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.memory_snapshot=3 on cpu"):
        Diagnostics(Train(memory_snapshot=3), CPU, tmp_path, print, print)
    with pytest.raises(ConfigError, match=r"train\.tf32=false on cpu"), arithmetic(Train(tf32=False), CPU):
        pass


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest"), (None, "medium")])
def test_tf32_is_set_and_put_back(tf32, precision):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    with arithmetic(Train(tf32=tf32), CUDA):
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 == (before[1] if tf32 is None else tf32)
    assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cudnn.allow_tf32 == before[1]
    torch.set_float32_matmul_precision(before[0])


def test_deterministic_kernels_or_an_error_and_put_back():
    x, values, places = torch.zeros(4), torch.ones(4), torch.zeros(4, dtype=torch.long)
    x.put_(places, values)  # which of equal places wins is not fixed
    with arithmetic(Train(deterministic=True), CPU), pytest.raises(RuntimeError, match="deterministic"):
        x.put_(places, values)
    assert not torch.are_deterministic_algorithms_enabled()


def test_anomalies_are_named_and_put_back():
    x = torch.zeros(3, requires_grad=True)
    with arithmetic(Train(anomaly=True), CPU), pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
        (x.sqrt() * 0).sum().backward()
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--train.profile=0"], "write 10:13 for steps 10, 11 and 12"),
        (["--train.profile=5:5"], "write 10:13 for steps 10, 11 and 12"),
        (["--train.profile=0:3"], "write 10:13 for steps 10, 11 and 12"),
        (["--train.profile=three"], "write 10:13 for steps 10, 11 and 12"),
        (["--train.profile=10:13", "--train.steps=11"], "the run ends before step 12"),
        (["--train.memory_snapshot=12", "--train.steps=11"], "the run ends before step 12"),
        (["--train.profile_ranks=all"], "nothing is profiled"),
    ],
)
def test_steps_that_cannot_be_meant(capsys, words, told):
    assert main(["train", "--print-config", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_run_writes_traces_and_stays_the_same(ranks, tmp_path):
    from cli.commands import on_ranks

    from shardwise.run.metrics import read_metrics

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    words = ("--model.args={dim: 32, num_layers: 2, ffn: 48}", "--data.seq_len=32", "--data.global_batch=8", "--data.micro_batch=2",
             "--train.steps=4", "--log.every=1", "--log.plot=false", "--train.prove=false", f"--data.path={tmp_path / 'text.txt'}")  # fmt: skip
    losses = []
    for more in (
        (),
        ("--train.profile=2:4", "--train.profile_ranks=all", "--train.deterministic=true", "--train.anomaly=true"),
    ):
        said = on_ranks(ranks, "train", *words, *more, folder=tmp_path)
        rows = read_metrics(tmp_path / "runs/latest/metrics.jsonl")
        losses.append([(row["loss"], row["tflops"] > 0) for row in rows if row["kind"] == "step"])
    assert losses[0] == losses[1]
    assert "written runs/latest/profile/steps-2-3-rank-0.json.gz" in said
    for rank in (0, 1):
        path = tmp_path / f"runs/latest/profile/steps-2-3-rank-{rank}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert len([e for e in events if e.get("name") == "Optimizer.step#AdamW.step" and e.get("ph") == "X"]) == 2
