"""What ranks write into their store: a beat (sign of life) each, and the first message about a failure."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

HAS_LEFT = -1  # the count of a rank that has left on purpose


@dataclass(frozen=True)
class Beat:
    """A sign of life of one rank.

    Attributes:
        count: a new number each time, or HAS_LEFT.
        place: where the main thread reported to be ("after window 3, before the step").
        line: where it is in the user's code ("train.py:21 in main"), or empty.
        waits: what it waits in ("at a barrier", "in all_reduce"), or empty.
        exchanges: how many exchanges it has come to; all ranks come to them in one order.
        process: its process id and host ("4711 on node3"), for a user who wants to look at it.
    """

    count: int
    place: str
    line: str = ""
    waits: str = ""
    exchanges: int = 0
    process: str = ""

    @property
    def has_left(self) -> bool:
        return self.count == HAS_LEFT

    @property
    def where(self) -> str:
        return f"{self.place} ({self.line})" if self.line else self.place


@dataclass(frozen=True)
class Word:
    """The message that a rank leaves in the store for all when a rank is lost.

    Attributes:
        ranks: the lost ranks; empty: see ``who``.
        why: the reason, as text.
        who: what is lost where ``ranks`` is empty.
        is_asked: the rank was sent SIGTERM, and perhaps all were.
        is_crossed: no rank is lost: ``ranks`` wait for each other.
    """

    ranks: list[int]
    why: str
    is_asked: bool = False
    is_crossed: bool = False
    who: str = "the launcher"


def read_word(store: dist.Store) -> Word | None:
    """The first message about a lost rank, if there is one."""
    return Word(**json.loads(store.get("alarm"))) if store.check(["alarm"]) else None


def leave_word(store: dist.Store, word: Word) -> Word:
    """Stores ``word`` if no message was stored before. Returns the stored one, which counts."""
    return Word(**json.loads(store.compare_set("alarm", "", json.dumps(asdict(word)))))


def leave_beat(store: dist.Store, rank: int, beat: Beat) -> None:
    """Writes a sign of life of ``rank`` into the store."""
    store.set(f"beat/{rank}", json.dumps(asdict(beat)))


class Beats:
    """The beats of the other ranks, read over one connection to the store.

    ``now`` is the reader's clock. A rank whose count stays the same from one reading to another is silent.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, now: Callable[[], float]):
        self._store, self._rank, self._size, self._now = store, rank, size, now
        self._seen: dict[int, tuple[int, float]] = {}  # the last count of a rank, and when it was first read

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Beat]:
        """The last beat of each of ``ranks`` (None: all but this one); ranks that have not begun are left out."""
        wanted = [rank for rank in range(self._size) if rank != self._rank] if ranks is None else list(ranks)
        keys = [f"beat/{rank}" for rank in wanted]
        if self._store.check(keys):
            texts = dict(zip(wanted, self._store.multi_get(keys), strict=True))
        else:
            texts = {
                rank: self._store.get(key) for rank, key in zip(wanted, keys, strict=True) if self._store.check([key])
            }
        found = {rank: Beat(**json.loads(text)) for rank, text in texts.items()}
        for rank in wanted:
            count = found[rank].count if rank in found else 0
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, self._now())
        return found

    def silent_for(self, rank: int) -> float:
        """Seconds since the current count of ``rank`` was first read; 0 for a rank that has left on purpose."""
        count, since = self._seen.get(rank, (HAS_LEFT, 0.0))
        return 0.0 if count == HAS_LEFT else self._now() - since


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What ``function`` returns, or None if it takes longer or finds no store. The store of a stopped process never
    answers."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, name="shardwise-read", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
