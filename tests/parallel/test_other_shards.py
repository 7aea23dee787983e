"""Files that one rank wrote by ``torch.save``: another rank does not take the shards in them for its own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw


def build(world, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 3)))
    return sw.parallelize(model, world, sharding=sw.Sharding(min_unit_bytes=0))


def trained(world, kind, local):
    model = build(world)
    optim = kind(model.parameters(), lr=0.1)
    optim = sw.local_optimizer(optim) if local else optim
    stepped(model, optim)
    return model, optim


def stepped(model, optim):
    with sw.accumulate(model, is_last=True):
        model(torch.ones(2, 4)).square().sum().backward()
    optim.step()
    optim.zero_grad()


def message(call):
    try:
        call()
    except sw.UsageError as error:
        return str(error)
    return "nothing was raised"


def of_rank_0(layout, path, kind, local):
    """What each way of loading the file of rank 0 says."""
    with sw.init(layout, device="cpu") as world:
        model, optim = trained(world, kind, local)
        if world.is_main:
            torch.save((model.state_dict(), model[2].state_dict(), optim.state_dict()), path)
        world.barrier()
        whole, part, moments = torch.load(path, weights_only=True)
        fresh = build(world, 1)
        # One that steps with what it has loaded before it was seen, and one that loads what is refused later.
        new, seen = (kind(fresh.parameters(), lr=0.1) for _ in range(2))
        stepped(fresh, seen)

        def unseen():
            new.load_state_dict(moments)
            fresh[0].weight.grad = torch.zeros_like(fresh[0].weight)
            new.step()

        calls = (
            lambda: fresh.load_state_dict(whole),
            lambda: fresh[2].load_state_dict(part),
            lambda: seen.load_state_dict(moments),
            unseen,
        )
        return [message(call) for call in calls]


@pytest.mark.parametrize("local", [False, True])
def test_shards_of_rank_0_are_refused_on_the_others(ranks, tmp_path, local):
    own, other = ranks.run(of_rank_0, 2, "dp_shard=2", str(tmp_path / "x.pt"), torch.optim.AdamW, local)
    assert own == ["nothing was raised"] * 4
    whole, part, *moments = other
    assert whole.startswith("0.weight: load_state_dict with shards of another rank")
    assert part.startswith("0.weight: load_state_dict with shards of another rank")
    assert all(text.startswith("an optimizer's state with shards of another rank") for text in moments)


def test_copies_of_the_same_shards_are_not(ranks, tmp_path):
    told = ranks.run(of_rank_0, 4, "dp_replicate=2,dp_shard=2", str(tmp_path / "x.pt"), torch.optim.SGD, False)
    assert ["shards of another rank" in texts[0] for texts in told] == [False, True, False, True]


def with_own_files(folder):
    """Each rank has a file of its own, as some loops save."""
    with sw.init("dp_shard=2", device="cpu") as world:
        model, optim = trained(world, torch.optim.AdamW, False)
        torch.save((model.state_dict(), optim.state_dict()), f"{folder}/{world.rank}.pt")
        weights, moments = torch.load(f"{folder}/{world.rank}.pt", weights_only=True)
        again = build(world, 1)
        new = torch.optim.AdamW(again.parameters(), lr=0.1)
        again.load_state_dict(weights)
        new.load_state_dict(moments)
        for one, its in ((model, optim), (again, new)):
            stepped(one, its)
        dist.barrier()
        return all(
            torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), again.parameters(), strict=True)
        )


def test_a_file_of_each_rank_is_loaded_as_it_was(ranks, tmp_path):
    assert ranks.run(with_own_files, 2, str(tmp_path)) == [True, True]
