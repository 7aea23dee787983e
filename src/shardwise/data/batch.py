"""Micro-batches: the mapping of tensors that model and loss read, collating and padding samples into one, and its copy on the
device."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shardwise.errors import ConfigError

IGNORED = -100
"""The label of a position that the loss ignores."""


class Place(tuple[int, int]):
    """The window that a micro-batch of a Loader belongs to: (epoch, position of its first sample in the epoch's order).

    Attributes:
        loader: number of the Loader; a number, since the batch may pass through threads and processes that read ahead.
        num_micro: micro-batches of the window over all ranks, without paddings.
        digest: of the dataset, of a stream of what was read of it until there: the same on every rank.
        num_samples: of the dataset; None: of a stream.
        waited_s: seconds that reading the window has kept this rank from training.
    """

    loader: int | None = None
    num_micro: int | None = None
    waited_s: float = 0.0
    digest: int = 0
    num_samples: int | None = None

    @classmethod
    def of(cls, epoch: int, start: int, loader: int, digest: int = 0, num_samples: int | None = None) -> "Place":
        found = cls((epoch, start))
        found.loader, found.digest, found.num_samples = loader, digest, num_samples
        return found


class MicroBatch(dict[str, Tensor]):
    """One micro-batch of a gradient accumulation window: a dict of tensors, with its index in the window.

    Args:
        tensors: the mapping, as the model and the loss read it.
        index: index of this micro-batch among those of all ranks in its window, the same under every data-parallel
            degree. Paddings are numbered after the last real one, so that no two of a window share an index.
        padding: True for a copy that exists only so that every rank has equally many; its sums count as 0.
        window: the window it belongs to, (epoch, position of its first sample in the epoch's order). If ranks differ in
            it, some of them have lost a window. None: not known.
        host: where ``tensors`` are copies on a device: the mapping on the CPU that they are copies of.
    """

    index: int
    padding: bool
    window: tuple[int, int] | None

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        index: int = 0,
        padding: bool = False,
        window: tuple[int, int] | None = None,
        host: Mapping[str, Tensor] | None = None,
    ):
        super().__init__(tensors)
        self.index, self.padding, self.window = index, padding, window
        self._copied = {name: (value, value._version, host[name]) for name, value in self.items()} if host else {}

    def on_host(self) -> "dict[str, Tensor] | None":
        """This micro-batch on the CPU, without a read of the device; None where there is no copy, or the micro-batch was
        changed since it was made."""
        changed = any(
            self.get(name) is not value or value._version != v for name, (value, v, _) in self._copied.items()
        )
        if not self._copied or changed or len(self) != len(self._copied):
            return None
        return {name: host for name, (_, _, host) in self._copied.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{list(value.shape)}" for name, value in self.items())
        return f"MicroBatch(index={self.index}, padding={self.padding}, {shapes})"


def is_padding(batch: Any) -> bool:
    """Whether a micro-batch only fills a window up, so that nothing of it counts; batches that no Loader made do not."""
    return bool(getattr(batch, "padding", False))


def default_collate(samples: Sequence[Any]) -> dict[str, Tensor]:
    """Stacks samples into a batch, as a DataLoader's ``collate_fn`` does: tensors get a new first dim of
    ``len(samples)``.

    A sample is a mapping of tensors, numbers or arrays (its keys are kept), one tensor, or a tuple ``(input, labels)``.
    A tensor of integers [T] is called ``input_ids``, any other ``input``.

    Args:
        samples: of one micro-batch.

    Raises:
        ConfigError: samples have unequal shapes or keys, or are of a kind this function does not know.
    """
    rows = rows_of(samples)
    return {name: _stack(name, [row[name] for row in rows]) for name in rows[0]}


def rows_of(samples: Sequence[Any]) -> list[dict[str, Tensor]]:
    """Each sample as a mapping of tensors, with the same keys; raises as :func:`default_collate`."""
    rows = [_as_mapping(sample) for sample in samples]
    names = list(rows[0])
    for row in rows:
        if row.keys() != rows[0].keys():
            raise ConfigError(
                f"samples with the keys {names} and {list(row)} in one micro-batch",
                why="a batch needs the same keys in every sample",
                fix="return the same keys from dataset[i], or give collate=",
            )
    return [{name: _as_tensor(name, row[name]) for name in names} for row in rows]


def _as_mapping(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return sample
    parts = sample if isinstance(sample, tuple) else (sample,)
    if len(parts) in (1, 2) and all(isinstance(part, (Tensor, np.ndarray, int, float)) for part in parts):
        first = torch.as_tensor(parts[0])
        tokens = first.dim() == 1 and not (first.is_floating_point() or first.is_complex())
        return dict(zip(("input_ids" if tokens else "input", "labels"), (first, *parts[1:]), strict=False))
    raise ConfigError(
        f"a sample of type {type(sample).__name__}" + (f" with {len(sample)} parts" if sample is parts else ""),
        why="the default collate knows mappings of tensors, one tensor, and a tuple (input, labels)",
        fix="return a dict of tensors from dataset[i], or give collate=, a function from a list of samples to a dict",
    )


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = repr(value)
        raise ConfigError(
            f"{name!r} of a sample is {shown if len(shown) <= 40 else shown[:40] + '...'}, of type {type(value).__name__}",
            why="a micro-batch holds tensors, and this cannot become one",
            fix="drop it from what dataset[i] returns, or give collate=, a function from a list of samples to a dict of tensors",
        ) from error


def _stack(name: str, values: list[Tensor]) -> Tensor:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise ConfigError(
            f"{name!r} has the shapes {sorted(shapes)} in one micro-batch",
            why="samples of unequal shapes cannot be stacked",
            fix=f"cut or pad the samples to one length (label {IGNORED} is ignored), or give collate=",
        )
    return torch.stack(values)


# ---- padding ---------------------------------------------------------------------------------------------------------


_KNOWN = {"labels": IGNORED, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0}


def pad_collate(*, multiple_of: int = 1, **pad_values: float) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
    """A ``collate`` for samples of unequal length: pads each tensor at the end, to the longest of the micro-batch.

    ``labels`` are padded with -100, which no loss counts, ``attention_mask``, ``token_type_ids`` and ``position_ids`` with 0;
    for other names give the value. With a value for ``input_ids``, samples without ``attention_mask`` get one, [B, T], 1 for a
    token; ``make_labels`` gives what it hides no label. Tensors of equal length are stacked as they are.

    Args:
        multiple_of: the padded length is rounded up to a multiple of it (8 or 64: kernels of GPUs; fewer shapes to compile).
        pad_values: name -> value, as ``input_ids=tokenizer.pad_token_id``.

    Raises:
        ConfigError: a multiple below 1. The returned function raises it for a name whose lengths differ and that has no
            value, and for tensors that differ in other dims than the first.

    Example::

        loader = sw.Loader(dataset, world, global_batch=32, micro_batch=4, collate=sw.pad_collate(input_ids=0))
    """
    if not isinstance(multiple_of, int) or isinstance(multiple_of, bool) or multiple_of < 1:
        raise ConfigError(f"multiple_of={multiple_of!r}", why="it counts tokens", fix="give an integer >= 1")
    return functools.partial(_padded, multiple_of=multiple_of, pad_values={**_KNOWN, **pad_values})


def _padded(samples: Sequence[Any], *, multiple_of: int, pad_values: Mapping[str, float]) -> dict[str, Tensor]:
    rows = rows_of(samples)
    padded = {name: _stacked(name, [row[name] for row in rows], multiple_of, pad_values) for name in rows[0]}
    ids = padded.get("input_ids")
    # In each micro-batch, also where none is padded: ranks and micro-batches have the same keys.
    if ids is not None and "attention_mask" not in padded and "input_ids" in pad_values and ids.dim() > 1:
        lengths = torch.tensor([row["input_ids"].shape[0] for row in rows])
        padded["attention_mask"] = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return padded


def _stacked(name: str, values: list[Tensor], multiple_of: int, pad_values: Mapping[str, float]) -> Tensor:
    """One tensor of all ``values``, padded in their first dim."""
    longest = max((value.shape[0] for value in values if value.dim()), default=0)
    if name in pad_values and all(value.dim() for value in values):
        longest = -(-longest // multiple_of) * multiple_of
    if all(value.shape[:1] in ((), (longest,)) for value in values):
        return default_collate([{name: value} for value in values])[name]
    if name not in pad_values:
        lengths = sorted({value.shape[0] for value in values if value.dim()})
        raise ConfigError(
            f"pad_collate of samples with {name!r} of lengths {lengths[0]} to {lengths[-1]}",
            why="what it is to be padded with is not known",
            fix=f"say it: sw.pad_collate({name}=0)",
        )
    if len({value.shape[1:] for value in values}) > 1:
        shapes = sorted({tuple(value.shape) for value in values})
        raise ConfigError(
            f"pad_collate of samples with {name!r} of the shapes {', '.join(map(str, shapes[:3]))}",
            why="only the first dim is padded, and others differ",
            fix="let dataset[i] make them equal, or give a collate= of your own",
        )
    filled = pad_sequence(values, batch_first=True, padding_value=pad_values[name])
    rest = filled.new_full((len(values), longest - filled.shape[1], *filled.shape[2:]), pad_values[name])
    return torch.cat([filled, rest], 1)


# ---- copies on the device --------------------------------------------------------------------------------------------


class Transfer:
    """Copies a micro-batch to a device.

    On cuda the copies are made from page-locked memory by a stream of their own: the host does not wait for them, and the device
    makes them while it still runs what was queued before, such as the optimizer's last step. What is queued after them on
    the caller's stream waits for them.

    Args:
        device: where the copies are.
        pin_memory: False: copies are made from the memory that the tensors are in, by the caller's stream, and the host waits.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool):
        self.device = device
        self._is_own_stream = device.type == "cuda" and pin_memory
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]:
        """The micro-batch on the device; and on the host, where a copy of it there is kept that nothing else writes."""
        if self.device.type == "cpu":
            return batch, None
        if not self._is_own_stream:
            # What is not locked is the dataset's own memory, which it may write again.
            return {name: value.to(self.device) for name, value in batch.items()}, None
        locked = {name: _page_locked(value) for name, value in batch.items() if not value.is_cuda}
        copies = self._copies(locked)
        there = {name: copies[name] if name in copies else batch[name].to(self.device) for name in batch}
        return there, locked if len(locked) == len(batch) else None

    def _copies(self, locked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            copies = {name: value.to(self.device, non_blocking=True) for name, value in locked.items()}
        theirs = torch.cuda.current_stream(self.device)
        theirs.wait_stream(self._stream)
        for copy in copies.values():
            copy.record_stream(theirs)  # else the next copies are written into its memory before it has been read
        return copies


def _page_locked(tensor: Tensor) -> Tensor:
    """A copy, always: the dataset may write its own tensors again before the device has them."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
