"""Parameters of no sharded model that a window's loss comes to: refused where each rank would step them by its own samples, and right where
the loop sums their gradients itself."""

import pytest
import torch
from step.plain import mine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.data.batch import MicroBatch

ROWS = [3, 1, 4, 2, 5]  # of micro-batches; of 5 on 2 ranks one is a padding


def batches():
    generator = torch.Generator().manual_seed(2)
    return [{"input": torch.randn(num, 5, generator=generator, dtype=torch.float64)} for num in ROWS]


def count(batch):
    return len(batch["input"])


def models(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    if kind == "second network":
        return model, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    own = nn.Module()
    own.log_var = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    return model, own


def loss_of(kind, output, own):
    if kind == "second network":
        return own(output).square().sum()
    return output.square().sum() * (-own.log_var).exp() + len(output) * own.log_var


def plain(kind):
    model, own = models(kind)
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, own)]
    for _ in range(3):
        for batch in batches():
            (loss_of(kind, model(**batch), own) / sum(ROWS)).backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return [p.detach().clone() for each in (model, own) for p in each.parameters()]


def trained(layout, kind, how):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model, own = models(kind)
        model = sw.parallelize(model, world, sharding=sw.Sharding(min_unit_bytes=0), example=batches()[2])
        if how == "ddp":
            own = DistributedDataParallel(own)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, own)]
        whole = [MicroBatch(x, index=i, padding=False) for i, x in enumerate(batches())]
        window = whole[:4] if how == "ddp" else [*whole, MicroBatch(whole[0], index=5, padding=True)]
        step = sw.TrainStep(model, optims[0], loss=lambda output, batch: loss_of(kind, output, own), count=count)
        for _ in range(3):
            if how == "step":
                step(mine(window, world))
            else:
                with sw.window(model, mine(window, world), count=count) as w:
                    num_tokens = w.num_tokens  # it is infinite in a padding; what is read before is not
                    for batch in w:
                        (loss_of(kind, model(**batch), own) / num_tokens).backward()
                for p in own.parameters() if how == "summed" else ():
                    p.grad = world.axis("loss").reduce(p.grad)
                if how == "clipped":
                    nn.utils.clip_grad_norm_(own.parameters(), 0.1)
                optims[0].step()
            for p in own.parameters() if how == "ddp" else ():
                p.grad *= world.axis("loss").size  # DDP gives the mean
            optims[1].step()
            for optim in optims:
                optim.zero_grad()
        return [sw.full_tensor(p).clone() for each in (model, own) for p in each.parameters()]


@pytest.mark.parametrize(
    ("layout", "kind", "how"),
    [
        ("dp_replicate=2", "second network", "loop"),
        ("dp_shard=2", "a loss's own", "clipped"),
        ("dp_shard=2", "second network", "step"),
        ("dp_shard=2,tp=2", "a loss's own", "step"),
    ],
)
def test_a_step_by_each_ranks_own_samples_is_refused(ranks, layout, kind, how):
    with pytest.raises(
        sw.RankError, match=r"that no sharded model has, of shapes .*: ranks have other values of them now"
    ):
        ranks.run(trained, 4 if "tp" in layout else 2, layout, kind, how)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("dp_replicate=2", "a loss's own"), ("dp_shard=2", "second network"), ("dp_shard=1,tp=2", "second network")],
)
def test_gradients_that_the_loop_sums_are_those_of_one_process_paddings_too(ranks, layout, kind):
    is_whole = "tp" in layout
    for found in ranks.run(trained, 2, layout, kind, "loop" if is_whole else "summed"):
        for a, b in zip(found, plain(kind), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_what_torch_has_summed_in_its_backward_is_no_stranger(ranks):
    found = ranks.run(trained, 2, "dp_shard=2", "second network", "ddp")
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def of_its_own(layout):
    """A latent code of this rank's sample, and a variance of a task that the samples of one rank have."""
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = sw.parallelize(models("")[0], world, sharding=sw.Sharding(min_unit_bytes=0), example=batches()[2])
        code = torch.full((5,), float(world.rank), dtype=torch.float64, requires_grad=True)
        tasks = [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2)]
        optims = [torch.optim.SGD(held, lr=0.1) for held in (model.parameters(), [code], tasks[:1], tasks[1:])]
        for _ in range(5):
            with sw.window(model, batches()[world.rank : world.rank + 1], count=count) as w:
                for batch in w:
                    loss = model(batch["input"] + code).square().sum() * (-tasks[world.rank]).exp()
                    (loss / w.num_tokens).backward()
            for p in tasks:
                p.grad = world.axis("loss").reduce(torch.zeros_like(p) if p.grad is None else p.grad)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        return float(tasks[0].detach()), float(tasks[1].detach()), float(code.detach().sum())


def test_what_each_rank_has_of_its_own_and_what_is_summed_where_one_rank_has_all_go_on(ranks):
    (a, b, one), (c, d, other) = ranks.run(of_its_own, 2, "dp_shard=2")
    assert (a, b) == (c, d) and 0 not in (a, b) and one != other
