"""Notifies the peers when a program ends by an exception, or without closing its world."""

import atexit
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.world.connections import LEFT
from shardwise.world.termination import stop_listening
from shardwise.world.uncaught import leave_to_world, note_first_rank, show

if TYPE_CHECKING:
    from shardwise.world.init import World

_open: set["World"] = set()  # kept alive: one that was made in a function must still notify its peers
_is_installed = False


def owe_exit_notice(world: "World") -> None:
    """Makes sure that a program that ends before ``world`` is closed notifies its peers."""
    global _is_installed
    _open.difference_update([w for w in _open if w.watch is None or not w.watch.is_current()])
    _open.add(world)
    if _is_installed:
        return
    _is_installed = True
    leave_to_world()
    shown, rank = sys.excepthook, world.rank

    def tell(kind: Any, error: BaseException, trace: Any) -> None:
        watch = next((w.watch for w in _open if w.watch is not None and not w.closed), None)
        # First, because peers that are notified may end this process's launcher.
        note_first_rank(watch, error)
        show(shown, error, trace, rank)
        for world in list(_open):
            if world.watch is not None and not world.closed:
                lost = world.lost_peer(error)
                if lost is not None:
                    shown(type(lost), lost, None)
                world.closed, world.watch.watchdog.is_shown = True, True
                world.watch.failed(lost or error)
                stop_listening(world.watch)

    sys.excepthook = tell
    atexit.register(_leave)


def owe_no_notice(world: "World") -> None:
    """Called when ``world`` is closed: no notice is needed any more."""
    _open.discard(world)


def _leave() -> None:
    for world in list(_open):
        if world.watch is None:
            continue
        stop_listening(world.watch)  # if the code below hangs, SIGTERM ends it
        world.watch.connections.say(LEFT)
        if not world.closed and dist.is_initialized():
            world.closed = True
            # The group first: a peer that waits in a collective for this rank is released, and then reads the reason.
            if world.owns_group:
                dist.destroy_process_group()
            world.watch.leave_unannounced()
        world.watch.stop()
