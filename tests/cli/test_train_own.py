"""``shardwise train`` on models, data and losses of the user's own: named functions, the same numbers, and what is refused."""

from pathlib import Path

import pytest
import torch
from cli.commands import on_ranks

from shardwise.cli import main as cli
from shardwise.run.metrics import FIGURES, read_metrics

ROOT = Path(__file__).resolve().parents[2]
OWN = "examples/own_data.py"
FEW = ("--train.steps=6", "--train.eval_every=3", "--log.every=1", "--log.plot=false")
RUNS = {
    "images": (f"--model.build={OWN}:images_model", f"--data.build={OWN}:images", "--data.args={num: 64}"),
    "diffusion": ("examples/diffusion.yaml", "--data.args={num: 96}"),
}
REGRESSION = """
import torch
from torch import nn

def stream(num=64):
    class Rows:
        def __iter__(self):
            for i in range(num):
                x = torch.full((3,), i / num)
                yield {"x": x, "y": x.sum()[None]}
    return Rows()

def table(num=64):
    return list(stream(num))

def empty(num=64):
    return [{"x": each["x"], "y": each["y"], "labels": torch.tensor([-100])} for each in table(num)]

def of_labels(output, batch):
    return ((output - batch["y"]).square() * (batch["labels"] != -100)).sum()

def model():
    return nn.Linear(3, 1)

def squares(output, batch):
    return {"loss": (output - batch["y"]).square().sum(), "absolute": (output - batch["y"]).abs().sum().detach()}

squares.count = lambda batch: len(batch["y"])

def taken(output, batch):
    return {**squares(output, batch), "epoch": squares(output, batch)["absolute"]}

taken.count = squares.count

def nothing():
    return 3

def one():
    return [torch.zeros(3)]

def broken(num, other):
    return []
"""


@pytest.mark.quick("images")
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_validates_and_is_proved(ranks, tmp_path, name):
    """Under one rank and two the losses are the same, and so are the gradients of one process, whatever a forward draws."""
    curves = []
    for number in (1, 2):
        dest = tmp_path / str(number)
        said = on_ranks(ranks, "train", *RUNS[name], *FEW, f"--log.dir={dest}", folder=ROOT, num_ranks=number)
        assert "proof largest gradient difference" in said
        rows = read_metrics(dest / "metrics.jsonl")
        curves.append([row["loss"] for row in rows if row["kind"] in ("step", "val")])
    assert len(curves[0]) == 8
    steps = [i for i in range(8) if name == "images" or i not in (3, 7)]  # each rank draws its own noise to validate
    assert [curves[1][i] for i in steps] == pytest.approx([curves[0][i] for i in steps], rel=1e-4)
    assert (tmp_path / "2" / "weights" / "model.safetensors").is_file()


@pytest.mark.parametrize("data", ["table", "stream"])
def test_a_regression_with_a_metric(ranks, tmp_path, data):
    (tmp_path / "own.py").write_text(REGRESSION)
    words = (
        "--model.build=own.py:model",
        f"--data.build=own.py:{data}",
        "--train.loss=own.py:squares",
        "--data.micro_batch=4",
    )
    said = on_ranks(ranks, "train", *words, *FEW, "--log.dir=run", folder=tmp_path)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    assert all({"loss", "absolute"} <= row.keys() and row["tokens"] in (16, 10) for row in steps)
    assert all(row.keys() - {"absolute"} <= FIGURES for row in rows if row["kind"] in ("step", "val"))
    assert ("a stream of samples" in said) == (data == "stream")
    assert len([row for row in rows if row["kind"] == "val"]) == (2 if data == "table" else 0)


def test_an_entry_of_the_loss_with_the_name_of_a_figure_is_refused(ranks, tmp_path):
    (tmp_path / "own.py").write_text(REGRESSION)
    words = ("--model.build=own.py:model", "--data.build=own.py:table", "--train.loss=own.py:taken")
    words += ("--train.steps=2", "--train.eval_every=0", "--data.val_fraction=0")  # as a validation refuses it too
    said = on_ranks(ranks, "train", *words, "--log.dir=run", folder=tmp_path, num_ranks=1, status=2)
    assert "a loss with an entry 'epoch'" in said and "'loss_epoch'" in said


OWN_LOSS = """
import torch.nn.functional as F
from torch import nn

class GPT(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.wte, self.up, self.head = nn.Embedding(256, dim), nn.Linear(dim, dim), nn.Linear(dim, 256)

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        logits = self.head(x + self.up(x).relu())
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

def logits(model, batch):
    return model(batch["input_ids"], batch["labels"])[0]
"""


def test_a_model_that_returns_its_loss(ranks, tmp_path):
    """As a nanoGPT has it: the run, its validation and its proof are those of the cross entropy of its logits."""
    (tmp_path / "own.py").write_text(OWN_LOSS)
    words = ("--model.build=own.py:GPT", "--data.seq_len=16", "--data.val_fraction=0.01", *FEW)
    rows = {}
    for name, more in {
        "model": ("--train.loss=model",),
        "logits": ("--train.forward=own.py:logits",),
    }.items():
        said = on_ranks(ranks, "train", *words, *more, f"--log.dir={name}", folder=tmp_path)
        assert "proof largest gradient difference" in said
        rows[name] = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
    assert len(rows["model"]) == 8 and rows["model"] == pytest.approx(rows["logits"], rel=1e-5)


@pytest.mark.parametrize(("steps", "seen"), [(3, 3), (30, 10)])
def test_a_run_in_which_no_label_is_valid_ends_with_an_error(ranks, tmp_path, steps, seen):
    (tmp_path / "own.py").write_text(REGRESSION)
    words = (
        "--model.build=own.py:model",
        "--data.build=own.py:empty",
        "--train.loss=own.py:of_labels",
        "--train.eval_every=0",
    )
    words += (
        "--data.micro_batch=4",
        "--log.plot=false",
        "--data.val_fraction=0",
        "--train.prove=false",
        "--log.dir=run",
    )
    said = on_ranks(ranks, "train", *words, f"--train.steps={steps}", folder=tmp_path, status=1)
    assert f"{seen} windows of 16 samples without a valid label" in said and "look at the labels" in said, said
    assert not (tmp_path / "run/model.safetensors").exists()


def test_it_resumes_in_the_middle_of_an_epoch(ranks, tmp_path):
    (tmp_path / "own.py").write_text(REGRESSION)
    words = (
        "--model.build=own.py:model",
        "--data.build=own.py:table",
        "--train.loss=own.py:squares",
        "--data.micro_batch=4",
    )
    words += (
        "--checkpoint.every=2",
        "--train.eval_every=0",
        "--log.every=1",
        "--log.plot=false",
        "--data.val_fraction=0",
        "--train.prove=false",
    )
    on_ranks(ranks, "train", *words, "--train.steps=7", "--log.dir=whole", folder=tmp_path)
    on_ranks(
        ranks,
        "train",
        *words,
        "--train.steps=6",
        "--schedule.name=constant",
        "--log.dir=parts",
        folder=tmp_path,
        num_ranks=1,
    )
    moved = [word.replace("own.py", "moved/own.py") for word in words]
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/own.py").write_text(f"# edited\n{REGRESSION}")
    said = on_ranks(
        ranks, "train", *moved, "--train.steps=7", "--schedule.name=constant", "--log.dir=parts", folder=tmp_path
    )
    assert "from step 6" in said
    for key in ("model.build=moved/own.py:model", "data.build=moved/own.py:table", "train.loss=moved/own.py:squares"):
        assert f"the file of {key} has changed since the checkpoint was saved" in said
    told = on_ranks(
        ranks, "train", *words, "--train.steps=8", "--log.dir=parts", "--data.args={num: 60}", folder=tmp_path, status=2
    )
    assert "data.args" in told


REFUSED = {
    "not a target": (("--data.build=own",), "it does not name a function"),
    "no such function": (("--data.build=own.py:tabel",), "own.py:tabel"),
    "no loss": (("--train.loss=modell",), "or model, for the loss that the model returns"),
    "no such loss": (("--train.loss=own.py:square",), "train.loss"),
    "args alone": (("--data.args={num: 3}",), "without data.build"),
    "with a path": (("--data.build=own.py:table", "--data.path=own.py"), "remove data.path"),
    "with seq_len": (("--data.build=own.py:table", "--data.seq_len=8"), "remove data.seq_len"),
    "fused": (("--train.loss=own.py:squares", "--train.fused=true"), "remove one of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_a_rank_starts(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("shardwise.launch.launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(REGRESSION)
    given, said = REFUSED[name]
    assert cli.main(["train", "--log.dir=run", *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "it returned int, and a dataset has len()"),
        ("one", "none would be left to train on"),
        ("broken", "it cannot be called with them"),
    ],
)
def test_what_a_function_returns_is_checked_on_the_ranks(ranks, tmp_path, function, said):
    (tmp_path / "own.py").write_text(REGRESSION)
    words = (
        "--model.build=own.py:model",
        f"--data.build=own.py:{function}",
        "--train.loss=own.py:squares",
        "--log.dir=run",
    )
    assert said in on_ranks(ranks, "train", *words, *FEW, folder=tmp_path, status=2)


def test_images_learn():
    """The example's model can tell its images apart: the run above is too short to show it."""
    import runpy

    own = runpy.run_path(str(ROOT / OWN))
    torch.manual_seed(0)
    model, (train, val) = own["images_model"](), own["images"](256)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        torch.nn.functional.cross_entropy(model(train.pixels), train.labels).backward()
        optim.step()
        optim.zero_grad()
    assert (model(val.pixels).argmax(1) == val.labels).float().mean() > 0.8


def test_ranks_that_a_step_has_nothing_for_are_told_and_the_proof_does_not_take_their_copies_for_data(ranks, tmp_path):
    words = ("--model.args={dim: 16, num_layers: 1, ffn: 16, num_heads: 2}", "--data.seq_len=16", "--train.steps=2")
    more = ("--data.global_batch=2", "--data.micro_batch=2", "--train.eval_every=0", "--log.plot=false")
    said = on_ranks(ranks, "train", *words, *more, "--data.val_fraction=0.001", folder=tmp_path)
    told = "a step has 1 micro-batch for 2 ranks: what 1 of them computes does not count; --data.micro_batch=1 gives each one"
    assert told in said and "proof largest gradient difference" in said


AUGMENTED = """
import random
import torch
from torch import nn

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.full((3,), i / 64) + 0.3 * torch.randn(3) * (random.random() < 0.5)
        return {"x": x, "y": x.sum()[None]}

def model():
    return nn.Linear(3, 1)

def squares(output, batch):
    return (output - batch["y"]).square().sum()

squares.count = lambda batch: len(batch["y"])
"""


def test_random_augmentation_is_the_same_on_any_ranks_by_any_workers_and_in_the_proof(ranks, tmp_path):
    (tmp_path / "own.py").write_text(AUGMENTED)
    words = ("--model.build=own.py:model", "--data.build=own.py:Rows", "--train.loss=own.py:squares", *FEW)
    losses = []
    for number, workers in ((1, 0), (2, 0), (2, 1)):
        folder = f"run-{number}-{workers}"
        options = (f"--log.dir={folder}", f"--data.num_workers={workers}")
        said = on_ranks(ranks, "train", *words, *options, folder=tmp_path, num_ranks=number)
        assert "proof largest gradient difference" in said
        rows = read_metrics(tmp_path / folder / "metrics.jsonl")
        losses.append([row["loss"] for row in rows if row["kind"] in ("step", "val")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_the_wait_for_a_compiler_is_told(ranks, tmp_path):
    (tmp_path / "own.py").write_text(OWN_LOSS)
    words = (
        "--model.build=own.py:GPT",
        "--data.seq_len=16",
        "--train.loss=model",
        *FEW,
        "--train.prove=false",
        "--log.dir=run",
    )
    compiled = "--parallel.compile={targets: [up], backend: eager}"
    said = on_ranks(ranks, "train", *words, compiled, folder=tmp_path, num_ranks=1)
    assert "training, after compiling the blocks" in said
