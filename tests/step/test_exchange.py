"""What a module agrees on before a step: buffers of every kind made equal, and a rank that does not come for it named."""

import time
from unittest import mock

import pytest
import torch
from models.tied import Tied
from step.plain import batch, mine, plain_backward, shard, sum_loss
from torch import nn

import shardwise as sw
import shardwise.parallel.buffers
from shardwise.errors import RankError

POLICIES = {"rank0": {"*": "rank0"}, "mean": {"short": "rank0", "flag": "rank0", "*": "mean"}}


class Written(Tied):
    """Writes buffers of awkward kinds in each forward: what came last, so ranks differ."""

    def __init__(self):
        super().__init__()
        self.register_buffer("short", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("turned", torch.zeros(3, 2, dtype=torch.float64).t())
        self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("none_of_it", torch.zeros(0))

    def forward(self, input_ids):
        first = int(input_ids[0, 0])
        self.short += first
        self.turned += torch.arange(6.0).view(2, 3) * first
        self.complex += complex(first, 1)
        self.flag.fill_(first % 2 == 0)
        self.scalar += first
        return super().forward(input_ids)


def build_written():
    torch.manual_seed(3)
    return Written().double()


def _step(layout, policy, timeout_s=20):
    """``(world, step)`` of a model whose ranks write other values into their buffers."""
    world = sw.init(layout, device="cpu", timeout_s=timeout_s)
    model = sw.parallelize(build_written(), world, sharding=sw.Sharding(min_unit_bytes=0, buffers=POLICIES[policy]))
    return world, sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)


def _written(layout, policy):
    world, step = _step(layout, policy)
    with world:
        own = {}
        same = shardwise.parallel.buffers.make_equal

        def keep(runtime, changed, place):
            own.update({name: buffer.clone() for name, buffer in step.model.named_buffers()})
            same(runtime, changed, place)

        with mock.patch.object(shardwise.parallel.buffers, "make_equal", keep):
            step(mine([batch(i) for i in range(4)], world))
        return own, {name: buffer.clone() for name, buffer in step.model.named_buffers()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_buffers_of_every_kind_are_made_equal(ranks, layout, policy):
    (own, got), (other, also) = ranks.run(_written, 2, layout, policy)
    assert not torch.equal(own["short"], other["short"])
    for name, mine_ in own.items():
        mean = policy == "mean" and (mine_.is_floating_point() or mine_.is_complex())
        wanted = (mine_ + other[name]) / 2 if mean else mine_
        assert torch.equal(got[name], wanted) and torch.equal(also[name], wanted), name


def _never_comes(policy, absent):
    """Rank ``absent`` goes on without making buffers equal, and meets the others nowhere else."""
    world, step = _step("dp_shard=2", policy, timeout_s=3)
    window = mine([batch(i) for i in range(2)], world)
    step(window)  # before the first step of an optimizer ranks meet once more
    if world.rank == absent:
        with mock.patch.object(shardwise.parallel.buffers, "make_equal", lambda *args: None):
            step(window)
        world.watch.at("a long lunch")
        time.sleep(4.0)
        return None
    with pytest.raises(RankError) as caught:
        step(window)
    return str(caught.value), caught.value.ranks


@pytest.mark.quick("mean-1")
@pytest.mark.parametrize(("policy", "absent"), [("rank0", 0), ("mean", 1)])
def test_a_rank_that_does_not_come_to_make_buffers_equal_is_named(ranks, policy, absent):
    text, who = ranks.run(_never_comes, 2, policy, absent, timeout_s=30)[1 - absent]
    assert who == (absent,)
    assert f"rank {1 - absent} waited 3 s at step 2, making buffers equal" in text
    assert f"rank {absent} waits at a long lunch" in text


class Rotor(nn.Module):
    """A 0-dim complex parameter, which no engine cuts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.turn = nn.Parameter(torch.tensor(0.6 + 0.8j))

    def forward(self, input_ids):
        x = (nn.functional.one_hot(input_ids, 4) * self.turn).pow(2)
        x = x.real + x.imag
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def build_rotor():
    torch.manual_seed(3)
    rotor = Rotor()
    rotor.blocks.double()
    rotor.turn.data = rotor.turn.data.to(torch.complex128)
    return rotor


def _rotor_gradients():
    world, model = shard("dp_shard=2", build=build_rotor)
    with world, sw.window(model, mine([batch(i, vocab=4) for i in range(4)], world)) as w:
        for b in w:
            (sum_loss(model(b["input_ids"]), b) / w.num_tokens).backward()
    return model.turn.grad


def test_a_complex_number_among_the_parameters_has_the_gradient_of_one_process(ranks):
    plain = build_rotor()
    plain_backward(plain, [batch(i, vocab=4) for i in range(4)])
    assert plain.turn.grad.imag.abs() > 1e-3
    for got in ranks.run(_rotor_gradients, 2):
        torch.testing.assert_close(got, plain.turn.grad, rtol=1e-12, atol=0)
