"""A module that only adds a loss to a model is saved as that model; any other has the names of its own modules."""

import json
import warnings
from pathlib import Path

import models
import pytest
import torch
from models.batches import VOCAB
from models.zoo import Odd
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.parallel import runtime_of

EVERY = sw.Sharding(min_unit_bytes=0)
STOCK = {name: models.get(name) for name in ("llama", "mixtral")}


class Weighted(nn.Module):
    """A loss that owns a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(VOCAB))

    def forward(self, output, batch):
        return (output.logits * self.scale).sum()


class Nested(nn.Module):
    """Has one name with and without what a task puts before all of them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.model = nn.ModuleDict({"a": nn.Linear(2, 2)})


class Alike(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = Weighted()


class Wrapped(nn.Module):
    """A wrapper of the user's, which may do anything."""

    def __init__(self, attribute):
        super().__init__()
        self.add_module(attribute, models.get("llama").build())
        self.head = nn.Linear(VOCAB, 2)


class Nothing:
    """A loss without parameters."""

    def __call__(self, output, batch):
        return output.logits.sum()


def task(name, loss=Weighted):
    torch.manual_seed(4)
    inner = STOCK[name].build() if name in STOCK else {"odd": Odd, "nested": Nested, "alike": Alike}[name]()
    return sw.TaskModel(inner, loss())


def stored(folder):
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(t, second[n]) for n, t in first.items())


def moved(name, layout, source, dest):
    """Loads ``source`` into a task, saves it; gives what was told and the whole tensors."""
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sw.parallelize(lambda: task(name, Nothing), world, init="load", sharding=EVERY)
        report = sw.load_weights(model, source)
        sw.save_weights(model, dest)
        return report, sw.full_state_dict(model)


@pytest.fixture
def alone():
    with sw.init("dp_shard=1", device="cpu") as world:
        yield world


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "dp_shard=2"),
        *(pytest.param("mixtral", layout, marks=pytest.mark.soak) for layout in ("dp_shard=2", "dp_replicate=2")),
    ],
)
def test_a_task_takes_and_gives_the_directory_of_its_model(ranks, tmp_path, name, layout):
    inner = task(name).model
    inner.save_pretrained(tmp_path / "stock")
    answers = ranks.run(moved, 2, name, layout, str(tmp_path / "stock"), str(tmp_path / "ours"))
    assert all((report.missing, report.unexpected, report.renamed) == ((), (), ()) for report, _ in answers)
    assert equal(stored(tmp_path / "stock"), stored(tmp_path / "ours"))
    assert equal(answers[0][1], {f"model.{n}": t for n, t in inner.state_dict().items()})
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [type(inner).__name__]
    again, told = type(inner).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    assert equal(again.state_dict(), inner.state_dict())


def test_what_the_loss_owns_lies_beside_and_stock_transformers_leaves_it_out(alone, tmp_path):
    inner = task("llama").model
    inner.save_pretrained(tmp_path / "stock")
    model = sw.parallelize(task("llama"), alone)
    report = sw.load_weights(model, tmp_path / "stock", strict=False)
    assert (report.missing, report.unexpected) == (("loss.scale",), ())
    sw.save_weights(model, tmp_path / "ours")
    again, told = type(inner).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert (list(told["missing_keys"]), list(told["unexpected_keys"])) == ([], ["loss.scale"])
    assert equal(again.state_dict(), inner.state_dict())
    assert sw.load_weights(model, tmp_path / "ours").num_tensors == report.num_tensors + 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("odd", "nested") for kind in ("saved", "canonical")] + [("odd", "wrapped")],
)
def test_a_task_takes_its_models_names_and_those_of_its_own(alone, tmp_path, name, kind):
    first = sw.parallelize(task(name), alone, sharding=EVERY)
    whole = sw.full_state_dict(first)
    sw.save_weights(first, tmp_path / "saved")
    assert {n.removeprefix("model.") for n in whole} >= stored(tmp_path / "saved").keys()
    source = {
        "saved": tmp_path / "saved",
        "canonical": whole,
        "wrapped": {f"module.{n}": t for n, t in whole.items()},
    }[kind]
    second = sw.parallelize(task(name), alone, sharding=EVERY)
    with torch.no_grad():
        for tensor in second.parameters():
            tensor.zero_()
    report = sw.load_weights(second, source)
    assert (report.missing, report.unexpected) == ((), ())
    assert equal(sw.full_state_dict(second), whole)


def test_a_checkpoint_of_a_task_is_the_directory_of_its_model_too(alone, tmp_path):
    inner = task("llama").model
    batch = models.get("llama").windows(1, 1)[0]
    model = sw.parallelize(task("llama"), alone, sharding=EVERY)
    step = sw.TrainStep(model, torch.optim.AdamW(model.parameters()), loss=None, count=lambda batch: 1)
    step(batch)
    whole = sw.full_state_dict(model)
    with sw.CheckpointManager(tmp_path, step, async_save=False) as manager:
        manager.save()
        step(batch)
        assert manager.load() == 1
    assert equal(sw.full_state_dict(model), whole)
    again = type(inner).from_pretrained(tmp_path / "latest")
    assert equal({f"model.{n}": t for n, t in again.state_dict().items()} | {"loss.scale": whole["loss.scale"]}, whole)


def test_a_tensor_that_is_missing_is_told_by_its_canonical_name(alone, tmp_path):
    model = sw.parallelize(task("nested"), alone)
    sw.save_weights(model, tmp_path / "saved")
    tensors = stored(tmp_path / "saved")
    del tensors["model.a.bias"]
    with pytest.raises(sw.CheckpointError, match=r"model\.model\.a\.bias"):
        sw.load_weights(model, tensors)


def test_where_the_loss_and_the_model_would_share_a_name_all_keep_their_canonical_ones(alone, tmp_path):
    model = sw.parallelize(task("alike"), alone)
    whole = sw.full_state_dict(model)
    assert whole.keys() == {"model.loss.scale", "loss.scale"}
    sw.save_weights(model, tmp_path / "saved")
    assert stored(tmp_path / "saved").keys() == whole.keys()
    assert sw.load_weights(model, tmp_path / "saved").num_tensors == 2


@pytest.mark.parametrize(("attribute", "rename"), [("model", ()), ("backbone", [(r"^", "backbone.")])])
def test_a_wrapper_of_the_users_own_keeps_its_names_and_takes_its_models_directory(alone, tmp_path, attribute, rename):
    torch.manual_seed(4)
    inner = models.get("llama").build()
    inner.save_pretrained(tmp_path / "stock")
    model = sw.parallelize(Wrapped(attribute), alone, sharding=EVERY)
    report = sw.load_weights(model, tmp_path / "stock", strict=False, rename=rename)
    assert report.missing == ("head.weight", "head.bias") and report.unexpected == ()
    sw.save_weights(model, tmp_path / "ours")
    ours = stored(tmp_path / "ours")
    assert ours.keys() == runtime_of(model).recipe.params.keys()
    names = {n: n.removeprefix(f"{attribute}.") for n in ours if n.startswith(f"{attribute}.")}
    assert equal({short: ours[n] for n, short in names.items()}, inner.state_dict())
