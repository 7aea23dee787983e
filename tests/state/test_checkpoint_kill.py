"""SIGKILL at every named moment of a save, and at random ones: what was acknowledged loads, nothing torn does, nothing stays behind."""

import os
import random
import signal
import threading
import time

import pytest
from state.runs import Average, Texts, equal, make, run, state

import shardwise as sw
from shardwise.state.checkpoint.fault_points import POINTS, on_reach

RANKS, LAYOUT = 2, "dp_shard=2"
VICTIMS = {"rank 0": (0,), "another": (1,), "all": (1, 0)}
MATRIX = [(point, victims, mode) for point in POINTS for victims in VICTIMS for mode in ("sync", "async")]
# In each run of the tests every third point, once; all in soak.
SAMPLE = [(p, list(VICTIMS)[i // 3 % 3], ("sync", "async")[i % 2]) for i, p in enumerate(POINTS) if i % 3 == 1]
CASES = [
    *(pytest.param(*case, id="-".join(case)) for case in SAMPLE),
    *(pytest.param(*case, id="-".join(case), marks=pytest.mark.soak) for case in MATRIX if case not in SAMPLE),
]


def states(until: int, first: int = 0) -> dict[int, tuple]:
    """Step -> the whole state after it, from step ``first`` on, of a run without checkpoints."""
    world, model, step = make(LAYOUT)
    found = {}
    with world:
        for number, window in [(0, None), *_windows(world, until)]:
            if window is not None:
                step(window)
            if number >= first:
                found[number] = state(model, step.optim)
    return found


def _windows(world, until):
    loader = sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
    number = 0
    while number < until:
        for window in loader:
            number += 1
            yield number, window
            if number == until:
                return


def saving(root: str, until: int, mode: str, ack: str, arm) -> None:
    """Trains, and saves after each step; leaves word of each save that was acknowledged. ``arm(pids)`` is called first."""
    world, _, step = make(LAYOUT)
    average, loader = Average(), sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
    with world:
        arm(world.rank, world.gather(os.getpid()))
        with sw.CheckpointManager(
            root, step, keep=2, extra={"average": average}, async_save=mode == "async"
        ) as manager:
            manager.resume(loader)
            while step.num_steps < until:
                for window in loader:
                    step(window)
                    manager.save()
                    # With async_save a save returns when the one before it is on disk.
                    _tell(world, ack, step.num_steps - (mode == "async"))


def _tell(world, ack: str, step: int) -> None:
    if world.is_main:
        with open(f"{ack}.new", "w") as file:
            file.write(str(step))
        os.replace(f"{ack}.new", ack)  # it may be killed here too


class AtPoint:
    """Kills the victims when rank 0 reaches a point of its second save."""

    def __init__(self, point: str, victims: tuple[int, ...]):
        self.point, self.victims = point, victims

    def __call__(self, rank: int, pids: list[int]) -> None:
        seen = [0]

        def act(point: str) -> None:
            seen[0] += point == "begun"
            if point == self.point and seen[0] == 2:
                for victim in self.victims:
                    os.kill(pids[victim], signal.SIGKILL)
                time.sleep(5)  # another's death is felt where this rank waits next

        if rank == 0:
            on_reach(act)


class AtRandom:
    """Kills the victims some time after the first step."""

    def __init__(self, seed: int):
        chosen = random.Random(seed)
        self.victims = chosen.choice(list(VICTIMS.values()))
        self.delay = chosen.uniform(0.0, 1.2)

    def __call__(self, rank: int, pids: list[int]) -> None:
        def act() -> None:
            time.sleep(self.delay)
            for victim in self.victims:
                os.kill(pids[victim], signal.SIGKILL)

        if rank == 0:
            threading.Thread(target=act, daemon=True).start()


def _kill_and_check(ranks, tmp_path, expected, mode, arm) -> int:
    root, ack = tmp_path / "run", tmp_path / "ack"
    with pytest.raises(sw.RankError) as caught:
        ranks.run(saving, RANKS, str(root), 400, mode, str(ack), arm)
    assert "SIGKILL" in str(caught.value) or "-9" in str(caught.value), caught.value
    acknowledged = int(ack.read_text()) if ack.exists() else 0
    found = ranks.run(run, RANKS, LAYOUT, str(root), 0, async_save=False)[0]
    assert found["warnings"] == []  # nothing torn stands under a checkpoint's name
    began = found["began"]
    assert began >= acknowledged
    if began not in expected:  # it came further than runs that are killed at a named moment
        expected |= ranks.run(states, RANKS, began, began)[0]
    assert equal(found["first"], expected[began])
    ranks.run(run, RANKS, LAYOUT, str(root), began + 1, (began + 1,), async_save=False, keep=2)
    left = sorted(path.name for path in root.iterdir())
    assert left[:2] == [".lock", "latest"] and all(name.startswith("step-") for name in left[2:]), left
    return began


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run(states, RANKS, 20)[0]


@pytest.mark.quick("half-written-another-sync", "manifest-synced-rank 0-sync", "latest-another-async")
@pytest.mark.parametrize(("point", "victims", "mode"), CASES)
def test_a_kill_at_a_named_moment_loses_nothing_that_was_acknowledged(ranks, tmp_path, expected, point, victims, mode):
    began = _kill_and_check(ranks, tmp_path, expected, mode, AtPoint(point, VICTIMS[victims]))
    after = POINTS.index(point) >= POINTS.index("renamed")
    assert began == (2 if after else 1) or (victims == "another" and began in (1, 2))


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 120))])
def test_a_kill_at_a_random_moment_loses_nothing_that_was_acknowledged(ranks, tmp_path, expected, seed):
    _kill_and_check(ranks, tmp_path, expected, ("sync", "async")[seed % 2], AtRandom(seed))
