"""What a rank does when a connection to a neighbour ends, or cannot be made."""

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardwise.world.beats import Word, leave_word, read_word, within
from shardwise.world.connections import RESET, TERMINATED, PeerConnections
from shardwise.world.watchdog import ended_word

if TYPE_CHECKING:
    from shardwise.world.liveness import Watch

_ALL_ASKED_S = 1.0  # time until a SIGTERM that was sent to all ranks of a job has reached this one, too
_UNSURE_S = 2.0  # a beat within this time shows that only the connection was lost, and not its rank


def connect(watch: "Watch", store: Callable[[], dist.Store], *, master: str, is_one_host: bool) -> PeerConnections:
    """The connections of a watch, which is called when one ends."""
    told = _Told(watch)
    return PeerConnections(
        watch.rank,
        watch.size,
        store=store,
        master=master,
        is_one_host=is_one_host,
        is_current=watch.is_current,
        on_end=told.of_an_end,
        on_problem=told.of_a_problem,
    )


class _Told:
    """The callbacks for the thread of the connections."""

    def __init__(self, watch: "Watch"):
        self._watch = weakref.ref(watch)  # weak: the watch has these connections, and a cycle would keep them open

    def of_an_end(self, rank: int, how: bytes) -> None:
        """Called when a neighbour's connection has ended without the byte that it leaves."""
        watch, word = self._watch(), ended_word([rank])
        if watch is None:
            return
        if how != TERMINATED and _has_left(watch, rank):
            watch.connections.closed.discard(rank)
            return
        if how == TERMINATED:
            word = Word([rank], f"rank {rank} was ended by SIGTERM", is_asked=True)
            watch.stopped.wait(_ALL_ASKED_S)
        if how == RESET and _is_alive(watch, rank):
            print(
                f"shardwise: rank {watch.rank} lost its connection to rank {rank}, which is still running",
                file=sys.stderr,
            )
            return
        if rank != watch.keeper:  # the store would have ended with the keeper
            with contextlib.suppress(RuntimeError):
                word = leave_word(watch.open_store(), word)
        watch.on_alarm(word)

    def of_a_problem(self, problem: str, is_closed: bool) -> None:
        """Called if this rank cannot connect to its right neighbour: the first of all ranks prints that, unless a rank
        has ended or left, which is known only after an interval."""
        watch = self._watch()
        if watch is None or watch.stopped.wait(watch.interval_s) or watch.alarm is not None:
            return
        who, right = f"rank {watch.rank}", (watch.rank + 1) % watch.size
        try:
            store = watch.open_store()
            if read_word(store) is not None or _has_left(watch, right):
                return
            if store.compare_set("unconnected", "", who) != who.encode():
                return
        except RuntimeError:  # the process that keeps the store has ended, which every rank will notice
            return
        advice = (
            f"look whether rank {right} has ended"
            if is_closed
            else "let the ranks' hosts connect to each other on any port"
        )
        print(
            f"shardwise: rank {watch.rank} cannot connect to rank {right} ({problem}): a rank that ends without notice will be "
            f"noticed by its silence only, which takes longer; {advice}",
            file=sys.stderr,
            flush=True,
        )


def _has_left(watch: "Watch", rank: int) -> bool:
    """Whether a rank has left on purpose, by its last beat: its byte may be lost if both leave at once."""
    beats = within(_UNSURE_S, lambda: watch.beats.read([rank])) or {}
    return rank in beats and beats[rank].has_left


def _is_alive(watch: "Watch", rank: int) -> bool:
    with contextlib.suppress(RuntimeError):
        before = watch.beats.read([rank])
        watch.stopped.wait(max(_UNSURE_S, 4 * watch.interval_s))
        return watch.beats.read([rank]) != before
    return False
