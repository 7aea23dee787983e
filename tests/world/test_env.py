"""The environment of torchrun, of a SLURM step, of nothing: what it says, and what in it contradicts itself."""

import pytest

from shardwise.errors import ConfigError, LayoutError
from shardwise.layout import layout_of
from shardwise.world.env import Env, is_distributed, ranks_per_node, read_env

RUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun():
    assert read_env(RUN) == Env("torchrun", 5, 8, 1, 4, "h", 29500)


def test_torchrun_without_the_local_part():
    env = {name: value for name, value in RUN.items() if not name.startswith("LOCAL")}
    assert read_env(env) == Env("torchrun", 5, 8, 5, 8, "h", 29500)


def test_torchrun_of_a_single_rank_is_a_group():
    env = {**RUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert is_distributed(env) and read_env(env).world_size == 1


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "-1", "WORLD_SIZE": "1"},
        {"RANK": "", "LOCAL_RANK": "-1"},
        {"MASTER_ADDR": "h"},
    ],
    ids=str,
)
def test_nothing_is_a_single_process(env):
    assert read_env(env) == Env("single") and not is_distributed(env)


def test_the_process_environment_is_the_default(monkeypatch):
    for name in (*RUN, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not is_distributed()
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    assert read_env().rank == 5


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name):
    with pytest.raises(ConfigError) as caught:
        read_env({key: value for key, value in RUN.items() if key != name})
    assert f"but not {name}" in caught.value.given and f"set {name}" in caught.value.fix


def test_a_world_without_a_rank_names_the_rank():
    with pytest.raises(ConfigError, match="but not RANK"):
        read_env({**RUN, "RANK": "-1"})


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("RANK", "8", "rank 8 of world size 8"),
        ("WORLD_SIZE", "0", "rank 5 of world size 0"),
        ("LOCAL_RANK", "4", "local rank 4 of 4"),
        ("LOCAL_WORLD_SIZE", "0", "local rank 1 of 0"),
        ("LOCAL_WORLD_SIZE", "9", "local rank 1 of 9"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000"),
        ("MASTER_PORT", "0", "MASTER_PORT=0"),
        ("RANK", "two", "RANK='two'"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE='-2'"),
        ("MASTER_PORT", "29500.0", "MASTER_PORT='29500.0'"),
    ],
)
def test_values_out_of_range_are_named(name, value, given):
    with pytest.raises(ConfigError) as caught:
        read_env({**RUN, name: value})
    assert given in caught.value.given and caught.value.why and name in caught.value.fix


def test_slurm_step():
    assert read_env(SLURM) == Env("slurm", 3, 4, 1, 2, "node03", 20000 + 123456 % 20000)


def test_slurm_ranks_agree_on_address_and_port_without_talking():
    first = read_env({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    last = read_env(SLURM)
    assert (first.master_addr, first.master_port) == (last.master_addr, last.master_port)


def test_slurm_address_and_port_of_ones_own():
    env = read_env({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert (env.master_addr, env.master_port) == ("10.0.0.1", 4321)


def test_a_batch_script_without_a_step_is_a_single_process():
    assert read_env({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == Env("single")


def test_torchrun_inside_slurm_comes_first():
    assert read_env({**SLURM, **RUN}).source == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node3", "node3"),
        ("node3,node4", "node3"),
        ("node[03-07,12],other", "node03"),
        ("node[12,14-15]", "node12"),
        ("gpu-a-[7-9]-ib", "gpu-a-7-ib"),
        ("rack[0-1]node[2-3]", "rack0node2"),
        ("a,b[1-2]", "a"),
    ],
)
def test_first_host_of_a_node_list(nodes, host):
    assert read_env({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == host


def test_node_lists_of_the_job_and_of_nothing():
    env = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NODELIST"}
    assert read_env({**env, "SLURM_JOB_NODELIST": "x[1-2]"}).master_addr == "x1"
    assert read_env({**env, "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}).master_addr == "10.1.1.1"
    assert read_env(env).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("tasks", "node", "size"), [("2(x2)", "1", 2), ("1,2", "1", 2), ("3(x2),1", "1", 3), ("4", "0", 4)]
)
def test_tasks_of_this_node(tasks, node, size):
    env = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert read_env(env).local_world_size == size


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_PROCID", "4"), ("SLURM_PROCID", "x"), ("SLURM_LOCALID", "2"), ("SLURM_STEP_TASKS_PER_NODE", "two")],
)
def test_slurm_values_out_of_range(name, value):
    with pytest.raises(ConfigError):
        read_env({**SLURM, name: value})


# ---- how many ranks a node has --------------------------------------------------------------------------------------


def on_nodes(env, layout="dp_replicate=-1,dp_shard=node"):
    """What ``sw.init`` makes of a layout under the environment of one rank."""
    found = read_env(env)
    return str(layout_of(layout, found.world_size, lambda: ranks_per_node(found, env)))


@pytest.mark.parametrize(
    ("env", "layout"),
    [
        (RUN, "dp_replicate=2,dp_shard=4"),
        ({**RUN, "GROUP_WORLD_SIZE": "2"}, "dp_replicate=2,dp_shard=4"),
        ({**RUN, "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, "dp_shard=8"),  # on one node, in any order
        (
            {**RUN, "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5", "GROUP_WORLD_SIZE": "2"},
            "dp_shard=8",
        ),  # started by a rank
        (SLURM, "dp_replicate=2,dp_shard=2"),
        (
            {**{k: v for k, v in SLURM.items() if k != "SLURM_STEP_TASKS_PER_NODE"}, "SLURM_NTASKS_PER_NODE": "2"},
            "dp_replicate=2,dp_shard=2",
        ),
        ({}, "dp_shard=1"),
    ],
)
def test_a_node_in_a_layout_is_the_ranks_of_a_node(env, layout):
    assert on_nodes(env) == layout and on_nodes(env, layout) == layout  # printed, it can be read again


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({k: v for k, v in RUN.items() if not k.startswith("LOCAL")}, "no LOCAL_WORLD_SIZE for this group"),
        ({**RUN, "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "2"}, "(2 nodes, 4 on this one)"),
        ({**RUN, "GROUP_WORLD_SIZE": "3"}, "(3 nodes, 4 on this one)"),  # 4, 2 and 2: a layout of its own on each
        ({**RUN, "WORLD_SIZE": "6"}, "4 does not divide 6"),
        ({**RUN, "RANK": "2", "LOCAL_RANK": "1"}, "--distribution=block"),  # numbered by turns
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,3"}, "different numbers of ranks (1, 3)"),
        ({**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, "are not neighbours"),  # srun --distribution=cyclic
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_TASKS_PER_NODE"}, "no SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_nodes_that_cannot_hold_a_group_of_shards_each_are_refused(env, words):
    with pytest.raises(LayoutError) as caught:
        on_nodes(env)
    assert words in str(caught.value)
    assert on_nodes(env, "dp_replicate=-1,dp_shard=2")  # with a number nothing of it matters
