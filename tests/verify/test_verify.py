"""``sw.verify`` of what users bring: complex parameters, counts that are weights, modules that return their loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.step.loss import call
from shardwise.verify import StepRecord, Task, run_oracle
from shardwise.verify.compare import _buffers, _tensors
from shardwise.verify.sharded import RankStep


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.to(torch.complex64) @ self.weight)


class Spectral(nn.Module):
    """Complex parameters, and a cast to complex64 that the lift must lift too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mix() for _ in range(3)])
        self.turn = nn.Parameter(torch.tensor(0.6 + 0.8j))

    def forward(self, input: Tensor) -> Tensor:
        x = input.cfloat() * self.turn
        for block in self.blocks:
            x = block(x)
        return x.real + 2 * x.imag


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = torch.tanh(block(input))
        return input


def sum_loss(output, batch):
    return F.cross_entropy(output, batch["labels"], reduction="sum")


def weighted_loss(output, batch):
    return (F.cross_entropy(output, batch["labels"], reduction="none") * batch["weights"]).sum()


def weights(batch):
    return batch["weights"].sum()


weighted_loss.count = weights


def in_double(module, batch):
    return module(batch["input"].float())  # an island that is lifted


def task_model():
    return sw.TaskModel(Small(), weighted_loss, forward=in_double)


def batches(num_windows=2, num=3):
    generator = torch.Generator().manual_seed(0)
    return [
        [
            {
                "input": torch.randn(3, 4, generator=generator, dtype=torch.float64),
                "labels": torch.randint(0, 4, (3,), generator=generator),
                "weights": torch.rand(3, generator=generator) * 0.1,
            }
            for _ in range(num)
        ]
        for _ in range(num_windows)
    ]


def verify(ranks, build, **options):
    return sw.verify(
        build, "dp_shard=2", batches=batches(), run=ranks.run, sharding=sw.Sharding(min_unit_bytes=0), **options
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_complex_model_is_compared_in_complex128(ranks, optimizer):
    report = verify(ranks, Spectral, loss=sum_loss, optimizer=optimizer, max_grad_norm=0.1)
    assert report.num_units >= 3 and report.err <= 1e-12


def test_both_sides_clip_as_the_run_does(ranks):
    clip = {"max_grad_norm": 1e-2, "norm_type": "inf", "clip_grad_value": 2e-3}
    assert verify(ranks, Small, loss=sum_loss, **clip).err <= 1e-12
    task = Task(Small, batches(), sum_loss, lambda batch: 3, call, **clip)
    largest = max(float(grad.abs().max()) for grad in run_oracle(task)[0].grads.values() if grad is not None)
    assert largest == 2e-3


def test_the_oracle_of_a_complex_model_is_complex():
    task = Task(Spectral, batches(), sum_loss, lambda batch: 3, call)
    gradient = run_oracle(task)[0].grads["blocks.0.weight"]
    assert gradient is not None and gradient.dtype == torch.complex128 and gradient.imag.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["grad", "param", "buffer"])
def test_a_wrong_imaginary_part_is_seen(kind):
    wanted = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.complex128)
    wrong = torch.tensor([1 - 7j, 2 + 9j], dtype=torch.complex128)
    if kind == "buffer":
        step = StepRecord(0.0, 0.0, 1, {}, {}, {"x": wanted})
        found = _buffers(step, [RankStep(0.0, 0.0, 1, {}, {}, {"x": wrong}, {})], 1)
    else:
        found = _tensors(kind, {"x": wrong}, {"x": wanted}, 1)
    assert max(difference.err for difference in found) > 1.0


def test_a_count_that_is_a_sum_of_weights_is_no_false_alarm(ranks):
    report = verify(ranks, Small, loss=weighted_loss)
    assert report.err <= 1e-12


def test_a_module_that_returns_its_loss_is_verified_as_it_is_trained(ranks):
    report = verify(ranks, task_model, loss=None)  # counts with the module's own count
    assert report.num_units >= 3 and report.err <= 1e-12


def test_a_module_that_returns_its_loss_with_a_count_that_was_given(ranks):
    assert verify(ranks, task_model, loss=None, count=weights).err <= 1e-12


@sw.transform("island")
def island(module):
    """Adds float32 weights: both sides must have them, in float64."""
    return nn.Sequential(module, nn.Linear(4, 4))


def test_transforms_are_on_both_sides(ranks):
    assert verify(ranks, Small, loss=weighted_loss, transforms=["island"]).err <= 1e-12


def test_the_outcome_says_which_buffers_are_not_those_of_one_process(ranks):
    def of(build):
        return str(verify(ranks, build, loss=sum_loss))

    told = "3 running statistics of norms compared between the ranks only"
    assert told in of(normed) and "running statistic" not in of(Small)


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
