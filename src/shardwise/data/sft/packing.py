"""Packing: several documents in one sample, none of which attends to another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError

_FEW = 4  # tokens of a document that is tried


@dataclass(frozen=True)
class Packs:
    """Which documents share a sample: ``[i]`` has their numbers. Two integers a document and not a list a sample: there may be
    many millions of them.

    Attributes:
        documents: int32, those of one sample after those of another.
        ends: int64 [number of samples + 1], where each begins among them, and where the last ends.
    """

    documents: np.ndarray
    ends: np.ndarray

    @classmethod
    def single(cls, num: int) -> "Packs":
        """``num`` samples of one document."""
        return cls(np.arange(num, dtype=np.int32), np.arange(num + 1))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[self.ends[index] : self.ends[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


def packs(lengths: Sequence[int] | np.ndarray, size: int) -> Packs:
    """Which documents share a sample: each document once, of at most ``size`` tokens together.

    Best fit: documents are taken from the longest to the shortest, and each goes where the least room is left that it fits
    into. The same for the same lengths in every process.

    Args:
        lengths: tokens of each document, at most ``size``.
        size: tokens of a sample.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").astype(np.int32)
    sample_of = np.empty(len(order), dtype=np.int32)  # of the documents in that order
    num = 0
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # room left -> numbers of samples
    # The rooms that some sample has, as bits of one integer: the smallest that fits is found without a search.
    rooms = 0
    for at, i in enumerate(order):
        length = int(lengths[i])
        fitting = rooms >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            sample = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, sample, num = size, num, num + 1
        sample_of[at] = sample
        left = room - length
        if left:
            with_room[left].append(sample)
            rooms |= 1 << left
    by_sample = np.argsort(sample_of, kind="stable")
    return Packs(order[by_sample], np.searchsorted(sample_of[by_sample], np.arange(num + 1)))


def check_attention(model: nn.Module, forward: Callable[[nn.Module, dict[str, Tensor]], Any]) -> None:
    """Runs a model on two documents in one sample, the first of them once with other tokens: what it says of the second must
    stay. All ranks must call it.

    Raises:
        ConfigError: it does not.
    """
    device = next(model.parameters()).device
    ids = torch.arange(2 * _FEW, device=device)[None] % 3 + 1
    other = torch.cat([3 - ids[:, :_FEW], ids[:, _FEW:]], 1)
    places = torch.arange(_FEW, device=device).repeat(2)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = [
                forward(model, {"input_ids": each, "labels": each, "position_ids": places}) for each in (ids, other)
            ]
    finally:
        model.train(was_training)
    one, two = (getattr(output, "logits", output)[:, _FEW:].double() for output in outputs)
    if (one - two).abs().max() > 1e-6 * one.abs().max():
        raise ConfigError(
            f"packed samples for a {type(model).__name__}",
            why="its attention goes from one document of a sample to the next: with other tokens in the first, its logits for the second "
            "change, though their position_ids begin anew",
            fix='use padding: pack=False (data.pack=false); or a causal model of transformers with attn_implementation="sdpa", "eager" or a '
            "flash one, which finds documents by position_ids where it is called with use_cache=False",
        )
