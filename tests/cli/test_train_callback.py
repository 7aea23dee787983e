"""``train.callback``: it sees every step on every rank, changes no bit of the run, and ends it where any rank says so."""

import json
import sys
from pathlib import Path

import pytest
from cli.commands import on_ranks, run_command

from shardwise.cli import main as cli
from shardwise.errors import ConfigError
from shardwise.run.build import make_callback

RUN = (
    "--data.global_batch=4", "--data.micro_batch=2", "--data.seq_len=32", "--train.eval_every=0", "--log.plot=false",
    "--data.val_fraction=0.001", "--model.args={dim: 32, num_layers: 2, ffn: 48, num_heads: 4}", "--schedule.name=constant",
    "--schedule.warmup_steps=1", "--checkpoint.every=2",
)  # fmt: skip
OWN = """
import os, random, torch
from pathlib import Path

RANK = os.environ.get("RANK", "0")

def see(out):
    torch.rand(3), random.random()
    Path(f"comm-{RANK}.txt").write_text(Path("/proc/self/comm").read_text() if Path("/proc/self/comm").exists() else "")
    with Path(f"seen-{RANK}.txt").open("a") as file:
        file.write(f"{out.step} {out.loss}\\n")

def third(out):
    see(out)
    return out.step == 3 and RANK == "1"

def last(out):
    return out.step == 3

def slip(out):
    return 1 if RANK == "1" and out.step == 2 else None

def breaks(out):
    if RANK == "1" and out.step == 2:
        raise ZeroDivisionError("in a callback")

number = 3
"""


def train(ranks, folder: Path, name: str, steps: int, *more: str, **options) -> str:
    (folder / "own.py").write_text(OWN)
    return on_ranks(
        ranks, "train", *RUN, f"--log.dir={name}", f"--train.steps={steps}", *more, folder=folder, **options
    )


def rows(folder: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def weights(folder: Path) -> bytes:
    return (folder / "weights" / "model.safetensors").read_bytes()


def test_one_rank_ends_the_run_in_order_and_it_can_go_on(ranks, tmp_path):
    plain, ended = tmp_path / "plain", tmp_path / "ended"
    unproved = "--train.prove=false"
    train(ranks, tmp_path, "plain", 3, unproved)
    said = train(ranks, tmp_path, "ended", 8, unproved, "--train.callback=own.py:third")
    assert "ended after step 3, as train.callback=own.py:third asked" in said and "after 3 steps" in said
    assert weights(ended) == weights(plain)
    assert [row["step"] for row in rows(ended, "step")] == [1, 3] and [row["step"] for row in rows(ended, "val")] == [3]
    assert rows(ended, "val")[0]["loss"] == rows(plain, "val")[0]["loss"]
    assert max(path.name for path in ended.glob("checkpoints/step-*")) == "step-00000003"
    seen = [(tmp_path / f"seen-{rank}.txt").read_text() for rank in (0, 1)]
    assert seen[0] == seen[1] and len(seen[0].splitlines()) == 3
    if sys.platform == "linux":  # as ps shows them
        assert [(tmp_path / f"comm-{rank}.txt").read_text() for rank in (0, 1)] == ["sw:0/2 train\n", "sw:1/2 train\n"]
    more = train(ranks, tmp_path, "ended", 5, unproved, "--train.callback=own.py:see")
    assert "from step 3" in more
    assert len((tmp_path / "seen-0.txt").read_text().splitlines()) == 5
    train(ranks, tmp_path, "plain", 5, unproved)
    assert weights(ended) == weights(plain)


def test_true_after_the_last_step_of_the_plan_changes_nothing(ranks, tmp_path):
    said = train(ranks, tmp_path, "run", 3, "--train.callback=own.py:last", num_ranks=1)
    assert "ended" not in said and "proof largest gradient difference" in said


@pytest.mark.parametrize(("name", "told"), [("slip", "it returned int 1 after step 2")])
def test_what_one_rank_does_wrong_ends_all_with_its_name(ranks, tmp_path, name, told):
    (tmp_path / "own.py").write_text(OWN)
    words = ("train", *RUN, "--log.dir=run", "--train.steps=5", f"--train.callback=own.py:{name}")
    done = ranks.run(run_command, 2, str(tmp_path), words, timeout_s=100)
    assert [code for code, _, _ in done] == [1, 2]
    assert f"train.callback='own.py:{name}': {told}" in done[1][2] and "rank 1" in done[0][2]
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.parametrize("answer", [1, 0, "no", [], 1.0])
def test_only_true_false_and_none_are_answers(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answer.py").write_text(f"def fn(out): return {answer!r}\nnumber = 3\n")

    class Out:
        step = 4

    with pytest.raises(ConfigError, match=r"train.callback='answer.py:fn': it returned .* after step 4"):
        make_callback("answer.py:fn")(Out())
    with pytest.raises(ConfigError, match="it is a int, and is called after each step"):
        make_callback("answer.py:number")


def test_a_name_that_is_none_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    for given, told in (("own", "it does not name a function"), ("own.py:thrid", "did you mean 'third'?")):
        assert cli.main(["train", f"--train.callback={given}"]) == 2
        assert told in capsys.readouterr().err
