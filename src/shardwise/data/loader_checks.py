"""What a Loader refuses when it is made: sizes that do not fit, options without effect, data that it cannot read."""

from typing import Any

from torch.utils.data import DataLoader

from shardwise.data.dataset_state import DatasetState
from shardwise.errors import ConfigError, UsageError
from shardwise.world.rng import is_generator

__all__ = [
    "check_flags",
    "check_sizes",
    "check_stream",
    "check_workers",
    "length_of",
    "refuse_data_loader",
    "refuse_own_state",
]


def check_sizes(global_batch: int, micro_batch: int | None, micro_tokens: int | None = None) -> None:
    if (micro_batch is None) == (micro_tokens is None):
        raise ConfigError(
            f"Loader(micro_batch={micro_batch}, micro_tokens={micro_tokens})",
            why="each of them says how much one forward of a rank has",
            fix="give one of them: micro_batch=4, a number of samples",
        )
    sizes = {"global_batch": global_batch} | ({} if micro_batch is None else {"micro_batch": micro_batch})
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r}", why="it counts samples", fix=f"give {name} as an integer >= 1")
    if micro_batch is not None and global_batch % micro_batch:
        near = max(d for d in range(1, min(micro_batch, global_batch) + 1) if global_batch % d == 0)
        raise ConfigError(
            f"global_batch={global_batch} with micro_batch={micro_batch}",
            why=f"a window of {global_batch} samples cannot be cut into micro-batches of {micro_batch}",
            fix=f"use micro_batch={near}, or global_batch={-(-global_batch // micro_batch) * micro_batch}",
        )


def check_flags(*, shuffle: bool | None, pin_memory: bool) -> None:
    for name, value, can_be in (("shuffle", shuffle, (True, False, None)), ("pin_memory", pin_memory, (True, False))):
        if not any(value is each for each in can_be):
            raise ConfigError(
                f"{name}={value!r}",
                why=f'it is {" or ".join(map(str, can_be))}; a text, "False" too, would count as True',
                fix=f"give one of them: {name}=False",
            )


def check_workers(num_workers: int, prefetch: int | None) -> None:
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


def refuse_own_state(found: DatasetState) -> None:
    place = next((place for place, value in found.values.items() if not is_generator(value)), None)
    if place is not None:
        raise UsageError(
            f"Loader(num_workers=...) of data with a state of its own, {place}",
            why="its state_dict would advance in the workers, each of which has a copy, and a checkpoint would keep another",
            fix="read without workers: num_workers=0; or let what a sample is depend on its number alone",
        )


def refuse_data_loader(dataset: Any) -> None:
    """Raises UsageError for torch's DataLoader, unless it gives samples: then it is a stream."""
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        raise UsageError(
            "a DataLoader where a dataset goes",
            why="it makes batches in an order of its own, which neither ranks nor a resumed run would share",
            fix="pass loader.dataset; Loader makes the batches itself (global_batch=, micro_batch=, shuffle=, collate=)",
        )


def check_stream(shuffle: bool | None, num_workers: int, micro_tokens: int | None = None) -> None:
    """Refuses what has no meaning for a dataset that is read in its own order.

    Raises:
        ConfigError: as above.
    """
    if shuffle:
        raise ConfigError(
            "Loader(shuffle=True) of a dataset without len() and [i]",
            why="it is read in its own order, so that shuffling would have no effect",
            fix="leave shuffle out, and let the dataset shuffle: a buffer of its own, by a seed that all ranks share",
        )
    if micro_tokens is not None:
        raise ConfigError(
            f"Loader(micro_tokens={micro_tokens}) of a dataset without len() and [i]",
            why="how many samples fit is found from the lengths of all of them, before one is read",
            fix="use micro_batch, or give a dataset with len(), [i] and lengths",
        )
    if num_workers:
        raise ConfigError(
            f"Loader(num_workers={num_workers}) of a dataset without len() and [i]",
            why="each worker has a copy of it, and would read all of it",
            fix="leave num_workers out, and let the dataset read ahead (torchdata.nodes.Prefetcher)",
        )


def length_of(dataset: Any) -> int:
    """The number of samples.

    Raises:
        UsageError: there is no length, or samples cannot be found by number.
        ConfigError: there is none.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a dataset of type {type(dataset).__name__} without len() and [i]",
            why="samples are found by number, or by iterating",
            fix="give a dataset with __len__ and __getitem__, or one with __iter__",
        )
    length = len(dataset)
    if length < 1:
        raise ConfigError(
            f"an empty dataset ({type(dataset).__name__})",
            why="there is no sample to make a window of",
            fix="check the path and the filters that made the dataset",
        )
    return length
