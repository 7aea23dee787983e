"""Where a script clears its gradients: as in one process, or refused. Before the window, in it, by the model, and as in a GAN."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.tempered import Tempered, batch, build
from techniques.data.test_own_loops import HSDP, WHERE, assert_equal, count, loss_of, sharded, whole
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.parallel import parallelize
from shardwise.step.own_loop import accumulate, count_tokens
from shardwise.step.window import window
from shardwise.world import init

LAYOUTS = [*WHERE, ("dp_shard=1", None), HSDP]
PLACES = (
    "before the window", "its first line", "in the loop", "to zeros", "by the model", "to zeros by the model",
    "by hand after a backward of another module", "by hand in the loop, after a gradient of its input",
)  # fmt: skip
STEPS, NUM = 3, 4


def clear(model: nn.Module, optim: torch.optim.Optimizer, place: str) -> None:
    if "by hand" in place:
        nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
        for param in model.parameters():
            param.grad = None
        return
    (model if "model" in place else optim).zero_grad(set_to_none="zeros" not in place)


def one_process_loop(place: str) -> list[dict[str, Tensor | None]]:
    """Gradients of each step. The head is frozen out of the last: its gradient is None there, or zeros."""
    model, found = build(), []
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        clear(model, optim, place)
        total = sum(count(batch(i)) for i in range(NUM))
        for i in range(NUM):
            (loss(model, batch(i), step) / total).backward()
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optim.step()
    return found


def loss(model: Tempered, given: dict[str, Tensor], step: int) -> Tensor:
    if step < STEPS - 1:
        return loss_of(model, given)
    features: list[Tensor] = []
    handle = model.blocks[2].register_forward_hook(lambda _module, _args, output: features.append(output))
    model(given["x"])
    handle.remove()
    return features[0].square().sum()


def looped(layout: str, unit: int | None, place: str) -> list[dict[str, Tensor | None]]:
    with init(layout, device="cpu", timeout_s=30) as world:
        model, found = sharded(world, unit), []
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = [batch(i) for i in range(world.rank, NUM, world.size)]
        for step in range(STEPS):
            if place == "before the window":
                clear(model, optim, place)
            with window(model, mine, count=count) as w:
                if place != "before the window" and "in the loop" not in place:
                    clear(model, optim, place)
                for number, given in enumerate(w):
                    if "of its input" in place:
                        x = given["x"].clone().requires_grad_()
                        torch.autograd.grad(loss(model, {**given, "x": x}, step), x)
                    if "in the loop" in place and number == 0:
                        clear(model, optim, place)
                    (loss(model, given, step) / w.num_tokens).backward()
            found.append({name: None if grad is None else grad.clone() for name, grad in whole(model).items()})
            optim.step()
        return found


@pytest.mark.combinations("values")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("layout", "unit"), LAYOUTS)
def test_gradients_are_cleared_wherever_the_script_does_it(ranks, layout, unit, place):
    """As the first line of a window it did nothing, and gradients added up for good: 0.72 off after three steps."""
    want = one_process_loop(place)
    for found in ranks.run(looped, 4 if "," in layout else int(layout[-1]), layout, unit, place):
        for mine, one in zip(found, want, strict=True):
            assert [n for n, grad in mine.items() if grad is None] == [n for n, grad in one.items() if grad is None]
            assert_equal(mine, {name: grad for name, grad in one.items() if grad is not None})


def too_late(layout: str, unit: int | None, script: str) -> str:
    with init(layout, device="cpu", timeout_s=30) as world:
        model = sharded(world, unit)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = [batch(i) for i in range(world.rank, 4, 2)]
        try:
            if script == "accumulate":
                n = count_tokens(model, mine, count=count)
                for i, given in enumerate(mine):
                    optim.zero_grad()
                    with accumulate(model, is_last=i == 1):
                        (loss_of(model, given) / n).backward()
                return ""
            with window(model, mine, count=count) as w:
                for given in w:
                    if script == "each micro-batch":
                        optim.zero_grad()
                    (loss_of(model, given) / w.num_tokens).backward()
                if script == "after the loop":
                    model.zero_grad()
        except UsageError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("script", ["each micro-batch", "after the loop", "accumulate"])
@pytest.mark.parametrize(("layout", "unit"), WHERE)
def test_clearing_gradients_of_micro_batches_is_refused(ranks, layout, unit, script):
    """Under FSDP2 they would stay, as they wait elsewhere for their sum; one process would drop them."""
    for text in ranks.run(too_late, 2, layout, unit, script):
        assert "zero_grad()" in text and ("is_last" in text if script == "accumulate" else "before the window" in text)


# ---- a GAN, in the order of PyTorch's tutorial ---------------------------------------------------------------------------


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


class Generator(Discriminator):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def gan(make: Callable[[Callable[[], nn.Module]], Any], run: Callable[..., None]) -> dict[str, Tensor]:
    """Discriminator: cleared, then trained; generator: cleared, and trained through the discriminator, whose gradients of that are
    dropped by the next clearing."""
    nets, optims = {}, {}
    for name, kind in (("d", Discriminator), ("g", Generator)):
        torch.manual_seed(5)
        nets[name] = make(lambda kind=kind: kind().double())
        optims[name] = torch.optim.Adam(nets[name].parameters(), lr=0.1)
    d, g = nets["d"], nets["g"]

    def real_and_fake(x: Tensor, n: float) -> None:
        ((d(x) ** 2).sum() / n).backward()
        ((d(g(x.flip(-1)).detach()) - 1).square().sum() / n).backward()

    def fooled(x: Tensor, n: float) -> None:
        (d(g(x.flip(-1))).square().sum() / n).backward()

    for _ in range(3):
        run(d, optims["d"], real_and_fake)
        optims["d"].step()
        run(g, optims["g"], fooled)
        optims["g"].step()
    found = {f"{name}.{n}": p.detach() for name, net in nets.items() for n, p in net.named_parameters()}
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in found.items()}


def sharded_gan(layout: str) -> dict[str, Tensor]:
    with init(layout, device="cpu", timeout_s=30) as world:
        mine = [batch(i) for i in range(world.rank, NUM, world.size)]

        def run(model: nn.Module, optim: torch.optim.Optimizer, part: Callable[[Tensor, float], None]) -> None:
            with window(model, mine, count=count) as w:
                optim.zero_grad()
                for given in w:
                    part(given["x"], w.num_tokens)

        return gan(lambda build: parallelize(build(), world), run)


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
def test_a_gan_in_the_order_of_the_tutorial(ranks, layout):
    total = sum(count(batch(i)) for i in range(NUM))

    def run(_model: nn.Module, optim: torch.optim.Optimizer, part: Callable[[Tensor, float], None]) -> None:
        optim.zero_grad()
        for i in range(NUM):
            part(batch(i)["x"], total)

    want = gan(lambda build: build(), run)
    for found in ranks.run(sharded_gan, 2, layout):
        assert_equal(found, want)
