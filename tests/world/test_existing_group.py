"""A group that the program has started itself: options of ``sw.init`` that it does not have are refused."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"backend": "nonsense"}, "backend='nonsense' with a process group that exists already"),
        ({"backend": "nccl"}, "backend='nccl' with a process group that exists already"),
        ({"backend": "cpu:mpi,cuda:nccl"}, "backend='cpu:mpi,cuda:nccl' with a process group that exists already"),
        ({"timeout_s": 30}, "timeout_s=30 with a process group that exists already"),
    ],
)
def test_options_that_the_group_does_not_have_are_refused(group, given, told):
    with pytest.raises(sw.ConfigError) as error:
        sw.init(device="cpu", **given)
    assert error.value.given == told and ("cpu:gloo" in error.value.why or "77 s" in error.value.why)


@pytest.mark.parametrize(
    "given", [{}, {"backend": "gloo"}, {"backend": "cpu:gloo"}, {"timeout_s": 77}, {"backend": None}]
)
def test_options_that_it_has_are_taken(group, given):
    with sw.init(device="cpu", **given) as world:
        assert world.size == 1


def test_a_group_without_a_backend_for_the_device_is_refused():
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(sw.ConfigError, match="has no backend for it: cuda:gloo"):
            sw.init(device="cpu")
    finally:
        dist.destroy_process_group()


def test_a_backend_that_torch_does_not_have_is_refused_before_anything_starts():
    with pytest.raises(sw.ConfigError, match="backend='nonsense' on cpu"):
        sw.init(device="cpu", backend="nonsense")
    assert not dist.is_initialized()


def plain_sum(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"], reduction="sum")


def test_autocast_around_a_step_and_an_evaluation_is_refused():
    data = [{"input": torch.linspace(-1, 1, 4), "labels": torch.tensor(i % 3)} for i in range(4)]
    with sw.init(device="cpu") as world:
        model = sw.parallelize(lambda: nn.Linear(4, 3), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=plain_sum)
        loader = sw.Loader(data, world, global_batch=4, micro_batch=2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(sw.UsageError, match=r"a training step inside torch\.autocast") as told:
                step(next(iter(loader)))
            assert 'precision="bf16"' in told.value.fix
            with pytest.raises(sw.UsageError, match=r"an evaluation inside torch\.autocast"):
                sw.evaluate(model, loader, loss=plain_sum)

        def inside(model, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(batch["input"])

        step = sw.TrainStep(model, step.optim, loss=plain_sum, forward=inside)
        assert step(next(iter(loader))).step == 1


@pytest.mark.parametrize(
    "sharding",
    [{"units": ("nosuch",)}, {"reshard_after_forward": {"nosuch": False}}],
)
def test_a_name_that_matches_nothing_is_refused_on_one_rank_too(sharding):
    with sw.init(device="cpu") as world, pytest.raises(sw.errors.PlanError, match="nosuch"):
        sw.parallelize(lambda: nn.Sequential(nn.Linear(4, 4)), world, sharding=sw.Sharding(**sharding))


@pytest.mark.parametrize("kind", ["parametrization", "hook"])
def test_describe_names_a_spectral_norm(kind):
    def build():
        made = nn.utils.parametrizations.spectral_norm if kind == "parametrization" else nn.utils.spectral_norm
        return nn.Sequential(nn.Linear(4, 4), made(nn.Linear(4, 4)))

    with sw.init(device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = sw.describe(sw.parallelize(build(), world))
        assert "1: warning: the power iteration of its spectral norm advances once per forward" in text
        assert "power iteration" not in sw.describe(sw.parallelize(lambda: nn.Linear(4, 4), world))


def a_run_with_batch_norm(layout, buffers):
    """What a run of 4 windows ends with: its losses, running means on this rank, and what describe says."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def squared_error(output, batch):
        return (output - batch["y"]).square().sum()

    def count(batch):
        return len(batch["y"])

    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cumsum(0)
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(build(), world, sharding=sw.Sharding(buffers=buffers))
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=squared_error, count=count)
        loader = sw.Loader([{"x": row[:4], "y": row[4:]} for row in x], world, global_batch=8, micro_batch=2)
        losses = [step(window).loss for window in loader]
        figure = sw.evaluate(model, loader, loss=squared_error, count=count)["loss"]
        return losses, figure, model[1].running_mean.clone(), model[1].num_batches_tracked.item(), sw.describe(model)


@pytest.mark.parametrize("buffers", ["rank0", "mean"])
def test_describe_says_that_running_statistics_depend_on_the_number_of_ranks(ranks, buffers):
    alone = ranks.run(a_run_with_batch_norm, 1, "dp_shard=1", buffers)[0]
    first, second = ranks.run(a_run_with_batch_norm, 2, "dp_shard=2", buffers)
    assert first[0] == pytest.approx(alone[0], rel=1e-10)  # training is the same
    assert torch.equal(first[2], second[2]) and first[1] == second[1]
    assert not torch.allclose(first[2], alone[2], rtol=0.01) and first[1] != pytest.approx(alone[1], rel=0.01)
    assert (alone[3], first[3]) == (16, 8)
    assert "1: its running statistics and those of 3 are of the micro-batches that a rank runs" in first[4]
    assert ("those of rank 0" if buffers == "rank0" else "their mean over the ranks") in first[4]


def test_describe_says_nothing_of_norms_whose_statistics_are_left_alone():
    frozen = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4)
    )
    frozen[1].eval()
    with sw.init(device="cpu") as world:
        assert "running statistics" not in sw.describe(sw.parallelize(frozen, world))


def test_a_module_that_is_called_as_an_option_is_is_no_option():
    """Notes of modules and of options have names; ``reduce`` is one of both."""

    class Reducing(nn.Module):
        def __init__(self):
            super().__init__()
            self.reduce = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

        def forward(self, x):
            return self.reduce(x)

    with sw.init(device="cpu") as world:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = sw.parallelize(Reducing(), world)
            sw.parallelize(
                Reducing(), world, precision=sw.Precision(reduce="bf16"), sharding=sw.Sharding(engine="fsdp2")
            )
        assert len(told) == 1 and str(told[0].message).startswith("precision: gradients are summed in bfloat16")
        recipe = sw.recipe_of(model)
        assert "reduce: warning: the power iteration" in sw.describe(model)
        assert type(recipe).from_json(recipe.to_json()) == recipe


def worlds_with_other_groups() -> list[float]:
    sums = []
    for num_groups in (0, 2):
        with sw.init("dp_replicate=2", device="cpu"):
            kept = [dist.new_group([0, 1]) for _ in range(num_groups)]
            with sw.init("dp_shard=2", device="cpu") as world:
                model = sw.parallelize(nn.Linear(4, 4), world)
                with sw.accumulate(model, is_last=True):
                    model(torch.ones(2, 4)).sum().backward()
                sums.append(float(model.weight.grad.full_tensor().sum()))
            del kept
    return sums


def test_a_world_that_is_opened_after_another_with_other_groups_gathers_over_its_own(ranks):
    """torch keeps results of operators on DTensors, with the mesh of the world before."""
    assert ranks.run(worlds_with_other_groups, 2) == [[64.0, 64.0]] * 2
