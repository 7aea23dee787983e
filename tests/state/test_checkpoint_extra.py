"""Optimizers and averages of sharded models in ``extra``: saved under one layout and resumed under another, or refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
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
        whole = [sw.full_tensor(p) for p in self.kept]
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
    "one to tp": (("dp_shard=1", 1), ("tp=2", 2), "listed"),
    "fsdp and tp to tp": (("dp_shard=2,tp=2", 4), ("tp=2", 2), "listed"),
}


@pytest.mark.quick("fsdp to hsdp", "one to tp", "fsdp and tp to tp")
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
    assert sums == pytest.approx(alone(4)[2], rel=1e-12)


# ---- averages of parameters that look alike on a rank ------------------------------------------------------------


class Alike(nn.Module):
    """Under ``tp=2`` three weights are [8, 8] on a rank: one whole, one of [16, 8], one of [8, 16]."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(8, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x @ self.place)))


class Squares(Named):
    """Means of squares, by name, in another dtype than the parameters."""

    def __init__(self, model):
        self.model = model
        self.kept = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]

    def update(self):
        for mine, theirs in zip(self.kept, self.model.parameters(), strict=True):
            mine.mul_(0.5).addcmul_(theirs.detach().float(), theirs.detach().float())


class Bare(Named):
    """By name, of tensors that do not know what they are parts of."""

    def __init__(self, model):
        super().__init__(model)
        self.kept = [bare(p) for p in self.kept]

    def update(self):
        with torch.no_grad():
            for mine, theirs in zip(self.kept, self.model.parameters(), strict=True):
                mine.lerp_(bare(theirs), 0.5)


class BareListed(Bare):
    state_dict, load_state_dict = Listed.state_dict, Listed.load_state_dict


class Turned(Named):
    def state_dict(self):
        """With a weight that is [8, 8] on a rank, the other way round."""
        return {"kept": {"up.weight": self.kept[1].t()}}


def bare(part):
    """What is built from this rank's own numbers."""
    local = part.detach().to_local().clone() if hasattr(part, "to_local") else part.detach().clone()
    if not isinstance(part, DTensor):
        return local
    return DTensor.from_local(local, part.device_mesh, part.placements, shape=part.shape, stride=part.stride())


KINDS = {kind.__name__: kind for kind in (Listed, Named, Squares, Bare, BareListed, Turned)}


def wholes(model, kept):
    """The whole tensors of an average."""
    like = [p.detach().to(mine.dtype).clone() for p, mine in zip(model.parameters(), kept.kept, strict=True)]
    for each, mine in zip(
        like, kept.kept, strict=True
    ):  # this rank's own numbers: a bare part may not stand beside a part
        _local(each).copy_(_local(mine))
    return [sw.full_tensor(each) for each in like]


def _local(part):
    return part.to_local() if hasattr(part, "to_local") else part


def averaged(layout, root, kind, until, *, loads):
    """An average, as loaded and after ``until`` steps, or how it was refused."""
    with sw.init(layout, device="cpu", seed=1) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sw.parallelize(alike(), world, sharding=EVERY, example={"x": X})
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.TrainStep(model, optim, loss=lambda y, b: y.square().sum(), count=lambda b: 4)
        kept = KINDS[kind](model)
        options = {"extra": {"kept": kept}, "async_save": False}
        with sw.CheckpointManager(root, step, **options) as checkpoints:
            try:
                if loads:
                    checkpoints.load()
                    with sw.CheckpointManager(root.with_name(f"as-loaded-{until}"), step, **options) as others:
                        others.save()
                first = wholes(model, kept)
                while step.num_steps < until:
                    step([{"x": X}])
                    kept.update()
                checkpoints.save()
            except sw.ShardwiseError as error:
                return error
        return first, wholes(model, kept)


def averaged_alone(kind, until):
    model = alike()
    kept, optim = KINDS[kind](model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(until):
        (model(X).square().sum() / 4).backward()
        optim.step()
        optim.zero_grad()
        kept.update()
    return kept.kept


def alike():
    torch.manual_seed(3)
    return Alike().double()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FSDP_TP = ("dp_shard=2,tp=2", 4)
LOOKS = [
    ("Named", FSDP_TP, FSDP_TP),
    ("Squares", FSDP_TP, ("tp=2", 2)),
    ("Bare", FSDP_TP, ("dp_shard=2", 2)),
    ("Bare", ("tp=2", 2), FSDP_TP),
    ("Listed", ("tp=2", 2), ("tp=2", 2)),
    ("Named", ("dp_replicate=2,tp=2", 4), ("dp_shard=1", 1)),
]


@pytest.mark.quick("Bare-first3-second3", "Listed-first4-second4", "Named-first5-second5")
@pytest.mark.parametrize(("kind", "first", "second"), LOOKS)
def test_averages_of_parameters_that_look_alike_on_a_rank_are_resumed(ranks, tmp_path, kind, first, second):
    limit = 1e-6 if kind == "Squares" else 1e-12
    begin = 0
    for (layout, num_ranks), until in ((first, 2), (second, 4), (first, 5)):
        told = ranks.run(averaged, num_ranks, layout, tmp_path / "run", kind, until, loads=begin > 0)
        for found, step in zip(told[-1], (begin, until), strict=True):
            for mine, expected in zip(found, averaged_alone(kind, step), strict=True):
                assert (mine - expected).abs().max() < limit
        begin = until


UNCLEAR = {
    "of one shape, in a list": ("Listed", FSDP_TP, "cut differently"),
    "without the parameter, in a list": ("BareListed", FSDP_TP, "cut differently"),
    "turned": ("Turned", FSDP_TP, "a part of up.weight that is not cut as"),
    "turned, under tp alone": ("Turned", ("tp=2", 2), "a part of up.weight that is not cut as"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_part_that_may_be_cut_in_two_ways_is_refused_by_its_place(ranks, tmp_path, case):
    kind, (layout, num_ranks), text = UNCLEAR[case]
    for error in ranks.run(averaged, num_ranks, layout, tmp_path, kind, 1, loads=False):
        assert isinstance(error, sw.CheckpointError) and text in error.why
        assert error.name.startswith("extra/kept/kept/") and "in a dict by their names" in error.fix  # as Named has it


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
            "bare list": lambda: BareListed(d),
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
    "bare list": ("tp=2", "cut over the ranks as the object's own tensor is"),
    "other class": ("dp_shard=2", "the state of Adam"),
    "late": ("dp_shard=2", ""),
}


@pytest.mark.parametrize("case", [case for case in REFUSED_AT_LOAD if case != "late"])
def test_what_cannot_be_cut_is_refused_when_it_is_loaded_not_at_the_next_step(ranks, tmp_path, case):
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
    for error in ranks.run(refused, 2, "bare list", "tp=2", tmp_path, "save"):
        assert isinstance(error, sw.UsageError) and "extra/held" in error.given


def test_an_average_without_tensors_of_its_own_cannot_take_what_was_cut(ranks, tmp_path):
    assert ranks.run(refused, 2, "late", "dp_shard=2", tmp_path, "save") == [None, None]
    for error in ranks.run(refused, 2, "late", "dp_shard=2", tmp_path, "load"):
        assert isinstance(error, sw.CheckpointError) and "no tensor there" in error.given


def with_dropout(root, until, *, loads=False):
    """Weights of two models with dropout, the second of which is in ``extra``, each trained by a loop of its own."""
    with sw.init("dp_shard=2", device="cpu", seed=1) as world:
        models = [
            sw.parallelize(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double(), world)
            for _ in range(2)
        ]
        optims = [sw.local_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
        run = Run(models[0], optims[0])
        with sw.CheckpointManager(root, run, extra={"second": models[1], "of_it": optims[1]}) as checkpoints:
            if loads:
                checkpoints.load()
            while run.num_steps < until:
                for model, optim in zip(models, optims, strict=True):
                    with sw.window(model, batches(run.num_steps, world), count=lambda b: len(b["x"])) as window:
                        for batch in window:
                            (model(batch["x"]).square().sum() / window.num_tokens).backward()
                    optim.step()
                    optim.zero_grad()
                run.num_steps += 1
            checkpoints.save()
        return [sw.full_state_dict(model) for model in models]


def test_a_second_model_draws_on_where_it_was(ranks, tmp_path):
    """Its windows were counted from 0 again after a resume: other dropout than without one, 4e-3 in weights."""
    whole = ranks.run(with_dropout, 2, str(tmp_path / "whole"), 4)[0]
    ranks.run(with_dropout, 2, str(tmp_path / "parts"), 2)
    resumed = ranks.run(with_dropout, 2, str(tmp_path / "parts"), 4, loads=True)[0]
    for one, other in zip(whole, resumed, strict=True):
        assert one and all(torch.equal(value, other[name]) for name, value in one.items())
