"""Layers that are cut over ranks by hand, beside those of one process."""

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (11, 8), "up": (16, 8), "up_bias": (16,), "down": (6, 16), "down_bias": (6,), "head": (8, 6)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


IDS = torch.arange(12).view(3, 4) % 11


def plain() -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of one process, and the gradients of a loss of them."""
    whole = {name: x.requires_grad_() for name, x in tensors().items()}
    x = F.embedding(IDS, whole["table"])
    y = F.linear(torch.tanh(F.linear(x, whole["up"], whole["up_bias"])), whole["down"], whole["down_bias"])
    y = F.linear(y, whole["head"])
    y.square().sum().backward()
    return y.detach(), {name: x.grad for name, x in whole.items()}


def cut(keeps_whole: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The same over tp. ``keeps_whole``: every rank has all of the parameters, and computes with its part of them."""
    dims = {"table": 1, "up": 0, "up_bias": 0, "down": 1, "head": 0}
    with sw.init("tp=2", device="cpu") as world:
        axis = world.axis("tp")
        if keeps_whole:
            held = {name: x.requires_grad_() for name, x in tensors().items()}
            part = {name: sw.tp_scatter(x, axis, dims[name]) if name in dims else x for name, x in held.items()}
        else:
            part = held = {
                name: (axis.split(x, dims[name]).clone() if name in dims else x).requires_grad_()
                for name, x in tensors().items()
            }
        x = sw.parallel_embedding(IDS, part["table"], axis=axis)
        x = torch.tanh(sw.column_parallel_linear(x, part["up"], part["up_bias"], axis=axis))
        y = sw.row_parallel_linear(x, part["down"], part["down_bias"], axis=axis)
        y = sw.column_parallel_linear(y, part["head"], axis=axis, gather_output=True)
        y.square().sum().backward()
        grads = {
            name: axis.gather(x.grad, dims[name]) if name in dims and not keeps_whole else x.grad
            for name, x in held.items()
        }
        return y.detach(), grads


def row_parallel_of_a_whole_input() -> tuple[float, float]:
    """The largest differences of outputs, and of the gradient of the inputs, to those of one process."""
    x, weight = tensors()["up"].T.clone().requires_grad_(), tensors()["down"]
    want = F.linear(x, weight)
    (wanted,) = torch.autograd.grad(want.square().sum(), x)
    with sw.init("tp=2", device="cpu") as world:
        axis = world.axis("tp")
        y = sw.row_parallel_linear(x, axis.split(weight, 1), axis=axis, input_is_parallel=False)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return float((y - want).abs().max()), float((grad - wanted).abs().max())


class ByHand(nn.Module):
    """A model that sums over tp by itself."""

    axis = None  # of the class: a process group cannot be copied with a model

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return sw.tp_reduce(self.layer(x), ByHand.axis)


def refused() -> dict[str, str]:
    found = {}
    with sw.init("tp=2", device="cpu") as world:
        axis = ByHand.axis = world.axis("tp")
        for case, call in {
            "uneven": lambda: sw.tp_scatter(torch.ones(3, 5), axis),
            "within parallelize": lambda: sw.parallelize(ByHand, world, example={"x": torch.ones(4, 6)}),
        }.items():
            try:
                call()
                found[case] = "no error"
            except sw.ShardwiseError as error:
                found[case] = f"{type(error).__name__}: {error}"
    return found


def loss_of_a_step() -> tuple[float, dict[str, Tensor]]:
    """A step of a model that is cut, with a loss that computes with parts of a table of its own."""
    record = models.get("linears: kv-1")
    table = tensors()["up"][:, 0].float()

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        axis = world.axis("tp")
        part = axis.split(table)
        seen = sw.tp_copy(logits, axis).mean(-1, keepdim=True) * part  # each rank has some of the columns
        return sw.tp_reduce(seen.square().sum(), axis)

    with sw.init("tp=2", device="cpu") as world:
        model = sw.parallelize(record.build, world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, count=lambda batch: 1)
        out = step(record.windows(1, 2)[0])
        return out.loss, sw.full_state_dict(model)


def loss_of_a_plain_step() -> tuple[float, dict[str, Tensor]]:
    """The same on one rank."""
    record = models.get("linears: kv-1")
    table = tensors()["up"][:, 0].float()
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(record.build, world)
        step = sw.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda logits, batch: (logits.mean(-1, keepdim=True) * table).square().sum(),
            count=lambda batch: 1,
        )
        out = step(record.windows(1, 2)[0])
        return out.loss, sw.full_state_dict(model)
