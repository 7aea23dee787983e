"""FSDP1's words mean what they meant, or say that they do not."""

import warnings
from enum import Enum

import pytest

from shardwise import Parallel, Prefetch
from shardwise.dialects.fsdp1 import STRATEGIES, from_fsdp1
from shardwise.errors import ConfigError


def quiet(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_fsdp1(*args, **options)


@pytest.mark.parametrize(
    ("name", "layout", "reshard", "engine"),
    [
        ("FULL_SHARD", "dp_shard=-1", True, "fsdp2"),
        ("SHARD_GRAD_OP", "dp_shard=-1", False, "fsdp2"),
        ("HYBRID_SHARD", "dp_replicate=-1,dp_shard=8", True, "fsdp2"),
        ("HYBRID_SHARD_ZERO2", "dp_replicate=-1,dp_shard=8", False, "fsdp2"),
        ("_HYBRID_SHARD_ZERO2", "dp_replicate=-1,dp_shard=8", False, "fsdp2"),
        ("NO_SHARD", "dp_replicate=-1", True, "ddp"),
    ],
)
def test_each_strategy(name, layout, reshard, engine):
    assert len(STRATEGIES) == 6
    made = quiet(name, ranks_per_node=8)
    assert (made.layout, made.sharding.reshard_after_forward, made.sharding.engine) == (layout, reshard, engine)


@pytest.mark.parametrize(("name", "reshard"), [("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)])
def test_a_hybrid_strategy_shards_within_the_node_that_the_launcher_says(name, reshard):
    made = quiet(Enum("ShardingStrategy", name)[name])
    assert (made.layout, made.sharding.reshard_after_forward) == ("dp_replicate=-1,dp_shard=node", reshard)


OUMI = {  # every field of oumi's FSDPParams, with its default, as its configuration is written out
    "enable_fsdp": False,
    "sharding_strategy": "FULL_SHARD",
    "cpu_offload": False,
    "mixed_precision": None,
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": False,
    "use_orig_params": None,
    "state_dict_type": "FULL_STATE_DICT",
    "auto_wrap_policy": "NO_WRAP",
    "min_num_params": 100_000,
    "transformer_layer_cls": None,
    "sync_module_states": True,
}


def test_oumis_fields_by_their_names_and_defaults():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        off = from_fsdp1(**OUMI)
    assert (off.layout, off.sharding.engine) == ("dp_replicate=-1", "ddp")
    said = warned(**{**OUMI, "enable_fsdp": True})
    assert ["auto_wrap_policy=NO_WRAP" in str(warning.message) for warning in said] == [True]
    assert quiet(**{**OUMI, "enable_fsdp": True}) == quiet()


def test_what_an_fsdp_that_is_not_enabled_does_not_use_is_named():
    given = {**OUMI, "sharding_strategy": "HYBRID_SHARD", "mixed_precision": "bf16", "cpu_offload": True}
    said = [str(warning.message).partition("=")[0] for warning in warned(**given)]
    assert said == ["sharding_strategy", "cpu_offload", "mixed_precision"]
    off = quiet(**given)
    assert (off.layout, off.precision, off.sharding.engine, off.sharding.offload) == (
        "dp_replicate=-1",
        None,
        "ddp",
        False,
    )


def test_prefetch_offload_and_units():
    assert quiet(backward_prefetch="NO_PREFETCH").sharding.prefetch == Prefetch(forward=0, backward=0)
    assert quiet(backward_prefetch=None, forward_prefetch=True).sharding.prefetch == Prefetch(forward=1, backward=0)
    assert quiet(cpu_offload=True).sharding.offload
    assert quiet(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=7).sharding.min_unit_params == 7
    named = quiet(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="A, pkg.B")
    assert named.sharding.units == ("A", "pkg.B")
    assert quiet(mixed_precision="bf16").precision == "bf16"
    assert quiet(mixed_precision="no").precision is None  # Accelerate's word


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "DDP is used"),
        ({"backward_prefetch": "BACKWARD_POST", "auto_wrap_policy": "SIZE_BASED_WRAP"}, "BACKWARD_PRE is used"),
        ({"use_orig_params": True}, "no counterpart"),
        ({"sync_module_states": False}, "no counterpart"),
        ({"limit_all_gathers": False}, "no counterpart"),
        ({}, "blocks are found all the same"),
        ({"mixed_precision": "bf16"}, "in float32"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "sw.CheckpointManager are sharded"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "flattened local pieces are FSDP1's alone"),
        ({"sharding_strategy": "NO_SHARD", "cpu_offload": True}, "deprecated in torch.*FSDP2 on whole copies"),
    ],
)
def test_what_changes_or_goes_is_said(options, text):
    with pytest.warns(UserWarning, match=text), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!.*" + text + ")")
        from_fsdp1(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharding_strategy": "FULL_SHRAD"}, "did you mean 'FULL_SHARD'"),
        ({"state_dict_type": "FULL"}, "FSDP1 has no such value"),
        ({"mixed_precision": "bfloat"}, 'use "bf16"'),
        ({"enable_fsdp": "false"}, "use enable_fsdp=True"),
        ({"backward_prefetch": "PRE"}, "FSDP1 has no such value"),
        ({"auto_wrap_policy": "SIZE"}, "FSDP1 has no such value"),
    ],
)
def test_what_cannot_be_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        from_fsdp1(**options)


def test_float16_is_kept():
    with pytest.warns(UserWarning, match="mixed_precision=fp16"):
        assert from_fsdp1(mixed_precision="fp16", auto_wrap_policy="SIZE_BASED_WRAP").precision == "fp16"


def warned(**options) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_fsdp1(**options)
    return caught


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sharding_strategy": "NO_SHARD", "forward_prefetch": True}, "forward_prefetch=True"),
        ({"sharding_strategy": "NO_SHARD", "backward_prefetch": None}, "backward_prefetch=NO_PREFETCH"),
        (
            {"sharding_strategy": "NO_SHARD", "auto_wrap_policy": "SIZE_BASED_WRAP"},
            "auto_wrap_policy=SIZE_BASED_WRAP",
        ),
        ({"sharding_strategy": "NO_SHARD", "transformer_layer_cls": "Block"}, "transformer_layer_cls=Block"),
        ({"sharding_strategy": "FULL_SHARD", "ranks_per_node": 8}, "ranks_per_node=8"),
        ({"transformer_layer_cls": "Block"}, "transformer_layer_cls=Block"),
        ({"min_num_params": 5}, "min_num_params=5"),
        ({"enable_fsdp": False, "min_num_params": 5}, "min_num_params=5"),
        ({"min_num_params": 5, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "min_num_params=5"),
    ],
)
def test_an_option_that_is_not_used_is_named(options, key):
    assert any(str(warning.message).startswith(f"{key}: ") for warning in warned(**options))


def test_warnings_point_at_the_caller():
    caught = warned(use_orig_params=True, backward_prefetch="BACKWARD_POST")
    assert len(caught) == 3 and {warning.filename for warning in caught} == {__file__}


def test_what_replicas_cannot_do_is_left_to_the_engine_that_can():
    halves = quiet("NO_SHARD", mixed_precision="bf16")
    assert (halves.layout, halves.sharding.engine, halves.precision) == ("dp_replicate=-1", "auto", "bf16")
    held = quiet("NO_SHARD", cpu_offload=True, forward_prefetch=True)
    assert held.sharding.engine == "auto" and held.sharding.offload and held.sharding.prefetch.forward == 1


def test_torchs_enums_are_known_by_name():
    strategy = Enum("ShardingStrategy", "FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD NO_SHARD")
    backward = Enum("BackwardPrefetch", "BACKWARD_PRE BACKWARD_POST")
    assert quiet(strategy["SHARD_GRAD_OP"]).sharding.reshard_after_forward is False
    assert (
        quiet(backward_prefetch=backward["BACKWARD_PRE"]).sharding.prefetch == "default"
    )  # so no recipe calls it idle
    assert quiet(backward_prefetch=backward["BACKWARD_PRE"], forward_prefetch=True).sharding.prefetch.backward == 1
    with pytest.raises(ConfigError, match="FSDP1 has no such value"):
        quiet(auto_wrap_policy=lambda module: True)


def test_a_class_or_the_models_own_list_names_the_units():
    class Block:
        pass

    path = f"{__name__}.{Block.__qualname__}"
    for given in (Block, {Block}, [Block]):
        assert quiet(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls=given).sharding.units == (path,)
    assert quiet(auto_wrap_policy="TRANSFORMER_BASED_WRAP").sharding.units == "no_split"


def test_options_are_what_parallelize_takes():
    meant = quiet("SHARD_GRAD_OP", mixed_precision="bf16")
    assert meant.options()["sharding"] is meant.sharding and meant.options()["precision"] == "bf16"
    assert set(meant.options()) == set(Parallel.__struct_fields__) - {"layout"}
