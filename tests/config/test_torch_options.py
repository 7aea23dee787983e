"""Options that users know from torch: an error that says what Shardwise does in their place, from Python and from a file."""

import pytest

from shardwise import DDP, Compile, Options, Remat, Sharding
from shardwise.config.torch_options import Replacement, replacement_for
from shardwise.errors import ConfigError
from shardwise.run.config import Checkpoint, load_config

RECORDS = {"DDP": DDP, "Sharding": Sharding, "Remat": Remat, "Compile": Compile}
FOREIGN = {name: record.foreign for name, record in RECORDS.items()}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FOREIGN.items() for key in keys])
def test_an_option_of_torch_is_named_with_what_is_done_in_its_place(name, key):
    assert key not in RECORDS[name].__struct_fields__
    with pytest.raises(ConfigError) as told:
        RECORDS[name](**{key: True})
    assert told.value.given == f"{name}({key}=True)" and told.value.fix == replacement_for(RECORDS[name], key, "python")
    assert told.value.why == f"torch has this option, and {name} does not"


def test_a_slip_in_an_option_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"DDP\(bucket_cap=1\)") as told:
        DDP(bucket_cap=1)
    assert told.value.fix.startswith("did you mean 'bucket_cap_mb'?")


def test_a_file_and_an_override_are_told_so_in_their_own_words(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  ddp:\n    find_unused_parameters: true\n")
    with pytest.raises(ConfigError) as told:
        load_config(path)
    assert "run.yaml:3" in told.value.given and told.value.fix == FOREIGN["DDP"]["find_unused_parameters"]
    path.write_text("parallel:\n  sharding:\n    cpu_offload: true\n")
    with pytest.raises(ConfigError) as told:
        load_config(path)
    assert told.value.why == f"{HAS}: there is no key 'cpu_offload' in parallel.sharding"
    assert told.value.fix == "it is called offload here: parallel.sharding.offload: true"
    for word in ("parallel.sharding.cpu_offload=true", "--parallel.sharding.cpu_offload.offload_params=true"):
        with pytest.raises(ConfigError) as told:
            load_config(None, [word])
        assert told.value.why == f"{HAS}: there is no key 'parallel.sharding.cpu_offload'"
        assert told.value.fix == "it is called offload here: --parallel.sharding.offload=true"
    with pytest.raises(ConfigError) as told:
        Sharding(cpu_offload=True)
    assert told.value.fix == "it is called offload here: offload=True"
    with pytest.raises(ConfigError, match=r"no key 'parallel\.sharding\.offlod'") as told:
        load_config(None, ["parallel.sharding.offlod=true"])
    assert "torch" not in told.value.why


HAS = "torch has this option, and Shardwise does not"
SHOWN = {each for keys in FOREIGN.values() for each in keys.values() if isinstance(each, Replacement) and each.key}


@pytest.mark.parametrize("each", sorted(SHOWN, key=lambda each: (each.key, each.value)), ids=lambda each: each.key)
def test_what_is_written_in_their_place_is_taken(each, tmp_path):
    load_config(None, [f"--{each.key}={each.value}"])
    assert f"--{each.key}={each.value}" in each.shown("override")
    path = tmp_path / "run.yaml"
    *sections, last = each.key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    path.write_text("\n".join([*lines, f"{'  ' * len(sections)}{last}: {each.value}"]) + "\n")
    load_config(path)


def test_a_users_own_record_of_the_same_name_is_another():
    class Remat(Options, frozen=True, kw_only=True):
        every: int = 1

    with pytest.raises(ConfigError) as told:
        Remat(debug=True)
    assert told.value.why == "Remat has no option 'debug'" and "every" in told.value.fix


@pytest.mark.parametrize("given", [{"keep": 5}, {"keep_every": 10}, {"background": False}])
def test_what_is_said_of_checkpoints_where_none_are_made_is_refused(given):
    (key,) = given
    with pytest.raises(ConfigError, match="no checkpoints are made") as told:
        Checkpoint(**given)
    assert f"Checkpoint({key}=" in told.value.given and "checkpoint.every=100" in told.value.fix
    assert Checkpoint(every=10, **given) and Checkpoint(stop_after_s=10.0, **given) and Checkpoint(keep=3)
