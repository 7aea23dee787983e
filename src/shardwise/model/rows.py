"""Which positions of a sequence each rank has, where ranks share the sequences of a batch."""

from typing import Literal

import torch
from torch import Tensor

Order = Literal["zigzag", "contiguous"]


def num_chunks(degree: int, order: Order) -> int:
    """Into how many chunks a sequence is cut: one for each rank, or two."""
    return 2 * degree if order == "zigzag" else degree


def most_rows(length: int, degree: int, order: Order) -> int:
    """The number of positions that no rank exceeds."""
    num = num_chunks(degree, order)
    return -(-length // num) * (num // degree)


def rows_of(length: int, degree: int, order: Order, device: torch.device | None = None) -> list[Tensor]:
    """The positions of each rank, in the order in which it has them.

    Any length can be cut: into chunks of ceil(length / number of chunks), of which the last ones are shorter, or empty. ``zigzag`` gives
    rank r the chunks r and 2 * degree - 1 - r: under a causal mask each rank has as many keys to look at. ``contiguous``: chunk r.
    """
    spans = (spans_of(length, degree, order, rank) for rank in range(degree))
    return [torch.cat([torch.arange(*span, device=device) for span in of_rank]) for of_rank in spans]


def spans_of(length: int, degree: int, order: Order, rank: int) -> list[tuple[int, int]]:
    """The first position, and the one behind the last, of each chunk of a rank; see :func:`rows_of`."""
    num = num_chunks(degree, order)
    size = -(-length // num)
    chunks = (rank, num - 1 - rank) if order == "zigzag" else (rank,)
    return [(min(i * size, length), min((i + 1) * size, length)) for i in chunks]


def imbalance(positions: Tensor, degree: int, order: Order) -> float:
    """Work of the most loaded rank over the mean of the ranks, in attention whose queries see the keys of their document up to themselves.

    Args:
        positions: ``[samples, positions]``: each number within its document.
        degree, order: how sequences are cut.
    """
    keys = (positions + 1).double()
    work = [float(keys[:, rows].sum()) for rows in rows_of(positions.shape[1], degree, order)]
    return max(work) * degree / sum(work)
