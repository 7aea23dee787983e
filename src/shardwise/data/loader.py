"""The data loader: each optimizer step gets the same samples under every data-parallel degree, split over the ranks.

The order of an epoch is a permutation that depends on (seed, epoch) alone. A *window* is the next ``global_batch``
samples of that order: those of one optimizer step. It is cut into micro-batches of ``micro_batch`` samples, and
micro-batch ``g`` goes to data-parallel rank ``g % dp``::

    order    7 2 9 4 | 0 5 1 8 | 3 6        global_batch=4, micro_batch=1, dp=2, ten samples
    window   0         1         2
    rank 0   7 9       0 1       3
    rank 1   2 4       5 8       6

The position is counted in samples of the global order, never in batches of a rank: a run may stop with four ranks and
resume with two, and no sample is seen twice or missed.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise.data.batch import IGNORED, MicroBatch, Place, default_collate
from shardwise.data.dataset_state import DatasetState, states_in
from shardwise.data.labels import make_labels, shift_labels
from shardwise.data.order import sample_order
from shardwise.data.same_dataset import digest_of_dataset
from shardwise.data.workers import Reader, Task, read, read_ahead
from shardwise.errors import ConfigError, UsageError
from shardwise.world.rng import is_generator

__all__ = [
    "IGNORED",
    "Loader",
    "MicroBatch",
    "default_collate",
    "loader_of",
    "make_labels",
    "mark_used",
    "sample_order",
    "shift_labels",
]

_LOADERS: "weakref.WeakValueDictionary[int, Loader]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_START = (-1, -1)  # stands for the place before the first window
_PREFETCH = 2  # as DataLoader's
_KEPT = 64  # the dataset's own state is kept for this many windows read ahead of training


class DataWorld(Protocol):
    """What the loader needs of a world: the data-parallel axis, the seed, the device."""

    seed: int

    @property
    def device(self) -> torch.device: ...

    def axis(self, name: str) -> Any: ...


class Loader:
    """Data loader and distributed sampler in one: yields, for each optimizer step of an epoch, the list of this rank's
    micro-batches (a window), on the world's device.

    Each ``iter()`` runs from the current position to the end of the current epoch: from its start, unless a loop was
    left early or a position was loaded. Each sample is seen once per epoch; the last window of an epoch may be smaller.
    Every rank gets equally many micro-batches of a window; a rank that has fewer gets paddings, copies marked
    ``.padding``. Each rank reads only its own samples. No communication: the ranks agree because the order is a
    function of the seed.

    Args:
        dataset: anything with ``len()`` and ``[i]``; the length must not change.
        world: has the data-parallel rank and size, the seed and the device.
        global_batch: samples of one optimizer step, over all ranks.
        micro_batch: samples of one forward of one rank; must divide ``global_batch``.
        collate: list of samples -> mapping of tensors; default :func:`default_collate`.
        prepare: mapping -> mapping, applied to each micro-batch; default :func:`make_labels`, which makes ``labels``
            where there are none and leaves existing ones, which must be aligned, as they are; :func:`shift_labels`
            also shifts existing ones (collators of Hugging Face and TRL); None leaves the batch as it is.
        shuffle: False keeps the dataset's own order in every epoch.
        num_workers: processes that read micro-batches ahead, as those of a DataLoader; 0: they are read when they are
            asked for, by the process that trains. Samples and their order are the same for any number, and so is what a
            resumed run reads.
        prefetch: micro-batches that each worker is ahead.
        pin_memory: on cuda: micro-batches are copied from page-locked memory, for which the host does not wait.

    In workers, random numbers that the dataset, ``collate`` and ``prepare`` draw depend on (seed, epoch, micro-batch) alone,
    from the global generators of torch, Python and numpy as from those in the dataset's attributes: they are the same for
    any number of workers and ranks. Without workers all go on from their state, which checkpoints keep.

    Attributes:
        waited_s: seconds that reading the last window has kept this process from training.

    Raises:
        ConfigError: sizes that do not fit, an empty dataset, options that have no effect together.
        UsageError: a dataset without a length or without ``[i]``; with workers, one with a state of its own.

    Example::

        loader = Loader(dataset, world, global_batch=64, micro_batch=4)
        for window in loader:       # one epoch
            out = step(window)
    """

    def __init__(
        self,
        dataset: Any,
        world: DataWorld,
        *,
        global_batch: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Mapping[str, Tensor]] | None = None,
        prepare: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = make_labels,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch: int | None = None,
        pin_memory: bool = True,
    ):
        _check_sizes(global_batch, micro_batch)
        _check_workers(num_workers, prefetch)
        self.num_workers, self.prefetch, self.pin_memory = num_workers, prefetch or _PREFETCH, pin_memory
        self.waited_s = 0.0
        self.dataset, self.world = dataset, world
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.collate, self.prepare, self.shuffle = collate or default_collate, prepare, shuffle
        self.num_samples = _length(dataset)
        self.digest = digest_of_dataset(dataset)
        self.seed = int(world.seed)
        self.epoch = 0
        self._position = 0
        self._number = next(_NUMBERS)
        _LOADERS[self._number] = self
        self._begin()
        self._turn = 0  # counts iterators and loaded positions, so that an old iterator notices it
        if num_workers:
            _refuse_own_state(self.own_states())

    def __len__(self) -> int:
        """The number of windows (optimizer steps) of a whole epoch."""
        return -(-self.num_samples // self.global_batch)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self._turn += 1
        turn = self._turn
        if self._position >= self.num_samples:
            self._next_epoch()
        batches = self._batches()
        while self._position < self.num_samples:
            began = time.perf_counter()
            place = Place.of(self.epoch, self._position, self._number)
            self._reading(place)
            window = self._window(place, batches)
            self.waited_s = place.waited_s = time.perf_counter() - began
            # Before the yield: while the caller has a window, the position is already after it.
            self._position = min(self._position + self.global_batch, self.num_samples)
            self._num_handed_out += 1
            yield window
            if turn != self._turn:
                raise UsageError(
                    "a loop over a Loader that was started or repositioned inside the loop",
                    why="a loader has one position, and two loops would share the samples between them",
                    fix="finish or leave the loop first, or make a second Loader",
                )
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self._position = self.epoch + 1, 0

    def _window(self, place: Place, batches: Iterator[Mapping[str, Tensor]]) -> list[MicroBatch]:
        """This rank's micro-batches of the window at ``place``; ``batches`` are the next ones that it reads."""
        axis = self.world.axis("dp")
        place.num_micro = num_micro = self._num_micro(place[1])
        own = self._own(place[1])
        mine = [self._on_device(next(batches), index, place) for index in own]
        if own[0] != axis.rank:  # a rank without its own micro-batch copies the first one of the window
            mine = [MicroBatch(mine[0], index=axis.rank, padding=True, window=place)]
        for index in range(axis.rank + len(mine) * axis.size, -(-num_micro // axis.size) * axis.size, axis.size):
            mine.append(MicroBatch(mine[0], index=index, padding=True, window=place))
        return mine

    def _num_micro(self, start: int) -> int:
        """Micro-batches over all ranks of the window that begins with the sample at ``start``."""
        return -(-(min(start + self.global_batch, self.num_samples) - start) // self.micro_batch)

    def _own(self, start: int) -> list[int]:
        """Indices of the micro-batches that this rank reads in that window."""
        axis = self.world.axis("dp")
        return list(range(axis.rank, self._num_micro(start), axis.size)) or [0]

    def _tasks(self) -> Iterator[Task]:
        """What is read from the current position to the end of the epoch."""
        epoch = self.epoch
        for start in range(self._position, self.num_samples, self.global_batch):
            stop = min(start + self.global_batch, self.num_samples)
            for index in self._own(start):
                first = start + index * self.micro_batch
                samples = np.arange(first, min(first + self.micro_batch, stop))
                if self.shuffle:
                    samples = sample_order(samples, self.num_samples, seed=self.seed, epoch=epoch)
                yield Task(epoch, first, tuple(map(int, samples)))

    def _batches(self) -> Iterator[Mapping[str, Tensor]]:
        if not self.num_workers:
            return map(self._read_here, self._tasks())
        reader = Reader(self.dataset, self.collate, self.prepare, self.seed)
        return read_ahead(reader, self._tasks(), num_workers=self.num_workers, prefetch=self.prefetch)

    def _read_here(self, task: Task) -> Mapping[str, Tensor]:
        # Not with numbers of its own: the caller may read in a thread, beside a forward that draws from the same generators.
        return read(task, self.dataset, self.collate, self.prepare)

    def _on_device(self, batch: Mapping[str, Tensor], index: int, place: Place) -> MicroBatch:
        if self.world.device.type == "cpu":
            return MicroBatch(batch, index=index, window=place)
        is_locked = self.world.device.type == "cuda" and self.pin_memory
        if is_locked:  # else the host waits for the copy, and for all that the device does before it
            batch = {name: value if value.is_cuda else _page_locked(value) for name, value in batch.items()}
        on_device = {name: value.to(self.world.device, non_blocking=is_locked) for name, value in batch.items()}
        # What is not locked is the dataset's own memory, which it may write again.
        is_kept = is_locked and not any(value.is_cuda for value in batch.values())
        return MicroBatch(on_device, index=index, window=place, host=batch if is_kept else None)

    # ---- what was used -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Starts counting the windows that are read and used, from the current position."""
        self._begun = self.epoch, self._position
        self._used: tuple[int, int] | None = None
        self._num_handed_out = 0
        self._read: tuple[int, int] | None = None  # the last window whose reading began
        # The dataset's state after each window not yet used: if windows are read ahead, its state now is not the one
        # after the last used window.
        self._states: dict[tuple[int, int], DatasetState] = {}

    def _reading(self, place: Place) -> None:
        """Keeps the dataset's own state from before the window at ``place`` is read."""
        own = self.own_states()
        if own:
            self._states[self._read or _START] = own.taken()
            while len(self._states) > _KEPT:
                self._states.pop(next(iter(self._states)))
        self._read = tuple(place)

    def mark_used(self, place: tuple[int, int]) -> None:
        """Notes that the window at ``place`` was trained or evaluated: a resumed run continues after it."""
        self._used = tuple(place)
        for older in [window for window in list(self._states) if window < self._used]:
            self._states.pop(older, None)

    def used_state_dict(self, num_trained: int | None) -> tuple[dict[str, Any], int]:
        """The :meth:`state_dict` after the last window that was trained or evaluated, and 0. If the windows have lost
        their places: the current position, and the number of windows read beyond the trained ones.

        Args:
            num_trained: windows that were trained since the loader's position was set; None: not known.
        """
        if self._used is not None:
            epoch, start = self._used
            return self._state_at(epoch, min(start + self.global_batch, self.num_samples)), 0
        if num_trained == 0:
            return self._state_at(*self._begun), 0
        return self.state_dict(), max(0, self._num_handed_out - (num_trained or self._num_handed_out))

    def own_states(self) -> DatasetState:
        """The stateful objects in the dataset, ``collate`` and ``prepare``."""
        return states_in(dataset=self.dataset, collate=self.collate, prepare=self.prepare)

    def used_states(self) -> DatasetState | None:
        """The states of :meth:`own_states` after the last used window; None: it was read in another process, or too
        long ago."""
        own = self.own_states()
        if self._read == self._used:
            return own.taken()
        return self._states.get(self._used or _START)

    def _state_at(self, epoch: int, position: int) -> dict[str, Any]:
        if position >= self.num_samples:
            epoch, position = epoch + 1, 0
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position after the last window yielded, as plain numbers; the same on every rank."""
        return self._state_at(self.epoch, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a position, under any data-parallel degree, global batch and micro-batch.

        The order of samples is that of the run that saved the position: its seed replaces the world's.

        Raises:
            ConfigError: the position belongs to another dataset or another order.
        """
        self.check_state_dict(state)
        self.epoch, self._position, self.seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
        self._turn += 1
        self._begin()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises what :meth:`load_state_dict` would raise; changes nothing."""
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise ConfigError(
                f"a loader position without {', '.join(missing)}",
                why=f"it has {', '.join(map(str, state)) or 'nothing'}",
                fix="give what Loader.state_dict() returned",
            )
        for key, mine in (("num_samples", self.num_samples), ("shuffle", self.shuffle)):
            if state[key] != mine:
                raise ConfigError(
                    f"a loader position with {key}={state[key]} for a loader with {key}={mine}",
                    why="the position counts samples of one order; in another, samples would be repeated or missed",
                    fix=f"use the dataset and options of the interrupted run ({key}={state[key]}), or start from the beginning",
                )


def mark_used(batches: Iterable[Any]) -> None:
    """Notes in the Loaders of these micro-batches that they were trained or evaluated."""
    for place in dict.fromkeys(getattr(batch, "window", None) for batch in batches):
        loader = loader_of(place)
        if loader is not None and place is not None:
            loader.mark_used(place)


def loader_of(place: tuple[int, int] | None) -> Loader | None:
    """The Loader that the window at ``place`` is from, if it is in this process; else None."""
    if not isinstance(place, Place) or place.loader is None:
        return None
    return _LOADERS.get(place.loader)


def _check_sizes(global_batch: int, micro_batch: int) -> None:
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r}", why="it counts samples", fix=f"give {name} as an integer >= 1")
    if global_batch % micro_batch:
        near = max(d for d in range(1, min(micro_batch, global_batch) + 1) if global_batch % d == 0)
        raise ConfigError(
            f"global_batch={global_batch} with micro_batch={micro_batch}",
            why=f"a window of {global_batch} samples cannot be cut into micro-batches of {micro_batch}",
            fix=f"use micro_batch={near}, or global_batch={-(-global_batch // micro_batch) * micro_batch}",
        )


def _check_workers(num_workers: int, prefetch: int | None) -> None:
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 0:
        raise ConfigError(f"num_workers={num_workers!r}", why="it counts processes", fix="give it as an integer: 0, 2")
    if prefetch is None:
        return
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 1:
        raise ConfigError(
            f"prefetch={prefetch!r}", why="it counts micro-batches", fix="give it as an integer: 2, or leave it out"
        )
    if not num_workers:
        raise ConfigError(
            f"prefetch={prefetch} with num_workers=0",
            why="nothing is read ahead without workers, so it would have no effect",
            fix="give num_workers too: num_workers=2; or leave prefetch out",
        )


def _refuse_own_state(found: DatasetState) -> None:
    place = next((place for place, value in found.values.items() if not is_generator(value)), None)
    if place is not None:
        raise UsageError(
            f"Loader(num_workers=...) of data with a state of its own, {place}",
            why="its state_dict would advance in the workers, each of which has a copy, and a checkpoint would keep another",
            fix="read without workers: num_workers=0; or let what a sample is depend on its number alone",
        )


def _length(dataset: Any) -> int:
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a DataLoader where a dataset goes",
            why="it makes batches in an order of its own, which neither ranks nor a resumed run would share",
            fix="pass loader.dataset; Loader makes the batches itself (global_batch=, micro_batch=, shuffle=, collate=)",
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a dataset of type {type(dataset).__name__} without len() and [i]",
            why="each sample must be found by its number, so that every rank count and every resume sees the same",
            fix="give a dataset with __len__ and __getitem__; a stream can be written to a .npy file first",
        )
    length = len(dataset)
    if length < 1:
        raise ConfigError(
            f"an empty dataset ({type(dataset).__name__})",
            why="there is no sample to make a window of",
            fix="check the path and the filters that made the dataset",
        )
    return length


def _page_locked(tensor: Tensor) -> Tensor:
    """A copy, always: the dataset may write its own tensors again before the device has them."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
