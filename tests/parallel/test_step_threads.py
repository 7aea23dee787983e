"""Under a launcher that gives each rank one thread, the step of offloaded parameters takes the rank's part of the cores."""

import contextlib
import os

import pytest
import torch
from torch import nn

import shardwise as sw


class OwnStep(torch.optim.AdamW):
    """Not known to be elementwise: it steps on DTensors."""


def _threads(offload, kind, env, meets=()):
    """The number of threads before, in and after each of two steps, of a script on a node with 8 cores."""
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "SHARDWISE_SET_OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):
        os.environ.pop(name, None)
    os.environ.update(env)
    os.cpu_count, cpu_count = (lambda: 8), os.cpu_count
    os.sched_getaffinity, affinity = (lambda pid: set(range(8))), os.sched_getaffinity
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    seen = []

    def look(*_):
        seen.append(torch.get_num_threads())
        if "fails" in meets:
            raise ArithmeticError

    try:
        with sw.init("dp_shard=-1", device="cpu") as world:
            sharding = sw.Sharding(engine="fsdp2", offload=offload)
            model = sw.parallelize(lambda: nn.Linear(4, 2), world, sharding=sharding)
            optim = (OwnStep if kind == "own" else torch.optim.AdamW)(model.parameters(), fused=kind == "fused")
            optim.register_step_pre_hook(look)
            if kind != "plain" and kind != "own":
                sw.local_optimizer(optim)
            if "sets" in meets:
                torch.set_num_threads(3)
            for _ in range(2):
                seen.append(torch.get_num_threads())
                model.weight.grad = torch.zeros_like(model.weight)
                with contextlib.suppress(ArithmeticError):
                    optim.step()
            seen.append(torch.get_num_threads())
    finally:
        os.cpu_count, os.sched_getaffinity = cpu_count, affinity
    return seen


TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "job"}


@pytest.mark.parametrize("kind", ["local", "fused", "plain", "own"])
def test_an_offloaded_step_under_torchrun_takes_the_ranks_part_of_the_cores(ranks, kind):
    assert ranks.run(_threads, 2, True, kind, TORCHRUN) == [[1, 4, 1, 4, 1]] * 2
    assert ranks.run(_threads, 1, False, kind, TORCHRUN) == [[1, 1, 1, 1, 1]], "nothing is offloaded"


def test_so_it_does_under_our_own_launcher(ranks):
    ours = {"OMP_NUM_THREADS": "1", "SHARDWISE_SET_OMP_NUM_THREADS": "1"}
    assert ranks.run(_threads, 1, True, "local", ours) == [[1, 8, 1, 8, 1]]


def test_a_step_that_fails_leaves_the_threads_as_they_were(ranks):
    assert ranks.run(_threads, 1, True, "local", TORCHRUN, ("fails",)) == [[1, 8, 1, 8, 1]]


@pytest.mark.parametrize(
    ("env", "meets", "wanted"),
    [
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "job"}, (), 2),
        ({"OMP_NUM_THREADS": "1"}, (), 1),
        (TORCHRUN, ("sets",), 3),
    ],
    ids=["in the environment", "without a launcher", "by a call"],
)
def test_a_number_that_the_user_has_set_stays(ranks, env, meets, wanted):
    assert ranks.run(_threads, 1, True, "local", env, meets) == [[wanted] * 5]


def test_the_limit_of_openmp_is_kept(ranks):
    env = {**TORCHRUN, "OMP_THREAD_LIMIT": "3"}
    assert ranks.run(_threads, 1, True, "plain", env) == [[1, 3, 1, 3, 1]]
