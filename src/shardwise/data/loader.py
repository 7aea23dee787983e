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

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.config.keywords import public_call
from shardwise.data.batch import MicroBatch, Place, Transfer, default_collate
from shardwise.data.dataset_state import DatasetState, states_in
from shardwise.data.labels import make_labels
from shardwise.data.loader_checks import (
    OF_DATA_LOADER,
    check_flags,
    check_sizes,
    check_stream,
    check_weights,
    check_workers,
    length_of,
    refuse_data_loader,
    refuse_other_position,
    refuse_own_state,
)
from shardwise.data.order import TokenBudget, WeightedOrder, sample_order
from shardwise.data.same_dataset import digest_of_dataset
from shardwise.data.stream import Stream, empty_dataset, is_stream
from shardwise.data.workers import Reader, Task, read_ahead
from shardwise.errors import UsageError

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

    A dataset that is only iterable (a stream) is read in its own order: each rank reads all samples and keeps its own. A
    run that resumes goes on by the dataset's ``state_dict``, under any number of ranks; without one it reads again, and
    leaves out, what came before.

    Args:
        dataset: anything with ``len()`` and ``[i]``, of which the length must not change; or with ``__iter__``.
        world: has the data-parallel rank and size, the seed and the device.
        global_batch: samples of one optimizer step, over all ranks.
        micro_batch: samples of one forward of one rank; must divide ``global_batch``.
        micro_tokens: in its place: a forward has as many samples as fit into so many positions, padding included, by the
            dataset's ``lengths``, the positions of each sample.
        collate: list of samples -> mapping of tensors; default :func:`default_collate`.
        prepare: mapping -> mapping, applied to each micro-batch; default :func:`make_labels`, which makes ``labels``
            where there are none and leaves existing ones, which must be aligned, as they are; :func:`shift_labels`
            also shifts existing ones (collators of Hugging Face and TRL); None leaves the batch as it is.
        shuffle: False keeps the dataset's own order in every epoch; None: True, but for a stream.
        num_workers: processes that read micro-batches ahead, as those of a DataLoader; 0: they are read when they are
            asked for, by the process that trains. Samples and their order are the same for any number, and so is what a
            resumed run reads.
        prefetch: micro-batches that each worker is ahead.
        pin_memory: on cuda: micro-batches are copied from page-locked memory, by a stream of their own: the host does not wait,
            and the device makes the copies while it still runs the last step.

        weights: one number for each sample: an epoch is as many draws as there are samples, each with replacement and with a
            chance in proportion to the weight (as ``WeightedRandomSampler``). A function of (seed, epoch, position), as the
            shuffled order: the same under every number of ranks, and resumed exactly.

    Random numbers that the dataset, ``collate`` and ``prepare`` draw (augmentation) depend on (seed, epoch, micro-batch)
    alone, from the global generators of torch, Python and numpy as from those in the dataset's attributes: they are the
    same for any number of workers and ranks. Where a thread of your own reads, the global ones go on from their state
    instead, as the thread that trains draws from them.

    Attributes:
        waited_s: seconds that reading the last window has kept this process from training.

    Raises:
        ConfigError: sizes that do not fit, an empty dataset, options that have no effect together.
        UsageError: a dataset that is neither, or an iterator, which can be read once only; with workers, a dataset with a
            state of its own.

    Example::

        loader = Loader(dataset, world, global_batch=64, micro_batch=4)
        for window in loader:       # one epoch
            out = step(window)
    """

    @public_call(OF_DATA_LOADER)
    def __init__(
        self,
        dataset: Any,
        world: DataWorld,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        micro_tokens: int | None = None,
        collate: Callable[[list[Any]], Mapping[str, Tensor]] | None = None,
        prepare: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = make_labels,
        shuffle: bool | None = None,
        num_workers: int = 0,
        prefetch: int | None = None,
        pin_memory: bool = True,
        weights: Sequence[float] | Tensor | None = None,
    ):
        check_flags(shuffle=shuffle, pin_memory=pin_memory)
        check_sizes(global_batch, micro_batch, micro_tokens)
        check_workers(num_workers, prefetch)
        self.num_workers, self.prefetch, self.pin_memory = num_workers, prefetch or _PREFETCH, pin_memory
        self._transfer = Transfer(world.device, pin_memory=pin_memory)
        self.waited_s = 0.0
        self.dataset, self.world = dataset, world
        self.global_batch, self.micro_batch = global_batch, micro_batch or 1
        self.collate, self.prepare = collate or default_collate, prepare
        refuse_data_loader(dataset)
        self._stream = Stream(dataset) if is_stream(dataset) else None
        if self._stream is not None:
            check_stream(shuffle, num_workers, micro_tokens)
        self.shuffle = self._stream is None if shuffle is None else shuffle
        self.num_samples = None if self._stream is not None else length_of(dataset)
        self._weights = None if weights is None else WeightedOrder(check_weights(weights, self.num_samples, shuffle))
        self._budget = None if micro_tokens is None else TokenBudget(micro_tokens, dataset)
        self._digest = digest_of_dataset(dataset) if self._stream is None else 0
        self._digest ^= 0 if self._weights is None else self._weights.digest
        self.seed = int(world.seed)
        self.epoch = 0
        self._position = 0
        self._state: Any = None  # of a stream at the position
        self._is_over = False  # the position is that of the end of a stream
        self._number = next(_NUMBERS)
        _LOADERS[self._number] = self
        self._begin()
        self._turn = 0  # counts iterators and loaded positions, so that an old iterator notices it
        if num_workers:
            refuse_own_state(self.own_states())

    def __len__(self) -> int:
        """The number of windows (optimizer steps) of a whole epoch; TypeError for a dataset that has no length."""
        if self.num_samples is None:
            raise TypeError(
                f"len() of a Loader of {type(self.dataset).__name__}, which is read by iterating: how many samples there are is "
                "seen when an epoch has ended"
            )
        return -(-self.num_samples // self.global_batch)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self._turn += 1
        turn = self._turn
        if self._is_over or (self.num_samples is not None and self._position >= self.num_samples):
            self._next_epoch()
        for window in self._windows() if self._stream is None else self._windows_of(self._stream):
            self._num_handed_out += 1
            yield window
            if turn != self._turn:
                raise UsageError(
                    "a loop over a Loader that was started or repositioned inside the loop",
                    why="a loader has one position, and two loops would share the samples between them",
                    fix="finish or leave the loop first, or make a second Loader",
                )
        self._next_epoch()

    def _windows(self) -> Iterator[list[MicroBatch]]:
        """From the current position to the end of the epoch. While the caller has a window, the position is after it."""
        batches = self._batches()
        while self._position < self._length:
            began = time.perf_counter()
            place = Place.of(self.epoch, self._position, self._number, self._digest, self.num_samples)
            self._reading(place)
            place.num_micro = self._num_micro(place[1])
            own = self._own(place[1])
            with self._reading_is_told():
                read = [next(batches) for _ in own]
            window = self._window(place, own, read)
            self.waited_s = place.waited_s = time.perf_counter() - began
            self._position = min(self._position + self.global_batch, self._length)
            yield window

    def _windows_of(self, stream: Stream) -> Iterator[list[MicroBatch]]:
        """The same of a dataset that is read in its own order: every rank reads all samples, and keeps its own."""
        axis = self.world.axis("dp")
        reader = Reader(None, self.collate, self.prepare, self.seed)
        stream.start(self.epoch, self._position, self._state)
        while True:
            began = time.perf_counter()
            place = Place.of(self.epoch, self._position, self._number)
            self._reading(place)
            with self._reading_is_told():
                samples = stream.take(self.global_batch)
            if not samples:
                if not self._position:
                    raise empty_dataset(self.dataset)
                self._state = stream.state()
                stream.end()
                return
            place.digest = stream.digest
            place.num_micro = num_micro = -(-len(samples) // self.micro_batch)
            own = list(range(axis.rank, num_micro, axis.size)) or [0]
            firsts = [index * self.micro_batch for index in own]
            parts = [(self._position + first, samples[first:][: self.micro_batch]) for first in firsts]
            window = self._window(place, own, [reader.batch_of(part, place[0], first) for first, part in parts])
            self.waited_s = place.waited_s = time.perf_counter() - began
            self._position += len(samples)
            self._state = stream.state()
            self._is_over = stream.has_ended
            self._ends[tuple(place)] = (
                (self.epoch + 1, 0, self._state) if self._is_over else (self.epoch, self._position, self._state)
            )
            yield window
            if self._is_over:
                stream.end()
                return

    def _reading_is_told(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: a rank that waits for its data, or for a worker that is stopped, is named with that."""
        watch = getattr(self.world, "watch", None)
        return contextlib.nullcontext() if watch is None else watch.doing("reading data")

    def refuse_partial(self, what: str) -> None:
        """Raises UsageError in the middle of an epoch, for ``what`` that is meant for all samples."""
        if self._position and not self._is_over and self._position != self.num_samples:
            raise UsageError(
                f"{what} of a Loader in the middle of an epoch",
                why=f"a loop over it was left after {self._position} samples, or is running: the next one goes on from there, and those before it "
                "would be left out",
                fix="give it a Loader of its own, and let each loop over that run to its end",
            )

    def _next_epoch(self) -> None:
        self.epoch, self._position, self._is_over = self.epoch + 1, 0, False

    @property
    def _length(self) -> int:
        assert self.num_samples is not None, "of a dataset that is read by number"
        return self.num_samples

    def _window(self, place: Place, own: list[int], batches: list[Mapping[str, Tensor]]) -> list[MicroBatch]:
        """This rank's micro-batches of the window at ``place``; ``batches`` are those it read, with the indices ``own``."""
        axis, num_micro = self.world.axis("dp"), place.num_micro or 0
        mine = [self._on_device(batch, index, place) for index, batch in zip(own, batches, strict=True)]
        if own[0] != axis.rank:  # a rank without its own micro-batch copies the first one of the window
            mine = [MicroBatch(mine[0], index=axis.rank, padding=True, window=place)]
        for index in range(axis.rank + len(mine) * axis.size, -(-num_micro // axis.size) * axis.size, axis.size):
            mine.append(MicroBatch(mine[0], index=index, padding=True, window=place))
        return mine

    def _num_micro(self, start: int) -> int:
        """Micro-batches over all ranks of the window that begins with the sample at ``start``."""
        if self._budget is not None:
            return len(self._parts(start))
        return -(-(min(start + self.global_batch, self._length) - start) // self.micro_batch)

    def _own(self, start: int) -> list[int]:
        """Indices of the micro-batches that this rank reads in that window."""
        axis = self.world.axis("dp")
        return list(range(axis.rank, self._num_micro(start), axis.size)) or [0]

    def _tasks(self) -> Iterator[Task]:
        """What is read from the current position to the end of the epoch."""
        epoch = self.epoch
        for start in range(self._position, self._length, self.global_batch):
            parts = self._parts(start)
            for index in self._own(start):
                samples = self._ordered(parts[index], epoch)
                yield Task(epoch, int(parts[index][0]), tuple(map(int, samples)))

    def _parts(self, start: int) -> list[np.ndarray]:
        """Positions of the samples of each micro-batch of the window that begins at ``start``."""
        window = np.arange(start, min(start + self.global_batch, self._length))
        if self._budget is None:
            return [window[at : at + self.micro_batch] for at in range(0, len(window), self.micro_batch)]
        return [window[places] for places in self._budget.parts(self._ordered(window, self.epoch))]

    def _ordered(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at these positions of the epoch's order."""
        if self._weights is not None:
            return self._weights.draws(positions, seed=self.seed, epoch=epoch)
        return sample_order(positions, self._length, seed=self.seed, epoch=epoch) if self.shuffle else positions

    def _batches(self) -> Iterator[Mapping[str, Tensor]]:
        reader = Reader(self.dataset, self.collate, self.prepare, self.seed)
        if not self.num_workers:
            return map(reader, self._tasks())
        return read_ahead(reader, self._tasks(), num_workers=self.num_workers, prefetch=self.prefetch)

    def _on_device(self, batch: Mapping[str, Tensor], index: int, place: Place) -> MicroBatch:
        there, host = self._transfer(batch)
        return MicroBatch(there, index=index, window=place, host=host)

    # ---- what was used -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Starts counting the windows that are read and used, from the current position."""
        self._begun = self.epoch, self._position, self._state
        self._used: tuple[int, int] | None = None
        self._num_handed_out = 0
        self._read: tuple[int, int] | None = None  # the last window whose reading began
        # The dataset's state after each window not yet used: if windows are read ahead, its state now is not the one
        # after the last used window.
        self._states: dict[tuple[int, int], DatasetState] = {}
        # Of a stream: epoch, position and the dataset's own state after each window not yet used.
        self._ends: dict[tuple[int, int], tuple[int, int, Any]] = {}

    def _reading(self, place: Place) -> None:
        """Keeps the dataset's own state from before the window at ``place`` is read."""
        own = self.own_states()
        if own:
            self._states[self._read or _START] = own.taken()
        for kept in (self._states, self._ends):
            while len(kept) > _KEPT:
                kept.pop(next(iter(kept)))
        self._read = tuple(place)

    def mark_used(self, place: tuple[int, int]) -> None:
        """Notes that the window at ``place`` was trained or evaluated: a resumed run continues after it."""
        self._used = tuple(place)
        for kept in (self._states, self._ends):
            for older in [window for window in list(kept) if window < self._used]:
                kept.pop(older, None)

    def used_state_dict(self, num_trained: int | None) -> tuple[dict[str, Any], int]:
        """The :meth:`state_dict` after the last window that was trained or evaluated, and 0. If the windows have lost
        their places: the current position, and the number of windows read beyond the trained ones.

        Args:
            num_trained: windows that were trained since the loader's position was set; None: not known.
        """
        if self._used is not None:
            epoch, start = self._used
            return self._state_at(*self._ends.get(self._used, (epoch, start + self.global_batch, None))), 0
        if num_trained == 0:
            return self._state_at(*self._begun), 0
        return self.state_dict(), max(0, self._num_handed_out - (num_trained or self._num_handed_out))

    def own_states(self) -> DatasetState:
        """The stateful objects in the dataset, ``collate`` and ``prepare``."""
        roots = {} if self._stream is not None else {"dataset": self.dataset}  # a stream's is in the position
        return states_in(**roots, collate=self.collate, prepare=self.prepare)

    def used_states(self) -> DatasetState | None:
        """The states of :meth:`own_states` after the last used window; None: it was read in another process, or too
        long ago."""
        own = self.own_states()
        if self._read == self._used:
            return own.taken()
        return self._states.get(self._used or _START)

    def _state_at(self, epoch: int, position: int, state: Any) -> dict[str, Any]:
        if self.num_samples is not None and position >= self.num_samples:
            epoch, position = epoch + 1, 0
        of_stream = {} if self._stream is None else {"dataset": state}
        of_weights = {} if self._weights is None else {"weights": self._weights.digest}
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            **of_weights,
            **of_stream,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position after the last window yielded, as plain numbers, and the own state of a dataset that is read by
        iterating; the same on every rank."""
        if self._is_over:
            return self._state_at(self.epoch + 1, 0, self._state)
        return self._state_at(self.epoch, self._position, self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a position, under any data-parallel degree, global batch and micro-batch.

        The order of samples is that of the run that saved the position: its seed replaces the world's.

        Raises:
            ConfigError: the position belongs to another dataset or another order.
        """
        self.check_state_dict(state)
        self.epoch, self._position, self.seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
        self._state, self._is_over = state.get("dataset"), False
        if self._stream is not None:
            self._stream.end()
        self._turn += 1
        self._begin()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises what :meth:`load_state_dict` would raise; changes nothing."""
        refuse_other_position(self.state_dict(), state)


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
