"""``shardwise train`` on datasets of Hugging Face that were saved: the run of the JSONL with the same records, resumed exactly; what
cannot be read is refused before a rank starts."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from cli.commands import on_ranks, run_command
from models import chat

from shardwise.cli import main as cli
from shardwise.config.render import dump_config
from shardwise.run.config import load_config
from shardwise.run.metrics import read_metrics

RUN = (
    "--data.seq_len=48",
    "--data.global_batch=4",
    "--data.micro_batch=2",
    "--schedule.name=constant",  # the same, however many steps a run has
    "--schedule.warmup_steps=0",
    "--log.every=1",
    "--log.plot=false",
)


def conversation(i: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": f"I am {i}"}
    return {
        "messages": [{"role": "user", "content": "how are you" * (1 + i % 3)}, answer | ({"n": i} if i % 2 else {})]
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A model directory; one DatasetDict of it, with train, validation and test; and the first two as JSONL."""
    folder = chat.saved(tmp_path_factory.mktemp("small"))
    datasets.disable_progress_bars()
    parts = {"train": range(24), "validation": range(30, 36), "test": range(40, 42)}
    rows = {name: [conversation(i) for i in numbers] for name, numbers in parts.items()}
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in rows.items()})
    made.save_to_disk(folder / "saved", num_shards={"train": 2, "validation": 1, "test": 1})
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    return folder


def words(small: Path, dest: Path, data: Path, *more: str) -> list[str]:
    return ["train", f"--model.hf={small}", f"--data.path={data}", f"--log.dir={dest}", *RUN, *more]


def steps(folder: Path, kind: str = "step") -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == kind}


# Single records of it are read as those of JSONL, of which test_train_chat.py sees each by itself.
@pytest.mark.parametrize("pack", [pytest.param("false", marks=pytest.mark.soak), "true"])
def test_a_saved_dataset_is_trained_on_as_the_jsonl_and_is_resumed(ranks, small, tmp_path, pack):
    more = ("--parallel.layout=dp_shard=2", f"--data.pack={pack}", "--train.eval_every=2", "--checkpoint.every=2")
    val = f"--data.val_path={small / 'validation.jsonl'}"
    lines, rows = tmp_path / "lines", tmp_path / "rows"
    first = (*more, "--train.prove=false")
    on_ranks(ranks, *words(small, lines, small / "train.jsonl", val, *first, "--train.steps=4"), folder=tmp_path)
    kept = f"--data.cache={tmp_path / 'kept'}"
    said = on_ranks(ranks, *words(small, rows, small / "saved", kept, *first, "--train.steps=2"), folder=tmp_path)
    assert "records 24 records" in said and f"of {small / 'saved' / 'train'}, " in said
    assert len([*(tmp_path / "kept").glob("tokens-*")]) == 2
    assert load_config(rows / "config.yaml").config.data.val_path == str(small / "saved" / "validation")
    moved = shutil.copytree(small / "saved", tmp_path / "moved")
    said = on_ranks(ranks, *words(small, rows, moved, kept, *more, "--train.steps=4"), folder=tmp_path)
    assert "from step 2" in said and f"of {moved / 'train'}, as kept" in said and "proof" in said
    assert len([*(tmp_path / "kept").glob("tokens-*")]) == 2
    assert steps(rows) == pytest.approx(steps(lines)) and steps(rows, "val") == pytest.approx(steps(lines, "val"))
    assert [*steps(rows)] == [1, 2, 3, 4]
    other = tmp_path / "other"
    datasets.load_from_disk(moved / "train").shuffle(seed=0).save_to_disk(other)
    again = words(small, rows, other, f"--data.val_path={moved / 'validation'}", *more, "--train.steps=6")
    assert "data.path: not as in the run" in on_ranks(ranks, *again, folder=tmp_path, status=2)


def test_ranks_with_other_rows_are_told(ranks, small, tmp_path):
    """Each node has its own disk: two copies under one path, of which one is older."""
    for rank, seed in enumerate((0, 1)):
        (tmp_path / f"{rank}").mkdir()
        made = datasets.load_from_disk(small / "saved" / "train").shuffle(seed=seed)
        made.save_to_disk(tmp_path / f"{rank}" / "data")
    given = words(small, tmp_path / "run", Path("data"), "--parallel.layout=dp_shard=2", "--train.steps=1")
    done = ranks.run(own_disk, 2, str(tmp_path), given, timeout_s=100)
    said = " ".join("".join(err for _, _, err in done).split())
    assert {code for code, _, _ in done} == {1} and "the ranks' configurations" in said and "data.path" in said, said


def own_disk(folder: str, given: list[str]) -> tuple[int, str, str]:
    return run_command(str(Path(folder) / os.environ["RANK"]), tuple(given))


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a name of the Hub": (
        ("--data.path=HuggingFaceH4/ultrachat_200k", "--data.pack=true", "--data.cache=kept"),
        "nothing is downloaded: a dataset of the Hugging Face Hub is saved first",
    ),
    "no file": (("--data.path=FOLDER/no.txt",), "there is no such file or directory"),
    "another directory": (("--data.path=FOLDER/tokens",), "it is not one that save_to_disk of datasets has written"),
    "several splits to validate": (("--data.path=FOLDER/saved", "--data.val_path=FOLDER/saved"), "one split is read"),
    "a fraction too": (("--data.path=FOLDER/saved", "--data.val_fraction=0.2"), "the split validation"),
    "row 3": (("--data.path=FOLDER/wrong",), "row 3 of"),
    "bytes of it": (("--data.path=FOLDER/saved/train", "--data.tokenizer=bytes"), "it is a directory"),
    "a text beside it": (("--data.path=FOLDER/saved", "--data.val_path=FOLDER/text.txt"), "give both as"),
    "no tokenizer": (("--data.path=FOLDER/saved",), "without data.tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_before_a_rank_starts(small, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    (tmp_path / "saved").symlink_to(small / "saved")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "text.txt").write_text("Hello there. " * 99)
    datasets.Dataset.from_dict({"text": ["a", "b", "c", None]}).save_to_disk(tmp_path / "wrong")
    given, said = REFUSED[name]
    out = tmp_path / "out"
    more = [word.replace("FOLDER", str(tmp_path)) for word in given]
    more += [] if name == "no tokenizer" else [f"--model.hf={small}"]
    status = cli.main(["train", f"--log.dir={out}", *more])
    told = " ".join(capsys.readouterr().err.split())
    assert status == 2 and said in told and not out.exists(), told


def test_the_configuration_of_a_run_is_read_where_its_data_is_not(small, tmp_path):
    """As ``shardwise generate`` does, from the folder of a run that was copied to another machine."""
    given = [f"--model.hf={small}", f"--data.path={small / 'saved'}", "--data.pack=true", "--data.cache=kept"]
    text = dump_config(load_config(None, [word.removeprefix("--") for word in given]).config)
    (tmp_path / "config.yaml").write_text(text.replace(str(small / "saved"), "/not/here"))
    found = load_config(tmp_path / "config.yaml").config.data
    assert (found.path, found.val_path, found.tokenizer) == ("/not/here/train", "/not/here/validation", str(small))
