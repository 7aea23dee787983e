"""Programs that are drawn: what a user's script calls between its windows, in an order that nobody thought of, on ranks and in one
plain process of PyTorch side by side. Each number that both give is compared."""

import random
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from verify.drawn_models import build, drawn_kind

import shardwise as sw

LAYOUTS = {
    2: ["dp_shard=2", "dp_replicate=2", "tp=2", "tp=2", "cp=2"],
    4: [
        *("dp_shard=4", "dp_shard=2,dp_replicate=2", "dp_shard=2,tp=2", "dp_replicate=2,tp=2", "dp_shard=2,cp=2"),
        *("dp_replicate=2,cp=2", "tp=4", "cp=4", "cp=2,tp=2"),
    ],
}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=5e-2, momentum=0.9, nesterov=True),
}
BETWEEN = ("nothing", "rate", "written", "norm", "evaluated", "called", "resumed", "frozen", "weights")
OFF = 1e-9


def loss_of(output: Tensor, batch: dict) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def with_z_loss(output: Tensor, batch: dict) -> Tensor:
    return loss_of(output, batch) + 1e-2 * output.logsumexp(-1).square().sum()


def drawn_options(r: random.Random, layout: str, kind: dict) -> dict:
    options: dict[str, Any] = {"remat": r.choice(["none", "none", "full", "selective"])}
    sharding: dict[str, Any] = {"min_unit_bytes": 0} if r.random() < 0.6 else {}
    if "dp_shard" in layout:
        sharding |= r.choice(
            [
                {},
                {},
                {"reshard_after_forward": False},
                {"sync_every_microbatch": True},
                {"offload": True, "pin_memory": False},
            ]
        )
    elif r.random() < 0.3:
        sharding["engine"] = "fsdp2"
    if kind["counts"]:
        sharding["buffers"] = {"seen": "sum"}
    if "tp" in layout and r.random() < 0.5:
        options["tensor_parallel"] = sw.TensorParallel(sequence_parallel=True)
    if "cp" in layout and r.random() < 0.4:
        options["context_parallel"] = sw.ContextParallel(method="gather")
    return options | {"sharding": sw.Sharding(**sharding)}


def drawn_batches(r: random.Random, kind: dict, num: int) -> list[dict]:
    generator, batches = torch.Generator().manual_seed(r.randrange(1 << 30)), []
    for _ in range(num):
        size, length = r.choice([1, 2, 3]), r.choice([5, 8, 11, 16, 23])
        ids = torch.randint(0, kind["vocab"], (size, length + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < r.choice([0, 0.3, 0.7])] = -100
        labels[0, 0] = 1  # one counts
        batches.append({"input_ids": ids[:, :-1], "labels": labels})
    return batches


class Plain:
    """A run of plain PyTorch on all batches."""

    def __init__(self, model: nn.Module, make: Any):
        self.model, self.optim = model, make(model.parameters())

    def window(self, batches: list[dict], how: str, clip: float | None, norm_type: str) -> tuple[float, float]:
        num, total = sum(int((batch["labels"] != -100).sum()) for batch in batches), 0.0
        for batch in batches:
            loss = (with_z_loss if how == "z-loss" else loss_of)(self.model(batch["input_ids"]), batch) / num
            loss.backward()
            total += float(loss.detach())
        params = [param for param in self.model.parameters() if param.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, clip, float(norm_type)) if clip else 0.0
        self.optim.step()
        self.optim.zero_grad()
        return total, float(norm)


class Sharded:
    """The same on the ranks of a world."""

    def __init__(self, model: nn.Module, world: sw.World, make: Any, options: dict):
        self.world, self.data = world, world.axis("dp")
        self.model = sw.parallelize(model, world, **options)
        self.optim = make(self.model.parameters())
        self.step, self._local = sw.TrainStep(self.model, self.optim, loss=loss_of), None

    def mine(self, batches: list[dict]) -> list[dict]:
        return batches[self.data.rank :: self.data.size]

    def window(self, batches: list[dict], how: str, clip: float | None, norm_type: str) -> tuple[float, float]:
        if how == "step":
            self.step.max_grad_norm, self.step.norm_type = clip, norm_type if clip else 2.0
            out = self.step(self.mine(batches))
            return out.loss, float(out.grad_norm) if clip else 0.0
        self._local = self._local or sw.local_optimizer(self.optim)
        total, is_cut = torch.zeros((), dtype=torch.float64), self.world.axis("cp").size > 1
        with sw.window(self.model, self.mine(batches)) as window:
            for batch in window:
                output = self.model(batch["input_ids"])
                given = sw.cut_sequence(self.model, batch) if is_cut else batch
                loss = (with_z_loss if how == "z-loss" else loss_of)(output, given) / window.num_tokens
                loss.backward()
                total += loss.detach()
        norm = sw.clip_grad_norm_(self.model, clip, norm_type=norm_type) if clip else 0.0
        self._local.step()
        self.optim.zero_grad()
        dist.all_reduce(total)
        return float(total) / self.world.axis("tp").size, float(norm)


@dataclass
class Program:
    """One drawn program.

    Attributes:
        seed: of all that is drawn.
        calls: what it has done so far, for reports.
    """

    seed: int
    num: int
    calls: list[Any] = field(default_factory=list)

    def run(self) -> str | None:
        """None if all numbers are those of one process, else the refusal. Raises AssertionError where one differs."""
        r = random.Random(self.seed)
        self.r, self.kind = r, drawn_kind(r)
        self.make = OPTIMIZERS[r.choice([*OPTIMIZERS])]
        self.plain = Plain(build(self.kind, self.seed), self.make)
        layout = r.choice(LAYOUTS[self.num])
        self.world = self._init(layout)
        self.root = self.world.broadcast(tempfile.mkdtemp() if self.world.is_main else None)
        try:
            self.sharded = self._make(layout, self.seed)
            for turn in range(r.choice([3, 4, 5])):
                self._between(r.choice(BETWEEN) if turn else "nothing")
                how, clip, norm_type = (
                    r.choice(["step", "step", "loop", "z-loss"]),
                    r.choice([None, 0.5, 1.0]),
                    r.choice("12i"),
                )
                given = (how, clip, "inf" if norm_type == "i" else norm_type)
                self.calls.append(given)
                batches = drawn_batches(r, self.kind, self.sharded.data.size * r.choice([1, 2, 3]))
                self._same("loss and norm", self.plain.window(batches, *given), self.sharded.window(batches, *given))
            self._compare_weights()
        except sw.ShardwiseError as error:
            return str(error)
        finally:
            self.world.close()
        return None

    def _init(self, layout: str) -> sw.World:
        return sw.init(layout, device="cpu", seed=self.seed, timeout_s=60)

    def _make(self, layout: str, seed: int) -> Sharded:
        options = drawn_options(self.r, layout, self.kind)
        self.calls.append((layout, {name: str(value) for name, value in options.items()}))
        model = build(self.kind, seed)
        for mine, theirs in zip(model.parameters(), self.plain.model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        return Sharded(model, self.world, self.make, options)

    def _between(self, call: str) -> None:
        """Does one thing between two windows, in both."""
        r, plain, sharded = self.r, self.plain, self.sharded
        name, factor = r.choice([name for name, _ in plain.model.named_parameters()]), r.choice([0.5, 1.5])
        self.calls.append((call, name))
        one, other = plain.model.get_parameter(name), sharded.model.get_parameter(name)
        if call == "rate":
            for group in (*plain.optim.param_groups, *sharded.optim.param_groups):
                group["lr"] *= factor
        elif call == "written":
            with torch.no_grad():
                one.mul_(factor)
                other.mul_(factor)
        elif call == "norm":
            self._same(name, [float(one.norm())], [float(sw.full_tensor(other.detach()).norm())])
        elif call in ("evaluated", "called"):
            self._run_alone(call, drawn_batches(r, self.kind, sharded.data.size))
        elif call in ("resumed", "frozen"):
            if call == "frozen" and (
                not one.requires_grad or sum(p.requires_grad for p in plain.model.parameters()) > 1
            ):
                one.requires_grad_(not one.requires_grad)
            with sw.CheckpointManager(self.root, sharded.step) as manager:
                manager.save()
            self.world.close()
            layout = r.choice(LAYOUTS[self.num])
            self.world = self._init(layout)
            self.sharded = self._make(layout, self.seed + 1)
            with sw.CheckpointManager(self.root, self.sharded.step) as manager:
                manager.load()
        elif call == "weights":
            self._compare_weights()

    def _run_alone(self, call: str, batches: list[dict]) -> None:
        models = self.plain.model, self.sharded.model
        is_training = call == "called" and not self.kind["counts"] and self.r.random() < 0.5
        for model in models:
            model.train(is_training)
        with torch.no_grad():
            if call == "called":
                one, other = (model(batches[0]["input_ids"]) for model in models)
                assert one.shape == other.shape
                torch.testing.assert_close(other, one, rtol=OFF, atol=OFF)
            else:
                num = sum(int((batch["labels"] != -100).sum()) for batch in batches)
                one = sum(float(loss_of(models[0](batch["input_ids"]), batch)) for batch in batches) / num
                found = sw.evaluate(models[1], self.sharded.mine(batches), loss=loss_of)["loss"]
                self._same("evaluation", [one], [found])
        for model in models:
            model.train()

    def _compare_weights(self) -> None:
        found = sw.full_state_dict(self.sharded.model)
        for name, value in self.plain.model.state_dict().items() if self.world.is_main else ():
            torch.testing.assert_close(
                found[name], value, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
            )

    def _same(self, what: str, wanted: Any, found: Any) -> None:
        for one, other in zip(wanted, found, strict=True):
            assert abs(one - other) <= OFF * max(1, abs(one)), f"{what}: {found} for {wanted}"


def run(seed: int, num: int) -> str | None:
    program = Program(seed, num)
    try:
        return program.run()
    except AssertionError as error:
        raise AssertionError(f"program {seed} on {num} ranks, {program.kind}, {program.calls}: {error}") from error
