"""``shardwise verify`` and ``sw.verify`` as a user meets them."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verify.faults import run_with_fault_of_defaults

from shardwise.cli.main import main as cli
from shardwise.errors import ConfigError
from shardwise.verify import verify

ROOT = Path(__file__).parents[2]
MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 11)
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

def build():
    return Net()

class Forgetful(Net):
    """Not deterministic: no two runs of it are alike, sharded or not."""
    def forward(self, input_ids):
        torch.seed()
        return super().forward(input_ids) + torch.rand(1).double() * self.head.bias

def forgetful():
    return Forgetful()

class Dropping(Net):
    def forward(self, input_ids):
        return torch.nn.functional.dropout(super().forward(input_ids), 0.3, self.training)

def dropping():
    net = Dropping()
    net.layers[1] = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    return net

class Balance(torch.autograd.Function):
    """Adds a penalty to the gradients, whatever the loss is divided by, as balancing losses of experts do."""
    @staticmethod
    def forward(ctx, x, penalty):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full((), 1e-3, dtype=grad.dtype)

class Balanced(Net):
    def forward(self, input_ids):
        x = super().forward(input_ids)
        return Balance.apply(x, x.square().mean())

class Positions(Net):
    """Twelve positions, and no more."""
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(12, 11))
    def forward(self, input_ids):
        return super().forward(input_ids) + self.positions[torch.arange(input_ids.shape[1])]

class Own(nn.Module):
    """Its tokens have another name, and it returns its loss."""
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx))
        return logits, None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Pictures(Own):
    def forward(self, image):
        return self.head(image)

def plain():
    return nn.Linear(3, 3)
'''


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path / "net.py"


def _verify(*args, cwd):
    """The command in this process, which has torch already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli(["verify", *args])
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def _verify_alone(*args, cwd):
    command = [sys.executable, "-m", "shardwise", "verify", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture
def warm(ranks, monkeypatch):
    """The command's ranks are warm ones."""
    monkeypatch.setattr("shardwise.verify.job.in_fresh_processes", ranks.run)


def test_a_right_model_is_equal(model_file, warm):
    done = _verify(f"{model_file}:build", "--layout", "dp_shard=2", cwd=model_file.parent)
    assert done.returncode == 0, done.stderr
    assert "equal: 2 ranks, layout dp_shard=2, fsdp2, 4 units" in done.stdout


def test_tokens_are_guessed_that_a_model_has_positions_for(model_file, warm):
    done = _verify(f"{model_file}:Positions", "--layout", "dp_replicate=2", "--steps", "1", cwd=model_file.parent)
    assert done.returncode == 0, done.stderr


def test_a_difference_names_the_tensor(model_file, warm):
    done = _verify(f"{model_file}:forgetful", "--layout", "dp_replicate=2", cwd=model_file.parent)
    assert done.returncode == 1
    assert "VerifyError" in done.stderr and "differs at step 1" in done.stderr and "Traceback" not in done.stderr
    assert "random numbers are drawn in the model's own forward" in done.stderr and "report" not in done.stderr


def test_a_model_with_dropout_is_compared_in_train_mode(model_file, warm):
    done = _verify(f"{model_file}:dropping", "--layout", "dp_shard=2", cwd=model_file.parent)
    assert done.returncode == 0, done.stderr
    told = "random numbers are drawn in 'layers.1.1' (dropout?): the ranks draw the same"
    assert told in " ".join(done.stdout.split()) and "NOT compared" not in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("... ")]
    assert said[:2] == ["... loading the model", "... one plain process: 3 steps"] and len(said) == 7
    assert said[5] == "... the ranks ran them once more, with every block a unit"  # first the units of training


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--layout=dp_shard=1,tp=2"], "ranks along tp draw numbers of their own for their parts"),
        (
            ["--layout=dp_shard=1", "--parallel.compile.backend=inductor"],
            "graphs of inductor draw numbers of their own",
        ),
    ],
)
def test_where_ranks_draw_other_numbers_dropout_is_compared_in_eval_mode_and_it_says_so(model_file, warm, words, why):
    done = _verify(f"{model_file}:dropping", "--steps=1", *words, cwd=model_file.parent)
    told = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert "in eval mode: in training, random numbers are drawn in 'layers.1.1'" in told and why in told
    assert "NOT compared: train mode, with its dropout and batch norm: the model was in eval mode" in told


@pytest.mark.parametrize(
    ("fault", "model", "step"),
    [
        ("clipped_to_half", "build", 1),
        ("paddings_taken_for_data", "build", 2),
        ("paddings_have_gradients", "Balanced", 2),
        ("same_masks", "dropping", 1),
    ],
)
def test_the_command_finds_by_default_what_training_has(model_file, ranks, monkeypatch, fault, model, step):
    def faulty(function, num_ranks, *args):
        return ranks.run(run_with_fault_of_defaults, num_ranks, fault, function, *args)

    monkeypatch.setattr("shardwise.verify.job.in_fresh_processes", faulty)
    done = _verify(f"{model_file}:{model}", cwd=model_file.parent)
    assert done.returncode == 1 and f"embed.weight: grad differs at step {step}:" in done.stderr, done.stderr
    assert "did not compute what one process computes" in done.stderr  # and dropout is not blamed


def test_a_gradient_beside_that_of_the_loss_is_compared_with_a_padding(model_file, warm):
    done = _verify(f"{model_file}:Balanced", cwd=model_file.parent)
    assert done.returncode == 0, done.stderr


def test_the_report_says_what_was_looked_at(model_file, warm):
    for words, told in (
        (
            [],
            "gradient clipping, to a norm of 0.066, in 3 of 3 steps; a padding (the copy that a rank with a micro-batch fewer runs",
        ),
        (
            ["--steps=1"],
            "NOT compared: a padding (the copy that a rank with a micro-batch fewer runs): all ranks had as many",
        ),
    ):
        done = _verify(f"{model_file}:build", *words, cwd=model_file.parent)
        assert done.returncode == 0 and told in " ".join(done.stdout.split()), done.stdout


def test_a_model_nothing_can_be_guessed_for(model_file):
    done = _verify(f"{model_file}:plain", cwd=model_file.parent)
    assert done.returncode == 2 and "Linear without --batch" in done.stderr and "--batch pkg.mod:fn" in done.stderr


def test_tokens_go_to_the_first_argument_of_a_forward_without_input_ids(model_file, warm):
    done = _verify(f"{model_file}:Own", "--layout", "dp_shard=2", "--loss", "model", cwd=model_file.parent)
    assert done.returncode == 0 and "equal: 2 ranks" in done.stdout, done.stderr
    done = _verify(f"{model_file}:Pictures", "--layout", "dp_shard=2", cwd=model_file.parent)
    assert done.returncode == 2 and "random tokens were tried as image" in done.stderr


@pytest.mark.parametrize("layout", ["dp_shard=-1", "pp=2", "dp_shrad=2"])
def test_layouts_are_refused_before_anything_starts(model_file, layout):
    done = _verify(f"{model_file}:build", "--layout", layout, cwd=model_file.parent)
    assert done.returncode in (1, 2) and "fix:" in done.stderr and "comparing" not in done.stdout


@pytest.mark.soak  # by the function tests/techniques/test_knobs.py compares them
def test_techniques_are_compared_too(model_file):
    words = ("--parallel.remat=full", "--parallel.sharding.units=[layers.1]")
    done = _verify(f"{model_file}:build", "--steps=1", *words, cwd=model_file.parent)
    assert done.returncode == 0, done.stderr
    assert "equal: 2 ranks, layout dp_shard=2, fsdp2, 2 units" in done.stdout


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--train.steps=3", "reads keys of parallel only"),
        ("--parallel.layout=dp_shard=2", "give it as --layout"),
        ("--parallel.precision.compute=bf16", "both sides compute in float64"),
        ("--parallel.remt=full", "did you mean"),
    ],
)
def test_keys_that_verify_does_not_read_are_refused(model_file, capsys, word, text):
    assert cli(["verify", f"{model_file}:build", word]) == 2
    assert text in capsys.readouterr().err


# ---- what is named: batches of images, a count, a directory; and mistakes in them ------------------------------------

USERS = """
import math, os
import torch
import torch.nn.functional as F
from torch import nn
from typing import Any

SIZE = 3
drawn = torch.randn(3)  # at import: the ranks import it too, while they build

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, SIZE), nn.Linear(4, 5)
    def forward(self, pixel_values):
        return self.head(self.conv(pixel_values).mean((2, 3)))

class Sized(nn.Module):
    def __init__(self, size):
        super().__init__()

class Unfit(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(5, 9)
    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

class Record:
    pass

def number():
    return 3

def sized(size):
    return Sized(size)

def images(index):
    generator = torch.Generator().manual_seed(index)
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "y": pixels.mean((1, 2, 3))}

def classes(index):
    return {"pixel_values": images(index)["pixel_values"], "labels": torch.tensor([index % 5, 1])}

def squared(output, batch):
    return (output.mean(-1) - batch["y"]).square().sum()

def counted(output, batch):
    return squared(output, batch)

def rows(batch):
    return 7 * batch["y"].shape[0]

counted.count = rows
made = Images()

def row(index):
    return torch.zeros(3)

def two(index):
    return {"a": torch.zeros(2), "labels": torch.zeros(2).long()}
"""


@pytest.fixture
def users(tmp_path, warm):
    """A user's file in the working directory."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "broken.py").write_text("import torch\nimport nonesuch_lib\n\ndef build(): pass\n")
    return tmp_path


OWN_LOSS = """
import torch
import torch.nn.functional as F
from torch import nn

class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
    def forward(self, idx, targets=None):
        logits = self.head(self.wte(idx))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

def texts(index):
    ids = torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

def logits(model, batch):
    return model(batch["input_ids"], batch["labels"])[0]
"""


def saved(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=19, attention_dropout=0.1, **sizes)).save_pretrained(folder)


@pytest.mark.quick("a directory", "float32 images", "--count")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("users.py:Images", ["--batch", "users.py:classes"]),
        ("users.py:Images", ["--batch", "users.py:images", "--loss", "users.py:squared", "--count", "users.py:rows"]),
        ("users.py:Images", ["--batch", "users.py:images", "--loss", "users.py:counted"]),
        ("own.py:OwnLoss", ["--batch", "own.py:texts", "--loss", "model"]),
        ("own.py:OwnLoss", ["--batch", "own.py:texts", "--forward", "own.py:logits"]),
        ("model", []),
    ],
    ids=["float32 images", "--count", "loss.count", "its own loss", "--forward", "a directory"],
)
def test_images_counts_and_directories_are_compared_and_told_in_80_columns(users, monkeypatch, model, words):
    monkeypatch.setenv("COLUMNS", "80")
    if model == "model":
        saved(users / model)
    (users / "own.py").write_text(OWN_LOSS)
    words = [f"{users}/{word}" if word.startswith(("users.py", "own.py")) else word for word in words]
    done = _verify(f"{users}/{model}", *words, "--steps=1", cwd=users)
    assert done.returncode == 0, done.stderr
    assert "equal: 2 ranks, layout dp_shard=2, fsdp2, 1 unit, 1 step\n" in done.stdout
    assert ("equal: 2 ranks, layout dp_shard=2, fsdp2, 3 units" in done.stdout) == (model == "model")
    assert ("random numbers are drawn" in done.stdout) == (model == "model")
    assert "against one process: 1 step, 2 micro-batches per rank" in " ".join(done.stdout.split())
    assert "1 steps" not in done.stdout and "... one plain process: 1 step\n" in done.stdout
    # Lines of torch are not ours: where a name server is slow it says that it has no name for a socket.
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and "[c10d]" not in line]
    assert not long, long


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["users.py:Imagse"], "did you mean 'Images'? it has: Images, Unfit, number\n"),
        (
            ["users.py:Images", "--batch", "users.py:clases"],
            "did you mean 'classes'? it has: Images, Sized, Unfit, Record, number,",
        ),
        (
            ["users.py:Sized"],
            "calling it raised TypeError: Sized.__init__() missing 1 required positional argument: 'size'",
        ),
        (["users.py:number"], "it returned int, and a torch.nn.Module is compared"),
        (["users.py:SIZE"], "it is of type int, and a function is called"),
        (["users.py:made"], "it is a module that is made already"),
        (["users.py:Unfit"], "mat1 and mat2 shapes cannot be multiplied (32x4 and 5x9)\n       at users.py, line 27\n"),
        (
            ["broken.py:build"],
            "importing it raised ModuleNotFoundError: No module named 'nonesuch_lib'\n       at broken.py, line 2",
        ),
        (
            ["users.py:Images", "--batch", "users.py:rows"],
            "'int' object is not subscriptable\n       at users.py, line 53\n",
        ),
        (["users.py:Images", "--batch", "users.py:row"], "it returned Tensor, and a micro-batch maps names to tensors"),
        (
            ["users.py:Images", "--batch", "users.py:images"],
            "a batch with the keys ['pixel_values', 'y'] and no --count",
        ),
        (
            ["users.py:Images", "--batch", "users.py:images", "--count", "users.py:squared"],
            "missing 1 required positional",
        ),
        (
            ["users.py:Images", "--batch", "users.py:classes", "--loss", "users.py:rows"],
            "takes 1 positional argument but 2",
        ),
        (
            ["users.py:Images", "--batch", "users.py:two"],
            "input to conv2d, but got input of size: [2]\n       at users.py, line 16",
        ),
        ([".", "--steps=1"], "there is no config.json in this directory"),
        (["org/model"], "it names neither a function nor a directory that is there; nothing is downloaded"),
    ],
)
def test_mistakes_in_what_is_named_are_told_in_words(users, words, told):
    done = _verify(*words, cwd=users)
    assert done.returncode == 2 and told in done.stderr and "fix: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "_lifted" not in done.stderr


def test_a_forward_that_takes_other_names_is_told_what_the_command_can_do(users):
    (users / "pair.py").write_text("from users import *\n\nclass Pair(Images):\n    def forward(self, x, y): pass\n")
    done = _verify("pair.py:Pair", "--batch", "users.py:two", cwd=users)
    assert done.returncode == 1 and "name the keys of what --batch returns" in done.stderr, done.stderr


def test_an_error_of_the_second_units_says_that_the_first_were_run(users):
    (users / "twice.py").write_text(
        "import os, torch\n"
        "made = []\n"
        "def build():\n"
        "    made.append(os.environ.get('RANK'))\n"
        "    if made.count('0') + made.count('1') > 1: raise ValueError('never again')\n"
        "    return torch.nn.Sequential(torch.nn.Linear(3, 3), *[torch.nn.Linear(3, 3) for _ in range(3)])\n"
        "def batch(index): return {'input': torch.randn(4, 3), 'labels': torch.tensor([0, 1, 2, 0])}\n"
    )
    done = _verify("twice.py:build", "--batch", "twice.py:batch", cwd=users)
    assert done.returncode != 0 and "never again" in done.stderr
    assert "this was the second comparison, with every block a unit" in done.stderr, done.stderr


def test_verify_casts_batches_to_its_dtype_and_leaves_integers(ranks):
    batch = {"input": torch.randn(4, 3), "labels": torch.tensor([0, 1, 2, 0])}
    for dtype in (torch.float64, torch.float32):
        given = {**batch, "input": batch["input"].to(torch.float64 if dtype == torch.float32 else torch.float16)}
        report = verify(linear, "dp_shard=2", batches=[[given, given]], dtype=dtype, run=ranks.run)
        assert report.err <= report.gate
    assert given["input"].dtype == torch.float64, "the user's own batch is left as it was"


def linear():
    return torch.nn.Linear(3, 3)


def test_verify_without_batches():
    with pytest.raises(ConfigError, match="without batches"):
        verify(torch.nn.Identity, "dp_shard=2", batches=[])


def test_a_script_that_trains_when_it_is_imported_is_refused_by_name(model_file):
    script = model_file.parent / "trains.py"
    script.write_text(
        "import shardwise as sw\nfrom torch import nn\n"
        "class Net(nn.Linear):\n    pass\n"
        "world = sw.init('dp_shard=-1')\nopen('trained', 'w')\n"
    )
    done = _verify("trains.py:Net", "--layout", "dp_shard=2", cwd=script.parent)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"sw.init at the top level of {script}" in done.stderr and "__main__" in done.stderr
    assert not (script.parent / "trained").exists()
