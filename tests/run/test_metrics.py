"""Metrics that survive a crash, speed and time left, memory of a rank, words of a completion, the picture."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, UsageError
from shardwise.run.memory import memory_of, rss_bytes, state_bytes
from shardwise.run.metrics import MetricsWriter, Pace, plot_losses, read_metrics
from shardwise.run.sample import vocabulary, word_share


def test_lines_are_json_and_there_at_once(tmp_path):
    path = tmp_path / "a" / "b" / "m.jsonl"
    with contextlib.closing(MetricsWriter(path)) as out:
        out.write(step=1, loss=torch.tensor(2.5), name="x", none=None)
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 1, "loss": 2.5, "name": "x", "none": None}
        ]
        out.write(step=2, loss=float("nan"), worst=float("-inf"), parts=(1, 2), memory={0: 3})
    assert read_metrics(path)[1] == {"step": 2, "loss": "nan", "worst": "-inf", "parts": [1, 2], "memory": {"0": 3}}


def test_a_torn_line_is_left_out_with_a_word_and_not_continued(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\xc3')
    with pytest.warns(UserWarning, match=r"left out of .*m\.jsonl: line 2, which was cut off"):
        assert read_metrics(path) == [{"step": 1}]
    with contextlib.closing(MetricsWriter(path)) as out:
        out.write(step=3)
    said: list[str] = []
    assert read_metrics(path, say=said.append) == [{"step": 1}, {"step": 3}]
    assert said == [f"left out of {path}: line 2, which was cut off"]


def test_what_a_full_disk_took_of_a_line_is_cut_off_again(tmp_path, monkeypatch):
    real, path = os.write, tmp_path / "m.jsonl"

    def little_room(file, data):
        if len(data) < 20:  # the second write of a line
            raise OSError(28, "No space left on device")
        return real(file, data[:-10])

    with contextlib.closing(MetricsWriter(path)) as out:
        out.write(step=1)
        monkeypatch.setattr(os, "write", little_room)
        with pytest.raises(CheckpointError, match="No space left"):
            out.write(step=2, loss=2.5)
        monkeypatch.undo()
        assert path.read_text() == '{"step": 1}\n'
        out.write(step=3)
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


def test_a_killed_process_keeps_what_it_wrote(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys, os, signal\nfrom shardwise.run.metrics import MetricsWriter\nout = MetricsWriter(sys.argv[1])\n"
        "for step in range(100): out.write(step=step)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(path)] == list(range(100))


def test_a_closed_or_impossible_file_is_named(tmp_path):
    out = MetricsWriter(tmp_path / "m.jsonl")
    out.close()
    out.close()
    with pytest.raises(UsageError, match="closed metrics file"):
        out.write(step=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/m\.jsonl"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")


def test_pace_looks_at_the_last_steps():
    now = [0.0]
    pace = Pace(100, span=2, clock=lambda: now[0])
    assert pace.tokens_per_s == 0.0 and pace.seconds_left is None
    for step, at in ((1, 10.0), (2, 11.0), (3, 12.0)):  # the first step is slow
        now[0] = at
        pace.step(step, 500)
    assert pace.tokens_per_s == 500.0 and pace.seconds_left == 97.0


def test_pace_leaves_out_a_pause():
    now = [0.0]
    pace = Pace(10, clock=lambda: now[0])
    now[0] = 1.0
    pace.step(1, 100)
    now[0] = 31.0  # a validation
    pace.pause()
    now[0] = 32.0
    pace.step(2, 100)
    assert pace.tokens_per_s == 100.0 and pace.seconds_left == 8.0


def test_memory_counts_parameters_gradients_and_state():
    model = nn.Linear(10, 10, bias=False)
    model.tied = model.weight
    optim = torch.optim.AdamW(model.parameters())
    assert memory_of(model, optim).state == 400
    model(torch.ones(1, 10)).sum().backward()
    optim.step()
    use = memory_of(model, optim)
    assert (use.params, use.grads) == (400, 400)
    assert 800 <= use.optim <= 804  # two moments, and the step counter
    assert use.as_dict()["state"] == use.state == use.params + use.grads + use.optim
    optim.zero_grad()
    assert memory_of(model).grads == 0


def test_memory_of_a_process_is_that_of_the_process():
    gc.collect()  # or what earlier tests left goes meanwhile
    before = rss_bytes()
    block = torch.ones(256 << 20, dtype=torch.uint8)
    assert rss_bytes() - before > 128 << 20
    del block


def _sharded_bytes(layout: str) -> tuple[int, ...]:
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(
            nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)),
            world,
            example={"x": torch.ones(1, 10)},
        )
        optim = torch.optim.AdamW(model.parameters())
        with sw.accumulate(model, is_last=True):
            model(torch.ones(1, 10)).sum().backward()
        optim.step()
        use = memory_of(model, optim)
        return use.params, use.grads, *state_bytes(model, optim)


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_memory_of_a_sharded_model_is_that_of_the_rank(ranks, layout):
    for params, grads, here, alone in ranks.run(_sharded_bytes, 2, layout):
        assert (params, grads) == (400, 400)
        assert (here, alone) == (1608, 3208)  # of 8 are the optimizer's two step counters, which no rank divides


def test_word_share():
    words = vocabulary("The quick brown fox doesn't stop. I saw a fox.")
    assert {"the", "doesn't", "a", "i"} <= words
    assert word_share("the fox zzgr quick ", words) == 0.75
    assert word_share("The FOX.", words) == 1.0
    assert word_share("the fo", words) == 1.0  # the last word may be cut off
    assert word_share("x q the ", vocabulary("x q the")) == 1 / 3  # single letters are no words
    assert word_share("12 #+ \ufffd", words) == 0.0


def test_picture_is_drawn(tmp_path):
    curves = {"train": [(i, 5.0 / (i + 1)) for i in range(100)], "validation": [(50, 1.0), (100, float("nan"))]}
    assert plot_losses(curves, tmp_path / "loss.png", title="a run") is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plot_losses(curves, tmp_path / "loss.svg", title="a run", unit="nats/byte") is None
    svg = (tmp_path / "loss.svg").read_text()
    assert "<svg" in svg and "optimizer step" in svg


def test_without_matplotlib_the_reason_is_returned(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert "pip install 'shardwise[plot]'" in plot_losses({"a": [(0, 1.0)]}, tmp_path / "loss.png", title="a run")
    assert not (tmp_path / "loss.png").exists()


def test_a_picture_that_cannot_be_written_is_no_reason_to_end_a_run(tmp_path):
    told = plot_losses({"a": [(0, 1.0)]}, tmp_path / "none" / "loss.png", title="a run")
    assert told == f"no picture: {tmp_path}/none/loss.png cannot be written: No such file or directory"
