"""The proof of sequence parallelism: which sites and islands it finds, and that no plan with a fault passes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from techniques.tp.streams import BY_ROWS, EXACT, WHOLE, Block, Words, batch, build
from torch import nn

from shardwise.model.row_facts import Differs
from shardwise.model.row_runs import run_on_rows
from shardwise.model.rows import rows_of
from shardwise.model.stream_rows import StreamRows
from shardwise.techniques.sequences import sequences_in
from shardwise.techniques.tp.probe import facts_of
from shardwise.techniques.tp.search.cut_search import search
from shardwise.techniques.tp.search.stream_search import StreamSearch


def searched(module, degree=2):
    """The search for a model, and what it found."""
    inputs = {"input_ids": batch(1, 24)["input_ids"]}
    with torch.enable_grad():
        found = search(module, lambda copy: copy(**inputs), degree)
    facts = facts_of(found, [name for name, _ in module.named_parameters()])
    search_ = StreamSearch(
        module,
        next(sequences_in(((), inputs))),
        degree,
        "contiguous",
        found=found,
        cut=frozenset(facts["cuts"]),
        partial=frozenset(facts["partial"]),
    )
    return search_, search_.run()


ATTENTION = [f"blocks.{i}.attention" for i in (0, 1)]
MLP = [f"blocks.{i}.mlp" for i in (0, 1)]
UP = [f"blocks.{i}.mlp.up" for i in (0, 1)]
MIXES = [f"blocks.{i}.mixes" for i in (0, 1)]
FOUND = {
    "": ({*ATTENTION, *MLP}, []),
    "inline": ({*ATTENTION, "blocks.0.up", "blocks.1.up"}, []),
    "gate inside": ({*ATTENTION, *UP}, []),
    "used both ways": ({*ATTENTION, *UP}, []),
    "norm of the root": ({*ATTENTION, *MLP}, ["blocks.1.norm2"]),
    "shift": ({*ATTENTION, *MLP}, MIXES),
    "batch norm": ({*ATTENTION, *MLP}, MIXES),
    "counts": ({*ATTENTION, *MLP}, MIXES),
}


@pytest.mark.quick("-2", "inline-4", "counts-2")
@pytest.mark.parametrize(
    ("how", "degree"),
    [
        pytest.param(
            how, degree, marks=[] if degree == (4 if how in ("shift", "inline") else 2) else [pytest.mark.soak]
        )
        for how in FOUND
        for degree in (2, 4)
    ],
)
def test_sites_and_islands(how, degree):
    """A gate on all positions would have a whole gradient beside those of parts: so it works on rows. A parameter that is used on rows and
    elsewhere is used on all of them; so is a buffer written."""
    _, facts = searched(build(how, torch.float32), degree)
    sites, islands = FOUND[how]
    assert (set(facts.sites), list(facts.islands)) == (sites, islands)
    assert list(facts.join) == ["blocks.1"] and len(facts.scatters) == 4


def test_what_stays_on_rows_is_summed():
    _, facts = searched(build("", torch.float32))
    norms = {f"blocks.{i}.{norm}.{kind}" for i in (0, 1) for norm in ("norm", "norm2") for kind in ("weight", "bias")}
    biases = {f"blocks.{i}.{layer}.bias" for i in (0, 1) for layer in ("attention.out", "mlp.down")}
    assert set(facts.on_rows) == norms | biases | {"blocks.0.scale", "blocks.1.scale"}


def test_tables_that_blocks_share_stay_whole():
    _, facts = searched(build("mask", torch.float32))
    assert all(path == "[0][0]" for calls in facts.cut.values() for call in calls for dims in call for path in dims)


class Late(Block):
    """A block that shifts its tokens from the fifth on."""

    def __init__(self, number):
        super().__init__("shift" if number >= 4 else "")


@pytest.mark.parametrize("is_alike", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_many_blocks(is_alike):
    model = Words()
    model.blocks = nn.ModuleList(Block("") if is_alike else Late(number) for number in range(10))
    _, facts = searched(model)
    assert len(facts.sites) == 20 and len(facts.scatters) == 20 and list(facts.join) == ["blocks.9"]
    assert len(facts.islands) == (0 if is_alike else 6)
    assert {name for name in facts.on_rows if name.startswith("blocks.9.norm2")} == {
        "blocks.9.norm2.weight",
        "blocks.9.norm2.bias",
    }


@pytest.mark.quick(
    "loss of a sum",
    "hook",
    "vmap",
    "operator of a threshold",
    "kernel of rows",
    "script",
    "views",
)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[pytest.mark.soak] if how in ("hook before a node", "kept on the CPU") else [])
        for how in (*WHOLE, *BY_ROWS)
    ],
)
def test_backwards_of_ones_own(how):
    """One that depends on all positions, or hides a loss that does, is seen as a mixture of positions is; so is what cannot be seen."""
    _, facts = searched(build(how, torch.float32))
    assert list(facts.islands) == (MIXES if how in WHOLE else [])
    gains = {f"blocks.{i}.mixes.gain" for i in (0, 1)}
    assert gains & facts.on_rows.keys() == (gains if how in BY_ROWS else set())


def test_backward_hooks_of_modules():
    """Behind the blocks, and in a block that runs on all positions, each rank has whole gradients."""
    model = build("", torch.float32)
    model.norm.register_full_backward_hook(lambda *_: None)
    assert len(searched(model)[1].sites) == 4
    model.blocks[1].norm.register_full_backward_pre_hook(lambda *_: None)
    assert list(searched(model)[1].islands) == ["blocks.1"]


class Kept(Words):
    """Keeps what a block has made."""

    def forward(self, input_ids):
        y = super().forward(input_ids)
        self.kept = self.blocks[0].norm(self.tokens(input_ids))
        return y


class Penalised(Words):
    """Returns a norm of a weight that blocks use on rows."""

    def forward(self, input_ids):
        return super().forward(input_ids), self.blocks[0].norm.weight.square().sum()


@pytest.mark.parametrize("model", [Penalised, Kept])
def test_a_parameter_with_a_whole_gradient_elsewhere_is_not_used_on_rows(model):
    _, facts = searched(model())
    assert list(facts.islands) == ["blocks.0.norm"] and "blocks.0.norm.weight" not in facts.on_rows


class Conditioned(Words):
    """Blocks read a number of each sample, which has a gradient, from an attribute, where no part of it can be summed."""

    def forward(self, input_ids):
        for block in self.blocks:
            block.mixes.number = self.tokens(input_ids)[:, :1].tanh()
        return super().forward(input_ids)


class Multiplied(nn.Module):
    def forward(self, x):
        return x * self.number


class Dropped(nn.Module):
    """Drops rows and channels of samples by the same code."""

    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


class DropsBoth(Block):
    def __init__(self):
        super().__init__("inline")
        self.drop = Dropped()

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.drop(torch.ones(len(x), 1, x.shape[-1])) * self.down(F.gelu(self.up(self.norm2(x))))


def test_what_every_rank_has_does_not_meet_rows():
    model = Conditioned()
    for block in model.blocks:
        block.mixes = Multiplied()
    _, facts = searched(model)
    assert set(MIXES) <= set(facts.islands)


def test_code_that_drops_rows_and_what_has_no_positions_has_all_of_them():
    model = Words()
    model.blocks = nn.ModuleList(DropsBoth() for _ in range(2))
    _, facts = searched(model)
    assert [f"blocks.{i}.drop" for i in (0, 1)] == list(facts.islands)


def broken(plan, facts):
    """Plans with one fault each, and a name for it."""
    yield "not cut", dataclasses.replace(plan, cut=plan.cut[1:])
    for name in plan.join:
        yield f"{name} not joined", dataclasses.replace(plan, join=tuple(n for n in plan.join if n != name))
    for name in plan.islands:
        yield f"island {name}", dataclasses.replace(plan, islands=tuple(n for n in plan.islands if n != name))
    for name in [name for name in plan.sites if facts.sites[name]]:
        yield f"site {name}", dataclasses.replace(plan, sites={n: p for n, p in plan.sites.items() if n != name})
        yield f"site {name} but its stream", dataclasses.replace(plan, sites={**plan.sites, name: ("[0][0]",)})
    for name in plan.scatters:
        plain = {n: w for n, w in plan.plain.items() if w != name}
        rest = tuple(n for n in plan.scatters if n != name)
        yield f"sum of {name}", dataclasses.replace(plan, scatters=rest, plain=plain)


NUM_FAULTS = {"shift": 14, "inline": 14, "norm of the root": 15}


@pytest.mark.quick("shift")
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in NUM_FAULTS else [pytest.mark.soak]) for how in EXACT]
)
def test_no_broken_plan_passes(how):
    found, facts = searched(build(how, torch.float32))
    parts = rows_of(found.length, 2, "contiguous")

    def done(plan):
        return [run_on_rows(found.trial, found.whole, plan, found.length, rows, kind=StreamRows) for rows in parts]

    assert done(found.plan) == [facts, facts]
    faults = list(broken(found.plan, facts))
    for what, plan in faults:
        with pytest.raises(Differs):
            if done(plan) != [facts, facts]:
                raise Differs("", f"{what}: other facts")
    assert len(faults) >= NUM_FAULTS.get(how, 10)
