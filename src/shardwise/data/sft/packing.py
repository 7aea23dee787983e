"""Packing: several documents in one sample, none of which attends to another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.model.mode import eval_mode

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


def check_attention(model: nn.Module, forward: Callable[[nn.Module, dict[str, Tensor]], Any], num_samples: int) -> None:
    """Runs a model on ``num_samples`` samples of two documents, the first of them once with other tokens: what it says of the second
    must stay. All ranks must call it."""
    if not _crosses(model, forward, num_samples):
        return
    if num_samples > 1 and not _crosses(model, forward, 1):
        raise ConfigError(
            f"packed samples for a {type(model).__name__}, {num_samples} in a micro-batch",
            why="its attention stays within a document of a batch of one sample, and goes from one document to the next in a larger one: "
            "so do the flash kernels of transformers, which look for documents by position_ids in a batch of one",
            fix="use micro-batches of one sample, in training and evaluation: micro_batch=1 (--data.micro_batch=1), which may be longer "
            '(seq_len); or attn_implementation="sdpa" or "eager" (--model.args.attn_implementation=sdpa); or pack=False',
        )
    raise ConfigError(
        f"packed samples for a {type(model).__name__}",
        why="its attention goes from one document of a sample to the next: with other tokens in the first, its logits for the second "
        "change, though their position_ids begin anew",
        fix='use padding: pack=False (data.pack=false); or a causal model of transformers with attn_implementation="sdpa", "eager", or a '
        "flash one and micro_batch=1, which finds documents by position_ids where it is called with use_cache=False",
    )


def _crosses(model: nn.Module, forward: Callable[[nn.Module, dict[str, Tensor]], Any], num_samples: int) -> bool:
    """Whether tokens of one document change what is said of the next."""
    device = next(model.parameters()).device
    ids = (torch.arange(2 * _FEW, device=device)[None] % 3 + 1).repeat(num_samples, 1)
    other = torch.cat([3 - ids[:, :_FEW], ids[:, _FEW:]], 1)
    places = torch.arange(_FEW, device=device).repeat(num_samples, 2)
    with eval_mode(model), torch.no_grad():
        outputs = [forward(model, {"input_ids": each, "labels": each, "position_ids": places}) for each in (ids, other)]
    one, two = (getattr(output, "logits", output)[:, _FEW:].double() for output in outputs)
    return bool((one - two).abs().max() > 1e-6 * one.abs().max())
