"""Worker processes of a Loader: the windows that it gives without them, in their order, whoever reads and wherever a run resumes."""

import collections
import contextlib
import errno
import gc
import io
import multiprocessing
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from data.test_data import fake_world
from torch import nn
from torch.utils.data import Subset

import shardwise as sw
from shardwise.data import workers
from shardwise.data.loader import Loader
from shardwise.errors import UsageError

NUM = 23


class Rows:
    """Samples by number, with the process that read them."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"i": torch.tensor(i), "x": torch.arange(3) + i, "by": torch.tensor(os.getpid())}


class Drawing(Rows):
    """Draws from every kind of generator for each sample."""

    def __init__(self) -> None:
        self.rng, self.numpy, self.python = torch.Generator(), np.random.default_rng(3), random.Random(4)

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = [torch.rand(()), torch.rand((), generator=self.rng), np.random.rand(), self.numpy.random()]
        return {"i": torch.tensor(i), "drawn": torch.tensor([*drawn, random.random(), self.python.random()]).double()}


class Failing(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 7:
            raise KeyError("sample 7 is broken")
        return super().__getitem__(i)


class Dying(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class Counting(Rows):
    """A curriculum."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def loaders(size: int, dataset: Any = None, micro: int = 2, batch: int = 6, **options: Any) -> list[Loader]:
    dataset = Rows() if dataset is None else dataset
    made = [fake_world(rank, size, seed=1) for rank in range(size)]
    return [Loader(dataset, world, global_batch=batch, micro_batch=micro, **options) for world in made]


def seen(per_rank: list[Loader], num: int | None = None, key: str = "i") -> list[Any]:
    """Of the next windows: index of each micro-batch, whether it is a padding, and what is in it."""
    found = []
    for i, windows in enumerate(zip(*per_rank, strict=True)):
        found.append([[(b.index, b.padding, b.window, b[key].tolist()) for b in window] for window in windows])
        if i + 1 == num:
            break
    return found


def children() -> int:
    gc.collect()
    return len(multiprocessing.active_children())


@pytest.mark.quick("1", "4")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_are_those_without_workers_over_two_epochs(size):
    plain, ahead = loaders(size), loaders(size, num_workers=2)
    for _ in range(2):
        assert seen(plain) == seen(ahead)
    assert children() == 0


def test_samples_are_read_by_the_workers():
    (loader,) = loaders(1, num_workers=2, prefetch=1)
    readers = {pid for window in loader for batch in window for pid in batch["by"].tolist()}
    assert len(readers) == 2 and os.getpid() not in readers


def test_a_position_goes_on_with_other_ranks_and_workers():
    whole = seen(loaders(1))
    first = loaders(2, num_workers=2)
    begun = seen(first, num=2)
    others = loaders(3)
    for loader in others:
        loader.load_state_dict(first[0].state_dict())
    rest = seen(others)

    def samples(windows: list[Any]) -> list[list[int]]:
        return [sorted(i for rank in w for _, padding, _, part in rank if not padding for i in part) for w in windows]

    assert samples(begun) + samples(rest) == samples(whole)
    assert sorted(i for window in samples(whole) for i in window) == list(range(NUM))


def drawn(size: int, num_workers: int) -> list[dict[int, Any]]:
    """Numbers drawn for each sample, in two epochs."""
    per_rank = loaders(size, Drawing(), num_workers=num_workers)
    found = []
    for _ in range(2):
        batches = [b for loader in per_rank for window in loader for b in window if not b.padding]
        found.append({i: row for b in batches for i, row in zip(b["i"].tolist(), b["drawn"].tolist(), strict=True)})
    return found


def test_random_numbers_depend_on_the_seed_the_epoch_and_the_micro_batch_alone():
    first, *others = [drawn(size, num) for size, num in [(1, 1), (1, 2), (3, 2), (1, 0), (3, 0)]]
    assert all(other == first for other in others)
    for numbers in zip(*[row for epoch in first for row in epoch.values()], strict=True):
        assert len(set(numbers)) == 2 * NUM


class Steps:
    """Transforms in a row, as torchvision has them."""

    def __init__(self, *steps: Any) -> None:
        self.transforms = list(steps)


class Wrapped(Rows):
    """Draws from a generator that lies four attributes and a list deep."""

    def __init__(self) -> None:
        self.transform = Steps(Steps(Drawing()))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.transform.transforms[0].transforms[0][i]


def test_generators_deep_inside_of_a_dataset_are_found():
    part = Subset(Subset(Wrapped(), range(NUM)), range(NUM))
    with_workers, without = [seen(loaders(1, part, num_workers=num), key="drawn") for num in (2, 0)]
    assert with_workers == without


def history(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.nn.functional.linear(torch.ones(2, 3), torch.ones(3, 3, requires_grad=True))}


class Unpicklable(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not this one")


def subclass(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.ones(2).as_subclass(Unpicklable)}


@pytest.mark.parametrize(("collate", "why"), [(history, "autograd history"), (subclass, "not this one")])
def test_a_batch_that_no_worker_can_hand_over_is_refused(collate, why):
    with pytest.raises(UsageError, match=f"'x' that no worker can hand over(.|\n)*{why}"):
        seen(loaders(1, collate=collate, num_workers=1), key="x")


def raises(samples: list[Any]) -> Any:
    class LocalError(Exception):
        pass

    raise LocalError("row 5 is broken")


def test_an_error_that_cannot_be_pickled_is_told():
    with pytest.raises(UsageError, match=r"a worker has raised LocalError(.|\n)*row 5 is broken(.|\n)*in raises"):
        seen(loaders(1, collate=raises, num_workers=1))


def by_default(samples: list[Any]) -> Any:
    return collections.defaultdict(lambda: None, {"i": torch.stack([sample["i"] for sample in samples])})


def test_a_mapping_that_cannot_be_pickled_is_handed_over_as_a_dict():
    with_worker, without = [seen(loaders(1, collate=by_default, num_workers=num)) for num in (1, 0)]
    assert with_worker == without


def _states():
    return random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_of_this_process_are_left_alone(num_workers):
    states = _states()
    assert len(seen(loaders(1, Drawing(), num_workers=num_workers), key="drawn")) == 4
    assert states == _states()


def test_a_thread_that_reads_leaves_alone_what_the_main_thread_draws_from():
    with ThreadPoolExecutor(1) as reader:
        first, second = (reader.submit(seen, loaders(1, Drawing()), key="drawn").result() for _ in range(2))
    assert first != second


def test_a_loop_that_is_left_early_ends_the_workers():
    (loader,) = loaders(1, num_workers=2)
    for _ in loader:
        assert children() == 2
        break
    assert children() == 0


def test_an_error_of_the_dataset_is_shown_as_it_is():
    assert "KeyError: Caught KeyError in DataLoader worker" in failed(loaders(1, Failing(), num_workers=2)[0])
    assert children() == 0


def failed(loader: Loader) -> str:
    try:
        list(loader)
    except Exception as error:  # forgotten with its frames when this returns
        return f"{type(error).__name__}: {str(error).strip(chr(34) + chr(39))}"
    raise AssertionError("nothing failed")


def test_a_worker_that_was_killed_is_named_as_such():
    told = failed(loaders(1, Dying(), num_workers=2)[0])
    assert (
        told.startswith("UsageError: Loader(num_workers=2), of which a worker process ended")
        and "exit status -9" in told
    )
    assert children() == 0


def test_a_worker_that_ends_raises_nothing_where_this_process_does_not_wait_for_it():
    windows = iter(loaders(1, num_workers=2)[0])
    next(windows)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.5)  # a handler of SIGCHLD would raise here
    with pytest.raises(sw.UsageError, match="of which a worker process ended"):
        list(windows)
    assert children() == 0


def test_no_room_in_shared_memory_is_told(monkeypatch):
    """DataLoader writes what a worker has read there in a thread, and waits for ever where it has failed."""

    def full(tensor):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device (28)")

    def no_lock(loader):
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name, broken in ((torch.Tensor, "share_memory_", full), (workers.DataLoader, "__iter__", no_lock)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            told = failed(loaders(1, num_workers=2)[0])
        assert "UsageError: Loader(num_workers=2) without room in shared memory" in told and "--shm-size" in told
        assert children() == 0


class Leftover:
    """Garbage that may be destroyed only in the process that made it, as a process group with its threads."""

    def __init__(self, folder):
        self.folder, self.pid, self.me = folder, os.getpid(), self

    def __del__(self):
        if os.getpid() != self.pid:
            (self.folder / f"destroyed in {os.getpid()}").touch()


class Collects(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        gc.collect()
        return super().__getitem__(i)


def test_workers_destroy_nothing_that_the_rank_has_left_to_the_garbage_collector(tmp_path):
    (loader,) = loaders(1, Collects(), num_workers=2)
    gc.collect()
    gc.disable()
    try:
        Leftover(tmp_path)
        windows = list(loader)
        assert windows and not gc.isenabled() and list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    assert list(loader) and gc.isenabled()


def test_workers_go_on_where_all_processes_of_a_job_are_asked_to_stop(monkeypatch):
    (loader,) = loaders(1, num_workers=2, prefetch=1, shuffle=False)
    samples = []
    for window in loader:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGTERM)
            os.kill(worker.pid or 0, signal.SIGINT)
        samples += [i for batch in window for i in batch["i"].tolist()]
    assert samples == list(range(NUM))


def test_a_worker_that_was_asked_to_stop_does_not_stay_for_ever(monkeypatch):
    monkeypatch.setattr(workers, "_GRACE_S", 0.2)
    (loader,) = loaders(1, num_workers=1)
    next(windows := iter(loader))
    (worker,) = multiprocessing.active_children()
    with contextlib.suppress(RuntimeError):  # torch raises one wherever this process is, if it sees the end first
        os.kill(worker.pid or 0, signal.SIGTERM)
        worker.join(10)
    assert worker.exitcode == -signal.SIGALRM
    del windows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, r"num_workers=-1"),
        ({"num_workers": True}, r"num_workers=True"),
        ({"num_workers": 2, "prefetch": 0}, r"prefetch=0"),
        ({"prefetch": 2}, r"prefetch=2 with num_workers=0"),
    ],
)
def test_what_means_nothing_is_refused(options, words):
    with pytest.raises(sw.ConfigError, match=words):
        loaders(1, **options)


def test_data_with_a_state_of_its_own_is_refused():
    with pytest.raises(sw.UsageError, match=r"data with a state of its own, dataset"):
        loaders(1, Counting(), num_workers=1)


def test_collate_must_return_tensors_in_a_worker_too():
    told = failed(loaders(1, num_workers=1, collate=lambda rows: {"rows": rows})[0])
    assert told.startswith("ConfigError: collate returned a mapping with rows: list")


class Slow(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(0.05)
        return {"input": torch.ones(3), "labels": torch.tensor(1)}


def waited(num_workers: int) -> tuple[list[float], float]:
    """What each step says, and how long all steps took with the reading before them."""
    with sw.init("dp_replicate=2", device="cpu", timeout_s=60) as world:
        model = sw.parallelize(nn.Linear(3, 2), world)
        step = sw.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch["labels"], reduction="sum"),
            forward=lambda model, batch: model(batch["input"]),
        )
        loader = sw.Loader(Slow(), world, global_batch=4, micro_batch=2, num_workers=num_workers)
        began = time.perf_counter()
        return [step(window).data_s for window, _ in zip(loader, range(3), strict=False)], time.perf_counter() - began


def test_a_step_says_how_long_it_waited_for_data(ranks):
    (first, took), (second, took_too) = ranks.run(waited, 2, 0)
    assert first == second and all(seconds >= 0.1 for seconds in first)
    assert sum(first) < max(took, took_too)


class SlowOnOneRank(Rows):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if os.environ.get("RANK") == "1" and i == 1:
            time.sleep(4.5)
        return super().__getitem__(i)


def trains_on_slow_data():
    with sw.init("dp_replicate=2", device="cpu", timeout_s=2) as world:
        model = sw.parallelize(lambda: nn.Linear(3, 1), world)
        step = sw.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda output, _: output.sum(),
            count=lambda batch: len(batch["x"]),
            forward=lambda model, batch: model(batch["x"].float()),
        )
        for window in sw.Loader(SlowOnOneRank(), world, global_batch=NUM, micro_batch=1, shuffle=False):
            step(window)


def told_of_slow_data():
    try:
        trains_on_slow_data()
    except sw.RankError as error:
        return str(error)


def test_a_rank_that_reads_for_long_is_named_with_that(ranks):
    told = ranks.run(told_of_slow_data, 2, timeout_s=60)[0]
    assert told is not None and "rank 1 is reading data" in told


def reads_for_long():
    """All ranks at once, where no collective has a timeout."""
    with sw.init("dp_shard=2", device="cpu", timeout_s=8) as world:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), world.watch.doing("reading data"):
            time.sleep(3.4)
        return said.getvalue()


def test_ranks_that_all_read_for_long_say_so(ranks):
    for said in ranks.run(reads_for_long, 2, timeout_s=60):
        assert re.search(r"rank \d has been reading data for [23] s \(test_workers.py:\d+ in reads_for_long\)", said), (
            said
        )
