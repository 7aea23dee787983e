"""Figures of a run in CSV, TensorBoard and Weights & Biases, and in a logger of the user's."""

import csv
import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import msgspec
import pytest

from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig
from shardwise.run.loggers import CSVLogger, Loggers, TensorBoardLogger, WandbLogger, check_loggers, scalars
from shardwise.run.metrics import read_metrics

CONFIG = msgspec.to_builtins(RunConfig())
OFFLINE = {**CONFIG, "log": {**CONFIG["log"], "wandb_mode": "offline"}}


def row(step: int, kind: str = "step", **figures):
    return {"kind": kind, "step": step, **figures}


def lines_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]


def test_scalars_are_the_numbers_of_a_row():
    found = dict(scalars({"kind": "step", "step": 3, "steps": 9, "loss": 2.5, "skipped": True, "text": "x", "none": None,
                          "memory": {"rss": 7, "deep": {"a": 1}}, "per_rank": [1, 2]}))  # fmt: skip
    assert found == {"loss": 2.5, "skipped": 1.0, "memory/rss": 7.0, "memory/deep/a": 1.0}


class TestCSV:
    def test_a_line_for_each_row_and_a_column_for_each_name(self, tmp_path):
        logger = CSVLogger(tmp_path, CONFIG, 0)
        logger.log(row(1, loss=2.5, lr=1e-3))
        logger.log(row(1, "val", loss=3.0, num_tokens=100))
        logger.log({"kind": "weights", "path": "x"})  # nothing to plot
        logger.log(row(2, loss=math.nan, lr=1e-3, extra=float("-inf")))
        assert lines_of(tmp_path / "metrics.csv") == [
            {"kind": "step", "step": "1", "loss": "2.5", "lr": "0.001"},
            {"kind": "val", "step": "1", "loss": "3", "num_tokens": "100"},
            {"kind": "step", "step": "2", "loss": "nan", "lr": "0.001", "extra": "-inf"},
        ]

    def test_a_run_that_resumes_goes_on_after_its_last_step(self, tmp_path):
        first = CSVLogger(tmp_path, CONFIG, 0)
        for step in (1, 2, 3):
            first.log(row(step, loss=step / 8))
        CSVLogger(tmp_path, CONFIG, 2).log(row(3, loss=9.5, late=1))
        assert [(line["step"], line["loss"]) for line in lines_of(tmp_path / "metrics.csv")] == [
            ("1", "0.125"),
            ("2", "0.25"),
            ("3", "9.5"),
        ]

    def test_an_older_runs_file_is_moved_aside(self, tmp_path):
        CSVLogger(tmp_path, CONFIG, 0).log(row(1, loss=0.5))
        CSVLogger(tmp_path, CONFIG, 0).log(row(1, loss=0.25))
        assert lines_of(tmp_path / "metrics.csv")[0]["loss"] == "0.25"
        assert lines_of(tmp_path / "metrics.previous.csv")[0]["loss"] == "0.5"

    def test_what_it_wrote_is_there_at_once(self, tmp_path):
        logger = CSVLogger(tmp_path, CONFIG, 0)
        for step in range(1, 50):
            logger.log(row(step, loss=1 / step))
            assert len(lines_of(tmp_path / "metrics.csv")) == step


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


class TestTensorBoard:
    def test_scalars_by_kind_and_texts(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logger = TensorBoardLogger(tmp_path, CONFIG, 0)
        logger.log(row(1, loss=2.5, memory={"rss": 7}))
        logger.log(row(1, "val", loss=3.0))
        logger.log({"kind": "sample", "when": "before", "prompt": "a", "text": "b", "word_share": 0.5})
        logger.close()
        found = scalars_of(tmp_path / "tensorboard")
        assert found["step/loss"] == [(1, 2.5)] and found["val/loss"] == [(1, 3.0)]
        assert found["step/memory/rss"] == [(1, 7.0)]
        texts = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["tensors"]
        assert {"config/text_summary", "sample/before/text_summary"} <= set(texts)

    def test_a_run_that_resumes_replaces_what_came_after(self, tmp_path):
        for done, steps, loss in ((0, (1, 2, 3), 1.0), (2, (3, 4), 9.0)):
            logger = TensorBoardLogger(tmp_path, CONFIG, done)
            for step in steps:
                logger.log(row(step, loss=loss))
            logger.close()
        assert scalars_of(tmp_path / "tensorboard")["step/loss"] == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]

    def test_an_older_runs_files_are_moved_aside(self, tmp_path):
        for loss in (1.0, 2.0, 3.0):
            logger = TensorBoardLogger(tmp_path, CONFIG, 0)
            logger.log(row(1, loss=loss))
            logger.close()
        assert scalars_of(tmp_path / "tensorboard")["step/loss"] == [(1, 3.0)]
        assert scalars_of(tmp_path / "tensorboard.previous")["step/loss"] == [(1, 2.0)]


def history_of(folder: Path, num_rows: int) -> list[dict[str, float]]:
    """What the files of an offline run hold, in the order of steps; the process that writes them may be a moment behind."""
    until = time.monotonic() + 20
    while len(rows := _history_of(folder)) < num_rows and time.monotonic() < until:
        time.sleep(0.1)
    return rows


def _history_of(folder: Path) -> list[dict[str, float]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return sorted(rows, key=lambda found: found["train_step"])


def _records_of(data: bytes) -> list[bytes]:
    """A file of Weights & Biases: LevelDB's log format after a header of 7 bytes; blocks of 32 KiB."""
    found, parts, place = [], b"", 7
    while place + 7 <= len(data):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:  # too little for a header: padding
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        if kind in (1, 4):  # the whole record, or its last part
            found.append(parts)
            parts = b""
        place += 7 + length
    return found


@pytest.mark.soak
def test_weights_and_biases_offline_and_resumed(tmp_path):
    for done, step in ((0, 1), (1, 2)):
        logger = WandbLogger(tmp_path, OFFLINE, done)
        logger.log(row(step, loss=2.5 / step))
        logger.log(row(step, "val", loss=3.0))
        logger.close()
    assert history_of(tmp_path, 4) == [
        {"step/loss": 2.5, "train_step": 1},
        {"val/loss": 3.0, "train_step": 1},
        {"step/loss": 1.25, "train_step": 2},
        {"val/loss": 3.0, "train_step": 2},
    ]
    ids = {file.name for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    assert ids == {f"run-{(tmp_path / 'wandb/shardwise-run-id').read_text().strip()}.wandb"}  # one run, in two parts


OWN = """
import json

class Own:
    def __init__(self, folder, config, done):
        self.file = open(folder / "own.txt", "a")
        self.file.write(f"open {config['train']['steps']} {done}\\n")

    def log(self, row):
        if row.get("loss") == 13.0:
            raise OSError("the service is gone")
        self.file.write(json.dumps(row) + "\\n")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:Own"


def test_a_logger_of_ones_own_that_fails_is_told_once_and_left_out(tmp_path, own):
    config = msgspec.convert({"log": {"to": [own, "csv"]}}, RunConfig)
    troubles: list[str] = []
    loggers = Loggers(config, tmp_path, 0, troubles.append)
    for step, loss in enumerate((1.0, 13.0, 2.0), 1):
        loggers.log(row(step, loss=loss))
    loggers.close()
    loggers.close()
    assert troubles == [f"log.to={own}: OSError: the service is gone; training goes on without it"]
    assert [line["loss"] for line in lines_of(tmp_path / "metrics.csv")] == ["1", "13", "2"]
    assert (tmp_path / "own.txt").read_text().splitlines()[-1] == "closed"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return None", "it returned NoneType, which has no log and no close()"),
        ("return type('Half', (), {'log': print})()", "it returned Half, which has no close()"),
    ],
)
def test_what_is_no_logger_is_told_at_the_start(tmp_path, body, why):
    (tmp_path / "own.py").write_text(f"def make(folder, config, done):\n    {body}\n")
    troubles: list[str] = []
    Loggers(msgspec.convert({"log": {"to": [f"{tmp_path}/own.py:make"]}}, RunConfig), tmp_path, 0, troubles.append)
    assert len(troubles) == 1 and why in troubles[0]


class TestRefused:
    def test_a_package_that_is_missing(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"tensorboard is not installed(.|\n)*shardwise\[log\]"):
            check_loggers(("tensorboard",), None, "default")
        check_loggers(("csv",), None, "default")

    def test_weights_and_biases_without_a_key(self, monkeypatch, tmp_path):
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        with pytest.raises(ConfigError, match="no key is known here"):
            check_loggers(("wandb",), None, "default")
        check_loggers(("wandb",), "offline", "default")
        monkeypatch.setenv("WANDB_MODE", "offline")
        check_loggers(("wandb",), None, "default")
        with pytest.raises(ConfigError, match="no key is known here"):
            check_loggers(("wandb",), "online", "default")
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x")
        check_loggers(("wandb",), "online", "default")

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--log.to=tensorbord"], "did you mean 'tensorboard'?"),
            (["--log.to=csv,csv"], "one is named twice"),
            (["--log.to=no.such:thing"], "no.such"),
            (["--log.project=x"], "log.project='x' without wandb"),
            (["--log.wandb_mode=offline", "--log.to=csv"], "log.wandb_mode='offline' without wandb"),
        ],
    )
    def test_words_that_cannot_be_meant(self, capsys, words, told):
        assert main(["train", "--print-config", *words]) == 2
        assert told in capsys.readouterr().err

    def test_torch_is_not_loaded_to_find_out(self):
        assert main(["train", "--print-config", "--log.to=csv,tensorboard"]) == 0
        assert "tensorboard.backend" not in sys.modules or "torch" in sys.modules


TINY = ("--model.args={dim: 32, num_layers: 2, ffn: 48}", "--data.seq_len=32", "--data.global_batch=8",
        "--data.micro_batch=2", "--log.every=1", "--log.plot=false", "--checkpoint.every=2")  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_a_run_and_its_second_half_are_one_in_every_logger(ranks, tmp_path, text, own):
    from cli.commands import on_ranks

    words = (
        "--log.to",
        f"[csv, tensorboard, wandb, '{own}']",
        "--log.wandb_mode=offline",
        f"--data.path={text}",
        "--train.prove=false",
    )
    said = ""
    for steps in (3, 5):
        said += on_ranks(
            ranks, "train", *TINY, f"--log.to={words[1]}", *words[2:], f"--train.steps={steps}", folder=tmp_path
        )
    assert "trouble" not in said, said
    folder = tmp_path / "runs/latest"
    losses = [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "step"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    in_csv = [line for line in lines_of(folder / "metrics.csv") if line["kind"] == "step"]
    assert [(int(line["step"]), float(line["loss"])) for line in in_csv] == losses
    in_board = scalars_of(folder / "tensorboard")["step/loss"]
    assert [step for step, _ in in_board] == [1, 2, 3, 4, 5] and all(
        abs(a - b) < 1e-6 * abs(b) for (_, a), (_, b) in zip(in_board, losses, strict=True)
    )
    in_wandb = [(r["train_step"], r["step/loss"]) for r in history_of(folder, 7) if "step/loss" in r]
    assert dict(in_wandb) == dict(losses)
    ids = {file.name for file in folder.glob("wandb/offline-run-*/run-*.wandb")}
    assert ids == {f"run-{(folder / 'wandb/shardwise-run-id').read_text().strip()}.wandb"}  # one run, in two parts
    told = (folder / "own.txt").read_text().splitlines()
    assert told.count("closed") == 2 and [line for line in told if line.startswith("open")] == ["open 3 0", "open 5 3"]
