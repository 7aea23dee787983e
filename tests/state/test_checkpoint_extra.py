"""Optimizers and averages of sharded models in ``extra``: saved under one layout and resumed under another, or refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

EVERY = sw.Sharding(min_unit_bytes=0)


class Block(nn.Module):
    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim_in, 16), nn.Linear(16, dim_out)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def seeded(dim_in, dim_out):
    torch.manual_seed(dim_in)
    return Block(dim_in, dim_out).double()


def batches(step, world=None):
    generator = torch.Generator().manual_seed(step)
    made = [
        {name: torch.randn(n, dim, generator=generator, dtype=torch.float64) for name, dim in (("z", 4), ("x", 6))}
        for n in (2, 3, 1, 4)
    ]
    return made if world is None else made[world.axis("dp").rank :: world.axis("dp").size]


def judged(g, d, batch, num):
    return (F.softplus(-d(batch["x"])).sum() + F.softplus(d(g(batch["z"]).detach())).sum()) / num


def fooled(g, d, batch, num):
    return F.softplus(-d(g(batch["z"]))).sum() / num


class Run:
    """What a checkpoint needs of a step of one's own loop."""

    def __init__(self, model, optim):
        self.model, self.optim, self.num_steps = model, optim, 0

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]

    def check_state_dict(self, state):
        pass


class Listed:
    """An average in a list, in the order of the parameters."""

    def __init__(self, model):
        self.model = model
        self.kept = [p.detach().clone() for p in model.parameters()]

    def update(self):
        with torch.no_grad():
            for mine, theirs in zip(self.kept, self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    def state_dict(self):
        return {"kept": self.kept, "rate": 0.5}

    def load_state_dict(self, state):
        self.kept = state["kept"]

    def sums(self):
        """Of each whole tensor, weighted, so that no element may stand elsewhere."""
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.kept]
        return [float((t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum()) for t in whole]


class Named(Listed):
    """An average by name, which takes the values and keeps its own tensors."""

    def state_dict(self):
        return {"kept": {name: t for (name, _), t in zip(self.model.named_parameters(), self.kept, strict=True)}}

    def load_state_dict(self, state):
        for mine, other in zip(self.kept, state["kept"].values(), strict=True):
            mine.copy_(other)


AVERAGES = {"listed": Listed, "named": Named}


def trained(layout, root, until, average, *, loads=False, saves=False):
    """A GAN with a checkpoint that has the second model, its optimizer, another one of the first model's, and an average."""
    with sw.init(layout, device="cpu", seed=1) as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        g, d = (
            sw.parallelize(seeded(*dims), world, sharding=EVERY, example={"x": torch.ones(2, dims[0]).double()})
            for dims in ((4, 6), (6, 1))
        )
        weights = [p for name, p in g.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in g.named_parameters() if name.endswith("bias")]
        of_weights, of_biases, of_d = (
            sw.local_optimizer(optim)
            for optim in (
                torch.optim.Adam(weights, lr=0.02),
                torch.optim.SGD(biases, lr=0.02, momentum=0.9),
                torch.optim.Adam(
                    [{"params": [*d.parameters()][:1], "lr": 0.02}, {"params": [*d.parameters()][1:]}], lr=0.01
                ),
            )
        )
        run, kept = Run(g, of_weights), AVERAGES[average](d)
        extra = {"d": d, "of_d": of_d, "of_biases": of_biases, "kept": kept}
        with sw.CheckpointManager(root, run, extra=extra) as checkpoints:
            if loads:
                assert checkpoints.load() == 2
            while run.num_steps < until:
                mine = batches(run.num_steps, world)
                for model, loss, optims in ((d, judged, [of_d]), (g, fooled, [of_weights, of_biases])):
                    with sw.window(model, mine, count=lambda b: len(b["x"])) as window:
                        for batch in window:
                            loss(g, d, batch, window.num_tokens).backward()
                    for optim in optims:
                        optim.step()
                    for optim in (of_d, of_weights, of_biases):
                        optim.zero_grad()
                kept.update()
                run.num_steps += 1
            if saves:
                checkpoints.save()
        told = [str(warning.message) for warning in seen if "summed" in str(warning.message)]
        return sw.full_state_dict(g), sw.full_state_dict(d), kept.sums(), told


def alone(until):
    """The same in one plain process."""
    g, d = seeded(4, 6), seeded(6, 1)
    optims = (
        torch.optim.Adam([p for n, p in g.named_parameters() if n.endswith("weight")], lr=0.02),
        torch.optim.SGD([p for n, p in g.named_parameters() if n.endswith("bias")], lr=0.02, momentum=0.9),
        torch.optim.Adam([{"params": [*d.parameters()][:1], "lr": 0.02}, {"params": [*d.parameters()][1:]}], lr=0.01),
    )
    kept = Listed(d)
    for step in range(until):
        made = batches(step)
        num = sum(len(batch["x"]) for batch in made)
        for loss, stepped in ((judged, optims[2:]), (fooled, optims[:2])):
            sum(loss(g, d, batch, num) for batch in made).backward()
            for optim in stepped:
                optim.step()
            g.zero_grad(), d.zero_grad()
        kept.update()
    return g.state_dict(), d.state_dict(), kept.sums()


WAYS = {
    "one to fsdp": (("dp_shard=1", 1), ("dp_shard=2", 2), "listed"),
    "fsdp to one": (("dp_shard=2", 2), ("dp_shard=1", 1), "named"),
    "fsdp to ddp": (("dp_shard=2", 2), ("dp_replicate=2", 2), "listed"),
    "ddp to fsdp": (("dp_replicate=2", 2), ("dp_shard=2", 2), "named"),
    "fsdp to hsdp": (("dp_shard=2", 2), ("dp_replicate=2,dp_shard=2", 4), "listed"),
    "tp to fsdp": (("tp=2", 2), ("dp_shard=2", 2), "named"),
    "fsdp to tp": (("dp_shard=2", 2), ("tp=2", 2), "named"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_gan_with_two_optimizers_and_an_average_goes_on_under_another_layout(ranks, tmp_path, way):
    (first, num_first), (second, num_second), average = WAYS[way]
    *_, told = ranks.run(trained, num_first, first, tmp_path, 2, average, saves=True)[0]
    assert told == []
    g, d, sums, told = ranks.run(trained, num_second, second, tmp_path, 4, average, loads=True)[0]
    assert told == []
    for found, expected in zip((g, d), alone(4)[:2], strict=True):
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-12, name
    if not second.startswith("tp"):  # there a rank has the sums of its parts
        assert sums == pytest.approx(alone(4)[2], rel=1e-12)


# ---- what is refused, when it is saved and when it is loaded -----------------------------------------------------


class Around:
    """An object with an optimizer in it."""

    def __init__(self, optim):
        self.optim = optim

    def state_dict(self):
        return {"inner": self.optim.state_dict()}

    def load_state_dict(self, state):
        self.optim.load_state_dict(state["inner"])


def refused(case, layout, root, phase):
    with sw.init(layout, device="cpu", seed=1) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = seeded(6, 1)
        stale = torch.optim.Adam(old.parameters())
        x = {"x": torch.ones(2, 6, dtype=torch.float64)}
        d = sw.parallelize(old, world, sharding=EVERY, example=x)
        g = sw.parallelize(seeded(4, 6), world, sharding=EVERY, example={"x": torch.ones(2, 4, dtype=torch.float64)})
        of_d = sw.local_optimizer(torch.optim.Adam(d.parameters()))
        with sw.window(d, [x], count=lambda b: 1) as window:
            for batch in window:
                d(batch["x"]).sum().backward()
        if phase == "save":
            of_d.step()
        held = {
            "of two": lambda: torch.optim.Adam([*d.parameters(), *g.parameters()]),
            "stale": lambda: stale,
            "around": lambda: Around(of_d),
            "listed": lambda: Listed(d),
            "other class": lambda: of_d if phase == "save" else torch.optim.SGD(d.parameters()),
            "late": lambda: Listed(d) if phase == "save" else Later(),
        }[case]()
        run = Run(g, sw.local_optimizer(torch.optim.Adam(g.parameters())))
        before = sw.full_state_dict(g)
        try:
            with sw.CheckpointManager(root, run, extra={"held": held}, async_save=False) as checkpoints:
                checkpoints.save() if phase == "save" else checkpoints.load()
        except sw.ShardwiseError as error:
            after = sw.full_state_dict(g)
            assert all(torch.equal(before[name], value) for name, value in after.items())
            return error
        return None


class Later:
    """An average that has no tensors before the first step."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.kept = state["kept"]


def test_an_optimizer_that_has_no_names_is_refused_when_the_manager_is_made(ranks, tmp_path):
    for error in ranks.run(refused, 2, "of two", "dp_shard=2", tmp_path, "save"):
        assert isinstance(error, sw.ConfigError) and "more than one model" in error.given
    for error in ranks.run(refused, 2, "stale", "dp_shard=2", tmp_path, "save"):
        assert isinstance(error, sw.ConfigError) and error.name == "up.weight"


REFUSED_AT_LOAD = {
    "around": ("dp_shard=2", "inside of another object"),
    "listed": ("tp=2", "cut over the ranks as the object's own tensor is"),
    "other class": ("dp_shard=2", "the state of Adam"),
    "late": ("dp_shard=2", ""),
}


@pytest.mark.parametrize("case", [case for case in REFUSED_AT_LOAD if case != "late"])
def test_what_cannot_be_cut_is_refused_when_it_is_loaded_not_at_the_next_step(fresh_ranks, tmp_path, case):
    ranks = fresh_ranks  # models of other tests that are still alive have cut parameters of these shapes
    layout, text = REFUSED_AT_LOAD[case]
    assert ranks.run(refused, 1, case, "dp_shard=1", tmp_path, "save") == [None]
    for error in ranks.run(refused, 2, case, layout, tmp_path, "load"):
        assert isinstance(error, sw.CheckpointError) and text in str(error)


def test_an_optimizer_inside_of_another_object_is_refused_when_it_is_saved_too(ranks, tmp_path):
    for error in ranks.run(refused, 2, "around", "dp_shard=2", tmp_path, "save"):
        assert isinstance(error, sw.CheckpointError) and "inside of another object" in error.given
        assert "extra={'optim': optim}" in error.fix  # as the runs above have theirs


def plain_one(root, layout, loads):
    with sw.init(layout, device="cpu", seed=1) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g, plain = sw.parallelize(seeded(4, 6), world, sharding=EVERY), seeded(4, 6)
        optim = torch.optim.Adam(plain.parameters(), lr=0.1)
        run = Run(g, sw.local_optimizer(torch.optim.Adam(g.parameters())))
        with sw.CheckpointManager(root, run, extra={"plain": plain, "optim": optim}) as checkpoints:
            if loads:
                checkpoints.load()
            for param in plain.parameters():
                param.grad = torch.ones_like(param)
            optim.step()
            if not loads:
                checkpoints.save()
        return plain.state_dict(), float(optim.state[next(plain.parameters())]["step"])


def test_an_optimizer_of_a_plain_model_is_saved_as_any_object(ranks, tmp_path):
    first, num = ranks.run(plain_one, 1, tmp_path, "dp_shard=1", False)[0]
    again, num_again = ranks.run(plain_one, 2, tmp_path, "dp_shard=2", True)[1]
    assert (num, num_again) == (1, 2)
    assert all((again[name] - value + 0.1).abs().max() < 1e-6 for name, value in first.items())


def test_parts_that_do_not_say_how_they_are_cut_are_refused_when_they_are_saved(ranks, tmp_path):
    for error in ranks.run(refused, 2, "listed", "tp=2", tmp_path, "save"):
        assert isinstance(error, sw.UsageError) and "extra/held" in error.given


def test_an_average_without_tensors_of_its_own_cannot_take_what_was_cut(ranks, tmp_path):
    assert ranks.run(refused, 2, "late", "dp_shard=2", tmp_path, "save") == [None, None]
    for error in ranks.run(refused, 2, "late", "dp_shard=2", tmp_path, "load"):
        assert isinstance(error, sw.CheckpointError) and "no tensor there" in error.given
