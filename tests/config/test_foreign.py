"""Options that users know from torch: an error that says what Shardwise does in their place, from Python and from a file."""

import pytest

from shardwise.config.foreign import FOREIGN
from shardwise.config.loader import load_config
from shardwise.config.options import DDP, Compile, Remat, Sharding
from shardwise.config.schema import Checkpoint
from shardwise.errors import ConfigError

RECORDS = {"DDP": DDP, "Sharding": Sharding, "Remat": Remat, "Compile": Compile}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FOREIGN.items() for key in keys])
def test_an_option_of_torch_is_named_with_what_is_done_in_its_place(name, key):
    assert key not in RECORDS[name].__struct_fields__
    with pytest.raises(ConfigError) as told:
        RECORDS[name](**{key: True})
    assert told.value.given == f"{name}({key}=True)" and told.value.fix == FOREIGN[name][key]
    assert told.value.why == f"torch has this option, and {name} does not"


def test_a_slip_in_an_option_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"DDP\(bucket_cap=1\)") as told:
        DDP(bucket_cap=1)
    assert told.value.fix.startswith("did you mean 'bucket_cap_mb'?")


def test_a_file_and_an_override_are_told_the_same(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  ddp:\n    find_unused_parameters: true\n")
    with pytest.raises(ConfigError) as told:
        load_config(path)
    assert "run.yaml:3" in told.value.given and told.value.fix == FOREIGN["DDP"]["find_unused_parameters"]
    with pytest.raises(ConfigError) as told:
        load_config(None, ["parallel.sharding.mp_policy=bf16"])
    assert told.value.fix == FOREIGN["Sharding"]["mp_policy"]


@pytest.mark.parametrize("given", [{"keep": 5}, {"keep_every": 10}, {"background": False}])
def test_what_is_said_of_checkpoints_where_none_are_made_is_refused(given):
    (key,) = given
    with pytest.raises(ConfigError, match="no checkpoints are made") as told:
        Checkpoint(**given)
    assert f"Checkpoint({key}=" in told.value.given and "checkpoint.every=100" in told.value.fix
    assert Checkpoint(every=10, **given) and Checkpoint(stop_after_s=10.0, **given) and Checkpoint(keep=3)
