"""What the ranks of a world write into their store about themselves: a beat each, and the first word of a failure."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["HAS_LEFT", "Beat", "Beats", "Word", "leave_beat", "leave_word", "read_word", "within"]

HAS_LEFT = -1  # the count of a rank that has left on purpose


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        count: another one each time, or HAS_LEFT.
        place: where the main thread says it is ("after window 3, before the step").
        line: where it is in the user's code ("train.py:21 in main"), or nothing.
        waits: what it waits in ("at a barrier", "in all_reduce"), or nothing.
        exchanges: how many it has come to; ranks come to them in one order.
        process: its number and host ("4711 on node3"), for who wants to look at it.
    """

    count: int
    place: str
    line: str = ""
    waits: str = ""
    exchanges: int = 0
    process: str = ""

    @property
    def has_left(self) -> bool:
        """Whether the rank has left on purpose."""
        return self.count == HAS_LEFT

    @property
    def where(self) -> str:
        """Place and line, for messages."""
        return f"{self.place} ({self.line})" if self.line else self.place


@dataclass(frozen=True)
class Word:
    """What a rank leaves in the store for all when one is lost.

    Attributes:
        ranks: who is lost; none: see ``who``.
        why: in words.
        who: what is lost where ``ranks`` is empty.
        is_asked: it was sent SIGTERM, and perhaps all were.
        is_crossed: nobody is lost: ``ranks`` wait for each other.
    """

    ranks: list[int]
    why: str
    is_asked: bool = False
    is_crossed: bool = False
    who: str = "the launcher"


def read_word(store: dist.Store) -> Word | None:
    """The first word that was left, if there is one."""
    return Word(**json.loads(store.get("alarm"))) if store.check(["alarm"]) else None


def leave_word(store: dist.Store, word: Word) -> Word:
    """Leaves ``word`` if it is the first; the one that counts."""
    return Word(**json.loads(store.compare_set("alarm", "", json.dumps(asdict(word)))))


def leave_beat(store: dist.Store, rank: int, beat: Beat) -> None:
    """A sign of life of ``rank``."""
    store.set(f"beat/{rank}", json.dumps(asdict(beat)))


class Beats:
    """The beats of the other ranks, read over one connection to the store.

    ``now`` is the reader's clock. A count that stays the same from one reading to another is silence.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, now: Callable[[], float]):
        self._store, self._rank, self._size, self._now = store, rank, size, now
        self._seen: dict[int, tuple[int, float]] = {}  # the last count of a rank, and when it was new

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Beat]:
        """The last beat of ``ranks`` (None: of all but this one); of those that have not begun none."""
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
        """Seconds from the first reading of the count that ``rank`` has still; 0 for one that has left on purpose."""
        count, since = self._seen.get(rank, (HAS_LEFT, 0.0))
        return 0.0 if count == HAS_LEFT else self._now() - since


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What ``function`` returns, or None where it takes longer or finds no store: a store whose process is stopped never answers."""
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
