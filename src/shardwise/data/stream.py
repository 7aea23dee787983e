"""A dataset that is read in its own order, one sample after the other: an iterable, of known or unknown length."""

import copy
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from shardwise.data.batch import default_collate
from shardwise.errors import ConfigError, UsageError
from shardwise.model.plain_state import is_same_value
from shardwise.model.pytrees import leaves_of
from shardwise.model.tensors import bytes_of

_SAMPLES = 4  # of a window, that are compared over ranks
_BYTES = 1 << 12  # of each tensor in them


def is_stream(dataset: Any) -> bool:
    """Whether samples are found by iterating only. torch's ``IterableDataset`` has ``[i]``, which raises."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def first_of(stream: Any, count: int) -> list[Any]:
    """The first samples of a stream, whose own state is afterwards what it was."""
    has_state = _has_state(stream)
    before = copy.deepcopy(stream.state_dict()) if has_state else None
    samples = list(itertools.islice(stream, count))
    if has_state:
        stream.load_state_dict(before)
    return samples


def _has_state(dataset: Any) -> bool:
    """Whether a dataset can go on where it was. A stream of Hugging Face datasets with a shuffle buffer cannot: the samples in
    its buffer are not in its state."""
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return not _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))


def _has_shuffle_buffer(part: Any) -> bool:
    """Of what a Hugging Face stream is made of, which says so nowhere else."""
    inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return type(part).__name__.startswith("BufferShuffled") or any(
        _has_shuffle_buffer(each) for each in inner if each is not None
    )


class Stream:
    """Reads an iterable dataset, from any sample on.

    A dataset with ``state_dict`` and ``load_state_dict`` (``datasets.IterableDataset``, torchdata's nodes and
    ``StatefulDataLoader``) goes on from its state, into the next epoch too: its state may have the epoch in it, or the generator
    of its order. Any other, and one of Hugging Face with a shuffle buffer, is read again from the start of the epoch, and as many
    samples are left out. ``set_epoch(epoch)`` is called at each start, if there is one.

    Args:
        dataset: each ``iter(dataset)`` begins a new pass over the samples.

    Attributes:
        digest: of the samples read since the stream was last started: the same on every rank that reads the same.

    Raises:
        UsageError: an iterator, which can be read once only.
    """

    def __init__(self, dataset: Any):
        if iter_is_itself(dataset):
            raise UsageError(
                f"a dataset of type {type(dataset).__name__}, which can be read once only",
                why="each epoch, and a run that resumes, reads it from its start",
                fix="give an object whose __iter__ starts anew: a class with `def __iter__(self): yield ...`",
            )
        self.dataset = dataset
        self.has_state = _has_state(dataset)
        self._first = self._taken()  # its state before anything was read
        self._items: Iterator[Any] | None = None
        self._held: list[Any] = []  # the sample after those that were taken, if there is one
        self._state: Any = None  # of the dataset, before it gave that one
        self._place: tuple[int, int] | None = None
        self.digest = 0

    def start(self, epoch: int, position: int, state: Any) -> None:
        """Makes the sample at ``position`` of ``epoch`` the next one. ``state``: what :meth:`state` returned there; None: not
        known.

        Raises:
            UsageError: the epoch has fewer samples.
        """
        if self._items is not None and self._place == (epoch, position):
            return
        wanted = self._first if state is None else state
        if position:
            self._set_epoch(epoch)  # first: the state is one within the epoch
        # What it holds by itself, where an epoch has ended here, is not loaded: that may draw a number, or end the epoch again.
        if self.has_state and (position or not is_same_value(self._taken(), wanted)):
            self._load(wanted)
        if not position:
            self._set_epoch(epoch)  # last: the state may have the epoch that has ended, or the first one
        self._items, self._held, self._place, self.digest = iter(self.dataset), [], (epoch, position), 0
        if state is None:
            for number in range(position):
                if next(self._items, self) is self:
                    raise UsageError(
                        f"a stream of {number} samples, for a position after {position}",
                        why="it is not the stream of the run that saved the position, and samples would be repeated or missed",
                        fix="give the dataset of that run, or start from the beginning",
                    )

    def take(self, count: int) -> list[Any]:
        """The next ``count`` samples; fewer where the epoch ends. One more is read, to know whether it has ended."""
        assert self._items is not None and self._place is not None, "start() comes first"
        samples = self._held
        try:
            samples += itertools.islice(self._items, count - len(samples))
            if not (samples or self._place[1]) and self.has_state:
                samples += self._rewound(count)
            self._state = self._taken()
            self._held = list(itertools.islice(self._items, 1))
            if not self._held:
                self._state = self._taken()  # it may only now have drawn, or counted, for the next epoch
        except BaseException:
            self.end()  # a generator that has raised gives nothing more, which would look like the epoch's end
            raise
        self._place = (self._place[0], self._place[1] + len(samples))
        for sample in samples[:: max(1, -(-len(samples) // _SAMPLES))]:
            self.digest = _digest(sample, self.digest)
        return samples

    def _rewound(self, count: int) -> list[Any]:
        """The first samples of an epoch that begins in a state in which nothing is left: some datasets begin anew by themselves, once
        they have said so, and others only from their first state."""
        assert self._place is not None
        for state in (None, self._first):
            if state is not None:
                self._load(state)
            self._set_epoch(self._place[0])
            self._items = iter(self.dataset)
            if samples := list(itertools.islice(self._items, count)):
                return samples
        return []

    def _load(self, state: Any) -> None:
        if getattr(self.dataset, "_iter_for_state_dict", False):
            iter(
                self.dataset
            )  # torchdata's nodes: the iterator that was made to be asked would come next, whatever is loaded
        self.dataset.load_state_dict(copy.deepcopy(state))

    def _set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    @property
    def has_ended(self) -> bool:
        return not self._held

    def end(self) -> None:
        """Called when it will be started anew: the epoch has ended, another position was loaded."""
        self._items, self._held = None, []

    def state(self) -> Any:
        """The dataset's own state after what was taken, and after the end of the epoch where that has been seen; None if it has none."""
        return self._state

    def _taken(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict()) if self.has_state else None


def iter_is_itself(dataset: Any) -> bool:
    """Whether ``dataset`` is an iterator: a generator, a file, ``map(...)``."""
    return hasattr(dataset, "__next__") and iter(dataset) is dataset


def empty_dataset(dataset: Any) -> ConfigError:
    """The error for a dataset without samples."""
    return ConfigError(
        f"an empty dataset ({type(dataset).__name__})",
        why="there is no sample to make a window of",
        fix="check the path and the filters that made the dataset",
    )


def _digest(sample: Any, before: int) -> int:
    try:
        parts = default_collate([sample])
    except ConfigError:  # only the user's own collate knows what it is
        return zlib.crc32(f"{type(sample).__name__} {len(leaves_of(sample))}".encode(), before)
    for name, value in parts.items():
        data = bytes_of(value.cpu()).numpy().tobytes()[:_BYTES]
        before = zlib.crc32(data, zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), before))
    return before
