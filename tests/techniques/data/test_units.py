"""Which modules are gathered together."""

import msgspec
import pytest
from recipe.anatomies import fact, tower

from shardwise import Precision, Sharding
from shardwise.errors import PlanError
from shardwise.layout import Layout
from shardwise.recipe import BlockList
from shardwise.techniques.fold import make_recipe

FSDP = Layout(dp_shard=2)


def recipe_for(anatomy, precision=None, **sharding):
    return make_recipe(anatomy, FSDP, precision=precision or Precision(), sharding=Sharding(**sharding))


def units_of(recipe) -> list[tuple[str, ...]]:
    """Modules of every unit but the root."""
    assert recipe.units[-1].name == "" and recipe.units[-1].modules == ("",)
    return [unit.modules for unit in recipe.units[:-1]]


def why(recipe, name: str) -> str:
    return next(note.why for note in recipe.notes if note.name == name)


def test_a_model_smaller_than_min_unit_bytes_is_one_unit():
    recipe = recipe_for(tower(4), min_unit_bytes=2 << 20)
    assert units_of(recipe) == []
    assert {param.unit for param in recipe.params.values()} == {""}
    assert why(recipe, "") == "one unit: the model's 1.01 MiB are below min_unit_bytes = 2.00 MiB"


def test_zero_makes_every_block_a_unit():
    recipe = recipe_for(tower(4), min_unit_bytes=0)
    assert units_of(recipe) == [("blocks.0",), ("blocks.1",), ("blocks.2",), ("blocks.3",)]
    assert recipe.params["blocks.2.weight"].unit == "blocks.2" and recipe.params["head.weight"].unit == ""
    assert recipe.units[0].reshard is True and recipe.units[-1].reshard is False


@pytest.mark.parametrize(
    ("kib", "groups"),
    [
        (256, [1, 1, 1, 1, 1]),  # a block is 256 KiB
        (257, [2, 3]),  # the last, too small, joins its neighbour
        (512, [2, 3]),
        (513, [5]),
        (1280, [5]),
    ],
)
def test_neighbours_are_merged_until_a_unit_is_large_enough(kib, groups):
    recipe = recipe_for(tower(5), min_unit_bytes=kib << 10)
    assert [len(modules) for modules in units_of(recipe)] == groups
    assert sum(units_of(recipe), ()) == tuple(f"blocks.{i}" for i in range(5))
    if groups == [2, 3]:
        assert recipe.units[0].name == "blocks.0..blocks.1"
        assert recipe.units[0].why.startswith("2 neighbours merged to reach min_unit_bytes = ")


def test_sizes_are_those_of_the_compute_dtype():
    bf16 = Precision(storage="float32", compute="bfloat16", reduce="float32")
    assert len(units_of(recipe_for(tower(4), min_unit_bytes=256 << 10))) == 4
    assert len(units_of(recipe_for(tower(4), min_unit_bytes=256 << 10, precision=bf16))) == 2


@pytest.mark.parametrize(
    ("blocks", "kib_rows", "groups"),
    [
        (15, 4, []),  # 60 MiB and a little: one unit
        (16, 4, [2] * 8),  # blocks of 4 MiB
        (8, 8, [1] * 8),
        (8, 9, [1] * 8),
        (6, 12, [1] * 6),
    ],
)
def test_by_default_a_model_below_64_mib_is_one_unit_and_a_unit_of_a_larger_one_holds_8_mib(blocks, kib_rows, groups):
    recipe = recipe_for(tower(blocks, rows=kib_rows << 10))
    assert [len(modules) for modules in units_of(recipe)] == groups
    if not groups:
        assert why(recipe, "").startswith("one unit: the model's 60.") and why(recipe, "").endswith(
            "are below 64.00 MiB"
        )
    if groups == [2] * 8:
        assert "2 neighbours merged to reach 8.00 MiB: " in recipe.units[0].why


@pytest.mark.parametrize(("rows", "warns"), [(300 << 10, True), (1 << 10, False)])
def test_a_unit_that_is_most_of_a_large_model_is_warned_of(rows, warns):
    """Without a list of blocks a model of 1.2 GiB is whole on every rank at once, and nobody said so."""
    anatomy = msgspec.structs.replace(tower(4, rows=rows), lists=())
    text = [note.why for note in recipe_for(anatomy).notes if note.why.startswith("warning")]
    assert [("are in this unit, and whole on every rank at once" in why) for why in text] == [True] * warns
    blocks = recipe_for(tower(4, rows=rows))
    assert not any(note.why.startswith("warning") for note in blocks.notes)


def test_blocks_are_not_merged_across_lists():
    anatomy = tower(4)
    lists = tuple(BlockList(name=f"half{i}", blocks=(f"blocks.{2 * i}", f"blocks.{2 * i + 1}")) for i in range(2))
    recipe = recipe_for(msgspec.structs.replace(anatomy, lists=lists), min_unit_bytes=300 << 10)
    assert units_of(recipe) == [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]


# ---- ties ------------------------------------------------------------------------------------------------------------


def test_blocks_that_share_a_tensor_are_in_one_unit():
    shared = fact(4, 4, aliases=("blocks.1.shared", "blocks.3.shared"))
    recipe = recipe_for(tower(5, blocks__0__shared=shared), min_unit_bytes=0)
    assert units_of(recipe) == [("blocks.0", "blocks.1", "blocks.3"), ("blocks.2",), ("blocks.4",)]
    assert recipe.params["blocks.0.shared"].unit == recipe.units[0].name
    assert why(recipe, "blocks.0.shared") == "its owners are in one unit, because they share it"


def test_a_block_that_shares_a_tensor_with_the_outside_is_in_the_root_unit():
    anatomy = tower(4)
    anatomy.params["head.weight"] = fact(100, 8, aliases=("blocks.3.out",))
    recipe = recipe_for(anatomy, min_unit_bytes=0)
    assert units_of(recipe) == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    assert recipe.params["blocks.3.weight"].unit == "" and recipe.params["head.weight"].unit == ""
    assert why(recipe, "blocks.3") == "kept in the root unit: it shares head.weight with a module outside its list"


def test_and_so_is_every_block_that_shares_a_tensor_with_that_block():
    anatomy = tower(4, blocks__1__shared=fact(4, 4, aliases=("blocks.3.shared",)))
    anatomy.params["head.weight"] = fact(100, 8, aliases=("blocks.3.out",))
    recipe = recipe_for(anatomy, min_unit_bytes=0)
    assert units_of(recipe) == [("blocks.0",), ("blocks.2",)]
    assert recipe.params["blocks.1.shared"].unit == ""


# ---- units named by the user ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("Block",), 4),
        (("blocks.*",), 4),
        (("blocks.[01]",), 2),
        (("blocks.0", "blocks.3"), 2),
        (("blocks.1", "Linear"), 2),
    ],
)
def test_patterns_name_modules_or_classes(patterns, expected):
    recipe = recipe_for(tower(4), units=patterns)
    assert len(units_of(recipe)) == expected
    assert all("named by units=" in unit.why for unit in recipe.units[:-1])


def test_a_star_stands_for_one_part_of_a_name():
    anatomy = tower(2)
    anatomy.classes.update({"blocks.0.attn": "Attention", "blocks.1.attn": "Attention"})
    assert units_of(recipe_for(anatomy, units=("blocks.*",))) == [("blocks.0",), ("blocks.1",)]
    assert units_of(recipe_for(anatomy, units=("blocks.*.attn",))) == []  # it has no parameters of its own here


def test_a_pattern_that_matches_nothing_is_refused_with_what_it_could_have_been():
    with pytest.raises(PlanError) as caught:
        recipe_for(tower(2), units=("Blok",))
    assert str(caught.value) == (
        "units='Blok'\n  why: it matches no module's name and no module's class\n"
        "  fix: did you mean 'Block' or 'blocks'? use a class of this model (Block, Embedding, Linear, ModuleList) "
        "or a pattern of names, part by part, such as 'blocks.*'"
    )


def test_a_unit_inside_a_unit_is_refused():
    anatomy = tower(2)
    anatomy.classes["blocks.0.attn"] = "Attention"
    with pytest.raises(PlanError, match="gathered twice") as caught:
        recipe_for(anatomy, units=("Block", "Attention"))
    assert caught.value.name == "blocks.0.attn"


def test_none_is_one_unit():
    recipe = recipe_for(tower(4), units="none")
    assert units_of(recipe) == [] and why(recipe, "") == 'one unit: units="none"'
