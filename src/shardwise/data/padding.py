"""Samples of unequal length in one micro-batch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shardwise.data.batch import IGNORED, default_collate, rows_of
from shardwise.errors import ConfigError

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
