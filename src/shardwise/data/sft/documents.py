"""The documents of a dataset: tokens of records, and which of them are trained on, in one row of integers.

A token that is trained on stands in the row as its complement (``~token``, which is negative), so that it takes four bytes with
what is to be known of it. A document of n positions has n + 1 tokens: the last is predicted only.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.data.batch import IGNORED
from shardwise.data.token_store import StoredTokens


def row_of(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """The tokens of a record, int32 [n]; ``trained``: whether each is trained on, bool [n]."""
    return np.where(trained, ~ids, ids)


@dataclass(frozen=True)
class Documents:
    """Documents by number: ``[i]`` is (input ids, labels), int32 [n] each.

    Attributes:
        rows: the tokens of all, as :func:`row_of` gives them; memory-mapped, where they are from a file.
        ends: int64 [number of documents + 1], where each begins in ``rows``, and where the last ends.
        lines: of each, in its file.
        facts: of the whole file, also for a part of it: ``worst``, the largest token; ``report``.
    """

    rows: np.ndarray
    ends: np.ndarray
    lines: np.ndarray
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, found: StoredTokens) -> "Documents":
        return cls(found.tokens, found.arrays["ends"], found.arrays["lines"], found.facts)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        row = np.asarray(self.rows[self.ends[index] : self.ends[index + 1]])
        is_trained = row < 0
        ids = np.where(is_trained, ~row, row)
        return ids[:-1], np.where(is_trained[1:], ids[1:], np.int32(IGNORED))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each document, int64."""
        return np.diff(self.ends) - 1

    def part(self, numbers: slice) -> "Documents":
        """Some of the documents, which share the tokens."""
        first, stop, _ = numbers.indices(len(self))
        return Documents(self.rows, self.ends[first : stop + 1], self.lines[first:stop], self.facts)

    def digest(self) -> int:
        """Of the lengths of all documents, and the first and the last of them: other documents have another."""
        found = zlib.crc32(np.diff(self.ends).tobytes())
        for ids, labels in (self[0], self[len(self) - 1]):
            found = zlib.crc32(labels.tobytes(), zlib.crc32(ids.tobytes(), found))
        return found
