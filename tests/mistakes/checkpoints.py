"""Runs that go on with something else than was saved, or than is set; weights that are read as other values."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mistakes.rows import Mistake, Plain, off
from mistakes.toys import batch, build, params, sharded, sum_loss, values
from state.test_changed_settings import script
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import shardwise as sw

INFINITY = float("inf")


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()


def stepped(optim, num=1):
    """Steps with gradients that differ by parameter."""
    for _ in range(num):
        for i, group in enumerate(optim.param_groups):
            for j, param in enumerate(group["params"]):
                param.grad = torch.full_like(param, 1.0 + i + j)
        optim.step()
        optim.zero_grad()
    return optim


class RateChanged(Mistake):
    """The learning rate is changed in the script, and the run is started again: `load_state_dict` puts the old one back."""

    says = "lr: not as in the run that"

    def plain(self):
        saved = stepped(torch.optim.AdamW(linear().parameters(), lr=0.01)).state_dict()
        optim = torch.optim.AdamW(linear().parameters(), lr=0.5)
        optim.load_state_dict(saved)
        found = optim.param_groups[0]["lr"]
        return Plain(f"goes on with {found}; the script says 0.5", off(found, 0.5))

    def ours(self):
        script(Path("run"), 2)
        script(Path("run"), 3, optim=(torch.optim.AdamW, {"lr": 0.5}))
        return INFINITY


class BetasChanged(Mistake):
    """Other settings of the optimizer are changed: betas, weight decay, eps."""

    says = "betas, weight_decay: not as in the run that"

    def plain(self):
        saved = stepped(torch.optim.AdamW(linear().parameters(), lr=0.01)).state_dict()
        optim = torch.optim.AdamW(linear().parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.3)
        optim.load_state_dict(saved)
        group = optim.param_groups[0]
        return Plain(
            f"goes on with betas of {group['betas']} and a decay of {group['weight_decay']}; the script says (0.8, 0.9) and 0.3",
            off(group["weight_decay"], 0.3),
        )

    def ours(self):
        script(Path("run"), 2)
        script(Path("run"), 3, optim=(torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.3}))
        return INFINITY


class ScheduleChanged(Mistake):
    """A run is made longer: `T_max` of the schedule is changed, and the checkpoint has the old one."""

    says = "T_max: not as in the run"

    def plain(self):
        def schedule(steps):
            return lr_scheduler.CosineAnnealingLR(torch.optim.SGD(linear().parameters(), lr=0.1), steps)

        first = schedule(9)
        stepped(first.optimizer)
        first.step()
        longer = schedule(99)
        longer.load_state_dict(first.state_dict())
        return Plain(f"goes on with T_max={longer.T_max}; the script says 99", off(float(longer.T_max), 99.0))

    def ours(self):
        script(Path("run"), 2, scheduler=lambda optim: lr_scheduler.CosineAnnealingLR(optim, 9))
        script(Path("run"), 3, scheduler=lambda optim: lr_scheduler.CosineAnnealingLR(optim, 99))
        return INFINITY


def resumed(world, root, until, make=build, loads=True, **options):
    """A script that saves at ``until``, and goes on from what is there; the step it has."""
    model = sharded(world, make)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = lr_scheduler.ExponentialLR(optim, 0.5)
    step = sw.TrainStep(model, optim, loss=sum_loss, scheduler=schedule, **options)
    with sw.CheckpointManager(root, step, async_save=False) as ckpt:
        if step.num_steps == 0 and loads and Path(root).exists() and any(Path(root).glob("step-*")):
            ckpt.load()
        while step.num_steps < until:
            i = 2 * step.num_steps
            step([batch(i + world.rank)] if world.size == 2 else [batch(i), batch(i + 1)])
        ckpt.save()
    return step


class StateMissing(Mistake):
    """DCP fills what is there: a fresh optimizer has no state yet, so its moments begin at 0."""

    ranks = 2
    versus_one = True

    def plain(self):
        model = fully_shard(linear())
        optim = stepped(torch.optim.AdamW(model.parameters(), lr=0.1))
        dcp.save({"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id="run")
        fresh = fully_shard(linear(1))
        optim = torch.optim.AdamW(fresh.parameters(), lr=0.1)
        state = {"model": fresh.state_dict(), "optim": optim.state_dict()}
        dcp.load(state, checkpoint_id="run")
        optim.load_state_dict(state["optim"])
        return Plain(f"the states of {len(optim.state)} of 2 parameters are restored", 1.0 - len(optim.state) / 2)

    def ours(self):
        with sw.init("dp_shard=-1", device="cpu") as world:
            if world.size == 1:  # not interrupted
                return values(resumed(world, "whole", 4).model)
            resumed(world, "run", 2)
            return values(resumed(world, "run", 4).model)


class SchedulerNotSaved(Mistake):
    """The checkpoint has the weights and the optimizer, and the schedule begins anew."""

    def plain(self):
        def schedule_of(optim):
            return lr_scheduler.LambdaLR(optim, lambda num: 0.5**num)

        optim = torch.optim.SGD(linear().parameters(), lr=1.0)
        schedule = schedule_of(optim)
        for _ in range(3):
            stepped(optim)
            schedule.step()
        before = optim.param_groups[0]["lr"]
        again = torch.optim.SGD(linear().parameters(), lr=1.0)
        again.load_state_dict(optim.state_dict())
        schedule_of(again)
        found = again.param_groups[0]["lr"]
        return Plain(f"goes on with a rate of {found}; it was {before}", off(found, before))

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            resumed(world, "run", 2)
            return off(resumed(world, "run", 3).optim.param_groups[0]["lr"], 0.01 * 0.5**3)


class GroupsInAnotherOrder(Mistake):
    """Parameters are given to the optimizer in another order than in the run that saved: torch matches states by their number."""

    def plain(self):
        model = linear()
        saved = stepped(torch.optim.AdamW(list(model.parameters()), lr=0.1)).state_dict()
        optim = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.1)
        optim.load_state_dict(saved)
        found, wanted = (float(optim.state[model[0].weight]["exp_avg"].mean()), 0.1)
        return Plain(f"the first layer goes on with a moment of {found:.1f}; its own is {wanted}", off(found, wanted))

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(linear(), world)
            saved = sw.full_optimizer_state_dict(model, stepped(torch.optim.AdamW(list(model.parameters()), lr=0.1)))
            optim = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.1)
            sw.load_full_optimizer_state_dict(model, optim, saved)
            return off(float(optim.state[model[0].weight]["exp_avg"].mean()), 0.1)


class PrefixOfAWrapper(Mistake):
    """Weights were saved from a wrapper (`module.`, `_orig_mod.`) and are loaded with `strict=False`."""

    def plain(self):
        saved = {f"module.{name}": value for name, value in linear(1).state_dict().items()}
        model = linear()
        model.load_state_dict(saved, strict=False)
        changed = sum(not torch.equal(a, b) for a, b in zip(model.parameters(), linear().parameters(), strict=True))
        return Plain(f"{changed} of 2 tensors are loaded", 1.0 - changed / 2)

    def ours(self):
        saved = {f"module.{name}": value for name, value in linear(1).state_dict().items()}
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(linear(), world)
            sw.load_full_state_dict(model, saved, strict=False)
            return off(values(model), params(linear(1)))


class BitFlipped(Mistake):
    """A bit of a stored file has flipped (a disk, a copy over the network)."""

    says = "are not what was written there"

    def plain(self):
        torch.save(linear().state_dict(), "model.pt")
        content = bytearray(Path("model.pt").read_bytes())
        at = content.index(linear()[0].weight.detach().numpy().tobytes())
        content[at + 7] ^= 0x40  # the exponent of the first number
        Path("model.pt").write_bytes(content)
        found = torch.load("model.pt")["0.weight"][0, 0].item()
        wanted = linear()[0].weight[0, 0].item()
        return Plain(f"loads a number of {abs(found):.0e} where one of {abs(wanted):.3f} was saved", abs(found))

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            resumed(world, "run", 1)
            (file,) = Path("run").glob("step-*/*.safetensors")
            content = bytearray(file.read_bytes())
            content[-5] ^= 0x40
            file.write_bytes(content)
            resumed(world, "run", 2)
        return INFINITY


class TornDirectory(Mistake):
    """A checkpoint is written over the one before, and the job is killed between: one rank's file is of the old step."""

    ranks = 2
    says = "step-00000002"

    def plain(self):
        saved = []
        for step in (1, 2):
            model = fully_shard(linear())
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(float(step))
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"run{step}")
            saved.append(model)
        dist.barrier()
        if dist.get_rank() == 0:  # rank 1's file of step 2 was not written any more
            shutil.copy("run1/__1_0.distcp", "run2/__1_0.distcp")
        dist.barrier()
        state = {"model": fully_shard(linear()).state_dict()}
        dcp.load(state, checkpoint_id="run2")
        found = state["model"]["0.weight"].full_tensor()
        old = float((found == 1.0).double().mean())
        return Plain(f"loads a tensor of which {old:.0%} are of the step before", old)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            resumed(world, "run", 1)
            resumed(world, "run", 2)
            world.broadcast(0)
            if world.is_main:
                first, second = sorted(Path("run").glob("step-*"))
                for file in sorted(first.glob("*.safetensors"))[-1:]:
                    shutil.copy(file, second / file.name)
            world.broadcast(0)
            resumed(world, "run", 3)
        return INFINITY


class OverflowByACast(Mistake):
    """Weights are exported in float16, and some are beyond what it holds."""

    says = "beyond what float16 can hold"

    def plain(self):
        model = linear()
        with torch.no_grad():
            model[0].weight[0, 0] = 70000.0
        num = sum(int(value.half().isinf().sum()) for value in model.state_dict().values())
        return Plain(f"{num} of 32 values becomes infinite", num / 32)

    def ours(self):
        model = linear().float()
        with torch.no_grad():
            model[0].weight[0, 0] = 70000.0
        with sw.init("dp_shard=1", device="cpu") as world:
            sw.save_weights(sw.parallelize(model, world), "out", dtype=torch.float16)
        return INFINITY


class LoadedIntoIntegers(Mistake):
    """Floats are loaded into a tensor of integers (a table that was quantised, a mask)."""

    says = "a state dict: dtype float32"

    def plain(self):
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.ones(2, dtype=torch.int64))
        model.load_state_dict({**model.state_dict(), "scale": torch.tensor([0.9, 1.9])})
        wrong = off(model.scale.double(), torch.tensor([0.9, 1.9], dtype=torch.float64))
        return Plain(f"0.9 and 1.9 are loaded as {model.scale[0]} and {model.scale[1]}", wrong)

    def ours(self):
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.ones(2, dtype=torch.int64))
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(model, world)
            state = sw.full_state_dict(model)
            sw.load_full_state_dict(model, {**state, "scale": torch.tensor([0.9, 1.9])})
        return INFINITY


class TiesThatDiffer(Mistake):
    """A file has both names of a tied weight, with other values (one was fine-tuned): the last one read is taken."""

    says = "embed.weight and head.weight differ"

    def plain(self):
        model = build()
        state = model.state_dict()
        state["head.weight"] = state["head.weight"] + 1.0
        wanted = state["embed.weight"].clone()
        model.load_state_dict(state)
        return Plain(
            f"the embedding is {off(model.embed.weight, wanted):.1f} off its own values",
            off(model.embed.weight, wanted),
        )

    def ours(self):
        state = build().state_dict()
        state["head.weight"] = state["head.weight"] + 1.0
        with sw.init("dp_shard=1", device="cpu") as world:
            sw.load_full_state_dict(sharded(world), state)
        return INFINITY


class MasksAfterResuming(Mistake):
    """Random states are not saved, or rank 0's alone: a resumed run draws other dropout masks."""

    ranks = 2
    versus_one = True

    @staticmethod
    def make():
        return nn.Sequential(build(), nn.Dropout(0.5))

    def plain(self):
        model = self.make()
        torch.manual_seed(dist.get_rank())
        given = batch(0)
        model(given["input_ids"])
        state = [torch.get_rng_state()]
        went_on = model(given["input_ids"])
        dist.broadcast_object_list(state, src=0)  # what rank 0 has saved is given to all
        torch.set_rng_state(state[0])
        again = model(given["input_ids"])
        wrong = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(wrong, torch.tensor(off(again, went_on)).float())
        return Plain(f"outputs of rank 1 are {float(wrong[1]):.2f} off those of the run that went on", float(wrong[1]))

    def ours(self):
        with sw.init("dp_shard=-1", device="cpu", seed=4) as world:
            if world.size == 1:
                return values(resumed(world, "whole", 4, self.make).model)
            resumed(world, "run", 2, self.make)
            return values(resumed(world, "run", 4, self.make).model)


class TwoJobsInOneDirectory(Mistake):
    """A second job is started on the directory of the first (a restarted scheduler, a copied script): each overwrites the other's files."""

    says = "another run is using them"

    def plain(self):
        for seed in (0, 1):  # both save step 100
            torch.save(linear(seed).state_dict(), "step-100.pt")
        found = torch.load("step-100.pt")["0.weight"]
        wrong = off(found, linear(0)[0].weight)
        return Plain(f"the first job resumes with weights {wrong:.1f} off its own", wrong)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            steps = []
            for _ in range(2):
                model = sharded(world)
                steps.append(sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sum_loss))
            with sw.CheckpointManager("run", steps[0], async_save=False) as first:
                steps[0]([batch(0)])
                first.save()
                with sw.CheckpointManager("run", steps[1], async_save=False) as second:
                    steps[1]([batch(1)])
                    second.save()
        return INFINITY


class OldRunInTheDirectory(Mistake):
    """A new run is started in the directory of an older one and does not go on from it: files of two runs mix."""

    says = "those of an earlier run"

    def plain(self):
        for seed, steps in ((0, (100, 200, 300)), (1, (100,))):  # the second was killed at 100
            for step in steps:
                torch.save({"seed": seed}, f"step-{step}.pt")
        newest = max(Path().glob("step-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
        seed = torch.load(newest)["seed"]
        return Plain(f"restarted, the second run goes on from {newest.stem}, which is the first run's", 1.0 - seed)

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            resumed(world, "run", 3)
            resumed(world, "run", 1, loads=False)
        return INFINITY


class ShardsOfOneRank(Mistake):
    """`torch.save(model.state_dict(), path)` on rank 0, as for one process: it has shards, with the shapes of whole tensors, and every rank loads
    those of rank 0."""

    ranks = 2
    says = "it has that rank's shards"

    def plain(self):
        model = fully_shard(linear())
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "weights.pt")
        dist.barrier()
        again = fully_shard(linear(1))
        again.load_state_dict(torch.load("weights.pt"))
        wrong = off(again[0].weight.full_tensor(), linear()[0].weight)
        return Plain(f"goes on with weights {wrong:.1f} off those that were saved", wrong)

    def ours(self):
        with sw.init("dp_shard=-1", device="cpu") as world:
            model = sharded(world)
            if world.is_main:
                torch.save(model.state_dict(), "weights.pt")
            world.barrier()
            model.load_state_dict(torch.load("weights.pt"))
        return INFINITY
