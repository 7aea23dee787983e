"""``shardwise verify`` and ``sw.verify`` as a user meets them."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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

def plain():
    return nn.Linear(3, 3)
'''


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path / "net.py"


def _verify(*args, cwd):
    """The command in this process, which has torch already; the ranks it compares with are its own."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli(["verify", *args])
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def _verify_alone(*args, cwd):
    command = [sys.executable, "-m", "shardwise", "verify", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


def test_a_right_model_is_equal(model_file):
    done = _verify(f"{model_file}:build", "--layout", "dp_shard=2", cwd=model_file.parent)
    assert done.returncode == 0, done.stderr
    assert "equal: 2 ranks, layout dp_shard=2, fsdp2, 4 units" in done.stdout


def test_a_difference_names_the_tensor(model_file):
    done = _verify_alone(f"{model_file}:forgetful", "--layout", "dp_replicate=2", cwd=model_file.parent)
    assert done.returncode == 1
    assert "VerifyError" in done.stderr and "differs at step 1" in done.stderr and "Traceback" not in done.stderr
    assert "random numbers are drawn in the model's own forward" in done.stderr and "report" not in done.stderr


def test_a_model_with_dropout_is_compared_in_eval_mode_and_it_says_so(model_file):
    done = _verify(f"{model_file}:dropping", "--layout", "dp_shard=2", cwd=model_file.parent)
    assert done.returncode == 0, done.stderr
    assert "in eval mode: in training, random numbers are drawn in layers.1.1, others" in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("... ")]
    assert said[:2] == ["... loading the model", "... one plain process: 3 steps"] and len(said) == 10
    assert said[5] == "... once more, with every block a unit"  # first the units of training


def test_a_model_nothing_can_be_guessed_for(model_file):
    done = _verify(f"{model_file}:plain", cwd=model_file.parent)
    assert done.returncode == 2 and "Linear without --batch" in done.stderr and "--batch pkg.mod:fn" in done.stderr


@pytest.mark.parametrize("layout", ["dp_shard=-1", "tp=2", "dp_shrad=2"])
def test_layouts_are_refused_before_anything_starts(model_file, layout):
    done = _verify(f"{model_file}:build", "--layout", layout, cwd=model_file.parent)
    assert done.returncode in (1, 2) and "fix:" in done.stderr and "comparing" not in done.stdout


@pytest.mark.soak  # by the function tests/parallel/test_knobs.py compares them
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


def test_verify_without_batches():
    with pytest.raises(ConfigError, match="without batches"):
        verify(torch.nn.Identity, "dp_shard=2", batches=[])
