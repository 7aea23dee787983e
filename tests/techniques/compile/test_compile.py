"""Compiled blocks: the same gradients under every layout, one graph for blocks that are alike, the names of the user."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from layouts import LAYOUTS
from techniques.remat.recompute import assert_same, build, one_process, train
from torch import nn
from verify.matrix import Cell

from shardwise import Compile, Remat, Sharding
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.parallel import describe, parallelize
from shardwise.techniques.compile import act as act
from shardwise.world import init

EAGER = Compile(backend="aot_eager")


def on(ranks, layout: str, **options):
    text, count, engine = LAYOUTS[layout]
    return ranks.run(train, count, text, engine, timeout_s=110, **options)


# Each takes seconds to compile: every way of remat and every kind of technique once, the others in soak.
_ONCE = {("fsdp-2", remat) for remat in (None, "full", "selective")} | {("ddp-2", None), ("one-fsdp2", "full")}
_OTHERS = {("ddp-2", "full"), ("ddp-2", "selective"), ("ddp-4", "full"), ("fsdp-4", None)}


@pytest.mark.quick("fsdp-2-selective")
@pytest.mark.parametrize(
    ("layout", "remat"),
    [*sorted(_ONCE, key=str), *(pytest.param(*pair, marks=pytest.mark.soak) for pair in sorted(_OTHERS, key=str))],
)
def test_gradients_with_dropout_are_one_processs(ranks, layout, remat):
    want = one_process()
    for answer in on(ranks, layout, compile=Compile(backend="aot_eager", fullgraph=True), remat=remat):
        assert_same(answer["grads"], want)
        # One graph for the three blocks, one for the two experts, though the gathered ones are in units of their own.
        assert answer["graphs"] == 2 and answer["breaks"] == 0
        assert answer["edits"][-1] == ("compile", "experts.1")


def test_words_of_torch_compile_reach_it(monkeypatch):
    given = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options) or function)
    chosen = Compile(mode="reduce-overhead", dynamic=True, fullgraph=True)
    act._compile(len, {key: getattr(chosen, key) for key in chosen.__struct_fields__}, 1)
    assert {key: given[key] for key in ("backend", "mode", "dynamic", "fullgraph")} == {
        "backend": "inductor", "mode": "reduce-overhead", "dynamic": True, "fullgraph": True,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_replay_cuda_graphs_are_refused_on_cuda_alone(mode):
    with pytest.raises(UnsupportedError, match=f"Compile\\(mode='{mode}'\\) on cuda"):
        act.refuse_graphs(mode, torch.device("cuda", 0))
    act.refuse_graphs(mode, torch.device("cpu"))
    act.refuse_graphs("max-autotune-no-cudagraphs", torch.device("cuda", 0))


def test_nothing_is_compiled_unasked(ranks):
    assert on(ranks, "fsdp-2")[0]["graphs"] == 0


def names_of_a_wrapper():
    return next(iter(torch.compile(build().head).state_dict()))


@pytest.mark.quick("fsdp-2")
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_t33_names_are_the_users(ranks, layout):
    """torch.compile(block) puts ``_orig_mod`` into every name of the state dict."""
    assert ranks.run(names_of_a_wrapper, 1) == ["_orig_mod.weight"]
    model = build()
    for answer in on(ranks, layout, compile=Compile(backend="eager"), remat="full"):
        assert answer["names"] == [list(model.state_dict()), [name for name, _ in model.named_modules()]]


class Kinds(nn.Module):
    """Ten kinds of blocks, and ten blocks of one kind: more than torch makes graphs for one function (8)."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4)) for n in range(2, 12))
        self.alike = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10))

    def forward(self, x):
        for block in (*self.kinds, *self.alike):
            x = block(x)
        return x


def one_kind_each():
    from torch._dynamo.utils import counters

    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(Kinds(), world, compile=Compile(backend="eager"), remat="full")
        counters.clear()
        model(torch.ones(2, 4)).sum().backward()
        return counters["stats"]["unique_graphs"], dict(counters["frames"])


def test_t32_many_blocks_do_not_use_up_the_graphs_of_one_function(ranks):
    """With one cache for all, the ninth kind of block would run as written, and with a graph for each block so would the
    ninth block."""
    graphs, frames = ranks.run(one_kind_each, 1)[0]
    assert graphs == 11 and frames["ok"] == frames["total"]


def lora():
    """Frozen blocks with small trained matrices: their inputs need no gradient, the outputs do."""
    made = build().requires_grad_(False)
    for block in made.blocks:
        block.up.weight.requires_grad_(True)
    return made


@pytest.mark.quick("None-*", "compile1-fsdp-2")
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
@pytest.mark.parametrize("compile", [None, EAGER])
def test_t32_small_trained_parts_of_frozen_blocks_keep_their_gradients(ranks, layout, compile):
    """With the reentrant kind of checkpointing they end without: no input of the first block requires a gradient."""
    want = one_process(lora)
    assert sum(grad is not None for grad in want.values()) == 3
    for answer in on(ranks, layout, make=lora, remat="full", compile=compile):
        assert_same(answer["grads"], want)
        assert answer["graphs"] == (0 if compile is None else 2), "the first block has a graph of its own"


def budgets(layout: str):
    return [
        train(layout, compile=Compile(backend="aot_eager", activation_memory_budget=budget))
        for budget in (None, 1.0, 0.3, 0.0)
    ]


@pytest.mark.parametrize("layout", ["dp_shard=2", pytest.param("dp_replicate=2", marks=pytest.mark.soak)])
def test_a_memory_budget_keeps_less_and_the_same_dropout(ranks, layout):
    """torch ran bernoulli again with new numbers: gradients of other masks than forward's."""
    want = one_process()
    for answers in ranks.run(budgets, 2, layout, timeout_s=110):
        kept = [answer["kept"][0] for answer in answers]
        assert kept[0] == kept[1] > kept[2] and kept[3] < kept[0]
        for answer in answers:
            assert_same(answer["grads"], want)


@pytest.mark.quick("conv-ddp-2")
@pytest.mark.parametrize(("case", "layout"), [("conv", "ddp-2"), ("odd", "fsdp-4")])
def test_the_zoo_trains_as_in_one_process(ranks, case, layout):
    Cell(case, layout, 1, True, 0).run(ranks.run, compile=EAGER)


# ---- what is said, and what is refused ------------------------------------------------------------------------------------


def told():
    with init("dp_shard=1", device="cpu") as world:
        return describe(
            parallelize(build(), world, compile=Compile(targets=("blocks",), backend="eager", dynamic=False))
        )


def test_the_recipe_says_which_and_why(ranks):
    line = next(line for line in ranks.run(told, 1)[0].splitlines() if line.startswith("compile"))
    assert line == (
        "compile: 3 modules (blocks.0, blocks.1, blocks.2): compiled by eager: named by 'blocks' [backend=eager]"
    )


def refused(options, given):
    with init("dp_shard=1", device="cpu") as world:
        model = build()
        if given == "compiled":
            model.blocks[0].compile(backend="eager")
        none = patch.object(act, "_compiler", lambda: None)  # put back: the rank is warm, and other tests use it
        try:
            units = Sharding(engine="fsdp2", units=("blocks.*.up",)) if given == "units inside" else None
            with none if given == "no compiler" else nullcontext():
                parallelize(model, world, sharding=units, **options)
        except ShardwiseError as error:
            return type(error).__name__, str(error), "forward" in vars(model.blocks[0])
    return None


@pytest.mark.parametrize(
    ("options", "given", "kind", "words"),
    [
        ({"compile": Compile(targets=("Blok",))}, "", "PlanError", "did you mean 'Block' or"),
        ({"compile": Compile(backend="inducter")}, "", "PlanError", "did you mean 'inductor'?"),
        ({"compile": "blocks"}, "no compiler", "UnsupportedError", "without a C++ compiler"),
        ({"compile": EAGER}, "compiled", "UsageError", "compiled already"),
        ({"compile": EAGER}, "units inside", "PlanError", "which holds the unit 'blocks.0.up'"),
        (
            {"compile": Compile(activation_memory_budget=0.5), "remat": "full"},
            "",
            "PlanError",
            "both decide what a block runs again",
        ),
        (
            {"compile": Compile(targets=("blocks.*.up",)), "remat": Remat(mode="selective")},
            "",
            "PlanError",
            "not seen from outside it",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(ranks, options, given, kind, words):
    found, text, changed = ranks.run(refused, 1, options, given)[0]
    assert found == kind and words in text and not changed


# ---- inductor: tens of seconds to compile -----------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_inductor_draws_the_same_numbers_in_every_layout(ranks, layout):
    """Its random numbers are its own, so that dropout is not the one process's of eager; but the same on every layout, and
    backward's are forward's: with remat, and with a budget, the gradients stay."""
    plain = Compile(backend="inductor")
    text, count, _ = LAYOUTS[layout]
    alone = ranks.run(train, 1, "dp_shard=1", "fsdp2", compile=plain, timeout_s=900)[0]
    assert alone["graphs"] == 2
    for options in (
        {"compile": plain},
        {"compile": plain, "remat": "full"},
        {"compile": Compile(backend="inductor", activation_memory_budget=0.3)},
        {"compile": Compile(backend="inductor", activation_memory_budget=0.0)},
    ):
        for answer in ranks.run(train, count, text, timeout_s=900, **options):
            assert_same(answer["grads"], alone["grads"], gate=1e-10)
