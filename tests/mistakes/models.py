"""Models: built, wrapped, changed and called in ways that leave ranks with models of their own, or nothing trained."""

import torch
import torch.distributed as dist
from mistakes.rows import Mistake, Plain, off
from mistakes.toys import (
    DDP,
    batch,
    build,
    drift,
    gradients,
    of_one_process,
    params,
    sharded,
    sum_loss,
    values,
)
from models.tied import Tied
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw

INFINITY = float("inf")


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def rows_of(rank, num=4):
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def squares(output, given):
    return output.square().sum()


def step_of(model, loss=squares, **options):
    return sw.TrainStep(
        model, sgd(model), loss=loss, count=lambda b: len(b["x"]), forward=lambda m, b: m(b["x"]), **options
    )


def apart(model):
    """How far the ranks are apart, in words."""
    wrong = drift(model)
    return Plain(f"the ranks' parameters are {wrong:.3f} apart", wrong)


class OptimizerBeforeSharding(Mistake):
    """The optimizer is built before the model is sharded: it holds tensors that nothing reads any more."""

    ranks = 2
    says = "that the model does not have"

    def plain(self):
        model = blocks()
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        fully_shard(model)
        before = [p.full_tensor().clone() for p in model.parameters()]
        for _ in range(3):
            model(rows_of(dist.get_rank())).square().sum().backward()
            optim.step()
            optim.zero_grad()
        moved = off([p.full_tensor() for p in model.parameters()], before)
        return Plain(f"after 3 steps parameters have moved by {moved:.1f}", 1.0 if moved == 0 else 0.0)

    def ours(self):
        module = blocks()
        optim = torch.optim.AdamW(module.parameters(), lr=0.1)
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sw.parallelize(module, world)
            sw.TrainStep(model, optim, loss=squares, count=len)
        return INFINITY


class OptimizerOfOldParameters(Mistake):
    """A layer is replaced (a new head, another vocabulary) after the optimizer was built: the new one is never stepped."""

    says = "changed after it was sharded"

    def plain(self):
        model = blocks()
        optim = sgd(model)
        model[2] = nn.Linear(8, 4).double()
        before = model[2].weight.detach().clone()
        for _ in range(3):
            model(rows_of(0)).square().sum().backward()
            optim.step()
        moved = off(model[2].weight, before)
        return Plain(f"after 3 steps the new layer has moved by {moved:.1f}", 1.0 if moved == 0 else 0.0)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(blocks, world)
            step = step_of(model)
            model[2] = nn.Linear(8, 4).double()
            step([{"x": rows_of(0)}])
        return INFINITY


class LayerAddedLater(Mistake):
    """A layer is added after wrapping, and the optimizer has its parameters: no rank's gradients of it are summed."""

    ranks = 2
    says = "changed after it was sharded"

    def plain(self):
        model = DDP(blocks())
        torch.manual_seed(1)
        model.module.append(nn.Linear(4, 4).double())
        optim = sgd(model, 0.01)
        for _ in range(3):
            model(rows_of(dist.get_rank())).square().sum().backward()
            optim.step()
            optim.zero_grad()
        return apart(model.module)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sw.parallelize(blocks, world)
            model.append(nn.Linear(4, 4).double())
            step_of(model)([{"x": rows_of(world.rank)}])
        return INFINITY


class UnfrozenLater(Mistake):
    """A part is unfrozen after wrapping (gradual unfreezing): DDP has no bucket for it."""

    ranks = 2
    says = "a parameter was unfrozen"

    def plain(self):
        model = blocks()
        model[0].requires_grad_(False)
        model = DDP(model)
        model.module[0].requires_grad_(True)
        optim = sgd(model, 0.01)
        for _ in range(3):
            model(rows_of(dist.get_rank())).square().sum().backward()
            optim.step()
            optim.zero_grad()
        return apart(model.module)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            module = blocks()
            module[0].requires_grad_(False)
            model = sw.parallelize(module, world)
            model[0].requires_grad_(True)
            step_of(model)([{"x": rows_of(world.rank)}])
        return INFINITY


class CalledPastTheWrapper(Mistake):
    """`ddp.module(x)` in place of `ddp(x)`: the reducer is not prepared, and nothing is reduced."""

    ranks = 2

    def plain(self):
        model = DDP(blocks())
        optim = sgd(model, 0.01)
        for _ in range(3):
            model.module(rows_of(dist.get_rank())).square().sum().backward()
            optim.step()
            optim.zero_grad()
        return apart(model.module)

    def ours(self):
        plain = blocks()
        (sum(plain(rows_of(rank)).square().sum() for rank in range(2)) / 8).backward()
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sw.parallelize(blocks(), world)
            with sw.window(model, [{"x": rows_of(world.rank)}], count=lambda b: len(b["x"])) as w:
                for given in w:
                    (model.forward(given["x"]).square().sum() / w.num_tokens).backward()
            return off(gradients(model), {name: p.grad for name, p in plain.named_parameters()})


class SyncLeftOff(Mistake):
    """`set_requires_gradient_sync(False)` for an accumulation, and an exception on the way, or a `break`, leaves it off."""

    ranks = 2

    def plain(self):
        model = fully_shard(blocks())
        model.set_requires_gradient_sync(False)
        model(rows_of(dist.get_rank())).square().sum().backward()  # the loop broke here
        optim = sgd(model)
        before = [p.full_tensor().clone() for p in model.parameters()]
        for _ in range(3):
            optim.zero_grad()
            model(rows_of(dist.get_rank())).square().sum().backward()
            optim.step()
        moved = off([p.full_tensor() for p in model.parameters()], before)
        return Plain(f"after 3 steps parameters have moved by {moved:.1f}", 1.0 if moved == 0 else 0.0)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world)
            try:
                with sw.window(model, [batch(world.rank)] * 2) as w:
                    for _ in w:
                        raise KeyError("a bad sample")
            except KeyError:
                pass
            with sw.window(model, [batch(world.rank)]) as w:
                for given in w:
                    (sum_loss(model(given["input_ids"]), given) / w.num_tokens).backward()
            return off(gradients(model), of_one_process(range(2)))


class ValuesOfEachRank(Mistake):
    """Each rank draws its own initial values (another seed per rank, or none), and FSDP2 cuts each rank's part out of its own."""

    ranks = 2
    versus_one = True

    @staticmethod
    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double()

    def plain(self):
        torch.manual_seed(dist.get_rank())
        model = self.make()
        rank0 = [p.detach().clone() for p in model.parameters()]
        fully_shard(model)
        wrong = off([p.full_tensor() for p in model.parameters()], rank0)
        return Plain(f"half of the values are rank 1's: {wrong:.1f} off those of rank 0", wrong)

    def ours(self):
        with sw.init("dp_shard=-1", device="cpu", seed=3) as world:
            torch.manual_seed(100 + world.rank)
            return values(sharded(world, self.make))


class TieLost(Mistake):
    """A model is built on `meta` and given memory by `to_empty`: tied weights come apart."""

    ranks = 2
    versus_one = True

    def plain(self):
        with torch.device("meta"):
            model = build()
        model.to_empty(device="cpu")
        model.load_state_dict(build().state_dict())
        optim, given = sgd(model), batch(0)
        sum_loss(model(given["input_ids"]), given).backward()
        optim.step()
        wrong = off(model.head.weight, model.embed.weight)
        return Plain(f"after one step the tied weights are {wrong:.1f} apart", wrong)

    def ours(self):
        with sw.init("dp_shard=-1", device="cpu") as world:
            model = sharded(world, lambda: Tied().double())  # a callable is built on meta
            step = sw.TrainStep(model, sgd(model), loss=sum_loss)
            step([batch(i) for i in range(world.rank, 2, world.size)])
            return values(model)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", 1.0 / 100.0 ** (torch.arange(8.0) / 8), persistent=False)

    def forward(self, x):
        return self.linear(x * self.table)


class BufferThatNoFileHas(Mistake):
    """A model is built on `meta` and loaded: a rotary table, which no state dict holds, is what the memory held."""

    ranks = 2
    plain_ranks = 1

    def plain(self):
        saved = Rotary().state_dict()
        with torch.device("meta"):
            model = Rotary()
        model.to_empty(device="cpu")
        model.table.fill_(7.7)  # what the memory may hold: another number each time
        told = str(model.load_state_dict(saved)).strip("<>").lower()
        wrong = off(model.table, Rotary().table)
        return Plain(f"{told}; the table is {wrong:.1f} off", wrong)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world, Rotary)
            sw.load_full_state_dict(model, sw.full_state_dict(model))
            return off(model.table, Rotary().table)


class StatisticsDiffer(Mistake):
    """Batch norm's running statistics are those of each rank's own data: ranks that evaluate do so with different ones."""

    ranks = 2
    against = "between the ranks"

    @staticmethod
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double()

    def plain(self):
        model = fully_shard(self.make())
        for i in range(3):
            model(rows_of(2 * i + dist.get_rank()) + dist.get_rank()).square().sum().backward()
        found = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(found, model[0].running_mean)
        wrong = off(*found)
        return Plain(f"running means of the two ranks are {wrong:.2f} apart", wrong)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world, self.make)
            step = step_of(model)
            for i in range(3):
                step([{"x": rows_of(2 * i + world.rank) + world.rank}])
            saved = world.broadcast(sw.full_state_dict(model).get("0.running_mean"))
            apart = world.gather(model[0].running_mean.tolist())
            return max(off(apart[0], apart[1]), off(model[0].running_mean, saved))


class SameMasks(Mistake):
    """Every rank seeds alike: all of them draw the same dropout masks, for different samples."""

    ranks = 2
    versus_one = True

    @staticmethod
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 4)).double()

    def plain(self):
        model = DDP(self.make())
        torch.manual_seed(1)
        masks = (model.module[1](torch.ones(4, 32)) == 0).double()
        found = [torch.empty_like(masks) for _ in range(2)]
        dist.all_gather(found, masks)
        same = float((found[0] == found[1]).double().mean())
        return Plain(f"{same:.0%} of the two ranks' masks are equal; of independent ones half would be", same - 0.5)

    def ours(self):
        samples = [{"x": row} for row in rows_of(0, 8)]
        with sw.init("dp_shard=-1", device="cpu") as world:
            model = sharded(world, self.make)
            step = step_of(model)
            for window in sw.Loader(samples, world, global_batch=4, micro_batch=2):
                step(window)
            return values(model)


class Listed(nn.Module):
    """Layers in a Python list: no parameters of the module."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.layers = [nn.Linear(4, 4) for _ in range(2)]

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class LayersInAList(Mistake):
    """Layers are kept in a Python list, not in an `nn.ModuleList`: `model.parameters()` does not have them."""

    says = "in a Python list, tuple or dict"

    def plain(self):
        torch.manual_seed(0)
        model = Listed()
        optim = sgd(model)
        before = model.layers[0].weight.detach().clone()
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optim.step()
        num = sum(p.numel() for p in model.parameters())
        moved = off(model.layers[0].weight, before)
        return Plain(f"{num} of 60 parameters are trained; the layers have moved by {moved:.1f}", 1 - num / 60)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(Listed(), world)
            step_of(model)([{"x": torch.ones(2, 4)}])
        return INFINITY


class HookNeverCalled(Mistake):
    """A hook on a parameter (a mask of its gradient) is put on before `fully_shard`, which makes another parameter."""

    ranks = 2
    says = "a hook on a parameter that is cut over the ranks"

    def plain(self):
        model, calls = blocks(), []
        model[2].weight.register_hook(lambda grad: calls.append(1) or grad * 0)
        fully_shard(model)
        model(rows_of(0)).square().sum().backward()
        norm = float(model[2].weight.grad.full_tensor().norm())
        return Plain(f"called {len(calls)} times; the gradient that it sets to 0 has a norm of {norm:.1f}", norm)

    def ours(self):
        module = blocks()
        module[2].weight.register_hook(lambda grad: grad * 0)
        with sw.init("dp_shard=2", device="cpu") as world:
            step_of(sw.parallelize(module, world))([{"x": rows_of(world.rank)}])
        return INFINITY


class TrainedInBf16(Mistake):
    """To train in bf16 the model is cast to bf16: updates are smaller than the distance of two numbers, and weights stand still."""

    gate = 2e-2

    @staticmethod
    def make():
        torch.manual_seed(0)
        return nn.Linear(16, 16).bfloat16()

    def plain(self):
        model = self.make()
        before = model.weight.detach().clone()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        for _ in range(10):
            model(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().sum().backward()
            optim.step()
            optim.zero_grad()
        share = float((model.weight != before).double().mean())
        return Plain(f"after 10 steps {share:.0%} of the weights have moved", 1 - share)

    def ours(self):
        plain = self.make().double()
        before = params(plain)
        (plain(torch.ones(2, 16).double()).square().sum() / 2).backward()
        sgd(plain, 1e-4).step()
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(self.make(), world, precision="bf16")
            optim = sgd(model, 1e-4)
            sw.TrainStep(model, optim, loss=squares, count=lambda b: len(b["x"]), forward=lambda m, b: m(b["x"]))(
                [{"x": torch.ones(2, 16)}]
            )
            moved = {name: value.double() - before[name] for name, value in values(model).items()}
        return off(moved, {name: value - before[name] for name, value in params(plain).items()})
