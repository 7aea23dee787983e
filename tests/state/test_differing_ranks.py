"""State that code outside of windows has written differently on the ranks: saves and evaluations refuse it by name, or take what a
policy says; never one rank's without a word."""

import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError


class Calibrated(nn.Module):
    """Writes in training what quantisation needs, and what training code counts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)
        self.register_buffer("amax", torch.tensor(0.0))  # of no dimension
        self.register_buffer("num_seen", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, x.abs().max()))
            self.num_seen += len(x)
            self.cache.fill_(float(x.sum()))
        return self.last(self.norm(self.first(x)))


def _batches():
    generator = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(4, 6, generator=generator).double() * (i + 1)} for i in range(8)]


def _model(world, policies):
    torch.manual_seed(0)
    model = Calibrated().double()
    example = {"example": {"x": _batches()[0]["x"]}} if world.layout.tp > 1 else {}
    return sw.parallelize(model, world, sharding=sw.Sharding(min_unit_bytes=0, buffers=policies), **example)


def _sum(output, _):
    return output.square().sum()


def _count(batch):
    return len(batch["x"])


def _kept(model, world, root, batches):
    """What saves and an evaluation make of a model, by name: their values, or the error."""
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=_sum, count=_count)

    def checkpoint():
        with sw.CheckpointManager(root + "/run", step, async_save=False) as manager:
            return load_file(manager.save() / "model.safetensors")

    calls = {
        "evaluate": lambda: sw.evaluate(model, batches, loss=_sum, count=_count)["loss"],
        "full_state_dict": lambda: sw.full_state_dict(model),
        "save_weights": lambda: load_file(sw.save_weights(model, root + "/weights")),
        "checkpoint": checkpoint,
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except ShardwiseError as error:
            found[name] = str(error)
    return found


_OWN = {"amax": "own", "num_seen": "own", "*running*": "mean"}
_BROUGHT_TOGETHER = {"amax": "max", "num_seen": "max", "*running*": "mean"}


def _calibrated(layout, root, policies, which="a part"):
    with sw.init(layout, device="cpu", timeout_s=30) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, dp = _model(world, policies), world.axis("dp")
        own = _batches()[dp.rank :: dp.size]
        for batch in _batches() if which == "all" else own:
            with torch.no_grad():
                model(batch["x"])
        cache = model.cache.clone()
        found = _kept(model, world, world.broadcast(root), own)
        assert torch.equal(model.cache, cache)  # each rank's own
        return found, {n: b.clone() for n, b in model.named_buffers()}, [str(each.message) for each in caught]


def _plain():
    torch.manual_seed(0)
    model, batches = Calibrated().double(), _batches()
    with torch.no_grad():
        for batch in batches:
            model(batch["x"])
        model.eval()
        loss = sum(float(_sum(model(batch["x"]), batch)) for batch in batches) / sum(map(_count, batches))
    return model, loss


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_buffers_that_ranks_have_written_differently_are_refused_by_name(ranks, tmp_path, layout):
    for rank, (found, _, _) in enumerate(ranks.run(_calibrated, 2, layout, str(tmp_path), {})):
        for name, error in found.items():
            assert isinstance(error, str) and error.startswith("amax: a persistent buffer whose values differ"), (
                name,
                error,
            )
            assert "rank 0 has [" in error and "rank 1 has [" in error and "num_seen" not in error.split("\n")[0]
            assert "run the same batches on each" in error and '"sum"' not in error, (rank, error)
    assert not (tmp_path / "weights").exists()


def test_a_policy_brings_them_together_before_a_save_and_an_evaluation(ranks, tmp_path):
    plain, loss = _plain()
    (found, buffers, _), (other, also, _) = ranks.run(_calibrated, 2, "dp_shard=2", str(tmp_path), _BROUGHT_TOGETHER)
    assert found["evaluate"] == other["evaluate"] == pytest.approx(loss, rel=1e-12)
    for name in ("amax", "norm.running_mean", "norm.running_var"):
        want = plain.get_buffer(name)
        for kept in (buffers, also, found["full_state_dict"], found["save_weights"], found["checkpoint"]):
            torch.testing.assert_close(kept[name], want, rtol=1e-12, atol=1e-12)


def _window(layout, policies, reads):
    with sw.init(layout, device="cpu") as world:
        model = _model(world, policies)
        optim, data = torch.optim.SGD(model.parameters(), lr=0.1), world.axis("dp")
        with sw.window(model, _batches()[data.rank :: data.size], count=_count) as window:
            for number, batch in enumerate(window):
                (model(batch["x"]).square().sum() / window.num_tokens).backward()
                if reads and number == 1:
                    sw.full_state_dict(model)
        optim.step()
        return sw.full_state_dict(model)


def test_a_save_within_a_window_changes_nothing(ranks):
    """The statistics of each rank are those of its micro-batches until the window ends."""
    kept = [
        ranks.run(_window, 2, "dp_shard=2", _BROUGHT_TOGETHER | {"num_seen": "sum"}, reads)[0]
        for reads in (False, True)
    ]
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())


def test_of_what_each_rank_keeps_for_itself_rank_0s_is_saved(ranks, tmp_path):
    # A sum that code between windows has written differently matters where it is read: to an evaluation, and not to a save.
    (found, buffers, _), (_, also, _) = ranks.run(_calibrated, 2, "dp_shard=2", str(tmp_path), {**_OWN, "cache": "sum"})
    assert found["evaluate"].startswith('cache: a buffer of the policy "sum" that ranks began an evaluation with other')
    assert not torch.equal(buffers["amax"], also["amax"])
    for kept in (found["full_state_dict"], found["save_weights"], found["checkpoint"]):
        assert torch.equal(kept["amax"], buffers["amax"])


def test_statistics_of_rank_0_are_taken_with_a_word(ranks, tmp_path):
    policies = {"amax": "max", "num_seen": "rank0"}
    (found, buffers, said), (other, also, silent) = ranks.run(_calibrated, 2, "dp_shard=2", str(tmp_path), policies)
    assert found["evaluate"] == other["evaluate"]
    assert torch.equal(buffers["norm.running_mean"], also["norm.running_mean"])
    (word,) = [text for text in said if "written outside of windows" in text]
    assert word.startswith("norm.running_mean, norm.running_var") and not any("outside of windows" in x for x in silent)


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_what_all_ranks_have_written_alike_is_saved_as_one_process_has_it(ranks, tmp_path, layout):
    plain, loss = _plain()
    (found, _, said), (other, _, _) = ranks.run(_calibrated, 2, layout, str(tmp_path), {}, "all")
    assert found["evaluate"] == other["evaluate"] == pytest.approx(loss, rel=1e-12) or layout == "tp=2"
    for kept in (found["full_state_dict"], found["save_weights"], found["checkpoint"]):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(kept[name], value, rtol=1e-12, atol=1e-12)
    assert not any("outside of windows" in text for text in said)


@torch.no_grad()
def _written(layout, root, how):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = _model(world, {})
        weight = model.first.weight
        own = weight.to_local() if hasattr(weight, "to_local") else weight.data
        if how == "rounding":
            own.mul_(1 + 1e-15 * world.rank)
        elif how == "NaN":
            own[0].fill_(float("nan"))
        elif world.rank == world.size - 1:
            own.clamp_(-0.1, 0.1)
        return _kept(model, world, world.broadcast(root), _batches())


@pytest.mark.parametrize(
    ("layout", "size", "who"), [("dp_replicate=2", 2, "0 and 1"), ("dp_replicate=2,dp_shard=2", 4, "1 and 3")]
)
def test_a_parameter_that_one_rank_has_written_is_refused_by_name(ranks, tmp_path, layout, size, who):
    for found in ranks.run(_written, size, layout, str(tmp_path), "one rank"):
        for name in ("full_state_dict", "save_weights", "checkpoint"):
            assert isinstance(found[name], str), name
            assert found[name].startswith(f"first.weight: a parameter that ranks {who} hold copies of, with other")


@pytest.mark.parametrize("how", ["rounding", "NaN"])
def test_copies_that_differ_by_rounding_are_saved(ranks, tmp_path, how):
    for found in ranks.run(_written, 2, "dp_replicate=2", str(tmp_path), how):
        assert not any(isinstance(value, str) for value in found.values())
