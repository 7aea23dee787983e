"""SIGTERM while a world is open: a rank that has lost a peer names it before it ends, and ends at once.

torchrun sends SIGTERM to the remaining ranks within 0.1 s of a rank's death. Python runs a signal handler in the main
thread, which may be blocked in a collective, so a thread is notified of the signal too (``signal.set_wakeup_fd``). If
no peer is lost, everything is as without this: the process ends by the signal, or does what its own handler does, or
saves and stops.
"""

import contextlib
import ctypes
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardwise.launch.stop_signals import leave, replaceable
from shardwise.world.connections import TERMINATED

if TYPE_CHECKING:
    from shardwise.world.liveness import Watch

_PATIENCE_S = 1.0  # for a main thread that ends by itself: it raises the error, or reports what is kept

_listener: "_Listener | None" = None


def listen(watch: "Watch") -> None:
    """Registers ``watch`` to be asked when SIGTERM arrives. Does nothing where the application has its own handler, or
    outside the main thread, where Python allows none."""
    global _listener
    if threading.current_thread() is not threading.main_thread():
        return
    if _listener is None:
        before = signal.getsignal(signal.SIGTERM)
        if before is _handle_sigterm:  # left by an earlier world, see _handle_sigterm
            before = signal.SIG_DFL
        if before not in (signal.SIG_DFL, leave):
            return
        _listener = _Listener(before)
        signal.signal(signal.SIGTERM, _handle_sigterm)
    _listener.watches.append(watch)


def stop_listening(watch: "Watch") -> None:
    """Unregisters ``watch``: its world is closed, or the program ends. Idempotent."""
    global _listener
    if _listener is None or watch not in _listener.watches:
        return
    _listener.watches.remove(watch)
    if not _listener.watches and threading.current_thread() is threading.main_thread():
        _listener.close()
        _listener = None


@replaceable
def _handle_sigterm(number: int, frame: FrameType | None) -> None:
    if _listener is not None:
        _listener.handle(number, frame)
    else:  # another library replaced the handler while the last world was closed, and restored it later
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _Listener:
    """The handler, the descriptor that the signal writes to, and the thread that reads it; one per process."""

    def __init__(self, before: Any):
        self.watches: list[Watch] = []
        self._before = before
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._is_woken = self._take_wakeup()
        self._thread = threading.Thread(target=self._run, name="shardwise-sigterm", daemon=True)
        self._thread.start()

    def _take_wakeup(self) -> bool:
        other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if other != -1:  # an event loop uses it: then only the handler wakes the thread
            signal.set_wakeup_fd(other)
        return other == -1

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread. The other thread does the work: it is notified even if this one blocks."""
        if not self.watches:
            self._end_by_signal()
        elif not self._is_woken:
            os.write(self._write, bytes([number]))
        if self._before is leave:
            leave(number, frame)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._read, 64):
                if signal.SIGTERM in data:
                    self._on_sigterm()
        os.close(self._read)

    def _on_sigterm(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if not str(getattr(handler, "__module__", "")).startswith("shardwise."):
            return
        for watch in list(self.watches):
            lost = watch.watchdog.loss()
            if lost is not None:
                watch.watchdog.end(lost, _PATIENCE_S if watch.is_told or self._before is leave else 0.0)
        if handler is _handle_sigterm and self._before == signal.SIG_DFL:
            self._end_by_signal()

    def _end_by_signal(self) -> None:
        for watch in list(self.watches):
            watch.connections.say(TERMINATED)
        # Python lets only the main thread set a handler, and the main thread may be blocked.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Restores the previous handler; in the main thread."""
        if signal.getsignal(signal.SIGTERM) is _handle_sigterm:
            signal.signal(signal.SIGTERM, self._before)
        if self._is_woken:
            other = signal.set_wakeup_fd(-1)
            if other != self._write:
                signal.set_wakeup_fd(other)
        os.close(self._write)  # so that the thread reads end of file
        self._thread.join(1.0)  # bounded: it may be waiting for messages about a lost peer

    def forget(self) -> None:
        """In a forked process: releases what belongs to the parent."""
        if signal.getsignal(signal.SIGTERM) is _handle_sigterm:
            signal.signal(signal.SIGTERM, self._before)
        if self._is_woken:
            signal.set_wakeup_fd(-1)
        os.close(self._write)
        os.close(self._read)


def _forget_in_child() -> None:
    global _listener
    if _listener is not None and threading.current_thread() is threading.main_thread():
        _listener.forget()
    _listener = None


os.register_at_fork(after_in_child=_forget_in_child)
