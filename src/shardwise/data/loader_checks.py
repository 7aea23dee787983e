"""What a Loader refuses when it is made: sizes that do not fit, options without effect, data that it cannot read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from shardwise.data.dataset_state import DatasetState
from shardwise.data.stream import empty_dataset
from shardwise.errors import ConfigError, UsageError
from shardwise.world.rng import is_generator

_BY_ITSELF = "leave it out: the samples of a window are shared out over the data-parallel ranks by itself"
_SEEDED = "leave it out: the order, and what a sample draws at random, follow from sw.init(seed=...) and the epoch"
OF_DATA_LOADER = {
    "batch_size": "give micro_batch, the samples of one forward of a rank, and global_batch, those of one optimizer step over all ranks",
    "batch_sampler": "leave it out: Loader makes the batches, by global_batch and micro_batch; micro_tokens= puts samples of about one "
    "length together",
    "sampler": "for draws by weight: weights=[...], a number for each sample; for some of the samples: "
    "torch.utils.data.Subset(dataset, indices); for the dataset's own order: shuffle=False",
    "collate_fn": "it is called collate here: collate=...",
    "drop_last": "leave it out: the last window of an epoch has the samples that are left, and its loss is divided by its own tokens; to "
    "leave them out: torch.utils.data.Subset(dataset, range(len(dataset) // global_batch * global_batch))",
    "timeout": "leave it out: a rank that waits for another is bounded by sw.init(timeout_s=...)",
    "worker_init_fn": "leave it out: random numbers in workers belong to the sample's place, and what each worker is to open is opened in the "
    "dataset's __getitem__, when it is first called",
    "multiprocessing_context": "leave it out: workers are started as torch starts them by default",
    "generator": _SEEDED,
    "seed": _SEEDED,
    "prefetch_factor": "it is called prefetch here: prefetch=2, with num_workers",
    "persistent_workers": "leave it out: each epoch starts workers anew, with the dataset as it is then",
    "pin_memory_device": "leave it out: the device is the world's, sw.init(device=...)",
    "in_order": "leave it out: micro-batches come in order, or ranks and a resumed run would not share them",
    "num_replicas": _BY_ITSELF,
    "rank": _BY_ITSELF,
}
"""Arguments of torch's DataLoader and DistributedSampler that a Loader does not have -> what to write in their place."""


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


def check_weights(weights: Any, num_samples: int | None, shuffle: bool | None) -> np.ndarray:
    """``weights`` as float64 [num_samples].

    Raises:
        ConfigError: they are not one number for each sample, or nothing could be drawn by them.
    """
    why = ""
    given = weights.detach().cpu().numpy() if isinstance(weights, torch.Tensor) else weights
    try:
        found = np.ascontiguousarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        found, why = np.zeros(0), f"it is no list of numbers, but a {type(weights).__name__}"
    if num_samples is None:
        why = "a dataset without len() and [i] is read in its own order"
    elif shuffle is False:
        why = "draws have an order of their own, so that shuffle=False would have no effect"
    elif not why and found.shape != (num_samples,):
        why = f"they have the shape {list(found.shape)}, and the dataset has {num_samples} samples"
    elif not why and not (np.isfinite(found).all() and (found >= 0).all() and found.sum() > 0):
        why = "weights are finite and not negative, and one of them is above 0"
    if why:
        raise ConfigError(
            f"Loader(weights={weights!s:.60})",
            why=why,
            fix="give a number for each sample, such as 1 / the number of samples of its class, with shuffle left out",
        )
    return found


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
            fix="pass loader.dataset; Loader makes the batches itself (global_batch=, micro_batch=, shuffle=, collate=; weights= "
            "for a WeightedRandomSampler)",
        )


def check_stream(shuffle: bool | None, num_workers: int, micro_tokens: int | None = None) -> None:
    """Refuses what has no meaning for a dataset that is read in its own order."""
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


def refuse_no_dataset(dataset: Any, given: str) -> None:
    """Raises ConfigError for what has a length and is no dataset: a ``DatasetDict`` (it counts splits), a table of columns, a class."""
    names = [name for name in dataset if isinstance(name, str)] if isinstance(dataset, Mapping) else []
    if names:
        why = "samples are found by number, and these, splits or columns, by name"
        fix = f"give one split, which is a dataset: splits[{names[0]!r}]; of columns make samples: [dict(zip(columns, row)) for row in "
        fix += "zip(*columns.values())]"
        raise ConfigError(f"{given}: a {type(dataset).__name__} with {', '.join(names[:5])}", why=why, fix=fix)
    if hasattr(dataset, "iloc"):
        why, fix = "samples are found by number, and its [i] is a column", 'give its rows: frame.to_dict("records")'
        raise ConfigError(f"{given}: a {type(dataset).__name__} of pandas", why=why, fix=fix)
    if isinstance(dataset, type):
        fix = f"call it: {dataset.__name__}(...)"
        raise ConfigError(f"{given}: the class {dataset.__name__}", why="a dataset is one of its objects", fix=fix)


def length_of(dataset: Any) -> int:
    refuse_no_dataset(dataset, "Loader")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a dataset of type {type(dataset).__name__} without len() and [i]",
            why="samples are found by number, or by iterating",
            fix="give a dataset with __len__ and __getitem__, or one with __iter__",
        )
    length = len(dataset)
    if length < 1:
        raise empty_dataset(dataset)
    return length


def refuse_other_position(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a position ``given`` that is of another dataset, or order, than a Loader's ``own``."""
    missing = [key for key in own if key not in given and key != "weights"]
    if missing:
        raise ConfigError(
            f"a loader position without {', '.join(missing)}",
            why=f"it has {', '.join(map(str, given)) or 'nothing'}",
            fix="give what Loader.state_dict() returned",
        )
    for key in ("num_samples", "shuffle", "weights"):
        there, here = given.get(key), own.get(key)
        if there != here:
            if key == "weights":
                there, here = (value and "others" for value in (there, here))
            raise ConfigError(
                f"a loader position with {key}={there} for a loader with {key}={here}",
                why="the position counts samples of one order; in another, samples would be repeated or missed",
                fix=f"use the dataset and options of the interrupted run ({key}={there}), or start from the beginning",
            )
