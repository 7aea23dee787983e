"""Means where sums are needed, figures that are averaged, losses that lead nowhere."""

import torch
import torch.distributed as dist
from mistakes.rows import Mistake, Plain, off
from mistakes.toys import (
    DDP,
    batch,
    build,
    drift,
    language_model,
    mean_loss,
    mine,
    of_one_process,
    params,
    plain_backward,
    sharded,
    sum_loss,
    values,
)
from torch import nn

import shardwise as sw

INFINITY = float("inf")


def step_of(world, loss, make=build, **options):
    model = sharded(world, make)
    return sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, **options)


class MeanOnEachRank(Mistake):
    """Each rank takes the mean over its own tokens, and the means are averaged: short batches weigh too much."""

    ranks = 2
    says = "a loss that takes a mean"

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        mean_loss(model(given["input_ids"]), given).backward()
        found = {name: p.grad for name, p in model.module.named_parameters()}
        wrong = off(found, of_one_process(range(2)))
        return Plain(f"gradients {wrong:.3f} off", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            step_of(world, mean_loss)([batch(world.rank)])
        return INFINITY


class MeanOfEachMicroBatch(Mistake):
    """Gradients are accumulated over means of micro-batches, divided by their number."""

    says = "a loss that takes a mean"

    def plain(self):
        model = build()
        for i in range(3):
            given = batch(i)
            (mean_loss(model(given["input_ids"]), given) / 3).backward()
        wrong = off({name: p.grad for name, p in model.named_parameters()}, of_one_process(range(3)))
        return Plain(f"gradients {wrong:.3f} off", wrong)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            step_of(world, mean_loss)([batch(i) for i in range(3)])
        return INFINITY


class MeanInALoopOfOnesOwn(Mistake):
    """The same in a hand-written loop, as under DDP: a mean and a plain `backward()` on each rank, where gradients are summed."""

    ranks = 2
    says = "a backward of a sharded model outside of a window"

    def plain(self):
        model, given = build(), batch(dist.get_rank(), valid=8)
        mean_loss(model(given["input_ids"]), given).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)  # a sum, as many systems have it
        plain = build()
        for i in range(2):
            given = batch(i, valid=8)
            (sum_loss(plain(given["input_ids"]), given) / 16).backward()
        norms = [torch.stack([p.grad.norm() for p in each.parameters()]).norm() for each in (model, plain)]
        return Plain(f"gradients {norms[0] / norms[1]:.2f} times as large", float(norms[0] / norms[1]) - 1)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            model, given = sharded(world), batch(world.rank)
            mean_loss(model(given["input_ids"]), given).backward()
        return INFINITY


class MeanInAWindow(Mistake):
    """In a hand-written loop with gradient accumulation, each mean is taken as it is: nothing divides by the number of micro-batches."""

    says = "nothing has read num_tokens of the window before"

    def plain(self):
        model = build()
        for i in range(4):
            given = batch(i, valid=8)
            mean_loss(model(given["input_ids"]), given).backward()
        wanted = build()
        plain_backward(wanted, [batch(i, valid=8) for i in range(4)])
        norms = [torch.stack([p.grad.norm() for p in each.parameters()]).norm() for each in (model, wanted)]
        return Plain(f"gradients {norms[0] / norms[1]:.2f} times as large", float(norms[0] / norms[1]) - 1)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world)
            for _ in range(2):
                with sw.window(model, [batch(i, valid=8) for i in range(4)]) as w:
                    for given in w:
                        mean_loss(model(given["input_ids"]), given).backward()
                model.zero_grad()
        return INFINITY


class DividedByTheRanksTokens(Mistake):
    """A sum is divided by the tokens of this rank and micro-batch, not by those of the step."""

    ranks = 2
    says = "a loss that takes a mean"

    @staticmethod
    def loss(output, given):
        return sum_loss(output, given) / (given["labels"] != -100).sum()

    def plain(self):
        model = DDP(build())
        windows = [[batch(i) for i in range(rank, 4, 2)] for rank in range(2)]
        with model.no_sync():
            first = windows[dist.get_rank()][0]
            (self.loss(model(first["input_ids"]), first) / 2).backward()
        last = windows[dist.get_rank()][1]
        (self.loss(model(last["input_ids"]), last) / 2).backward()
        wrong = off({name: p.grad for name, p in model.module.named_parameters()}, of_one_process(range(4)))
        return Plain(f"gradients {wrong:.3f} off", wrong)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            step_of(world, self.loss)(mine([batch(i) for i in range(4)], world))
        return INFINITY


class EachWithEach(Mistake):
    """A regression's output of shape [N, 1] meets its targets of shape [N]: the loss is of N x N differences."""

    says = "grows with the square of the number of samples"

    @staticmethod
    def line():
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).unsqueeze(-1)
        return nn.Linear(1, 1).double(), x, 2 * x.squeeze(-1)

    def plain(self):
        model, x, y = self.line()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(200):
            optim.zero_grad()
            (model(x) - y).square().mean().backward()
            optim.step()
        slope = model.weight.item()
        return Plain(f"a line of slope 2 is learnt as one of {abs(slope):.1f}", 1 - slope / 2)

    def ours(self):
        model, x, y = self.line()
        with sw.init("dp_shard=1", device="cpu") as world:
            step = step_of(
                world,
                lambda output, given: (output - given["y"]).square().sum(),
                lambda: model,
                count=lambda given: len(given["y"]),
                forward=lambda model, given: model(given["x"]),
            )
            step([{"x": x, "y": y}])
        return INFINITY


class AuxiliaryMean(Mistake):
    """A mean (the balance loss of a mixture of experts) is added to a sum over tokens."""

    says = "is a sum with something added"

    @staticmethod
    def loss(output, given):
        return sum_loss(output, given) + 0.1 * output.square().mean()

    def plain(self):
        model, given = build(), [batch(i, valid=8) for i in range(4)]
        outputs = [model(each["input_ids"]) for each in given]
        auxiliary = sum(0.1 * each.square().mean() for each in outputs)
        weight = model.embed.weight
        meant = torch.autograd.grad(auxiliary / 4, weight, retain_graph=True)[0]
        found = torch.autograd.grad(auxiliary / 32, weight)[0]  # divided by the tokens, as the sum is
        return Plain(f"it weighs {found.norm() / meant.norm():.3f} of what was set", off(found, meant))

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            step_of(world, self.loss)([batch(0)])
        return INFINITY


class MeanAmongMetrics(Mistake):
    """An accuracy is averaged over batches and ranks of unequal sizes."""

    says = "'accuracy'"

    def plain(self):
        model, given = build(), [batch(i) for i in range(3)]
        hits = [(model(b["input_ids"]).argmax(-1) == b["labels"])[b["labels"] != -100].double() for b in given]
        mean = sum(float(each.mean()) for each in hits) / 3
        truth = float(torch.cat(hits).mean())
        return Plain(f"reports {mean:.4f}; it is {truth:.4f}", off(mean, truth))

    def ours(self):
        def loss(output, given):
            valid = given["labels"] != -100
            accuracy = (output.argmax(-1) == given["labels"])[valid].double().mean()
            return {"loss": sum_loss(output, given), "accuracy": accuracy}

        with sw.init("dp_shard=1", device="cpu") as world:
            step_of(world, loss)([batch(i) for i in range(3)])
        return INFINITY


class MetricByItem(Mistake):
    """A metric is taken by `.item()` on each rank and logged by rank 0."""

    ranks = 2
    says = "drop float() / .item()"

    def plain(self):
        model, given = DDP(build()), batch(dist.get_rank())
        logged = sum_loss(model(given["input_ids"]), given).item() / int((given["labels"] != -100).sum())
        truth = plain_backward(build(), [batch(0), batch(1)])
        return Plain(f"rank 0 logs {logged:.3f}; the loss of the step is {truth:.3f}", off(logged, truth))

    def ours(self):
        def loss(output, given):
            return {"loss": sum_loss(output, given), "perplexity": sum_loss(output, given).item()}

        with sw.init("dp_shard=2", device="cpu") as world:
            step_of(world, loss)([batch(world.rank)])
        return INFINITY


class LossMadeAnew(Mistake):
    """The loss is made anew from its number: `torch.tensor(loss.item(), requires_grad=True)`."""

    says = "no trainable parameter was used"

    @staticmethod
    def loss(output, given):
        return torch.tensor(sum_loss(output, given).item(), requires_grad=True, dtype=torch.float64)

    def plain(self):
        model, given = build(), batch(0)
        before, optim = params(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            self.loss(model(given["input_ids"]), given).backward()
            optim.step()
        moved = off(params(model), before)
        return Plain(f"after 3 steps parameters have moved by {moved:.1f}", 1.0 if moved == 0 else 0.0)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            step_of(world, self.loss)([batch(0)])
        return INFINITY


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, output, given):
        return sum_loss(output * self.temperature.exp(), given)


class LossWithParameters(Mistake):
    """A loss has a parameter (a learned temperature), and only the model is wrapped."""

    ranks = 2
    says = "which owns parameters"

    def plain(self):
        model, loss, given = DDP(build()), Tempered(), batch(dist.get_rank())
        optim = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.01)
        for _ in range(3):
            loss(model(given["input_ids"]), given).backward()
            optim.step()
            optim.zero_grad()
        wrong = drift(loss)
        return Plain(f"after 3 steps the two ranks' are {wrong:.3f} apart", wrong)

    def ours(self):
        with sw.init("dp_replicate=2", device="cpu") as world:
            step_of(world, Tempered())([batch(world.rank)])
        return INFINITY


class EvaluationByBatches(Mistake):
    """An evaluation averages the means of its batches, of which the last is short."""

    def plain(self):
        model, given = build(), [batch(0), batch(3), batch(1, valid=1)]
        with torch.no_grad():
            mean = sum(float(mean_loss(model(b["input_ids"]), b)) for b in given) / 3
        truth = plain_backward(build(), given)
        return Plain(f"reports {mean:.3f}; it is {truth:.3f}", off(mean, truth))

    ranks = 2

    def ours(self):
        wanted = plain_backward(build(), [batch(i) for i in range(5)])
        with sw.init("dp_shard=2", device="cpu") as world:
            found = sw.evaluate(sharded(world), [batch(i) for i in range(5)], loss=sum_loss)
        return off(found["loss"], wanted)


class EvaluationPadded(Mistake):
    """`DistributedSampler` fills up the last batch of an evaluation with samples that were seen."""

    ranks = 2

    def plain(self):
        from torch.utils.data import DataLoader, DistributedSampler

        values = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0]).flip(0)
        total, num = torch.zeros(()), 0
        for given in DataLoader(values, 1, sampler=DistributedSampler(values, shuffle=False)):
            total, num = total + given.sum(), num + len(given)
        dist.all_reduce(total)
        found, truth = float(total) / (2 * num), float(values.mean())
        return Plain(f"a mean of {found:.2f} over {2 * num} samples; it is {truth:.2f} over 5", off(found, truth))

    def ours(self):
        samples = [{"x": torch.tensor([9.0 if i == 0 else 0.0], dtype=torch.float64)} for i in range(5)]
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sw.parallelize(nn.Linear(1, 1).double(), world)
            loader = sw.Loader(samples, world, global_batch=4, micro_batch=1, shuffle=False)
            found = sw.evaluate(
                model,
                loader,
                loss=lambda output, given: given["x"].sum(),
                count=lambda given: len(given["x"]),
                forward=lambda model, given: model(given["x"]),
            )
        return off(found["loss"], 9.0 / 5)


class EvaluationWithoutTokens(Mistake):
    """Every label of an evaluation is ignored (a prompt that fills the window), and the sum of nothing is a perfect score."""

    says = "an evaluation without a valid token"

    def plain(self):
        model, given = build(), batch(0, valid=0)
        total = float(sum_loss(model(given["input_ids"]), given).detach())
        num = int((given["labels"] != -100).sum())
        return Plain(f"reports a loss of {total / max(1, num):.1f}", 1.0 if total == num == 0 else 0.0)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            sw.evaluate(sharded(world), [batch(0, valid=0)], loss=sum_loss)
        return INFINITY


class EvaluationLeavesItsMode(Mistake):
    """`model.eval()` for an evaluation, and no `model.train()` after it; or none after `from_pretrained`: dropout is off from then on."""

    says = "a model in eval mode"

    @staticmethod
    def make():
        return nn.Sequential(language_model(11, 16).double(), nn.Dropout(0.5))

    def plain(self):
        model, given = self.make(), batch(0)["input_ids"]
        model.eval()
        model(given)
        zeros = float((model(given) == 0).double().mean())
        return Plain(f"dropout of 0.5 zeroes {zeros:.1f} of its input from then on", 0.5 - zeros)

    def ours(self):
        given = batch(0)
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sharded(world, self.make)
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
            model.eval()
            sw.evaluate(model, [given], loss=sum_loss)
            step([given])
        return INFINITY


class EvaluationDrawsNumbers(Mistake):
    """An evaluation in between draws random numbers (dropout is left on, or it shuffles), and training goes on with others."""

    @staticmethod
    def make():
        return nn.Sequential(language_model(11, 16).double(), nn.Dropout(0.5))

    def plain(self):
        found = []
        for evaluates in (True, False):
            model, given = self.make(), batch(0)
            torch.manual_seed(1)
            if evaluates:
                model(given["input_ids"])
            sum_loss(model(given["input_ids"]), given).backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        wrong = off(found[0], found[1])
        return Plain(f"gradients of the next step {wrong:.2f} off those of a run without it", wrong)

    def ours(self):
        given = batch(0)
        with sw.init("dp_shard=1", device="cpu") as world:
            found = []
            for evaluates in (True, False):
                model = sharded(world, self.make)
                step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss)
                if evaluates:
                    sw.evaluate(model, [given], loss=sum_loss, forward=lambda model, b: model.train()(b["input_ids"]))
                step([given])
                found.append(values(model))
        return off(found[0], found[1])
