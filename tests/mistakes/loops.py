"""Loops: where gradients are cleared, clipped, added up, reduced, and steps are taken."""

import math

import torch
import torch.distributed as dist
from mistakes.rows import Mistake, Plain, off
from mistakes.toys import (
    DDP,
    batch,
    build,
    drift,
    gradients,
    mine,
    of_one_process,
    params,
    plain_backward,
    sharded,
    sum_loss,
    train,
    values,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw

INFINITY = float("inf")


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def backward(model, given, divisor=1.0):
    (sum_loss(model(given["input_ids"]), given) / divisor).backward()


def grads_of(model):
    return {name: param.grad for name, param in model.named_parameters()}


class ClearedTooLate(Mistake):
    """`optim.zero_grad()` stands inside the loop over micro-batches."""

    says = "zero_grad() inside a window, after a backward"

    def plain(self):
        model = build()
        optim = sgd(model)
        for i in range(4):
            optim.zero_grad()
            backward(model, batch(i), 26.0)
        wrong = off(grads_of(model), of_one_process(range(4)))
        return Plain(f"only the last micro-batch counts: gradients {wrong:.2f} off", wrong)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model)
            with sw.window(model, [batch(i) for i in range(4)]) as w:
                for given in w:
                    optim.zero_grad()
                    backward(model, given, w.num_tokens)
        return INFINITY


class OldGradients(Mistake):
    """A backward before the loop (a sanity check, a search for the learning rate) leaves gradients, and the first step takes them too."""

    says = "gradients that were there before the step"

    def plain(self):
        model = build()
        backward(model, batch(7))
        plain_backward(model, [batch(0)])
        norm, wanted = (
            torch.stack([g.norm() for g in each.values()]).norm() for each in (grads_of(model), of_one_process([0]))
        )
        return Plain(f"gradients of the first step {float(norm / wanted):.0f} times as large", float(norm / wanted) - 1)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            backward(model, batch(7))
            sw.TrainStep(model, sgd(model), loss=sum_loss)([batch(0)])
        return INFINITY


class StepInsideTheWindow(Mistake):
    """`optim.step()` is indented too far: it steps after each micro-batch, by the gradients that are there so far."""

    says = "SGD.step() inside a window"

    def plain(self):
        model = build()
        optim = sgd(model)
        for i in range(4):
            backward(model, batch(i), 22.0)
            optim.step()
        wrong = off(params(model), train([[0, 1, 2, 3]]))
        return Plain(f"parameters {wrong:.3f} off after one window", wrong)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model)
            with sw.window(model, [batch(i) for i in range(4)]) as w:
                for given in w:
                    backward(model, given, w.num_tokens)
                    optim.step()
        return INFINITY


class ClippedInsideTheWindow(Mistake):
    """Gradients are clipped after each micro-batch, not after the last."""

    says = "clip_grad_norm_ inside a window"

    def plain(self):
        model, wanted = build(), build()
        for i in range(4):
            backward(model, batch(i))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain_backward(wanted, [batch(i) for i in range(4)])
        torch.nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
        wrong = off(grads_of(model), grads_of(wanted))
        return Plain(f"gradients {wrong:.2f} off", wrong)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            with sw.window(model, [batch(i) for i in range(4)]) as w:
                for given in w:
                    backward(model, given, w.num_tokens)
                    sw.clip_grad_norm_(model, 1.0)
        return INFINITY


class NormOfShards(Mistake):
    """A norm computed by hand, `sum(p.grad.norm().item() ** 2 for p in ...)`, for clipping or the log: it is that of this rank's shards."""

    ranks = 2
    says = "of a tensor that is cut over dp_shard=2"

    def plain(self):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(16, 8))
        model(torch.ones(2, 16)).square().sum().backward()
        found = math.sqrt(sum(p.grad.norm().item() ** 2 for p in model.parameters()))
        truth = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor())
        return Plain(f"a norm of {found:.1f}; it is {truth:.1f}", off(found, truth))

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world)
            with sw.window(model, [batch(world.rank)]) as w:
                for given in w:
                    backward(model, given, w.num_tokens)
            math.sqrt(sum(p.grad.norm().item() ** 2 for p in model.parameters()))
        return INFINITY


class UnequalMicroBatches(Mistake):
    """Ranks accumulate over different numbers of micro-batches."""

    ranks = 2
    says = "micro-batches per rank"

    def plain(self):
        model, num = DDP(build()), 3 if dist.get_rank() else 1
        given = [batch(i, valid=8) for i in ([0] if num == 1 else [1, 2, 3])]
        with model.no_sync():
            for each in given[:-1]:
                backward(model, each, 8 * num)
        backward(model, given[-1], 8 * num)
        plain = build()
        plain_backward(plain, [batch(i, valid=8) for i in range(4)])
        wrong = off(grads_of(model.module), grads_of(plain))
        return Plain(f"gradients {wrong:.2f} off", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sharded(world)
            given = [batch(i, valid=8) for i in ([1, 2, 3] if world.rank else [0])]
            sw.TrainStep(model, sgd(model), loss=sum_loss)(given)
        return INFINITY


class BackwardOutsideNoSync(Mistake):
    """The forward runs inside `no_sync()`, the backward outside of it: nothing is reduced."""

    ranks = 2
    says = "a backward of a sharded model outside of a window"

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        optim = sgd(model)
        with model.no_sync():
            loss = sum_loss(model(given["input_ids"]), given)
        loss.backward()
        optim.step()
        wrong = drift(model.module)
        return Plain(f"after one step the ranks' parameters are {wrong:.2f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model, given = sharded(world), batch(world.rank)
            num = sw.count_tokens(model, [given])
            with sw.accumulate(model, is_last=False):
                loss = sum_loss(model(given["input_ids"]), given)
            (loss / num).backward()
        return INFINITY


class LastMicroBatchWithoutSync(Mistake):
    """An epoch ends in the middle of an accumulation, and the step is taken with what is there: no rank has reduced."""

    ranks = 2
    says = "before the last micro-batch of sw.accumulate has ended"

    def plain(self):
        model = DDP(build())
        optim = sgd(model)
        for i in range(3):  # of the 4 that one step accumulates
            with model.no_sync():
                backward(model, batch(2 * i + dist.get_rank()), 26.0)
        optim.step()
        wrong = drift(model.module)
        return Plain(f"after one step the ranks' parameters are {wrong:.3f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model)
            for i in range(3):
                with sw.accumulate(model, is_last=False):
                    backward(model, batch(2 * i + world.rank), 26.0)
            optim.step()
        return INFINITY


class RestOfAnEpoch(Mistake):
    """`if (i + 1) % 4 == 0: step()`: the micro-batches left over at the end of an epoch go into the next epoch's first step, or nowhere."""

    ranks = 2

    def plain(self):
        model = build()
        optim = sgd(model)
        for i in range(6):
            backward(model, batch(i, valid=8), 32.0)
            if (i + 1) % 4 == 0:
                optim.step()
                optim.zero_grad()
        found, plain = params(model), build()
        optim = sgd(plain)
        for window in ([0, 1, 2, 3], [4, 5]):
            plain_backward(plain, [batch(i, valid=8) for i in window])
            optim.step()
            optim.zero_grad()
        wrong = off(found, params(plain))
        return Plain(f"2 of 6 micro-batches are not trained on; parameters {wrong:.3f} off", wrong)

    def ours(self):
        plain = build()
        optim = sgd(plain)
        samples = [{name: value[0] for name, value in batch(i, valid=8).items()} for i in range(6)]
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world)
            step = sw.TrainStep(model, sgd(model), loss=sum_loss)
            for window in sw.Loader(samples, world, global_batch=4, micro_batch=1, shuffle=False):
                step(window)
            found = values(model)
        for window in (samples[:4], samples[4:]):
            plain_backward(plain, [{name: value[None] for name, value in each.items()} for each in window])
            optim.step()
            optim.zero_grad()
        return off(found, params(plain))


class SkippedLast(Mistake):
    """All ranks `continue` over the last micro-batch of an accumulation, the one that would have reduced."""

    ranks = 2

    def plain(self):
        model = DDP(build())
        for i in range(2):
            if i == 1:
                continue
            with model.no_sync():
                backward(model, batch(2 * i + dist.get_rank()), 26.0)
        wrong = off(grads_of(model.module), self.wanted())
        return Plain(f"gradients {wrong:.2f} off, and others on each rank", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sharded(world)
            with sw.window(model, mine([batch(i) for i in range(4)], world)) as w:
                for i, given in enumerate(w):
                    if i == 1:
                        continue
                    backward(model, given, 26.0)
            return off(gradients(model), self.wanted())

    @staticmethod
    def wanted():
        plain = build()
        for i in range(2):
            backward(plain, batch(i), 26.0)
        return grads_of(plain)


class GradientsByHand(Mistake):
    """Gradients are taken by `torch.autograd.grad` and put into `param.grad` (meta-learning, PCGrad): DDP's hooks never run."""

    ranks = 2
    says = "torch.autograd.grad of the parameters of a sharded model outside of a window"

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        found = torch.autograd.grad(sum_loss(model(given["input_ids"]), given), list(model.parameters()))
        for param, grad in zip(model.parameters(), found, strict=True):
            param.grad = grad
        sgd(model, 0.01).step()
        wrong = drift(model.module)
        return Plain(f"after one step the ranks' parameters are {wrong:.3f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model, given = sharded(world), batch(world.rank)
            found = torch.autograd.grad(sum_loss(model(given["input_ids"]), given), list(model.parameters()))
            for param, grad in zip(model.parameters(), found, strict=True):
                param.grad = grad
            sgd(model, 0.01).step()
        return INFINITY


class SkippedOnOneRank(Mistake):
    """Each rank looks at its own loss and leaves out the step where that is not finite."""

    ranks = 2
    says = "NonFiniteError"

    @staticmethod
    def loss(output, given):
        return sum_loss(output, given) + (float("nan") if given.get("bad") is not None else 0.0)

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        optim = sgd(model)
        loss = sum_loss(model(given["input_ids"]), given)
        loss.backward()
        if dist.get_rank() == 0:  # rank 1's own loss was not finite
            optim.step()
        wrong = drift(model.module)
        return Plain(f"after one step the ranks' parameters are {wrong:.2f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model, given = sharded(world), batch(world.rank)
            given = {**given, "bad": torch.ones(2)} if world.rank else given
            sw.TrainStep(model, sgd(model), loss=self.loss, forward=lambda m, b: m(b["input_ids"]))([given])
        return INFINITY


class WrittenBetween(Mistake):
    """Parameters are written (an average put in, a clamp) between a forward and its backward."""

    ranks = 2
    says = "a backward of a forward that computed with other parameters"

    def plain(self):
        found = []
        for writes in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
            for block in (model[0], model[2], model):
                fully_shard(block)
            loss = model(torch.ones(2, 4)).sum()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5 if writes else 1.0)
            loss.backward()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        return Plain(f"gradients of no weights at all, {off(*found):.2f} off", off(*found))

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model, given = sharded(world), batch(world.rank)
            loss = sum_loss(model(given["input_ids"]), given)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
            with sw.accumulate(model, is_last=True):
                loss.backward()
        return INFINITY


class SchedulerSteppedTwice(Mistake):
    """The scheduler is stepped by the trainer and by the loop: it runs twice as fast."""

    says = "TrainStep(scheduler=...) steps it itself"

    def plain(self):
        model, given = build(), batch(0)
        optim = sgd(model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.0, total_iters=10)
        for _ in range(5):
            plain_backward(model, [given])
            optim.step()
            scheduler.step()  # inside of the trainer's step
            scheduler.step()
        found = optim.param_groups[0]["lr"]
        return Plain(f"after 5 of 10 steps the rate is {found:.2f}; meant was 0.05", off(found, 0.05))

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model)
            scheduler = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.0, total_iters=10)
            step = sw.TrainStep(model, optim, loss=sum_loss, scheduler=scheduler)
            for _ in range(5):
                step([batch(0)])
                scheduler.step()
        return off(optim.param_groups[0]["lr"], 0.05)


class GradientsNeverCleared(Mistake):
    """`optim.zero_grad()` is left out: each step takes the gradients of all batches before it, too."""

    says = "gradients of an earlier window are added to those of window 2"

    def plain(self):
        model = build()
        optim = sgd(model, 0.001)
        for i in range(3):
            plain_backward(model, [batch(i)])
            optim.step()
        norms = [
            torch.stack([g.norm() for g in each.values()]).norm() for each in (grads_of(model), of_one_process([2]))
        ]
        return Plain(
            f"gradients of the third step are {norms[0] / norms[1]:.1f} times as large", float(norms[0] / norms[1]) - 1
        )

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model, 0.001)
            for i in range(3):
                with sw.window(model, [batch(i)]) as w:
                    for given in w:
                        backward(model, given, w.num_tokens)
                optim.step()
        return INFINITY


class NoBackward(Mistake):
    """`loss.backward()` is left out (commented out for a test, lost in an edit)."""

    says = "a window without a backward"

    def plain(self):
        model = build()
        before, optim = params(model), sgd(model)
        for i in range(3):
            sum_loss(model(batch(i)["input_ids"]), batch(i))
            optim.step()
        moved = off(params(model), before)
        return Plain(f"after 3 steps parameters have moved by {moved:.1f}", 1.0 if moved == 0 else 0.0)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model)
            for i in range(3):
                with sw.window(model, [batch(i)]) as w:
                    for given in w:
                        _ = sum_loss(model(given["input_ids"]), given) / w.num_tokens
                optim.step()
        return INFINITY


class RatesByOwnValidation(Mistake):
    """`ReduceLROnPlateau` is given each rank's own validation loss: one rank lowers its rate, the others do not."""

    ranks = 2
    says = "the ranks' steps differ between ranks: group 0: lr"

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        optim = sgd(model)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, patience=0)
        for i in range(4):
            backward(model, given, 8.0)
            optim.step()
            optim.zero_grad()
            plateau.step(i if dist.get_rank() else -i)
        wrong = drift(model.module)
        return Plain(f"after 4 steps the ranks' parameters are {wrong:.3f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sharded(world)
            optim = sgd(model)
            step = sw.TrainStep(model, optim, loss=sum_loss)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, patience=0)
            for i in range(4):
                step([batch(world.rank)])
                plateau.step(i if world.rank else -i)
        return INFINITY


class RatesDifferByRank(Mistake):
    """A learning rate that each rank takes from its own environment differs by rank."""

    ranks = 2
    says = "the ranks' steps differ between ranks: group 0: lr"

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        optim = sgd(model, 0.1 / (1 + dist.get_rank()))
        for _ in range(3):
            backward(model, given, 8.0)
            optim.step()
            optim.zero_grad()
        wrong = drift(model.module)
        return Plain(f"after 3 steps the ranks' parameters are {wrong:.3f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model = sharded(world)
            sw.TrainStep(model, sgd(model, 0.1 / (1 + world.rank)), loss=sum_loss)
        return INFINITY
