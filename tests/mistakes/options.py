"""Settings that are misspelt, given twice, read as something else, or mean less than their name says."""

from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from mistakes.rows import Mistake, Plain, command, off
from mistakes.toys import gradients, params, sharded, values
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardwise as sw

INFINITY = float("inf")
TRAIN = ("--train.steps=1", "--launch.nproc=1", "--launch.device=cpu", "--log.dir=run", "--print-config")


def file_of(text):
    Path("run.yaml").write_text(text)
    return "run.yaml"


class KeyMisspelt(Mistake):
    """A key of the configuration is misspelt, and `config.get(key, default)` takes the default."""

    says = "optim.weight_decy (run.yaml:3)"

    def plain(self):
        config = yaml.safe_load("optim: {lr: 0.01, weight_decy: 0.3}")["optim"]
        made = torch.optim.AdamW(
            [nn.Parameter(torch.ones(1))], config["lr"], weight_decay=config.get("weight_decay", 0.01)
        )
        found = made.param_groups[0]["weight_decay"]
        return Plain(f"trains with a weight decay of {found}; the file says 0.3", off(found, 0.3))

    def ours(self):
        return command("train", file_of("optim:\n  lr: 0.01\n  weight_decy: 0.3\n"), *TRAIN)


class KeyTwice(Mistake):
    """A key stands twice in the file, after a merge: the last one counts."""

    says = "is given twice"

    def plain(self):
        found = yaml.safe_load("lr: 0.001\nsteps: 100\nlr: 0.1\n")["lr"]
        return Plain(f"a rate of {found}; the file also says 0.001", found)

    def ours(self):
        return command("train", file_of("optim:\n  lr: 0.001\n  lr: 0.1\n"), *TRAIN)


class NumberInOctal(Mistake):
    """A number with a leading zero in YAML (a date, a step copied from a file name) is read as octal."""

    def plain(self):
        found = yaml.safe_load("steps: 000400")["steps"]
        return Plain(f"`steps: 000400` is {found} steps", off(float(found), 400.0))

    def ours(self):
        from shardwise.run.config import load_config

        return off(float(load_config(file_of("train:\n  steps: 000400\n")).config.train.steps), 400.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def tower():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)])


class UnitsMisspelt(Mistake):
    """The class of blocks to be sharded one by one is misspelt: none is found, and the whole model is one unit."""

    ranks = 2
    says = "units='Blok'"

    def plain(self):
        model = tower()
        units = [fully_shard(m) for m in model.modules() if type(m).__name__ == "Blok"]
        fully_shard(model)
        return Plain(f"{len(units)} of 4 blocks are units: all parameters are gathered at once", 1 - len(units) / 4)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            sw.parallelize(tower, world, sharding=sw.Sharding(units=("Blok",)))
        return INFINITY


class RematMisspelt(Mistake):
    """The class of blocks whose activations are not to be kept is misspelt: none is wrapped."""

    says = "Blok"

    def plain(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        model = tower()
        apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ == "Blok")
        num = sum("Checkpoint" in type(m).__name__ for m in model.modules())
        return Plain(f"{num} of 4 blocks are wrapped: all activations are kept", 1 - num / 4)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            sw.parallelize(tower, world, remat=sw.Remat(targets=("Blok",)))
        return INFINITY


class MasksNotKept(Mistake):
    """`preserve_rng_state=False` makes checkpointing faster, and the second run of a block draws another dropout mask."""

    says = "Remat(preserve_rng_state=False)"

    def plain(self):
        from torch.utils.checkpoint import checkpoint

        found = []
        for keeps in (False, True):
            torch.manual_seed(0)
            block, x = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)), torch.ones(2, 8)
            checkpoint(block, x, use_reentrant=False, preserve_rng_state=keeps).square().sum().backward()
            found.append({name: p.grad for name, p in block.named_parameters()})
        return Plain(f"gradients {off(*found):.2f} off", off(*found))

    def ours(self):
        sw.Remat(preserve_rng_state=False)
        return INFINITY


class One(nn.Module):
    """One weight, whose gradient is the sum of the inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (self.weight * x).sum(-1)


INPUTS = ((256.0, 256.0), (0.5, 0.5))  # of rank 0 and 1


class SummedInBf16(Mistake):
    """`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`: where `reduce_dtype` is left out, gradients are summed over the ranks in bf16 too."""

    ranks = 2
    says = "gradients are summed in bfloat16"

    def plain(self):
        model = fully_shard(One(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.tensor([INPUTS[dist.get_rank()]])).sum().backward()
        found = float(model.weight.grad.full_tensor()[0])
        return Plain(f"256 + 0.5 is {found:.0f}: rank 1's gradient is lost", 1.0 if found == 256.0 else 0.0)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            sw.parallelize(One, world, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return INFINITY


class SummedInBf16ByAWord(Mistake):
    """The same, where all that was asked for is "bf16"."""

    ranks = 2

    def plain(self):
        return SummedInBf16().plain()

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sw.parallelize(One(), world, precision="bf16")
            with sw.window(model, [{"x": torch.tensor([INPUTS[world.rank]])}], count=len) as w:
                for given in w:
                    model(given["x"]).sum().backward()
            return off(gradients(model), {"weight": torch.tensor([256.5, 256.5])})


class Positions(nn.Module):
    """A block that takes positions as floats, as some rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = 0.0

    def forward(self, x, positions):
        self.seen = float(positions.max())
        return x * self.weight


class InTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Positions(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.block(x, torch.tensor([4090.0])))


class PositionsRounded(Mistake):
    """FSDP2 casts every floating input of a unit to bf16, positions too."""

    ranks = 2

    def plain(self):
        model, policy = InTwo(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model.block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model(torch.ones(2, 4))
        return Plain(f"position 4090 is {model.block.seen:.0f}", abs(model.block.seen - 4090.0))

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world, InTwo, precision="bf16")
            model(torch.ones(2, 4))
            return off(model.block.seen, 4090.0)


class TableRounded(Mistake):
    """`model.to(torch.bfloat16)` rounds the tables of rotary embeddings with the weights."""

    def plain(self):
        from mistakes.models import Rotary

        model, at = Rotary(), 4000.0
        exact = torch.cos(model.table * at)
        found = torch.cos(model.bfloat16().table.float() * at)
        return Plain(
            f"cosines at position 4000 are up to {float((found - exact).abs().max()):.1f} off", off(found, exact)
        )

    def ours(self):
        from mistakes.models import Rotary

        with sw.init("dp_shard=1", device="cpu") as world:
            return off(sw.parallelize(Rotary, world, precision="bf16").table, Rotary().table)


class OneAutocastForAll(Mistake):
    """The whole loop stands inside one `torch.autocast`: weights are cast once and kept, so no step shows in the next forward."""

    says = "inside torch.autocast"

    def plain(self):
        torch.manual_seed(0)
        model, x, losses = nn.Linear(8, 8), torch.ones(4, 8), []
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(5):
                loss = model(x).float().square().sum()
                losses.append(loss.item())
                loss.backward()
                optim.step()
                optim.zero_grad()
        same = losses[-1] == losses[0]
        return Plain(
            f"the loss is {losses[0]:.2f} at the first step and {losses[-1]:.2f} at the fifth", 1.0 if same else 0.0
        )

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(nn.Linear(8, 8), world)
            step = sw.TrainStep(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                loss=lambda output, given: output.square().sum(),
                count=lambda given: len(given["x"]),
                forward=lambda m, given: m(given["x"]),
            )
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step([{"x": torch.ones(4, 8)}])
        return INFINITY


class HalfWithoutScale(Mistake):
    """float16 is asked for, and no `GradScaler` is made: small gradients are 0."""

    ranks = 2
    gate = 2e-3

    @staticmethod
    def make():
        torch.manual_seed(0)
        return nn.Linear(8, 8)

    def plain(self):
        half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        model = fully_shard(self.make(), mp_policy=half)
        (model(torch.ones(2, 8)).float().sum() * 1e-8).backward()
        grad = model.weight.grad.full_tensor()
        return Plain(
            f"{float((grad == 0).double().mean()):.0%} of the gradients are 0", float((grad == 0).double().mean())
        )

    def ours(self):
        plain = self.make()
        before = params(plain)
        (plain(torch.ones(4, 8)).sum() * 1e-8 / 4).backward()
        torch.optim.SGD(plain.parameters(), lr=1e6).step()
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sw.parallelize(self.make(), world, precision="fp16")
            optim = torch.optim.SGD(model.parameters(), lr=1e6)
            step = sw.TrainStep(
                model,
                optim,
                loss=lambda output, given: output.float().sum() * 1e-8,
                count=lambda given: len(given["x"]),
                forward=lambda m, given: m(given["x"]),
            )
            step([{"x": torch.ones(2, 8)}])
            found = values(model)
        return off(
            {name: value - before[name] for name, value in found.items()},
            {name: value - before[name] for name, value in params(plain).items()},
        )
