"""Python numbers read from tensors that are cut: torch gives each rank the number of its own part. Each is a script as one writes
it for one process; under FSDP2 it is refused, with ``full_tensor()`` it has one process's numbers, and replicas are exact as they are.
"""

import functools

import numpy as np
import pytest
import torch
from step.plain import assert_close, batch, build, mine, shard, sum_loss, values
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import shardwise as sw
from shardwise.errors import UsageError


def as_it_is(value: Tensor) -> float:
    return value.item()


def whole(value: Tensor) -> float:
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


class Lamb(torch.optim.Optimizer):
    """The step of each layer is as long as its weights are."""

    def __init__(self, params, number):
        super().__init__(params, {"lr": 0.01})
        self.number = number

    @torch.no_grad()
    def step(self):
        for param in (p for group in self.param_groups for p in group["params"]):
            state = self.state[param]
            if not state:
                state["first"], state["second"] = torch.zeros_like(param), torch.zeros_like(param)
            state["first"].lerp_(param.grad, 0.1)
            state["second"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
            update = state["first"] / (state["second"].sqrt() + 1e-6)
            ratio = self.number(param.norm()) / self.number(update.norm())
            param.add_(update, alpha=-0.01 * ratio)


class Prodigy(torch.optim.Optimizer):
    """The length of the step is estimated from how far the weights have come."""

    def __init__(self, params, number):
        super().__init__(params, {"d": 1e-2})
        self.number = number

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        above, below = 0.0, 1e-12
        for param in params:
            state = self.state[param]
            if not state:
                state["start"], state["sum"] = param.clone(), torch.zeros_like(param)
            above += self.number((param.grad * (state["start"] - param)).sum())
            state["sum"].add_(param.grad)
            below += self.number(state["sum"].abs().sum())
        group = self.param_groups[0]
        group["d"] = max(group["d"], above / below)
        for param in params:
            param.sub_(param.grad * group["d"])


def lamb(model, number):
    return Lamb(model.parameters(), number).step


def prodigy(model, number):
    return Prodigy(model.parameters(), number).step


def adaptive_clipping(model, number):
    """Each gradient is held to a part of its weight's norm."""
    optim = torch.optim.SGD(model.parameters(), lr=0.5)

    def step():
        for param in model.parameters():
            most, norm = 0.02 * float(number(param.detach().norm())), number(param.grad.norm())
            if norm > most:
                param.grad.mul_(most / norm)
        optim.step()

    return step


def logged_norm(model, number):
    """A norm for the log, and a step that depends on it."""
    optim = torch.optim.SGD(model.parameters(), lr=0.5)

    def step():
        total = sum(number(param.grad.norm()) ** 2 for param in model.parameters()) ** 0.5
        optim.param_groups[0]["lr"] = 0.1 / total
        optim.step()

    return step


WAYS = (lamb, prodigy, adaptive_clipping, logged_norm)


def train(model, way, number, batches_of):
    step = way(model, number)
    for turn in range(3):
        for given, num_tokens in batches_of(turn):
            (sum_loss(model(given["input_ids"]), given) / num_tokens).backward()
        step()
        model.zero_grad()


def on_ranks(layout: str, engine: str | None, number) -> dict:
    """Whole parameters after three steps in each way, or the error."""
    found = {}
    for way in WAYS:
        world, model = shard(layout, engine=engine)

        def batches(turn, world=world, model=model):
            with sw.window(model, mine([batch(i + 4 * turn) for i in range(4)], world)) as w:
                for given in w:
                    yield given, w.num_tokens

        with world:
            try:
                train(model, way, number, batches)
                found[way.__name__] = values(model)
            except UsageError as error:
                found[way.__name__] = str(error)
    return found


@functools.cache
def alone(way) -> dict[str, Tensor]:
    model = build()

    def batches(turn):
        given = [batch(i + 4 * turn) for i in range(4)]
        num_tokens = sum(int((each["labels"] != -100).sum()) for each in given)
        return [(each, num_tokens) for each in given]

    train(model, way, as_it_is, batches)
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.quick("dp_shard=2-fsdp2-whole", "dp_replicate=2-None-as_it_is")
@pytest.mark.parametrize(
    ("layout", "engine", "number"),
    [
        ("dp_shard=2", "fsdp2", whole),
        ("dp_replicate=2", None, as_it_is),
        pytest.param("dp_replicate=2,dp_shard=2", "fsdp2", whole, marks=pytest.mark.soak),
        ("dp_replicate=2", "fsdp2", as_it_is),  # a mesh axis of size 1: nothing is cut
    ],
)
def test_whole_numbers_give_one_process(ranks, layout, engine, number):
    num_ranks = 4 if "," in layout else 2
    for found in ranks.run(on_ranks, num_ranks, layout, engine, number):
        for way in WAYS:
            want = alone(way)
            assert not isinstance(found[way.__name__], str), found[way.__name__]
            assert_close(found[way.__name__], want, 1e-10)  # LAMB divides by small numbers


def test_the_number_of_a_part_is_refused(ranks):
    """Weights were 0.1 to 0.5 off, and the logged norm was 0.74 in place of 1.06, without a word."""
    for found in ranks.run(on_ranks, 2, "dp_shard=2", "fsdp2", as_it_is):
        for name, text in found.items():
            assert isinstance(text, str) and "cut over dp_shard=2" in text, (name, text)
            assert ".full_tensor().item()" in text


READS = {
    "float": float,
    "int": int,
    "bool": bool,
    "item": lambda value: value.item(),
    "scalar argument": lambda value: torch.ones(2).add_(torch.ones(2), alpha=value),
    "is_nonzero": torch.is_nonzero,
    "tolist": lambda value: value.tolist(),
    "format": lambda value: f"{value:.3f}",
    "numpy": lambda value: value.numpy(),
    "asarray": lambda value: np.asarray(value),
}
# torch itself has none of these for a DTensor, whole or not, and its errors do not say what to do
NOT_OF_DTENSORS = {"tolist": "RuntimeError", "format": "TypeError", "numpy": "RuntimeError", "asarray": "RuntimeError"}


def how(call, value: Tensor) -> str | None:
    """The error that ``call(value)`` ends in."""
    try:
        call(value)
    except (UsageError, RuntimeError, TypeError) as error:
        return type(error).__name__
    return None


def reads() -> tuple[dict, dict, list]:
    """What each way to a number says of a part; what is no part; and what printing gives."""
    refused, read = {}, {}
    world, model = shard("dp_shard=2")
    with world:
        weight = model.blocks[0].weight
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))  # another library's
        foreign = distribute_tensor(torch.tensor([3.0, 4.0]), other, [Shard(0)]).norm()
        for name, call in READS.items():
            refused[name] = how(call, weight.detach().norm())
            refused[f"foreign {name}"] = how(call, foreign) if name in NOT_OF_DTENSORS else None
        read["whole"] = weight.norm().full_tensor().item()
        read["replicated"] = weight.detach().norm().redistribute(placements=[Replicate()]).item()
        read["compared"] = (
            bool(weight.detach().norm() > read["whole"] / 2),
            bool(weight.detach().norm() < read["whole"] / 2),
        )
        read["foreign"] = foreign.item()
        return refused, read, [str(weight), repr(weight.detach().norm()), f"{weight.detach().norm()}"]


def test_every_way_to_a_number(ranks):
    want = build().blocks[0].weight.norm().item()
    answers = ranks.run(reads, 2)
    for rank, (refused, read, printed) in enumerate(answers):
        for name in READS:
            assert refused[name] == "UsageError", (name, refused[name])
            assert refused[f"foreign {name}"] == NOT_OF_DTENSORS.get(name), name
        assert read["whole"] == read["replicated"] == pytest.approx(want, rel=1e-12)
        assert read["compared"] == (True, False)  # torch makes it whole to compare it
        assert read["foreign"] == (3.0, 4.0)[rank]
        assert all("DTensor" in text for text in printed)


def torchs_own(layout: str) -> dict:
    """torch's optimizers, clipping, norms and scaler, which read no number of a part."""
    found = {}
    for name, options in {
        "AdamW": {"foreach": False},
        "SGD": {"momentum": 0.9, "foreach": True},
        "Adagrad": {},
        "Adam": {"fused": True},
        "NAdam": {"foreach": True},
    }.items():
        world, model = shard(layout)
        with world:
            optim = getattr(torch.optim, name)([p for p in model.parameters() if p.dim()], lr=0.01, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for turn in range(2):
                with sw.window(model, mine([batch(i + 4 * turn) for i in range(4)], world)) as w:
                    for given in w:
                        scaler.scale(sum_loss(model(given["input_ids"]), given) / w.num_tokens).backward()
                scaler.unscale_(optim)
                params = [p for p in model.parameters() if p.dim()]
                total = torch.nn.utils.get_total_norm([p.grad for p in params])
                norm = torch.nn.utils.clip_grad_norm_(params, 0.1, error_if_nonfinite=True)
                scaler.step(optim)
                scaler.update()
                optim.zero_grad()
            norms = [(n.full_tensor() if isinstance(n, DTensor) else n).item() for n in (total, norm)]
            found[name] = values(model), norms
    return found


def test_torchs_own_optimizers_and_clipping_still_work(ranks):
    (want,) = ranks.run(torchs_own, 1, "dp_shard=1")
    for found in ranks.run(torchs_own, 2, "dp_shard=2"):
        for name, (params, norms) in found.items():
            assert norms == pytest.approx(want[name][1], rel=1e-9)
            for key, value in params.items():
                torch.testing.assert_close(value, want[name][0][key], rtol=1e-6, atol=1e-8)
