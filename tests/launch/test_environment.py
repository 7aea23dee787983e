"""What launchers set in the environment: all that read it agree on who has started a process, and as which rank."""

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.environment import is_rank, local_rank, rank_and_size
from shardwise.world.env import read_env

STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
UNSET = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "-1")
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "a_rank", "place", "local"),
    [
        ({}, False, (0, 1), 0),
        ({"RANK": "0", "WORLD_SIZE": "1", **ADDRESS}, True, (0, 1), 0),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **ADDRESS}, True, (3, 8), 1),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", **ADDRESS, **STEP}, True, (3, 8), 3),
        ({"RANK": "-1"}, False, (0, 1), 0),
        ({"RANK": "", "WORLD_SIZE": ""}, False, (0, 1), 0),
        (UNSET, False, (0, 1), 0),
        (STEP, True, (1, 2), 1),
        ({**UNSET, **STEP}, True, (1, 2), 1),
        ({"WORLD_SIZE": "1", **STEP}, True, (1, 2), 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False, (0, 1), 0),  # an interactive shell
        ({"SLURM_STEP_NUM_TASKS": "2"}, False, (0, 1), 0),
        ({"SLURM_STEP_NUM_TASKS": "", "SLURM_PROCID": ""}, False, (0, 1), 0),
    ],
)
def test_all_readers_agree_on_who_started_a_process(monkeypatch, environ, a_rank, place, local):
    assert (is_rank(environ), rank_and_size(environ), local_rank(environ)) == (a_rank, place, local)
    env = read_env(environ)
    assert (env.rank, env.world_size, env.local_rank) == (*place, local)
    for name in (*UNSET, *STEP):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (is_rank(), rank_and_size(), local_rank()) == (a_rank, place, local)


@pytest.mark.parametrize("environ", [{"RANK": "one", "WORLD_SIZE": "2"}, {**STEP, "SLURM_STEP_NUM_TASKS": "two"}])
def test_what_is_no_number_is_named(environ):
    name, value = next((name, value) for name, value in environ.items() if not value.isdigit())
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        rank_and_size(environ)
