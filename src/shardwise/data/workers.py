"""Reading micro-batches, in this process or in worker processes that are ahead of training: in the order in which a Loader
hands them out."""

import contextlib
import ctypes
import errno
import functools
import gc
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from shardwise._torch.data_workers import end_workers, no_signal_of_workers, why_ended
from shardwise.data.dataset_state import states_in
from shardwise.errors import ConfigError, ShardwiseError, UsageError
from shardwise.launch.imports import uncollected
from shardwise.launch.process import die_with_parent
from shardwise.world.rng import derive_seed, forked_generators, forked_streams, is_generator

_GRACE_S = 60.0  # for which a worker goes on after SIGTERM


class Task(NamedTuple):
    """A micro-batch that is to be read.

    Attributes:
        epoch: of the Loader.
        first: position of its first sample in the epoch's order.
        samples: indices in the dataset.
    """

    epoch: int
    first: int
    samples: tuple[int, ...]


Batch = Mapping[str, Tensor]


@dataclass
class Reader:
    """Reads micro-batches, each with random numbers of its own. In another thread than the main one, the global generators
    go on from where they are, as the thread that trains may draw from them.

    The arguments are those of a Loader.
    """

    dataset: Any
    collate: Callable[[list[Any]], Batch]
    prepare: Callable[[Batch], Batch] | None
    seed: int

    @functools.cached_property
    def _generators(self) -> dict[str, Any]:
        own = states_in(dataset=self.dataset, collate=self.collate, prepare=self.prepare).values
        return {place: value for place, value in own.items() if is_generator(value)}

    def __call__(self, task: Task) -> Batch:
        """Reads a micro-batch.

        Raises:
            ConfigError: ``collate`` or ``prepare`` return no mapping of tensors.
        """
        with self._numbers(task.epoch, task.first):
            return self._batch([self.dataset[i] for i in task.samples])

    def batch_of(self, samples: list[Any], epoch: int, first: int) -> Batch:
        """Makes a micro-batch of samples that were read already, of which the first one has this position; raises as a call."""
        with self._numbers(epoch, first):
            return self._batch(samples)

    def _batch(self, samples: list[Any]) -> Batch:
        batch = _mapping(self.collate(samples), "collate")
        return batch if self.prepare is None else _mapping(self.prepare(batch), "prepare")

    def _numbers(self, epoch: int, first: int) -> contextlib.AbstractContextManager[None]:
        seed = derive_seed(self.seed, "data", epoch, first)
        if threading.current_thread() is not threading.main_thread():
            return forked_generators(seed, self._generators)
        return forked_streams(seed, None, self._generators)


def read_ahead(reader: Reader, tasks: Iterable[Task], *, num_workers: int, prefetch: int) -> Iterator[Batch]:
    """What ``reader`` returns for each of ``tasks``, in their order, read by ``num_workers`` processes that are ``prefetch``
    tasks ahead each. The processes are those of a ``DataLoader``, and end with the iterator.

    Raises:
        UsageError: a worker was killed, or ended by itself; or there is no room for what it has read.
    """
    has_ended = RawValue(ctypes.c_bool, False)
    loader = DataLoader(
        _Reading(reader, num_workers),
        batch_size=None,
        sampler=_InOrder(tasks),
        num_workers=num_workers,
        prefetch_factor=prefetch,
        collate_fn=_as_read,
        worker_init_fn=functools.partial(_begin, has_ended, _parent()),
        generator=torch.Generator(),  # else it draws a number from the global one
    )
    batches: Any = None
    try:
        with uncollected(), no_signal_of_workers():
            batches = iter(loader)
        for batch in batches:
            if isinstance(batch, ShardwiseError):
                raise batch
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and batches is None:
            raise _no_shared_memory(num_workers, str(error)) from error
        why = why_ended(batches, error)
        if why is None:
            raise
        raise UsageError(
            f"Loader(num_workers={num_workers}), of which a worker process ended",
            why=why,
            fix=(
                "look whether memory has run out (each worker has the dataset)"
                if "exit status -9" in why
                else "look at what the dataset, collate and prepare call that ends a process: exit(), or native code that crashes"
            )
            + "; or read without workers, which shows where: num_workers=0",
        ) from error
    finally:
        has_ended.value = True
        if batches is not None:
            end_workers(batches)


class _Reading(Dataset[Any]):
    """The tasks as a dataset: one is read where DataLoader asks for a sample."""

    def __init__(self, reader: Reader, num_workers: int):
        self._reader, self._num_workers = reader, num_workers

    def __getitem__(self, index: Any) -> Batch | ShardwiseError:
        try:
            batch = dict(self._reader(index))  # a mapping of another kind may not be picklable
            # DataLoader would do it in a thread, whose errors are lost: the rank would wait for the batch for ever.
            for name, value in batch.items():
                _refuse_unfit(name, value, self._num_workers)
                _share(value, self._num_workers)
            return batch
        except ShardwiseError as error:  # which DataLoader could not make anew in the rank
            return error
        except Exception as error:
            if _can_be_pickled(type(error)):
                raise
            return UsageError(
                f"Loader(num_workers={self._num_workers}), of which a worker has raised {type(error).__name__}",
                why=f"{error}\n{traceback.format_exc()}",
                fix="look at the dataset, collate and prepare; the error's class cannot be pickled, as one that a function defines",
            )


def _can_be_pickled(value: Any) -> bool:
    with contextlib.suppress(Exception):
        pickle.dumps(value)
        return True
    return False


def _refuse_unfit(name: Any, value: Tensor, num_workers: int) -> None:
    """Raises UsageError for what cannot be handed over to another process."""
    why = None
    if value.requires_grad and not value.is_leaf:
        why = "it has an autograd history: a model has computed it, with gradients on"
    elif type(value) not in (Tensor, nn.Parameter) or not isinstance(name, str):
        try:
            pickle.dumps((name, value))
        except Exception as error:
            why = f"it cannot be pickled: {type(error).__name__}: {error}"
    if why is not None:
        raise UsageError(
            f"Loader(num_workers={num_workers}), of which a micro-batch has {name!r} that no worker can hand over",
            why=why,
            fix="make it in collate or in the dataset under torch.no_grad(), of plain tensors; or read without workers: num_workers=0",
        )


def _share(value: Tensor, num_workers: int) -> None:
    try:
        value.share_memory_()
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        raise _no_shared_memory(num_workers, str(error).partition("\n")[0]) from error


def _no_shared_memory(num_workers: int, said: str) -> UsageError:
    """The error of worker processes that cannot hand over what they read."""
    return UsageError(
        f"Loader(num_workers={num_workers}) without room in shared memory",
        why=f"worker processes hand over what they read in /dev/shm, and there is no room: {said}",
        fix="make it larger (docker run --shm-size=8g), use smaller micro-batches or prefetch=1, or read without workers: num_workers=0",
    )


class _InOrder(Sampler[Any]):
    def __init__(self, tasks: Iterable[Task]):
        self._tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)


def _as_read(batch: Any) -> Any:
    return batch


def _parent() -> int | None:
    """This process, with which workers are to be killed at once, also those that are stopped. None in a thread: the system would
    kill them with the thread."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else None


def _begin(has_ended: Any, parent: int | None, _number: int) -> None:
    """Called in a new worker. It was forked from a rank, whose signal handlers are not for it: a scheduler that ends a job
    signals all of its processes, and the rank still trains the window for which it reads. A worker ends with its rank in
    any case, as DataLoader looks after that."""
    if parent is not None:
        die_with_parent(parent)
    # What the rank has left to the garbage collector is not for this process to destroy: a process group's destructor waits
    # for threads that are not here, and crashes.
    gc.freeze()
    gc.enable()
    rank = os.getppid()

    def leave(*_: Any) -> None:
        if has_ended.value or os.getppid() != rank:
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _mapping(batch: Any, source: str) -> Mapping[str, Tensor]:
    if isinstance(batch, Mapping) and all(isinstance(value, Tensor) for value in batch.values()):
        return batch
    found = type(batch).__name__
    if isinstance(batch, Mapping):
        found = "a mapping with " + ", ".join(f"{k}: {type(v).__name__}" for k, v in batch.items())
    raise ConfigError(
        f"{source} returned {found}",
        why="a micro-batch is a mapping from names to tensors",
        fix=f"let {source}= return a dict such as {{'input_ids': tensor, 'labels': tensor}}",
    )
