"""Every choice a recipe makes, with its reason; what it refuses, by name; its text."""

import json

import msgspec
import pytest
from recipe.anatomies import fact, tower

from shardwise import Precision, Sharding
from shardwise.errors import PlanError, UnsupportedError
from shardwise.layout import Layout
from shardwise.recipe import Buffer, Codec, Draft, Recipe, check_recipe, dtype_groups, fingerprint_of
from shardwise.techniques import fold
from shardwise.techniques.fold import check_entries, describe, make_recipe
from shardwise.techniques.precision.options import precision_of
from shardwise.techniques.technique import MeshAxis

BF16 = precision_of("bf16")


def make(anatomy=None, layout=None, precision=None, **sharding) -> Recipe:
    return make_recipe(
        anatomy or tower(2),
        layout or Layout(dp_shard=2),
        precision=precision or Precision(),
        sharding=Sharding(**sharding),
    )


# ---- engine and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "precision", "sharding", "engine", "reason"),
    [
        (Layout(), None, {}, "ddp", "storage dtype = compute dtype: nothing to gather"),
        (Layout(dp_replicate=4), None, {}, "ddp", "nothing to gather"),
        (Layout(dp_replicate=4), precision_of("fp32"), {}, "ddp", "nothing to gather"),
        (Layout(dp_shard=2), None, {}, "fsdp2", "dp_shard=2 cuts parameters"),
        (Layout(dp_replicate=2, dp_shard=2), None, {}, "fsdp2", "dp_shard=2 cuts parameters"),
        (Layout(dp_replicate=2), BF16, {}, "fsdp2", "'embed.weight' stored in float32 and computed in bfloat16"),
        (Layout(dp_replicate=2), Precision(reduce="float64"), {}, "fsdp2", "stored in float32 and reduced in float64"),
        (Layout(dp_replicate=2), Precision(output="float32"), {}, "fsdp2", "an output of float32"),
        (Layout(dp_replicate=2), None, {"engine": "fsdp2"}, "fsdp2", 'asked for by Sharding(engine="fsdp2")'),
        (Layout(dp_replicate=2), None, {"engine": "ddp"}, "ddp", 'asked for by Sharding(engine="ddp")'),
    ],
)
def test_the_engine_and_why(layout, precision, sharding, engine, reason):
    recipe = make(layout=layout, precision=precision, **sharding)
    note = next(note for note in recipe.notes if note.name == "engine")
    assert recipe.engine == engine and note.why.startswith(f"{engine}: ") and reason in note.why
    assert all(bool(param.cuts) == (engine == "fsdp2") for param in recipe.params.values())


@pytest.mark.parametrize(
    ("layout", "precision", "words"),
    [(Layout(dp_shard=2), None, "dp_shard=2"), (Layout(), BF16, "computed in bfloat16")],
)
def test_ddp_is_refused_where_it_cannot_do_what_is_asked(layout, precision, words):
    with pytest.raises(UnsupportedError, match=words):
        make(layout=layout, precision=precision, engine="ddp")


def test_a_frozen_parameter_of_another_dtype_is_computed_in_the_dtype_asked_for():
    anatomy = tower(2, blocks__0__frozen=fact(4, dtype="bfloat16", trainable=False))
    recipe = make(anatomy, Layout(dp_replicate=2), precision_of("fp32"))
    frozen = recipe.params["blocks.0.frozen"]
    assert (frozen.storage, frozen.compute) == ("bfloat16", "float32")
    assert recipe.engine == "fsdp2"  # DDP would compute in bfloat16
    assert make(anatomy, Layout(dp_replicate=2)).engine == "ddp"  # as the model is


def test_dtypes_of_a_parameter():
    anatomy = tower(1, ids=fact(3, dtype="int64", trainable=False), frozen=fact(3, trainable=False))
    params = make(anatomy, precision=BF16).params
    assert (params["head.weight"].storage, params["head.weight"].compute, params["head.weight"].reduce) == (
        "float32",
        "bfloat16",
        "float32",
    )
    assert (params["ids"].storage, params["ids"].compute) == ("int64", "int64")
    assert (params["frozen"].storage, params["frozen"].compute) == ("float32", "bfloat16")


def test_a_0_dim_parameter_is_computed_as_it_is_stored():
    """Nothing gathers it, so nothing casts it."""
    recipe = make(tower(1, scale=fact()), precision=BF16)
    scale = recipe.params["scale"]
    assert (scale.storage, scale.compute, scale.reduce) == ("float32",) * 3
    assert "computed and reduced in float32" in next(note.why for note in recipe.notes if note.name == "scale")


def test_parameters_reduced_in_two_dtypes_are_two_groups():
    precision = Precision(storage="float32", compute="bfloat16", reduce="bfloat16", parts={"head": "bf16"})
    groups = dtype_groups(make(tower(1), precision=precision, units="none").params, "")
    assert [(group.names[-1], group.reduce) for group in groups] == [
        ("blocks.0.weight", None),
        ("head.weight", "float32"),
    ]


def test_trained_parameters_of_two_dtypes_are_two_groups_of_one_unit():
    def groups(anatomy, **options):
        return [
            (group.names, group.compute, group.reduce) for group in dtype_groups(make(anatomy, **options).params, "")
        ]

    plain, late = [("embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight")], ("blocks.1.late",)
    anatomy = tower(2, blocks__1__late=fact(4, dtype="float64"))
    assert [names for names, _, _ in groups(anatomy)] == [*plain, late]
    assert len(groups(tower(2, blocks__1__late=fact(dtype="float64")))) == 1  # 0-dim: in no collective
    assert len(groups(anatomy, precision=precision_of("fp32"))) == 1  # stored alike
    frozen = tower(2, blocks__1__late=fact(4, dtype="bfloat16", trainable=False))
    assert groups(frozen) == [((*plain[0], *late), None, None)]  # as it is, in one gather
    assert groups(frozen, precision=BF16) == [((*plain[0], *late), "bfloat16", "float32")]
    assert groups(frozen, precision=precision_of("fp32")) == [((*plain[0], *late), "float32", None)]
    make(anatomy, layout=Layout(dp_replicate=2))  # DDP has a bucket for each dtype


def test_zero_dim_parameters_are_replicated_with_a_note():
    recipe = make(tower(1, scale=fact()))
    assert recipe.params["scale"].cuts == ()
    assert next(note.why for note in recipe.notes if note.name == "scale").startswith("0-dim: replicated")


# ---- options that do nothing, or cannot work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "sharding", "key"),
    [
        (Layout(dp_replicate=2), {"units": ("Block",)}, "units"),
        (Layout(dp_replicate=2), {"min_unit_bytes": 0}, "min_unit_bytes"),
        (Layout(dp_replicate=2), {"reshard_after_forward": False}, "reshard_after_forward"),
        (Layout(dp_shard=2), {"reshard_after_forward": False}, "reshard_after_forward"),  # the root is the only unit
        (Layout(dp_shard=2), {"sync_every_microbatch": "reduce_scatter"}, "sync_every_microbatch"),  # no replicas
    ],
)
def test_an_option_without_effect_is_noted(layout, sharding, key):
    note = next(note for note in make(layout=layout, **sharding).notes if note.name == key)
    assert "has no effect here" in note.why


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2)])
def test_what_the_model_or_the_precision_has_nothing_for_is_noted(layout):
    def idle(anatomy=None, precision=None, **sharding):
        notes = make(anatomy, layout, precision, **sharding).notes
        return {note.option: note.why for note in notes if "has no effect here" in note.why}

    counts, means = fact(dtype="int64"), fact(4)
    for buffers in ({}, {"seen": counts}):
        anatomy = msgspec.structs.replace(tower(2), buffers=buffers)
        wanted = {"sharding.buffers": "'mean' has no effect here: the model has no floating buffers"}
        assert idle(anatomy, buffers="mean") == wanted and idle(anatomy) == {}
    assert idle(msgspec.structs.replace(tower(2), buffers={"seen": counts, "mean": means}), buffers="mean") == {}
    wanted = {"precision.cast_inputs": "'none' has no effect here: without compute no input of the model is cast"}
    assert idle(precision=Precision(cast_inputs="none")) == wanted
    assert idle(precision=Precision(cast_inputs="none", parts={"head": "bf16"})).keys() >= wanted.keys()
    assert idle(precision=Precision(compute="float32", cast_inputs="none")) == {}


def test_options_with_an_effect_are_not():
    recipe = make(min_unit_bytes=0, reshard_after_forward=False)
    assert not any("no effect" in note.why for note in recipe.notes)
    hybrid = make(layout=Layout(dp_replicate=2, dp_shard=2), sync_every_microbatch="reduce_scatter")
    assert not any("no effect" in note.why for note in hybrid.notes)
    assert [unit.reshard for unit in recipe.units] == [False, False, False]


def test_a_number_of_ranks_to_reshard_over_stays_a_number_and_must_divide_dp_shard():
    recipe = make(layout=Layout(dp_shard=4), min_unit_bytes=0, reshard_after_forward=2)
    assert recipe.units[0].reshard == 2 and recipe.units[0].reshard is not True
    with pytest.raises(PlanError, match=r"reshard_after_forward=3 on dp_shard=4") as caught:
        make(layout=Layout(dp_shard=4), min_unit_bytes=0, reshard_after_forward=3)
    assert caught.value.fix == "use 2 or 4, or true"


# ---- text ------------------------------------------------------------------------------------------------------------


def test_the_text_says_what_is_kept_in_host_memory():
    kept = "offload: parameters, gradients and optimizer state are kept in host memory\n"
    assert kept in describe(make(offload=True)) and "offload" not in describe(make())


def test_json_round_trip_is_stable_and_keeps_the_modules_order():
    recipe = make(tower(12, scale=fact()), layout=Layout(dp_replicate=2, dp_shard=2), precision=BF16, min_unit_bytes=0)
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe and again.to_json() == recipe.to_json()
    assert list(again.params) == list(recipe.params)  # blocks.10 after blocks.9: ranks count parameters in this order
    assert describe(again) == describe(recipe)
    assert (
        recipe.to_json()
        == make(
            tower(12, scale=fact()), layout=Layout(dp_replicate=2, dp_shard=2), precision=BF16, min_unit_bytes=0
        ).to_json()
    )


def test_a_recipe_is_frozen():
    with pytest.raises(AttributeError):
        make().engine = "ddp"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"engine": "fsdp2"', '"engine": "fsdp3"', "Invalid enum value 'fsdp3' - at `$.engine`"),
        ('"version": 2', '"version": 3', "a recipe of version 3"),
        ('"version": 2', '"version": 3,\n "stages": []', "a recipe of version 3"),
        ('"version": 2', '"version": 2,\n "stages": []', "Object contains unknown field `stages`"),
        ('"dp_shard": 2', '"dp_shard": 0', "'dp_shard' is not an axis with a degree of 1 or more"),
        ('"dp_shard": 2', '"dq": 2', "'dq' is not an axis"),
        ('"storage": "float32"', '"storage": "float31"', "dtype 'float31'"),
        ('"dim": 0', '"dim": 5', "a cut of dim 5"),
        ('"axis": "fsdp"', '"axis": "fsdq"', "a cut over axis 'fsdq'"),
        ('"unit": ""', '"unit": "blocks.7"', "unit 'blocks.7'"),
        ('"aliases": []', '"aliases": ["head.weight"]', "given as two tensors"),
        ('"shape": [', '"shape": ["a", ', "Expected `int`, got `str`"),
        ("{", "[", "JSON is malformed"),
    ],
)
def test_json_that_is_no_recipe_is_refused(before, after, words):
    text = make().to_json()
    assert before in text
    with pytest.raises(PlanError) as caught:
        Recipe.from_json(text.replace(before, after, 1))
    assert words in str(caught.value)


def test_what_contradicts_itself_names_the_parameter():
    recipe = make(min_unit_bytes=0)
    lost = msgspec.structs.replace(recipe.params["blocks.1.weight"], unit="blocks.9")
    with pytest.raises(PlanError, match=r"unit 'blocks.9'") as caught:
        check_recipe(msgspec.structs.replace(recipe, params={**recipe.params, "blocks.1.weight": lost}))
    assert caught.value.name == "blocks.1.weight"
    with pytest.raises(PlanError, match=r"names of units differ"):
        check_recipe(msgspec.structs.replace(recipe, units=(*recipe.units, recipe.units[0])))
    with pytest.raises(PlanError, match=r"and the root"):
        check_recipe(msgspec.structs.replace(recipe, units=recipe.units[:-1]))


@pytest.mark.parametrize(
    "change",
    [
        {"blocks.0.weight": fact(256, 255)},
        {"blocks.0.weight": fact(256, 256, dtype="bfloat16")},
        {"blocks.0.weight": fact(256, 256, trainable=False)},
        {"blocks.0.weight": fact(256, 256, aliases=("x",))},
        {"new": fact(1)},
    ],
)
def test_the_fingerprint_tells_modules_apart(change):
    anatomy = tower(2)
    assert fingerprint_of(anatomy) == fingerprint_of(tower(2))
    assert fingerprint_of(msgspec.structs.replace(anatomy, params={**anatomy.params, **change})) != fingerprint_of(
        anatomy
    )


def test_a_ranks_bytes_add_up():
    recipe = make(tower(2, odd=fact(3, 5), scale=fact()), layout=Layout(dp_shard=2))
    full = sum(4 * param.shape[0] * param.shape[1] for param in recipe.params.values() if param.shape)
    assert recipe.at(0).num_bytes() + recipe.at(1).num_bytes() == full + 2 * 4  # the 0-dim one twice
    assert recipe.at(1).num_bytes() < recipe.at(0).num_bytes()  # one row of three


ENTERED = "blocks of an outermost list"
GOLDEN = f"""\
Tower on layout dp_replicate=2,dp_shard=2 (4 ranks), engine fsdp2
parameters: 1.02 MiB in one process, at most 522.07 KiB per rank at rest

unit                tensors  size        stored/computed/reduced            reshard  why
----------------------------------------------------------------------------------------
blocks.0..blocks.1  3        513.00 KiB  float32/bfloat16/float32           True     2 neighbours merged to reach \
min_unit_bytes = 200.00 KiB: 256.50 KiB in bfloat16; {ENTERED}
blocks.2..blocks.3  2        512.00 KiB  float32/bfloat16/float32           True     2 neighbours merged to reach \
min_unit_bytes = 200.00 KiB: 256.00 KiB in bfloat16; {ENTERED}
(root)              4        19.14 KiB   float32, float32/bfloat16/float32  False    what no other unit holds; stays gathered \
from forward to backward, which starts with it

tied: blocks.0.shared = blocks.1.shared
frozen: 1 parameter (adapter)
engine: fsdp2: dp_shard=2 cuts parameters
scale: 0-dim: replicated, since there is nothing to cut; computed and reduced in float32, as it is stored
"""


def test_the_description():
    anatomy = tower(
        4,
        blocks__0__shared=fact(16, 16, aliases=("blocks.1.shared",)),
        scale=fact(),
        adapter=fact(50, 66, trainable=False),
    )
    recipe = make(anatomy, Layout(dp_replicate=2, dp_shard=2), BF16, min_unit_bytes=200 << 10)
    assert describe(recipe) == GOLDEN


# ---- recipes of before -----------------------------------------------------------------------------------------------


def test_a_recipe_of_version_1_is_read():
    """What belongs to one technique was a field of the recipe."""
    made = make(
        precision=Precision(compute="bfloat16", reduce="float32", cast_inputs="none"), offload=True, buffers="mean"
    )
    told = json.loads(made.to_json())
    entries = told.pop("techniques")
    data = entries["data"]
    told |= entries["precision"] | {"buffer_policy": "mean"} | data | {"version": 1}
    assert Recipe.from_json(json.dumps(told)) == made
    told["offlod"] = True
    with pytest.raises(PlanError, match="a recipe of version 1"):
        Recipe.from_json(json.dumps(told))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"data": {"offlod": True}}, "unknown field `offlod`"),
        ({"data": {"offload": "yes"}}, "Expected `bool`"),
        ({"ep": {}}, "no such technique"),
    ],
)
def test_what_a_recipe_says_of_a_technique_is_checked_before_it_is_carried_out(entries, words):
    with pytest.raises(PlanError, match=words):
        check_entries(msgspec.structs.replace(make(), techniques=entries))


@pytest.mark.parametrize(("field", "value"), [("axis", "tp"), ("axis", "dp_shard"), ("policy", "sums"), ("policy", "")])
def test_a_buffer_that_the_end_of_a_window_does_not_know_is_refused_by_name(field, value):
    buffer = Buffer(shape=(4,), dtype="float32", persistent=True)
    recipe = msgspec.structs.replace(make(), buffers={"table": buffer})
    assert Recipe.from_json(recipe.to_json()) == recipe
    other = msgspec.structs.replace(recipe, buffers={"table": msgspec.structs.replace(buffer, **{field: value})})
    with pytest.raises(PlanError, match=f"{field} {value!r}") as caught:
        Recipe.from_json(other.to_json())
    assert caught.value.name == "table"


# ---- axes by what their ranks have of a batch -----------------------------------------------------------------------------


def test_an_axis_of_which_no_technique_says_what_its_ranks_have_of_a_batch_is_refused():
    """Its gradients would be summed over whichever ranks the layout joins, with the same samples or others."""
    for layout, said in (
        (Layout(pp=2), "pp=2"),
        (Layout(dp_shard=4, ep=2), "ep=2"),
    ):
        with pytest.raises(PlanError, match=rf"{said}\n.*no technique says it\n.*MeshAxis\(name=\"{said[:2]}\""):
            make_recipe(tower(), layout)


@pytest.mark.parametrize(
    ("axis", "batch", "words"),
    [
        ("cp", "same", "'positions'"),
        ("cp", "samples", "'positions'"),
        ("pp", "positions", "'same' or 'stage'"),
        ("dp_shard", "same", "'samples'"),
        ("ep", "samples", "carved out of fsdp"),
    ],
)
def test_an_axis_whose_ranks_have_something_else_than_the_layout_sums_over_is_refused(monkeypatch, axis, batch, words):
    monkeypatch.setitem(fold.MESH_AXES, axis, MeshAxis(name=axis, batch=batch))
    with pytest.raises(PlanError, match=words):
        make_recipe(tower(), Layout(dp_shard=4, ep=2) if axis == "ep" else Layout(**{axis: 2}))


def test_an_axis_that_says_what_the_layout_does_is_taken():
    recipe = make_recipe(tower(), Layout(dp_shard=2, cp=2))
    assert recipe.engine == "fsdp2" and "dp_shard=2,cp=2 cuts parameters" in describe(recipe)
    assert {cut.axis for param in recipe.params.values() for cut in param.cuts} == {"fsdp"}
    alone = make_recipe(tower(), Layout(cp=2))  # no rank along dp_shard: cut over cp alone
    assert alone.engine == "fsdp2" and "cp=2 cuts parameters" in describe(alone)
    replicas = make_recipe(tower(), Layout(cp=2), sharding=Sharding(engine="ddp"))
    assert replicas.engine == "ddp" and not any(param.cuts for param in replicas.params.values())


# ---- what a recipe can say ------------------------------------------------------------------------------------------------


def test_bytes_that_stand_for_a_weight_say_of_which_and_are_neither_cast_nor_trained():
    bytes_of = Codec(kind="nf4", of="a.weight", shape=(4, 8), dtype="bfloat16", part="codes")
    anatomy = tower(a__weight_nf4=fact(4, 4, dtype="uint8", trainable=False))
    draft = Draft(anatomy, Layout(dp_shard=2))
    draft.codecs["a.weight_nf4"] = bytes_of
    recipe = draft.recipe()
    assert recipe.params["a.weight_nf4"].codec == bytes_of and Recipe.from_json(recipe.to_json()) == recipe
    assert all(param.codec is None for name, param in recipe.params.items() if name != "a.weight_nf4")
    for change in ({"trainable": True}, {"compute": "bfloat16"}):
        other = msgspec.structs.replace(recipe.params["a.weight_nf4"], **change)
        with pytest.raises(PlanError, match=r"nf4 bytes of a\.weight") as caught:
            check_recipe(msgspec.structs.replace(recipe, params={**recipe.params, "a.weight_nf4": other}))
        assert caught.value.name == "a.weight_nf4"
