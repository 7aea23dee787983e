"""How a batch reaches a forward that nobody wrote for Shardwise: by name, or as the one tensor that it asks for."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.model.calling import call


class Echo(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize(
    "forward",
    [
        lambda input_ids: input_ids,
        lambda input_ids, mask=None: input_ids,
        lambda idx, targets=None: idx,
        lambda **kwargs: kwargs["input_ids"],
        lambda *args, **kwargs: kwargs["input_ids"],
        lambda x, return_embeddings=False, **kwargs: x,  # x-transformers
    ],
)
def test_the_one_tensor_of_a_batch_arrives_under_any_name(forward):
    ids = torch.arange(3)
    assert call(Echo(forward), {"input_ids": ids, "labels": ids + 1}) is ids


def test_names_that_do_not_match_a_forward_of_two_tensors_are_refused():
    with pytest.raises(UsageError, match="the names do not match"):
        call(Echo(lambda x, edges, **kwargs: x), {"nodes": torch.ones(1), "edges": torch.ones(1)})


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, scale=None):
        return self.linear(x) * (1.0 if scale is None else scale)


def of_x(x, /):
    return x


X, WEIGHT, Y = torch.full((4, 8), 2.0), torch.rand(4), torch.zeros(4, 1)


@pytest.mark.parametrize(
    "batch, passed",
    [
        ({"weight": torch.rand(4, 8), "x": X, "y": Y}, {}),  # as many columns as x has: any of the two fits the layer
        ({"x": X, "scale": torch.tensor(3.0), "y": Y}, {"scale": 3.0}),
        ({"scale": torch.tensor(3.0), "weight": WEIGHT, "y": Y, "x": X, "labels": Y}, {"scale": 3.0}),
    ],
    ids=["weight before x", "a scale", "both"],
)
def test_each_key_of_a_batch_goes_to_the_parameter_of_its_name(batch, passed):
    def squared_error(output, batch):
        return (output - batch["y"]).square().sum()

    with sw.init(device="cpu") as world:
        model = sw.parallelize(Scaled, world)
        with torch.no_grad():
            meant = float(squared_error(model(batch["x"], **passed), batch)) / 4
        step = sw.TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.0), loss=squared_error, count=lambda b: len(b["y"])
        )
        assert step([batch]).loss == pytest.approx(meant)
        given = {"loss": squared_error, "count": lambda b: len(b["y"])}
        assert sw.evaluate(model, [batch], **given)["loss"] == pytest.approx(meant)


@pytest.mark.parametrize(
    "forward, batch",
    [
        (lambda x: x, {"x": X, "y": Y, "index": WEIGHT}),  # keys that no parameter is named as are the loss's
        (lambda inp: inp, {"y": Y, "features": X}),
        (lambda inp: inp, {"times": torch.tensor(2.0), "features": X}),  # a factor of the loss
        (lambda inp: inp, {"y": X}),  # an autoencoder's only tensor
        (of_x, {"x": X, "target": Y}),
        (lambda *args: args[0], {"input": X, "labels": Y}),
        (lambda *, x, scale=None: x, {"x": X, "y": Y}),
        (lambda input, labels=None: input if labels is None else None, {"input": X, "labels": Y}),
        (lambda x, y=None: x if y is Y else None, {"x": X, "y": Y}),
        (lambda x, **kwargs: x if "weight" in kwargs else None, {"weight": WEIGHT, "x": X, "y": Y}),
    ],
)
def test_what_says_by_its_names_what_is_meant_is_passed(forward, batch):
    assert call(Echo(forward), batch) is next(value for value in batch.values() if value is X)


@pytest.mark.parametrize(
    "forward, batch, why",
    [
        (
            lambda inp: inp,
            {"weight": WEIGHT, "features": X, "y": Y},
            r"any of \['features', 'weight'\] may be the 'inp'",
        ),
        (lambda idx, mask=None: idx, {"input_ids": X, "mask": X}, r"has \['mask'\], and nothing for \['idx'\]"),
        (lambda x, labels: x, {"x": X, "labels": Y}, r"has \['x'\], and nothing for \['labels'\]"),
        (lambda x=None, mask=None: x, {"x": X, "msak": X}, "the names do not match"),
        (lambda x=None: x, {"features": X}, "the names do not match"),
        (lambda *, x: x, {"features": X}, "the names do not match"),
        (of_x, {"x": X, "weight": WEIGHT}, "may be the 'x' of the forward"),
    ],
)
def test_what_may_be_meant_otherwise_is_refused(forward, batch, why):
    with pytest.raises(UsageError, match=why) as caught:
        call(Echo(forward), batch)
    assert "forward=lambda model, batch: model(batch[" in caught.value.fix


def test_a_count_of_a_key_that_the_batch_does_not_have_names_the_keys():
    data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.randn(4, 1))
    with sw.init(device="cpu") as world:
        model = sw.parallelize(nn.Linear(3, 1), world)
        given = {"loss": lambda output, b: (output - b["labels"]).square().sum(), "count": lambda b: b[1].numel()}
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
        loader = sw.Loader(data, world, global_batch=4, micro_batch=2)
        for call_it in (lambda: step(next(iter(loader))), lambda: sw.evaluate(model, loader, **given)):
            with pytest.raises(
                sw.ConfigError, match=r"raises KeyError: 1 on a batch with the keys \['input', 'labels'\]"
            ) as told:
                call_it()
            assert "batch['labels'].shape[0]" in told.value.fix
