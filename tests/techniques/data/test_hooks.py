"""Hooks that users put on parameters: carried along where they are right, refused by name where they are not."""

import functools

import pytest
import torch
from torch import nn

from shardwise import Sharding
from shardwise.errors import UnsupportedError, UsageError
from shardwise.parallel import parallelize, runtime_of
from shardwise.parallel.unfit_modules import refuse_held_accumulators
from shardwise.step.window import window
from shardwise.world import init

pytestmark = pytest.mark.timeout(60)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


def thrice(grad):
    return grad * 3


def plain():
    return Net().double()


def on_gradient():
    net = Net().double()
    net.blocks[1].weight.register_hook(thrice)
    return net


def on_scalar():
    net = Net().double()
    net.scale.register_hook(thrice)
    return net


def five_times(param):
    param.grad.mul_(5)


def after_accumulation():
    net = Net().double()
    net.blocks[1].weight.register_post_accumulate_grad_hook(five_times)
    return net


def on_node():
    global node_held  # in a list of its own: referrers are not looked for among what was there when the rank was started
    net = Net().double()
    node = net.blocks[1].weight.view_as(net.blocks[1].weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: None)
    node_held = [node]
    return net


def built(name: str, how: str, world, engine: str):
    torch.manual_seed(1)
    build = globals()[name]
    sharding = Sharding(engine=engine) if engine == "ddp" else Sharding(engine=engine, min_unit_bytes=0)
    if how == "module":
        return parallelize(build(), world, sharding=sharding)
    return parallelize(build, world, init="rank0" if how == "rank0" else None, sharding=sharding)


def micro_batches(num: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, 4, dtype=torch.float64, generator=generator)} for _ in range(num)]


def gradients(name: str, how: str, layout: str, engine: str):
    """Gradients of two micro-batches, with those of one process on the same values."""
    with init(layout, device="cpu", timeout_s=20) as world:
        model = built(name, how, world, engine)
        values = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        plain = globals()[name]()
        plain.load_state_dict({n: value.detach() for n, value in values.items()})
        batches = micro_batches(2 * world.size)
        with window(model, batches[2 * world.rank :][:2], count=len) as w:
            for batch in w:
                (model(batch["x"]).sum() / w.num_tokens).backward()
        for batch in batches:
            (plain(batch["x"]).sum() / w.num_tokens).backward()
        found = {n: p.grad for n, p in runtime_of(model).parameters.items()}
        found = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
        return found, {n: p.grad for n, p in plain.named_parameters()}


CARRIED = [
    ("on_gradient", "dp_replicate=2", "ddp"),
    ("on_gradient", "dp_shard=1", "ddp"),
    ("after_accumulation", "dp_shard=1", "ddp"),
    ("on_scalar", "dp_shard=2", "fsdp2"),
]


@pytest.mark.parametrize("how", ["module", "seeded", "rank0"])
@pytest.mark.parametrize(("name", "layout", "engine"), CARRIED)
def test_a_hook_goes_along_with_the_new_parameter(ranks, name, how, layout, engine):
    for found, want in ranks.run(gradients, int(layout[-1]), name, how, layout, engine):
        for key, grad in want.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-12, atol=1e-14)


def removed() -> bool:
    """A handle from before parallelize still takes the hook away."""
    with init("dp_shard=1", device="cpu") as world:
        handles = []

        def build():
            net = Net()
            handles.append(net.scale.register_hook(thrice))
            return net

        model = parallelize(build, world, init="rank0")
        for handle in handles:
            handle.remove()
        model(torch.ones(1, 4)).sum().backward()
        with_hook = model.scale.grad.clone()
        plain = Net()
        plain.load_state_dict(model.state_dict())
        plain(torch.ones(1, 4)).sum().backward()
        return bool(torch.equal(with_hook, plain.scale.grad))


def test_a_handle_removes_the_hook_that_went_along(ranks):
    assert ranks.run(removed, 1) == [True]


def refused(name: str, how: str, layout: str, engine: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        try:
            built(name, how, world, engine)
        except UnsupportedError as error:
            return error.name, error.why
        return None


@pytest.mark.parametrize("how", ["module", "seeded", "rank0"])
@pytest.mark.parametrize(
    ("name", "layout", "engine", "why"),
    [
        ("on_gradient", "dp_shard=2", "fsdp2", "never be called"),
        ("on_gradient", "dp_shard=1", "fsdp2", "never be called"),
        ("after_accumulation", "dp_shard=2", "fsdp2", "never be called"),
        ("on_node", "dp_shard=2", "fsdp2", "never called"),
        ("after_accumulation", "dp_replicate=2", "ddp", "this rank's part"),
    ],
)
def test_a_hook_that_would_be_wrong_is_refused_by_name(ranks, name, how, layout, engine, why):
    for said in ranks.run(refused, int(layout[-1]), name, how, layout, engine):
        assert said is not None and said[0] == "blocks.1.weight" and why in said[1]


def put_later(kind: str, layout: str, engine: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = built("plain", "module", world, engine)
        getattr(model.blocks[1].weight, kind)(lambda _: None)
        try:
            with window(model, micro_batches(1), count=len) as w:
                for batch in w:
                    model(batch["x"]).sum().backward()
        except UsageError as error:
            return error.name, error.why
        return None


@pytest.mark.parametrize(
    ("kind", "layout", "engine", "why"),
    [
        ("register_hook", "dp_shard=2", "fsdp2", "never called"),
        ("register_post_accumulate_grad_hook", "dp_shard=2", "fsdp2", "never called"),
        ("register_post_accumulate_grad_hook", "dp_replicate=2", "ddp", "this rank's part"),
        ("register_hook", "dp_replicate=2", "ddp", None),
        ("register_post_accumulate_grad_hook", "dp_shard=1", "ddp", None),
    ],
)
def test_a_hook_put_on_later(ranks, kind, layout, engine, why):
    for said in ranks.run(put_later, int(layout[-1]), kind, layout, engine):
        assert (said is None) == (why is None)
        if why is not None:
            assert said[0] == "blocks.1.weight" and why in said[1]


def node_held_later(layout: str, engine: str):
    """A forward before, whose graph is alive, holds nodes too: that is no hook."""
    with init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(1)
        net = plain()
        out = net(torch.ones(2, 4, dtype=torch.float64))
        model = parallelize(net, world, sharding=Sharding(engine=engine))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        found, held = [], []
        for is_held in (False, True):
            if is_held:
                held.append(torch.autograd.graph.get_gradient_edge(model.blocks[1].weight).node)
            runtime_of(model).before_first_step.append(functools.partial(refuse_held_accumulators, runtime_of(model)))
            for node in held:
                node.register_hook(lambda *_: None)
            with window(model, micro_batches(1), count=len) as w:
                for batch in w:
                    (model(batch["x"]).sum() / w.num_tokens).backward()
            try:
                optim.step()
                found.append(None)
            except UnsupportedError as error:
                found.append(error.name)
            optim.zero_grad()
        return found, out.requires_grad


@pytest.mark.parametrize(("layout", "engine"), [("dp_shard=2", "fsdp2"), ("dp_replicate=2", "ddp")])
def test_a_hook_on_a_node(ranks, layout, engine):
    """torch calls it before a gradient is accumulated into a leaf: into a shard it never is."""
    for found, _ in ranks.run(node_held_later, 2, layout, engine):
        assert found == [None, "blocks.1.weight" if engine == "fsdp2" else None]


def put_twice():
    """A hook that is right, and after it one that is not."""
    with init("dp_replicate=2", device="cpu") as world:
        model = built("plain", "module", world, "ddp")
        model.blocks[0].weight.register_hook(lambda grad: grad)
        batches = micro_batches(1)
        with window(model, batches, count=len) as w:
            for batch in w:
                model(batch["x"]).sum().backward()
        model.blocks[1].weight.register_post_accumulate_grad_hook(lambda param: None)
        for _ in range(2):  # to have refused it once is not to have accepted it
            with pytest.raises(UsageError, match="this rank's part"), window(model, batches, count=len):
                pass


def test_a_wrong_hook_after_a_right_one(ranks):
    ranks.run(put_twice, 2)
