"""``sw.verify`` of what users bring: complex parameters, counts that are weights, modules that return their loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigError, UsageError, VerifyError
from shardwise.model.calling import call
from shardwise.recipe import Buffer
from shardwise.verify import StepRecord, Task, run_oracle, run_sharded
from shardwise.verify.compare import _buffers, _tensors, compare
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


class Shifted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + self.shift)


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


@pytest.mark.quick("adamw")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_complex_model_is_compared_in_complex128(ranks, optimizer):
    report = verify(ranks, Spectral, loss=sum_loss, optimizer=optimizer, max_grad_norm=0.1)
    assert report.num_units >= 3 and report.err <= 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_window_without_a_label_is_left_out_on_both_sides(ranks, optimizer):
    windows = batches(3)
    windows[1] = [{**batch, "labels": torch.full((3,), -100)} for batch in windows[1]]
    report = sw.verify(Small, "dp_shard=2", batches=windows, run=ranks.run, loss=sum_loss, optimizer=optimizer)
    assert report.num_steps == 3 and report.err <= 1e-12


def test_both_sides_clip_as_the_run_does(ranks):
    clip = {"max_grad_norm": 1e-2, "norm_type": "inf", "clip_grad_value": 2e-3}
    assert verify(ranks, Small, loss=sum_loss, **clip).err <= 1e-12
    task = Task(Small, batches(), sum_loss, lambda batch: 3, call, **clip)
    largest = max(float(grad.abs().max()) for grad in run_oracle(task)[0].grads.values() if grad is not None)
    assert largest == 2e-3


def test_gradients_are_clipped_by_default_and_not_without_a_norm(ranks):
    report = verify(ranks, Small, loss=sum_loss)
    limit = run_oracle(Task(Small, batches()[:1], sum_loss, lambda batch: 3, call))[0].grad_norm / 2
    assert report.looked_at[0] == f"gradient clipping, to a norm of {limit:.2g}, in 2 of 2 steps"
    report = verify(ranks, Small, loss=sum_loss, max_grad_norm=None)
    assert report.left_out == ("gradient clipping: no gradient norm was above a max_grad_norm",)
    assert verify(ranks, still, loss=sum_loss).left_out == report.left_out  # half of nothing clips nothing


def still():
    model = Small()
    model.blocks[2].requires_grad_(False).weight.detach().zero_()
    return model


class Noisy(Small):
    """Draws by dropout, and from a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def forward(self, input: Tensor) -> Tensor:
        kept = torch.rand(input.shape, generator=self.own) < 0.7
        return super().forward(F.dropout(input * kept, 0.2, self.training))


def test_ranks_that_read_other_samples_draw_what_one_process_does(ranks):
    report = verify(ranks, Noisy, loss=sum_loss)
    assert report.err <= 1e-12 and not report.left_out


def test_where_ranks_draw_other_numbers_a_difference_is_not_blamed_on_the_layout(ranks):
    with pytest.raises(
        VerifyError, match=r"than on the ranks \(ranks along tp draw numbers of their own for their parts"
    ):
        sw.verify(Wide, "tp=2", batches=batches(), loss=sum_loss, run=ranks.run)


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


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
        found = _buffers(
            {"x": Buffer(shape=(2,), dtype="complex128", persistent=True)},
            step,
            [RankStep(0.0, 0.0, 1, {}, {}, {"x": wrong}, {})],
            1,
        )
    else:
        found = _tensors(kind, {"x": wrong}, {"x": wanted}, 1)
    assert max(difference.err for difference in found) > 1.0


def with_nan(step, kind: str):
    """``step`` of one process or of a rank, with a NaN in its last tensor, or its number, of this kind."""
    step = copy.deepcopy(step)
    if kind in {"loss", "grad_norm"}:
        setattr(step, kind, float("nan"))
    else:
        list(getattr(step, f"{kind}s").values())[-1].view(-1)[-1] = float("nan")
    return step


@pytest.mark.quick("sgd")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_nan_on_one_side_is_a_difference(ranks, optimizer):
    task = Task(Shifted, batches(), sum_loss, weights, call, optimizer)
    one, found = run_oracle(task), ranks.run(run_sharded, 2, task, "dp_shard=2")
    assert str(compare(task, one, found, gate=1e-12)).startswith("equal: ")
    for kind in ("loss", "grad_norm", "grad", "param", "buffer"):
        for rank in range(2):
            other = copy.deepcopy(found)
            other[rank].steps[1] = with_nan(other[rank].steps[1], kind)
            with pytest.raises(VerifyError, match=f": {kind} differs at step 2"):
                compare(task, one, other, gate=1e-12)
        with pytest.raises(VerifyError, match=f": {kind} differs at step 2"):
            compare(task, [one[0], with_nan(one[1], kind)], found, gate=1e-12)


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


def test_a_function_that_no_rank_could_be_sent_is_refused_before_anything_is_computed():
    batches = [[{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}]]
    with pytest.raises(UsageError, match=r"verify\(loss=<lambda>\)\n  why: it cannot be sent to another process"):
        sw.verify(_never, "dp_shard=2", batches=batches, loss=lambda out, batch: out.sum())


def _never():
    raise AssertionError("built")


def test_a_rank_of_another_launcher_does_not_start_ranks_of_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"verify in a process that is a rank[\s\S]*fix: start the script by python"):
        sw.verify(_never, "dp_shard=2", batches=[[{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}]])


def test_micro_batches_in_place_of_windows_are_told():
    with pytest.raises(ConfigError, match="micro-batches in place of windows"):
        sw.verify(_never, "dp_shard=2", batches=[{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}])
