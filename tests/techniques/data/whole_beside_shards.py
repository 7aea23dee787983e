"""Losses and loops that compute with parameters beside whole tensors, and what errors say to do in their place."""

import torch
import torch.nn.functional as F
from step.plain import mine
from techniques.tp.read_values import VOCAB, batches, build, loss_of

import shardwise as sw
from shardwise.errors import ShardwiseError

EACH = sw.Sharding(min_unit_bytes=0)
ONE = sw.Sharding(units="none")
PRIOR = torch.linspace(-1, 1, VOCAB * 8, dtype=torch.float64).view(VOCAB, 8)


def prior_model():
    model = build()
    with torch.no_grad():
        model.head.weight.copy_(PRIOR)
    return model


def cross_entropy(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


# ---- refused ----------------------------------------------------------------------------------------------------

TERMS = {
    "distance": lambda model, _: (model.head.weight - PRIOR).square().sum(),
    "mask": lambda model, _: torch.where(PRIOR > 0, model.head.weight, 0.0).abs().sum(),
    "product": lambda model, out: (out.new_ones(3, 8) @ model.head.weight.t()).square().sum(),
    "layer": lambda model, out: F.linear(out.new_ones(3, 8), model.head.weight).sum(),
    "cdist": lambda model, out: torch.cdist(out.new_ones(3, 8), model.embed.weight).sum(),
    "sum of squares": lambda model, _: sum(p.square().sum() for p in model.parameters()),
    "full_tensor": lambda model, _: sw.full_tensor(model.head.weight).square().sum(),
}


def refused(layout):
    """The error of a loss with each term."""
    found = {}
    for name, term in TERMS.items():
        with sw.init(layout, device="cpu", timeout_s=30) as world:
            model = sw.parallelize(build(), world, sharding=EACH)
            optim = torch.optim.SGD(model.parameters(), lr=0.1)

            def loss(output, batch, model=model, term=term):
                return cross_entropy(output, batch) + 0.1 * term(model, output)

            try:
                sw.TrainStep(model, optim, loss=loss)(mine(batches(0), world))
                found[name] = "no error"
            except ShardwiseError as error:
                found[name] = f"{type(error).__name__}: {error}"
            except Exception as error:
                found[name] = f"raw: {error}"
    return found


# ---- what to do instead: each is given a model and its batches, and takes steps ---------------------------------


def a_penalty(model, given, window_of, start):
    """``start``: what stands beside the parameter."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        with window_of(model, given(turn)) as w:
            for batch in w:
                (loss_of(model, batch) / w.num_tokens).backward()
            penalty = 0.1 * (model.head.weight - start).square().sum()
            if window_of is Window:
                penalty.backward()
            else:
                sw.parameter_penalty(model, penalty)
        optim.step()
        optim.zero_grad()


def after_the_window(model, given, window_of, start):
    """The penalty's gradient is added to the others, element by element."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        with window_of(model, given(turn)) as w:
            for batch in w:
                (loss_of(model, batch) / w.num_tokens).backward()
        model.head.weight.grad.add_(model.head.weight.detach() - start, alpha=0.2)
        optim.step()
        optim.zero_grad()


class Window:
    """``sw.window`` of one plain process."""

    def __init__(self, _model, given):
        self.given, self.num_tokens = given, sum(batch["labels"].numel() for batch in given)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        return iter(self.given)


WAYS = {"a penalty": a_penalty, "after the window": after_the_window}
STARTS = ("clone", "second model")


def followed(layout, way, start):
    """Whole parameters after a loop that does what the error says."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(build(), world, sharding=EACH)
        if start == "clone":
            beside = model.head.weight.detach().clone()
        else:
            beside = sw.parallelize(prior_model(), world, sharding=EACH).head.weight.detach()
        WAYS[way](model, lambda turn: mine(batches(turn), world), sw.window, beside)
        return {name: sw.full_tensor(p).detach() for name, p in model.named_parameters()}


def followed_alone(way, start):
    model = build()
    beside = model.head.weight.detach().clone() if start == "clone" else PRIOR
    WAYS[way](model, batches, Window, beside)
    return {name: param.detach() for name, param in model.named_parameters()}


class Product:
    """A loss that computes with parameters of two units of the model, which a ``TaskModel`` has in its forward."""

    def __init__(self, model):
        self.model = model

    def __call__(self, output, batch):
        rows = F.embedding(batch["labels"].flatten(), self.model.head.weight)
        return cross_entropy(output, batch) + 0.1 * F.linear(rows, self.model.blocks[0].up.weight).square().sum()


def in_a_forward(layout, sharding):
    """Whole parameters of a ``TaskModel``, or the error."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = build()
        task = sw.parallelize(sw.TaskModel(model, Product(model)), world, sharding=sharding)
        step = sw.TrainStep(
            task, torch.optim.SGD(task.parameters(), lr=0.01), loss=None, count=lambda b: b["labels"].numel()
        )
        try:
            for turn in range(3):
                step(mine(batches(turn), world))
        except ShardwiseError as error:
            return str(error)
        return {name: sw.full_tensor(p).detach() for name, p in task.named_parameters()}


def in_a_forward_alone():
    task = sw.TaskModel(model := build(), Product(model))
    optim = torch.optim.SGD(task.parameters(), lr=0.01)
    for turn in range(3):
        given = batches(turn)
        num = sum(batch["labels"].numel() for batch in given)
        (sum(task(batch) for batch in given) / num).backward()
        optim.step()
        optim.zero_grad()
    return {name: param.detach() for name, param in task.named_parameters()}


def read_in_the_loss(layout):
    """What a loss reads within ``sw.gathered``, and the loss."""
    seen = []
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(build(), world, sharding=EACH)

        def loss(output, batch):
            with torch.no_grad(), sw.gathered(model):
                seen.append(float((model.head.weight - PRIOR).norm()))
            return cross_entropy(output, batch)

        sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)(mine(batches(0), world))
    return seen[0]
