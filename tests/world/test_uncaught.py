"""An error that a script does not catch, as torchrun shows it: once, with the script's own lines.

Ranks without a launcher show it in each run of the tests: test_lost_ranks.py."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch, shardwise as sw

def mean(output, batch):
    return torch.nn.functional.mse_loss(output, batch["y"])

def train(world):
    model = sw.parallelize(lambda: torch.nn.Linear(4, 3), world)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters()), loss=mean, count=lambda b: len(b["y"]))
    step([{"x": torch.randn(4, 4), "y": torch.randn(4, 3) + world.rank}])

if WITH:
    with sw.init("dp_shard=2") as world:
        train(world)
else:
    train(sw.init("dp_shard=2"))
"""


@pytest.mark.soak
@pytest.mark.parametrize("with_block", [True, False])
def test_an_error_of_every_rank_is_shown_once_with_the_lines_of_the_script(tmp_path, with_block):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("WITH", str(with_block)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert done.returncode == 1, done.stderr
    assert sum("why: the micro-batch twice over" in line for line in told) == 1, done.stderr
    assert sum("a loss that takes a mean (shown by rank" in line for line in told) == 1, done.stderr
    assert any("step([{" in line for line in told) and not any("shardwise/" in line for line in told), done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("call", "line", "fix"),
    [
        ('sw.init("dp_shard=3")', "layout 'dp_shard=3' on 2 ranks", 'on 2 ranks use "dp_shard=2"'),
        pytest.param(
            'sw.init("pp=2")', "layout 'pp=2': pp=2", "there is no pipeline parallelism yet", marks=pytest.mark.soak
        ),
    ],
)
def test_a_layout_that_no_rank_can_have_is_shown_once_with_the_lines_of_the_script(tmp_path, call, line, fix):
    """Before there is a group, by which the ranks could find out which of them is the first."""
    script = tmp_path / "script.py"
    script.write_text(f"import shardwise as sw\n{call}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told, _, of_torchrun = done.stderr.partition("torch/distributed/elastic/multiprocessing/api.py")
    assert done.returncode == 1 and of_torchrun, done.stderr
    assert told.count(f"fix: {fix}") == told.count("Traceback") == 1 and f"    {call}\n" in told, told
    assert told.count(line) == 1 + told.count("(shown by rank ") and "shardwise/world" not in told, told
