"""FSDP1's words mean what they meant, or say that they do not."""

import warnings

import pytest

from shardwise.config.fsdp1 import STRATEGIES, from_fsdp1
from shardwise.config.options import Prefetch
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


def test_prefetch_offload_and_units():
    assert quiet(backward_prefetch="NO_PREFETCH").sharding.prefetch == Prefetch(forward=0, backward=0)
    assert quiet(backward_prefetch=None, forward_prefetch=True).sharding.prefetch == Prefetch(forward=1, backward=0)
    assert quiet(cpu_offload=True).sharding.offload
    assert quiet(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=7).sharding.min_unit_params == 7
    named = quiet(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="A, pkg.B")
    assert named.sharding.units == ("A", "pkg.B")
    assert quiet(mixed_precision="bf16").precision == "bf16"


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
        ({"sharding_strategy": "HYBRID_SHARD"}, "how many ranks a node has"),
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
