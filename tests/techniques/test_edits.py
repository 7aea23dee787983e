"""From options to edits: which modules are meant, why, and what is refused. No torch."""

import msgspec
import pytest
from recipe.anatomies import tower

from shardwise import Compile, Precision, Remat, Sharding
from shardwise.errors import PlanError
from shardwise.layout import Layout
from shardwise.recipe import Anatomy, BlockList, Recipe
from shardwise.techniques.fold import describe, make_recipe


def make(anatomy: Anatomy | None = None, **options) -> Recipe:
    return make_recipe(
        anatomy or listed(tower(4)), Layout(dp_shard=2), precision=Precision(), sharding=Sharding(), **options
    )


def listed(anatomy: Anatomy) -> Anatomy:
    """With the list marked as what it is, and modules inside the blocks."""
    classes = dict(anatomy.classes)
    for block in anatomy.lists[0].blocks:
        classes |= {f"{block}.attn": "Attention", f"{block}.mlp": "MLP"}
    return msgspec.structs.replace(anatomy, classes=classes, containers=("blocks",))


def modules(recipe: Recipe, technique: str = "remat") -> list[str]:
    return [edit.module for edit in recipe.edits if edit.technique == technique]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ({"every": 2}, ["blocks.0", "blocks.2"]),
        ({"every": 9}, ["blocks.0"]),
        ({"targets": ("Block",)}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ({"targets": ("blocks",)}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),  # a list means what is in it
        ({"targets": ("ModuleList",), "every": 3}, ["blocks.0", "blocks.3"]),
        ({"targets": ("blocks.[12]", "head")}, ["head", "blocks.1", "blocks.2"]),
        ({"targets": ("blocks.*.attn",)}, [f"blocks.{i}.attn" for i in range(4)]),
        (
            {"targets": ("Attention", "blocks.0.mlp")},
            ["blocks.0.attn", "blocks.0.mlp", *(f"blocks.{i}.attn" for i in (1, 2, 3))],
        ),
    ],
)
def test_targets(options, found):
    assert modules(make(remat=Remat(**options))) == found
    if "every" not in options:
        assert modules(make(compile=Compile(**options)), "compile") == found


def test_blocks_that_may_be_skipped_are_meant_too():
    assert len(modules(make(tower(3), remat=Remat()))) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"remat": Remat(targets=("Blok",))}, "did you mean 'Block'"),
        ({"compile": Compile(targets=("layers.*",))}, "a pattern of names, part by part, such as 'blocks.*'"),
        ({"remat": Remat(targets=("Block", "Attention"))}, "'blocks.0' and 'blocks.0.attn'"),
        ({"remat": Remat(offload=True), "compile": Compile()}, "moved to the host"),
        ({"remat": Remat(), "compile": Compile(activation_memory_budget=0.5)}, "both decide what a block runs again"),
        (
            {"remat": Remat(mode="selective"), "compile": Compile(targets=("Attention",))},
            "operators inside compiled code are not seen",
        ),
    ],
)
def test_what_means_nothing_or_undoes_itself_is_refused(options, words):
    with pytest.raises(PlanError) as caught:
        make(**options)
    assert words in str(caught.value)


def test_a_model_without_blocks_needs_names():
    anatomy = msgspec.structs.replace(tower(2), lists=())
    with pytest.raises(PlanError, match=r"(?s)no list of blocks.*targets=\('Block',\)"):
        make(anatomy, remat=Remat())


def test_a_list_with_nothing_to_run_is_refused():
    anatomy = tower(2)
    empty = msgspec.structs.replace(
        anatomy, classes={**anatomy.classes, "scales": "ParameterList"}, containers=("scales",)
    )
    with pytest.raises(PlanError, match="holds no module that has one") as caught:
        make(empty, remat=Remat(targets=("scales",)))
    assert caught.value.name == "scales"


def test_lists_in_a_list_mean_what_is_in_them():
    anatomy = tower(1)
    classes = {
        **anatomy.classes,
        "heads": "ModuleList",
        "heads.0": "ModuleList",
        "heads.0.0": "Head",
        "heads.0.1": "Head",
    }
    nested = msgspec.structs.replace(anatomy, classes=classes, containers=("heads", "heads.0"))
    assert modules(make(nested, remat=Remat(targets=("heads",)))) == ["heads.0.0", "heads.0.1"]


def test_a_unit_inside_a_compiled_module_is_refused():
    anatomy = listed(tower(2))
    with pytest.raises(PlanError, match=r"'blocks.0', which holds the unit 'blocks.0.attn'"):
        make_recipe(
            anatomy,
            Layout(dp_shard=2),
            precision=Precision(),
            sharding=Sharding(units=("Attention",)),
            compile=Compile(targets=("Block",)),
        )


def test_order_json_and_text():
    recipe = make(remat=Remat(mode="selective", every=2), compile=Compile(dynamic=True))
    assert [edit.technique for edit in recipe.edits] == ["remat"] * 2 + ["compile"] * 4
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.edits[0].args == {"mode": "selective", "save": ["matmul", "attention"]}
    text = describe(recipe)
    assert (
        "remat: 2 modules (blocks.0, blocks.2): run again in backward, but for matmul, attention: a block of an" in text
    )
    assert (
        "compile: 4 modules (blocks.0, ..., blocks.3): compiled by inductor" in text
        and "[backend=inductor, dynamic=True]" in text
    )


def test_blocks_of_two_lists_are_counted_each_for_itself():
    anatomy = tower(3)
    names = ("other.0", "other.1")
    lists = (*anatomy.lists, BlockList(name="other", blocks=names))
    classes = {**anatomy.classes, "other": "ModuleList", **dict.fromkeys(names, "Block")}
    both = msgspec.structs.replace(anatomy, lists=lists, classes=classes)
    assert modules(make(both, remat=Remat(every=2))) == ["blocks.0", "blocks.2", "other.0"]
