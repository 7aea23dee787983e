"""What users do with a model that is cut over tp and torch would do wrongly without a word."""

import copy
import os
import random
import warnings
from unittest import mock

import models
import numpy
import torch
import torch.distributed.checkpoint.state_dict as dcp
from techniques.tp.searches import searched_once
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardwise as sw

NAME = "linears: kv-1"


class Signs(torch.optim.SGD):
    """An optimizer of a user's own."""


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        return self.down(torch.relu(self.up(self.norm(x + y))))


class OfTwenty(Plain):
    """Takes 20 samples and nothing else."""

    def forward(self, x, y):
        return super().forward(x.view(20, 6), y)


class Notes(nn.Module):
    """Notes the shapes that it is given."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.seen = mock.Mock()  # not a list, which the search would put back

    def __deepcopy__(self, memo):
        made = copy.copy(self)
        made._modules, made._parameters = copy.deepcopy(self._modules, memo), {}
        return made

    def forward(self, input_ids):
        self.seen(tuple(input_ids.shape))
        return self.down(torch.relu(self.up(self.embed(input_ids))))


class Draws(Plain):
    """Draws from the generators of Python and numpy."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return super().forward(x, x * random.random() * numpy.random.rand())


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(3, 5)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.turn, self.down = (
            nn.Linear(6, 8),
            nn.Parameter(torch.randn(8, 8, dtype=torch.complex64)),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        return self.down((self.up(x).to(torch.complex64) @ self.turn).real)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(5, 3), nn.Linear(3, 9), nn.Linear(9, 4)

    def forward(self, input_ids):
        return self.down(torch.relu(self.up(self.embed(input_ids))))


def cut(world):
    with searched_once(NAME):
        return sw.parallelize(models.get(NAME).build, world)


def stepping(make):
    def call(world):
        model = cut(world)
        optim = make(model)
        batches = models.get(NAME).windows(1, 1)[0]
        with sw.window(model, batches) as window:
            for batch in window:
                (sw.next_token_loss(model(batch["input_ids"]), batch) / window.num_tokens).backward()
        optim.step()

    return call


def of_matrices(model):
    return torch.optim.Adafactor(model.parameters())


def other_data(world):
    batches = models.get(NAME).windows(3, 3)
    batches[1][1]["labels"] = batches[1][1]["labels"] - world.axis("tp").rank
    model = cut(world)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in batches:
        step(window)


def evaluating_other_data(world):
    rank = world.axis("tp").rank
    sw.evaluate(cut(world), models.get(NAME).windows(2, 1)[rank])


def looping_over_other_data(world):
    """A loop without a window."""
    model, rank = cut(world), world.axis("tp").rank
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    batch = models.get(NAME).windows(2, 1)[rank][0]
    sw.next_token_loss(model(batch["input_ids"]), batch).backward()


def sampling(seed):
    def call(world):
        torch.manual_seed(seed(world))
        model = sw.parallelize(models.get("llama").build, world)
        ids = torch.arange(6).view(2, 3) + 3
        found = model.generate(ids, do_sample=True, max_new_tokens=8, top_k=None, eos_token_id=None)
        one, other = world.gather(found)
        assert torch.equal(one, other)

    return call


def with_a_mask(example):
    """Steps with an attention mask, after a trial with ``example`` or, None, with tokens alone."""

    def call(world):
        model = models.get("llama")
        batches = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in model.windows(1, 1)[0]]
        module = sw.parallelize(model.build, world, example=batches[0] if example else None)
        sw.TrainStep(module, torch.optim.SGD(module.parameters(), lr=0.1))(batches)

    return call


def other_plan(world):
    style = ("colwise", "replicate")[world.rank]
    sw.parallelize(models.get("gpt2").build, world, tensor_parallel=sw.TensorParallel(plan={"lm_head": style}))


def hooked(world):
    model = models.get(NAME).build()
    model.blocks[0].mlp.up.weight.register_hook(lambda grad: grad * 0)
    sw.parallelize(model, world)


def hooked_norm(world):
    model = models.get("linears: norm-of-heads").build()
    model.blocks[0].attention.norm.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    sw.parallelize(model, world)


def hooked_later(world):
    known = models.get("linears: norm-of-heads")
    batches = known.windows(1, 1)[0]
    model = sw.parallelize(known.build(), world, example=batches[0])
    model.blocks[0].attention.norm.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))(batches)


def clipping(clip):
    """A window whose gradients torch clips, or takes the norm of."""

    def call(world):
        model, batches = cut(world), models.get(NAME).windows(1, 1)[0]
        with sw.window(model, batches) as window:
            for batch in window:
                (sw.next_token_loss(model(batch["input_ids"]), batch) / window.num_tokens).backward()
        clip(model)

    return call


def of_another_model(model):
    other = nn.Linear(3, 3)
    other(torch.ones(2, 3)).sum().backward()
    clip_grad_norm_(other.parameters(), 1.0)
    clip_grad_norm_(model.norm.parameters(), 1.0)  # whole on every rank


MISUSES = {
    "state_dict": lambda world: cut(world).state_dict(),
    "state_dict of a block": lambda world: cut(world).blocks[0].state_dict(),
    "torch's full state dict": lambda world: dcp.get_model_state_dict(cut(world), options=dcp.StateDictOptions(full_state_dict=True)),
    "gathered": lambda world: sw.gathered(cut(world)).__enter__(),
    "load_state_dict": lambda world: cut(world).load_state_dict(models.get(NAME).build().state_dict()),
    "an optimizer that mixes": stepping(of_matrices),
    "TrainStep with one": lambda world: sw.TrainStep(model := cut(world), of_matrices(model)),
    "an optimizer of one's own": stepping(lambda model: Signs(model.parameters(), lr=0.1)),
    "a backward without a window": lambda world: cut(world)(torch.zeros(1, 4, dtype=torch.long)).sum().backward(),
    "other data": other_data,
    "an evaluation of other data": evaluating_other_data,
    "a loop over other data": looping_over_other_data,
    "sampling without a seed": sampling(lambda world: world.rank),
    "torch's clipping": clipping(lambda model: clip_grad_norm_(model.parameters(), 1.0)),
    "torch's norm": clipping(lambda model: torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])),
    "another plan": other_plan,
    "a hook": hooked,
    "a hook on a norm of each head": hooked_norm,
    "a hook on it, later": hooked_later,
    "a token that is none": lambda world: torch.no_grad()(cut(world))(torch.full((1, 4), 19)),
    "a mask that the example did not have": with_a_mask(False),
    "no example": lambda world: sw.parallelize(Plain, world),
    "an example that does not fit": lambda world: sw.parallelize(Plain, world, example={"x": torch.ones(2, 5), "y": torch.ones(2, 5)}),
    "a model that does not run": lambda world: sw.parallelize(Fails, world),
    "complex parameters": lambda world: sw.parallelize(Complex, world, example={"x": torch.ones(2, 6)}),
}  # fmt: skip

WORKS = {
    "sampling with one seed": sampling(lambda world: 3),
    "torch's clipping of another model, and of what is whole": clipping(of_another_model),
    "no gradients": lambda world: torch.no_grad()(cut(world))(torch.zeros(1, 4, dtype=torch.long)),
    "an elementwise one": stepping(lambda model: torch.optim.AdamW(model.parameters())),
    "norms alone": stepping(lambda model: torch.optim.Adafactor([model.norm.weight, model.norm.bias])),
    "a mask that the example had": with_a_mask(True),
    "an example that cannot be cropped": lambda world: sw.parallelize(
        OfTwenty, world, example={"x": torch.ones(20, 6), "y": torch.ones(20, 6)}
    ),
    "an example": lambda world: sw.parallelize(Plain, world, example={"x": torch.ones(2, 6), "y": torch.ones(2, 6)}),
}


# What leaves the model as it was, and needs no other rank: these have one model, as to cut it is most of what each costs.
READS = (
    "state_dict",
    "state_dict of a block",
    "torch's full state dict",
    "gathered",
    "load_state_dict",
    "TrainStep with one",
)


def results(cases: str):
    calls, found = MISUSES if cases == "misuses" else WORKS, {}
    if cases == "misuses":
        with sw.init("tp=2", device="cpu") as world:
            model = cut(world)
            with mock.patch(f"{__name__}.cut", lambda _: model):
                found |= {name: result(calls[name], world) for name in READS}
    for name in [name for name in calls if name not in found]:  # in the same order on every rank
        with sw.init("tp=2", device="cpu") as world:
            found[name] = result(calls[name], world)
    return found


def result(call, world):
    try:
        call(world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Little(nn.Module):
    """A small MLP beside a large layer that mixes everything."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(7, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.mix = nn.Linear(4, 100)

    def forward(self, input_ids):
        x = self.embed(input_ids).softmax(-1)
        return self.mix((x + self.down(torch.relu(self.up(x)))).softmax(-1))


def described(layout: str, what: str, per_node: int | None = None):
    """What ``describe`` says of a model, and the warnings."""
    model = {"narrow": Narrow, "named": models.get(NAME).build, "little": Little}[what]
    if per_node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_node)
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = sw.describe(sw.parallelize(model, world))
        return text, [str(each.message) for each in told]


def sizes_seen():
    """The shapes of which a model has seen inputs while it was searched, given eight rows of 1000 tokens."""
    with sw.init("tp=2", device="cpu") as world:
        model = Notes()
        sw.parallelize(model, world, example={"input_ids": torch.ones(8, 1000, dtype=torch.long)})
        return {call.args[0] for call in model.seen.call_args_list}


def drawn_after():
    """The next random numbers after a model was sharded, without tp and with it."""
    drawn = []
    for layout in ("dp_replicate=2", "tp=2"):
        with sw.init(layout, device="cpu") as world:
            random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
            sw.parallelize(Draws, world)
            drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    return drawn


def alone(then: str):
    """A forward on rank 0; the other goes on to what all ranks do."""
    with sw.init("tp=2", device="cpu", timeout_s=100) as world:
        model = cut(world)
        if world.is_main:
            torch.no_grad()(model)(torch.zeros(1, 4, dtype=torch.long))
        if then == "a barrier":
            world.barrier()
