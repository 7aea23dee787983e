"""TCP connections from every rank to its neighbours in a ring, which the system closes when a process ends.

A closed connection proves that a process has ended; silence does not: a process that is stopped, busy in C code or held
by a debugger keeps its connections open. Each rank connects to the next one over addresses exchanged through the store,
in a thread, so that start-up does not wait. A rank that leaves on purpose sends one byte first, and so does one that is
ended by SIGTERM. Where ranks cannot connect (a firewall), one of them prints that once, and a lost process is then
noticed only by its silence.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

LEFT, TERMINATED = b"L", b"T"
"""The byte sent before a connection is closed: this rank leaves on purpose; it was ended by SIGTERM."""
CLOSED, RESET = b"", b"R"
"""How a connection ends without such a byte: the process ended; or the network reset it, and the process may live."""

_SECRET = 16  # bytes by which both ends identify each other
_CONNECT_S = 3.0
_TRIES = 3
_POLL_S = (0.02, 0.5)  # how often the store is asked for the neighbour's address: at first, and later
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have restored SIGPIPE's default, which ends the process
_KEEP_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 8))  # some firewalls drop idle connections

_open: "weakref.WeakSet[PeerConnections]" = weakref.WeakSet()


@dataclass
class _Peer:
    """One connection, and its rank once both ends have shown their secret."""

    is_ours: bool  # this rank made it
    rank: int | None = None
    received: bytes = b""
    last: bytes = field(default=CLOSED)  # the last byte that it sent


class PeerConnections:
    """The connections of one rank to its two neighbours.

    Args:
        rank, size: this rank, and the number of ranks.
        store: opens a new connection to the ranks' store, with keys of this world only; called in the thread.
        master: the host by whose route this rank's address is found: the host of rank 0.
        is_one_host: all ranks are on this host.
        is_current: whether the world still exists; False ends the thread.
        on_end: called in the thread with a neighbour's rank and how its connection ended: CLOSED, RESET or TERMINATED.
        on_problem: called in the thread if this rank cannot connect to its right neighbour, with the reason, and
            whether the neighbour is on this host and has closed its port: it has ended, or is about to.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        store: Callable[[], dist.Store],
        master: str,
        is_one_host: bool,
        is_current: Callable[[], bool],
        on_end: Callable[[int, bytes], None],
        on_problem: Callable[[str, bool], None],
    ):
        self.rank, self.right = rank, (rank + 1) % size
        self.closed: set[int] = set()  # neighbours whose process ended without a word
        self._open_store = store
        self._store: dist.Store | None = None  # until the right neighbour is connected
        self._master, self._is_one_host = master, is_one_host
        self._is_current, self._on_end, self._on_problem = is_current, on_end, on_problem
        self._num_tries = 0
        self._secrets = (secrets.token_bytes(_SECRET), secrets.token_bytes(_SECRET))  # of the hello, of the answer
        self._answer = b""  # the secret that the right neighbour has to answer with
        self._peers: dict[socket.socket, _Peer] = {}
        self._listener: socket.socket | None = None
        # The last byte for the neighbours, and a lock held while it is sent and while a neighbour identifies itself.
        self._said, self._meeting = b"", threading.RLock()
        self._wake, self._woken = socket.socketpair()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-connections", daemon=True)
        _open.add(self)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        return [peer.rank is not None for peer in self._peers.values()].count(True) >= 2

    def say(self, word: bytes) -> None:
        """Sends LEFT or TERMINATED to the neighbours, also to those that have not answered yet; never waits. A
        neighbour that has connected and not identified itself gets the byte after the secret that it expects: before
        the secret, it would take this rank for another program and close the connection."""
        with self._meeting:
            self._said = word
            for connection, peer in list(self._peers.items()):
                if peer.is_ours or peer.rank is not None:
                    with contextlib.suppress(OSError):
                        connection.send(word, _NO_SIGNAL)

    def ended(self) -> set[int]:
        """The neighbours whose process has ended without sending a byte, as the system knows at this moment."""
        found: set[int] = set()
        for connection, peer in list(self._peers.items()):
            if peer.rank is not None and peer.last == CLOSED:
                with contextlib.suppress(OSError):
                    if connection.recv(1, socket.MSG_PEEK) == b"":
                        found.add(peer.rank)
        return found | self.closed  # last: the thread may have dropped one meanwhile

    def close(self) -> None:
        """Sends LEFT and closes everything. Idempotent."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout=1.0)  # a thread that waits for an unresponsive store is left behind: it is a daemon

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store = self._open_store()
            self._listen()
            asked_at, pause = 0.0, _POLL_S[0]
            while not self._stop.is_set() and self._is_current():
                if self._store is not None and time.monotonic() > asked_at + pause:
                    self._connect()
                    asked_at, pause = time.monotonic(), min(1.5 * pause, _POLL_S[1])
                self._serve(pause if self._store is not None else _POLL_S[1])
        except OSError as error:
            self._on_problem(f"no socket: {error}", False)
        except RuntimeError:  # the process that keeps the store has ended, which every rank will notice
            return
        finally:
            self.say(LEFT)
            for connection in self._peers:
                with contextlib.suppress(OSError):
                    connection.recv(64)  # unread data would turn the close into a reset
            self.release()

    def _listen(self) -> None:
        assert self._store is not None
        address, family = _own_address(self._master)
        is_everywhere = not self._is_one_host and ipaddress.ip_address(address).is_loopback
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(("" if is_everywhere else address, 0))
        self._listener.listen(8)
        self._listener.setblocking(False)
        place = {"host": address, "port": self._listener.getsockname()[1], "machine": socket.gethostname()}
        self._store.set(f"connect/{self.rank}", json.dumps({**place, "secrets": [s.hex() for s in self._secrets]}))

    def _connect(self) -> None:
        """Connects to the right neighbour, as soon as its address is in the store."""
        assert self._store is not None
        if not self._store.check([f"connect/{self.right}"]):
            return
        place = json.loads(self._store.get(f"connect/{self.right}"))
        host = place["host"]
        if ipaddress.ip_address(host).is_loopback and place["machine"] != socket.gethostname():
            host = self._master  # that rank looked up its own name and found the loopback address
        hello, self._answer = (bytes.fromhex(text) for text in place["secrets"])
        try:
            connection = socket.create_connection((host, place["port"]), timeout=_CONNECT_S)
            connection.sendall(hello + self.rank.to_bytes(4, "big"), _NO_SIGNAL)
            self._add(connection, _Peer(is_ours=True))
            self._store = None
        except OSError as error:
            self._num_tries += 1
            if self._num_tries == _TRIES:
                self._store = None
                is_closed = isinstance(error, ConnectionRefusedError) and place["machine"] == socket.gethostname()
                self._on_problem(f"{host}:{place['port']}: {error}", is_closed)

    def _serve(self, wait_s: float) -> None:
        if self._listener is not None and self.is_complete:
            self._listener.close()
            self._listener = None
        sources = [self._woken, *([] if self._listener is None else [self._listener]), *self._peers]
        poll = select.poll()  # select() itself takes no descriptor above 1023
        for source in sources:
            poll.register(source, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * wait_s)}
        for source in sources:
            if source.fileno() in ready and source is self._listener:
                with contextlib.suppress(OSError):  # the connection has been closed again
                    self._add(source.accept()[0], _Peer(is_ours=False))
            elif source.fileno() in ready and source is not self._woken:
                self._receive(source)

    def _add(self, connection: socket.socket, peer: _Peer) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers = {**self._peers, connection: peer}  # a new dict: other threads iterate over the old one

    def _receive(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            data = connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data, peer.last = b"", RESET if peer.last == CLOSED else peer.last
        if peer.rank is not None:
            peer.last = data[-1:] or peer.last
        elif data:
            peer.received += data
            data = self._meet(connection, peer) and data
        if not data:
            self._drop(connection, peer)

    def _meet(self, connection: socket.socket, peer: _Peer) -> bool:
        """Identifies the other end, once enough bytes have arrived; False: it is not one of the ranks."""
        wanted = self._answer if peer.is_ours else self._secrets[0]
        num = _SECRET if peer.is_ours else _SECRET + 4
        if not secrets.compare_digest(wanted[: len(peer.received)], peer.received[:_SECRET]):
            return False
        if len(peer.received) < num:
            return True
        with self._meeting:
            if not peer.is_ours:
                connection.send(self._secrets[1] + self._said, _NO_SIGNAL)
            peer.rank = self.right if peer.is_ours else int.from_bytes(peer.received[_SECRET:num], "big")
        peer.last = peer.received[num:][-1:]  # it may have left already
        return True

    def _drop(self, connection: socket.socket, peer: _Peer) -> None:
        rank = None if peer.last == LEFT or self._stop.is_set() else peer.rank
        if rank is not None and peer.last == CLOSED:
            self.closed.add(rank)
        self._peers = {other: peer for other, peer in self._peers.items() if other is not connection}
        connection.close()
        if rank is not None:
            self._on_end(rank, peer.last)

    def release(self) -> None:
        """Closes this process's descriptors without sending anything: a forked process has copies of them."""
        for connection in [self._listener, *self._peers, self._wake, self._woken]:
            if connection is not None:
                connection.close()
        self._peers, self._listener, self._store = {}, None, None


def _own_address(master: str) -> tuple[str, Any]:
    """This host's address on the route to ``master``; nothing is sent."""
    for family, kind, _, _, place in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)
            return probe.getsockname()[0], family
    return "127.0.0.1", socket.AF_INET


def _close_copies() -> None:
    for connections in list(_open):
        connections.release()


# In a forked process (a data loader's worker): its copies would keep a connection open after the rank has died.
os.register_at_fork(after_in_child=_close_copies)
