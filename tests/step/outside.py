"""Losses that use parameters outside of the model's forward, and writes that torch does not count, beside one process."""

import pytest
import torch
from torch import nn

import shardwise as sw

ROWS = (1, 3, 2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.layer(x)


class Calibrated(Net):
    def forward(self, x):
        return self.scale * self.layer(x) + self.bias


class Rolls(Net):
    """Writes its buffers, on each rank in another way, so that their sums do not change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.tensor([1e9, 2.0, 0.0, 5.0]))

    def forward(self, x):
        self.places.data = self.places.roll(int(x.shape[0]))
        return self.layer(x)


def batch(index: int):
    generator = torch.Generator().manual_seed(index)
    rows = ROWS[index % 4]
    return {
        "x": torch.randn(rows, 6, generator=generator).double(),
        "y": torch.randn(rows, 3, generator=generator).double(),
    }


def pair(build=Net):
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    return build().double(), plain


def squared(output, given):
    return (output - given["y"]).square().sum()


def error(model, plain) -> float:
    """The largest difference of a gradient."""
    found = {name: param.grad for name, param in model.named_parameters()}
    worst = 0.0
    for name, param in plain.named_parameters():
        grad = found[name]
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        if param.grad is None or grad is None:
            worst = max(worst, float("inf") if (param.grad is None) != (grad is None) else 0.0)
        else:
            worst = max(worst, float((grad - param.grad).abs().max() / param.grad.abs().max()))
    return worst


def calibration(world):
    """A frozen network, whose outputs are scaled and shifted: the shift has the same gradient on all ranks."""
    model, plain = pair(Calibrated)
    for each in (model, plain):
        each.layer.requires_grad_(False)
    model = sw.parallelize(model, world)
    axis = world.axis("dp")
    batches = [{key: value[:1] for key, value in batch(i).items()} for i in range(axis.size)]

    def loss(m, given):
        return m(given["x"]).sum()

    with pytest.raises(sw.UsageError), sw.window(model, [batches[axis.rank]], count=lambda b: len(b["x"])) as window:
        for given in window:  # past the outputs, which are frozen, it may be a penalty
            (model.scale * model.layer(given["x"]) + model.bias).sum().backward()
    with sw.window(model, [batches[axis.rank]], count=lambda b: len(b["x"])) as window:
        for given in window:
            (loss(model, given) / window.num_tokens).backward()
    for given in batches:
        (loss(plain, given) / axis.size).backward()
    return error(model, plain)


def penalties(m):
    return m.scale**2 + m.bias**2


def penalty_in_a_window(world):
    model, plain = pair()
    model, axis = sw.parallelize(model, world), world.axis("dp")
    batches = [batch(i) for i in range(axis.size)]
    total = sum(len(given["x"]) for given in batches)
    with sw.window(model, [batches[axis.rank]], count=lambda b: len(b["x"])) as window:
        for given in window:
            (squared(model(given["x"]), given) / window.num_tokens).backward()
        sw.parameter_penalty(model, penalties(model))
    for given in batches:
        (squared(plain(given["x"]), given) / total).backward()
    penalties(plain).backward()
    return error(model, plain)


def penalty_in_accumulate(world):
    model, plain = pair()
    model, axis = sw.parallelize(model, world), world.axis("dp")
    given = batch(axis.rank)
    with sw.accumulate(model, is_last=False):
        sw.parameter_penalty(model, penalties(model))
    with sw.accumulate(model, is_last=True):
        squared(model(given["x"]), given).backward()
    for i in range(axis.size):
        squared(plain(batch(i)["x"]), batch(i)).backward()
    penalties(plain).backward()
    return error(model, plain)


def padding(world):
    """A padding counts as nothing, also where the loss divides by a number of its own."""
    model, plain = pair()
    model = sw.parallelize(model, world)
    data = [{key: value[0] for key, value in batch(i).items()} for i in range(5)]
    for window_of_data in sw.Loader(data, world, global_batch=6, micro_batch=1, shuffle=False):
        with sw.window(model, window_of_data, count=lambda b: len(b["x"])) as window:
            for given in window:
                (squared(model(given["x"]) * model.scale, given) / 5).backward()
    for given in data:
        (squared(plain(given["x"][None]) * plain.scale, {"y": given["y"][None]}) / 5).backward()
    model.bias.grad = plain.bias.grad = None
    return error(model, plain)


def moved_parameters(world):
    """``p.data = ...`` on replicas gives a parameter other memory, which the optimizer must step."""
    model, plain = pair()
    model, axis = sw.parallelize(model, world), world.axis("dp")
    if world.layout.dp_shard > 1:
        return 0.0  # a DTensor's data cannot be replaced so
    optim, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    step = sw.TrainStep(model, optim, loss=squared, count=lambda b: len(b["x"]), forward=lambda m, b: m(b["x"]))
    for _ in range(3):
        step([batch(axis.rank)])
        total = sum(len(batch(i)["x"]) for i in range(axis.size))
        for i in range(axis.size):
            (squared(plain(batch(i)["x"]), batch(i)) / total).backward()
        other.step()
        other.zero_grad()
        for m in (model, plain):
            for param in m.parameters():
                param.data = param.data * 0.9
    return max(float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def rolled_buffers(world):
    """How many elements of a buffer differ from rank 0's after windows in which each rank wrote its own."""
    torch.manual_seed(0)
    model, axis = (
        sw.parallelize(Rolls().double(), world, sharding=sw.Sharding(buffers={"places": "rank0"})),
        world.axis("dp"),
    )
    for i in range(2):
        with sw.window(model, [batch(axis.rank + i)], count=lambda b: len(b["x"])) as window:
            for given in window:
                (squared(model(given["x"]), given) / window.num_tokens).backward()
    found = world.gather(model.places.tolist())
    return float(sum(values != found[0] for values in found))


CASES = {
    case.__name__: case
    for case in (calibration, penalty_in_a_window, penalty_in_accumulate, padding, moved_parameters, rolled_buffers)
}


def errors(layout: str):
    found = {}
    for name, case in CASES.items():
        with sw.init(layout, device="cpu") as world:
            found[name] = case(world)
    return found
