"""parallelize and apply_recipe: what they do to a module, what they say about it, what they refuse."""

import copy

import msgspec
import pytest
import torch
from models.constructors import Kept
from models.shared_layer import Net, build
from techniques.data.test_traps_sharding import BLOCKS, DDP, FSDP, gradients, one_process
from torch import nn

from shardwise import Precision, Remat, Sharding
from shardwise.errors import ConfigError, PlanError, RankError, UnsupportedError
from shardwise.layout import Layout
from shardwise.model import read_anatomy
from shardwise.parallel import apply_recipe, describe, parallelize, recipe_of, runtime_of, world_of
from shardwise.recipe import Cut
from shardwise.step.own_loop import accumulate
from shardwise.techniques.fold import make_recipe
from shardwise.world import init


def same_module_back(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        module = build()
        names = list(module.state_dict())
        model = parallelize(module, world, sharding=None if layout == DDP else BLOCKS)
        return (
            model is module,
            isinstance(model, Net),
            list(model.state_dict()) == names,
            world_of(model) is world,
            recipe_of(model).engine,
            describe(model),
        )


@pytest.mark.parametrize(("layout", "engine"), [(DDP, "ddp"), (FSDP, "fsdp2")])
def test_the_same_module_comes_back_and_can_be_described(ranks, layout, engine):
    for same, kind, keys, world, found, text in ranks.run(same_module_back, 2, layout):
        assert same and kind and keys and world and found == engine
        assert text.startswith(f"Net on layout {layout} (2 ranks), engine {engine}\n")
        assert "tied: embed.weight = head.weight" in text
        assert "init: rank0: values of the module given on rank 0" in text


def seeded_text():
    with init("dp_shard=1", device="cpu") as world:
        return describe(parallelize(Net, world))


def test_the_description_says_where_values_come_from(ranks):
    assert "init: seeded: values are functions of (seed, name), made by each rank" in ranks.run(seeded_text, 1)[0]


# ---- ranks that ask for different things -------------------------------------------------------------------------------


OTHERWISE = {
    "output": {"precision": Precision(output="fp64")},
    "compute": {"precision": "bf16"},
    "notes": {"sharding": Sharding(buffers="mean")},  # of a model without statistics it is a note
    "offload": {"sharding": Sharding(offload=True)},
    "sync_every_microbatch": {"sharding": Sharding(sync_every_microbatch=True)},
    "parameter blocks.0.inner.weight: unit": {"sharding": Sharding(min_unit_bytes=0)},
    "parameter sometimes: dtype": {"precision": Precision(storage="fp32")},
    "remat of blocks.0": {"remat": "full"},
}
"""What differs -> options of rank 1 alone."""


def asked_by_one_rank(options: dict):
    with init(FSDP, device="cpu", timeout_s=20) as world:
        try:
            parallelize(build(), world, **(options if world.rank else {}))
        except RankError as error:
            return str(error), error.ranks


@pytest.mark.parametrize("what", OTHERWISE)
def test_an_option_that_one_rank_alone_gives(ranks, what):
    """It is refused on every rank, whatever the option: training would hang, or compute different things."""
    for text, who in ranks.run(asked_by_one_rank, 2, OTHERWISE[what]):
        assert who == (1,) and f"the ranks' modules differ between ranks: {what}\n" in text


# ---- a recipe belongs to a module and a layout ---------------------------------------------------------------------------


def change_nothing(module):
    return module


def widen(module):
    module.blocks[1].out = nn.Linear(4, 5)
    return module


def cast(module):
    module.blocks[1].out.bias.data = module.blocks[1].out.bias.data.float()
    return module


def freeze(module):
    module.sometimes.requires_grad_(False)
    return module


def untie(module):
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    return module


def add_a_buffer(module):
    module.register_buffer("table", torch.ones(2))
    return module


def applied(layout: str, change: str):
    with init("dp_shard=1", device="cpu") as world:
        made = make_recipe(
            read_anatomy(build()),
            Layout(dp_shard=2) if layout == FSDP else Layout(),
            precision=Precision(),
            sharding=Sharding(),
        )
        try:
            apply_recipe(globals()[change](build()), made, world)
        except PlanError as error:
            return error.name, error.given
        return None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("widen", "blocks.1.out.weight"),
        ("cast", "blocks.1.out.bias"),
        ("freeze", "sometimes"),
        ("untie", "embed.weight"),
        ("add_a_buffer", "table"),
    ],
)
def test_a_recipe_of_another_module_is_refused_by_the_first_name_that_differs(ranks, change, name):
    found = ranks.run(applied, 1, "dp_shard=1", change)[0]
    assert found is not None and found[0] == name
    assert found[1].startswith("a recipe for Net (")


def test_a_recipe_of_another_layout_is_refused(ranks):
    name, given = ranks.run(applied, 1, FSDP, "change_nothing")[0]
    assert name is None and given.endswith("on dp_shard=2")
    assert ranks.run(applied, 1, "dp_shard=1", "change_nothing")[0] is None


def applied_with_an_edit_that_cannot_be():
    """Whether blocks were changed by a recipe that ends in an error; and the error."""
    with init("dp_shard=1", device="cpu") as world:
        module = build()
        made = make_recipe(read_anatomy(module), world.layout, remat="full", compile="blocks")
        edits = tuple(
            msgspec.structs.replace(edit, args={**edit.args, "backend": "nosuch"})
            if edit.technique == "compile"
            else edit
            for edit in made.edits
        )
        try:
            apply_recipe(module, msgspec.structs.replace(made, edits=edits), world)
        except PlanError as error:
            return [name for name, child in module.named_modules() if "forward" in vars(child)], error.given
        return None


def test_a_recipe_is_checked_before_any_of_it_is_carried_out(ranks):
    """One technique had changed the module when the next refused its part."""
    assert ranks.run(applied_with_an_edit_that_cannot_be, 1)[0] == ([], "Compile(backend='nosuch')")


def recipe_from_text():
    """A recipe that went through JSON is carried out like the one it came from."""
    with init(FSDP, device="cpu", timeout_s=20) as world:
        module = build()
        made = make_recipe(read_anatomy(module), world.layout, precision=Precision(), sharding=BLOCKS)
        runtime = apply_recipe(module, type(made).from_json(made.to_json()), world)
        shapes = {name: tuple(tensor.shape) for name, tensor in runtime.local_tensors().items()}
        other = msgspec.structs.replace(
            made,
            params={
                n: msgspec.structs.replace(p, cuts=(Cut(axis="fsdp", dim=len(p.shape) - 1),))
                for n, p in made.params.items()
            },
        )
        try:
            apply_recipe(build(), other, world)
        except UnsupportedError as error:
            return shapes, runtime.trainable, error.name
        return shapes, runtime.trainable, None


def test_a_recipe_from_text(ranks):
    (shapes, trainable, refused), (_, again, _) = ranks.run(recipe_from_text, 2)
    assert shapes["blocks.0.inner.weight"] == (2, 4) and trainable == again
    assert refused == "embed.weight"  # a cut of another dim than fully_shard makes is not taken for one it does


# ---- dtypes --------------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen bf16 beside trained fp32, in every block and at the root."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([AdaptedBlock() for _ in range(3)])
        self.base = nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.base(x.to(self.base.weight.dtype)).to(x.dtype))


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)
        self.low, self.high = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.high(self.low(x))


def adapted():
    torch.manual_seed(5)
    return Adapted()


def frozen_beside(layout: str, precision):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(adapted(), world, precision=precision, sharding=BLOCKS if "shard" in layout else None)
        seen = []
        model.blocks[1].base.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        x = torch.linspace(-1, 1, 18).view(3, 6) * (1 + world.rank)
        with accumulate(model, is_last=True):
            out = model(x)
            out.float().sum().backward()
        grads = {
            n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for n, p in runtime_of(model).parameters.items()
        }
        return seen[0], grads, out.detach().float(), {n: p.storage for n, p in recipe_of(model).params.items()}


@pytest.mark.parametrize("layout", [FSDP, DDP])
def test_frozen_bf16_beside_trained_fp32_is_left_as_it_is(ranks, layout):
    plain = adapted()
    want = [plain(torch.linspace(-1, 1, 18).view(3, 6) * (1 + rank)) for rank in range(2)]
    (want[0].sum() + want[1].sum()).backward()
    for rank, (seen, grads, out, storage) in enumerate(ranks.run(frozen_beside, 2, layout, None)):
        assert seen == torch.bfloat16 and storage["blocks.0.base.weight"] == "bfloat16"
        torch.testing.assert_close(out, want[rank].detach(), rtol=1e-6, atol=1e-6)
        for name, param in plain.named_parameters():
            assert (grads[name] is None) == (param.grad is None), name
            if param.grad is not None:
                torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [FSDP, DDP])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_frozen_parameters_are_computed_in_the_dtype_asked_for_and_stored_as_they_are(ranks, layout, precision, dtype):
    for seen, grads, _, storage in ranks.run(frozen_beside, 2, layout, precision):
        assert seen == dtype
        assert storage["blocks.0.base.weight"] == "bfloat16" and storage["blocks.0.low.weight"] == "float32"
        assert grads["blocks.0.low.weight"].dtype == torch.float32 and grads["blocks.0.base.weight"] is None


# ---- the same tensor or module twice ---------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One module under two names, both named as units."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x):
        return self.again(torch.tanh(self.other(self.first(x))))


def shared_module():
    torch.manual_seed(1)
    plain = Shared().double()
    x = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
    with init(FSDP, device="cpu", timeout_s=20) as world:
        model = parallelize(copy.deepcopy(plain), world, sharding=Sharding(units=("Linear",)))
        with accumulate(model, is_last=True):
            model(x * (1 + world.rank)).sum().backward()
        for rank in range(2):
            plain(x * (1 + rank)).sum().backward()
        units = [unit.modules for unit in recipe_of(model).units]
        error = max(
            (p.grad - model.get_parameter(n).grad.full_tensor()).abs().max().item() for n, p in plain.named_parameters()
        )
        return units, error


def test_a_module_under_two_names_is_one_unit(ranks):
    units, error = ranks.run(shared_module, 2)[0]
    assert units == [("first", "again"), ("other",), ("",)]
    assert error < 1e-14


def lists_that_hold_parameters(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        model = parallelize(Kept, world)
        return model.watched[0] is model.linear.weight, len(model.watched)


@pytest.mark.parametrize("layout", [DDP, FSDP])
def test_a_list_that_holds_a_parameter_holds_the_sharded_one(ranks, layout):
    assert ranks.run(lists_that_hold_parameters, 2, layout) == [(True, 1)] * 2


def channels_last(layout: str):
    with init(layout, device="cpu", timeout_s=20) as world:
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3)).double().to(memory_format=torch.channels_last)
        model = parallelize(copy.deepcopy(plain), world)
        x = torch.linspace(0, 1, 3 * 64, dtype=torch.float64).view(1, 3, 8, 8)
        return (model(x) - plain(x)).abs().max().item(), plain[0].weight.is_contiguous()


@pytest.mark.parametrize("layout", [DDP, FSDP])
def test_weights_in_channels_last_order(ranks, layout):
    for error, contiguous in ranks.run(channels_last, 2, layout):
        assert error < 1e-14 and not contiguous


def test_the_oracle_of_this_file_is_not_trivial(ranks):
    want = one_process()
    assert sum(grad is not None and bool(grad.abs().sum() > 0) for grad in want.values()) > 8
    for grads in ranks.run(all_gradients, 2):
        assert grads.keys() == want.keys()


def all_gradients():
    with init(FSDP, device="cpu", timeout_s=20) as world:
        return gradients(world, parallelize(build(), world, sharding=BLOCKS))


# ---- options that are no records, and classes in them --------------------------------------------------------------------


def with_option(options: dict):
    with init("dp_shard=1", device="cpu") as world:
        try:
            parallelize(Net, world, **options)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("key", "value"), [("sharding", "Block"), ("sharding", {"units": "Block"}), ("ddp", 25.0)])
def test_an_option_that_is_no_record_is_named(ranks, key, value):
    said = ranks.run(with_option, 1, {key: value})[0]
    assert said.startswith(f"{key}={value!r}\n") and f"fix: write {key}=sw." in said


def named_by_class():
    with init("dp_shard=1", device="cpu") as world:
        kind = type(build().blocks[0])
        sharding = Sharding(engine="fsdp2", units=kind, reshard_after_forward={kind: False})  # type: ignore[arg-type]
        model = parallelize(build, world, sharding=sharding, remat=Remat(targets=(kind,)))  # type: ignore[arg-type]
        recipe = recipe_of(model)
        blocks = [name for name, child in model.named_modules() if isinstance(child, kind)]
        return [unit.modules for unit in recipe.units], [edit.module for edit in recipe.edits], blocks, recipe.units[0]


def test_classes_name_what_they_named_under_fsdp(ranks):
    units, edits, blocks, first = ranks.run(named_by_class, 1)[0]
    assert units == [("blocks.0", "blocks.2"), ("blocks.1",), ("",)]  # the first two share a layer
    assert edits == blocks == ["blocks.0", "blocks.1", "blocks.2"] and first.reshard is False
