"""What the ranks of the launch tests run; plain Python, so that a launch takes a tenth of a second."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardwise.errors import LayoutError, RankError, Stopped
from shardwise.launch import send_event

RANK = int(os.environ.get("RANK", "0"))


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def add(a, b):
    return a + b + RANK


def environment(*names):
    return [os.environ.get(name) for name in names]


def write():
    print("to stdout")
    print("to stderr", file=sys.stderr)
    sys.stdout.write("no newline")


def events(count):
    return [send_event({"step": step, "text": "x" * 10000}) for step in range(count)]


def bad_event():
    send_event({"value": object()})


def fail_on(rank):
    if rank == RANK:
        raise ValueError("boom")
    time.sleep(60)


def meet(folder):
    """Waits until all ranks are there: on a busy machine one may start seconds later than the others."""
    Path(folder, str(RANK)).touch()
    deadline = time.monotonic() + 30
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.01)


def fail_everywhere(folder):
    """Once all ranks are there: one that comes later is ended before it can fail as well."""
    meet(folder)
    raise ValueError("boom")


def fail_with_layout():
    raise LayoutError("dp_shard=3 on 4 ranks", why="it does not divide", fix="use dp_shard=4")


def fail_with_layout_that_another_shows():
    """As ranks of a world end that all have the same error."""
    error = LayoutError("dp_shard=3 on 4 ranks", why="it does not divide", fix="use dp_shard=4")
    error.shown_by = f"rank {1 - RANK}"
    raise error


def fail_unpicklable():
    raise UnpicklableError("one", "two")


def echo_first(text, folder):
    """Rank 0 reports the loss of its peer before rank 1 reports why it left."""
    meet(folder)
    if RANK == 0:
        if text:
            raise RuntimeError(text)
        raise RankError("rank 1 was lost", why="it left", fix="see its log", ranks=(1,))
    time.sleep(0.3)
    raise KeyError("the cause")


def lose_a_peer_that_starts():
    if RANK == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def echo_first_of_a_kill(folder):
    meet(folder)
    if RANK == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def signal_self(rank, number, directory=None):
    if directory:
        note_pid(directory)
    if rank == RANK:
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), number)
    time.sleep(60)


def stop_one_of_a_world(timeout_s, folder):
    import shardwise as sw
    import shardwise.verify.preload

    meet(folder)  # with torch imported: the limit is also that of the ranks' meeting
    with sw.init("dp_shard=2", device="cpu", timeout_s=timeout_s) as world:
        world.barrier()
        if RANK:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()


def exit_with(code, hard):
    if hard:
        os._exit(code)
    sys.exit(code)


def fail_at_exit():
    import atexit

    atexit.register(os._exit, 7)
    return "result"


def ignore_sigterm_and_fail(directory):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_pid(directory)
    if RANK == 1:
        raise ValueError("boom")
    time.sleep(60)


def note_pid(directory):
    with open(os.path.join(directory, f"rank{RANK}.{os.getpid()}"), "w"):
        pass


def sleep_with_child(directory):
    child = subprocess.Popen(["sleep", "60"])
    with open(os.path.join(directory, f"child{RANK}.{child.pid}"), "w"):
        pass
    note_pid(directory)
    time.sleep(60)


def leave_child(directory):
    child = subprocess.Popen(["sleep", "60"])
    with open(os.path.join(directory, f"child{RANK}.{child.pid}"), "w"):
        pass
    return "left"


def store_is_reachable():
    """A rendezvous as torch's own store makes it: rank 0 listens on MASTER_PORT with SO_REUSEADDR."""
    import socket

    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if RANK == 0:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(where)
            server.listen()
            server.settimeout(20)
            connection, _ = server.accept()
            connection.close()
        return True
    for _ in range(400):
        try:
            socket.create_connection(where, timeout=5).close()
            return True
        except ConnectionRefusedError:
            time.sleep(0.05)
    return False


def deaf(directory):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_pid(directory)
    time.sleep(60)


def give_up_on_a_peer():
    if RANK == 0:
        raise RuntimeError("Timed out waiting 4000ms for recv operation to complete")
    time.sleep(60)


def blame_a_peer():
    if RANK == 0:
        time.sleep(0.3)
        raise RankError("rank 1 was lost", why="it left", fix="see its log", ranks=(1,))
    time.sleep(60)


def quit_on(rank, whole):
    if rank == RANK:
        sys.exit(0)
    time.sleep(0.3)
    if whole:
        raise RankError(f"rank {rank} was lost", why="it ended its program", fix="see its log", ranks=(rank,))
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def write_stacks():
    """As faulthandler writes them in a process that is ending, and in one that is not."""
    head = "thread 0x00007f219d5e2b80 (most recent call first):"
    lines = ["before", f"Current {head}", "  Garbage-collecting", "  <no Python frame>"]
    lines += [
        head.capitalize(),
        "  <no Python frame>",
        head.capitalize(),
        "  Garbage-collecting",
        '  File "a.py", line 1 in f',
        "after",
    ]
    print(*lines, sep="\n", file=sys.stderr)


def signal_process(pid):
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.2 * (1 + RANK))


def save_when_told(directory, *, waits_s=0.1, talks=False):
    """Stops in order at a signal, as a run with checkpoints does; its child sleeps on."""
    told = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told.append(signal.Signals(number).name))
    child = subprocess.Popen(["sleep", "60"])
    with open(os.path.join(directory, f"child{RANK}.{child.pid}"), "w"):
        pass
    note_pid(directory)
    while not told:
        time.sleep(0.01)
    if talks:
        print("saving")
    time.sleep(waits_s)
    assert child.poll() is None, "the child was ended, too"
    raise Stopped(" and ".join(told), 7, "a/step-7")


def count_when_told(directory):
    """Is ready late for a signal, as a run is that loads torch first; takes two, and goes on to its end."""
    seen = []
    note_pid(directory)
    while not os.path.exists(os.path.join(directory, "signalled")):
        time.sleep(0.01)
    time.sleep(0.2)  # the first came, and waits
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    while len(seen) < 2:
        with open(os.path.join(directory, f"saved{RANK}.{len(seen)}"), "w"):
            pass
        time.sleep(0.01)
    raise Stopped("both", 7, "a/step-7")


def talk_and_save_when_told(directory):
    save_when_told(directory, waits_s=0.5, talks=True)


def never_save_when_told(directory):
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    note_pid(directory)
    time.sleep(60)


def fail_when_told(directory):
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    note_pid(directory)
    signal.pause() if hasattr(signal, "pause") else None
    if RANK == 1:
        raise OSError("the disk is full")
    time.sleep(60)


def fail_when_told_beside_a_plain_rank(directory, number=None):
    """Rank 1 fails when it is asked to stop, or exits with ``number``; rank 0 has nothing to save, and ends by the first signal
    after that: the one with which the launcher ends it."""
    signal.signal(signal.SIGTERM, lambda _, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL) if RANK == 0 else None)
    note_pid(directory)
    signal.pause()
    if RANK == 1 and number is not None:
        raise SystemExit(number)
    if RANK == 1:
        raise OSError("the disk is full")
    time.sleep(60)


def exit_when_told_beside_a_plain_rank(directory):
    fail_when_told_beside_a_plain_rank(directory, 143)


def lineage(*modules):
    """Who the parent is, which modules were there before anything here imported them, and the words of the process."""
    return os.getppid(), [name in sys.modules for name in modules], sys.argv[1:], sys.stdin.read()


def numbers():
    import random

    import numpy as np

    return random.random(), float(np.random.random())


def signal_its_server(number):
    """Never the process of the tests, which is the parent of a rank that was not forked."""
    assert "--serve" in Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0"), "this rank was not forked"
    os.kill(os.getppid(), number)


def end_the_server(directory):
    note_pid(directory)
    while RANK == 1 and len(os.listdir(directory)) < 2:
        time.sleep(0.01)
    if RANK == 1:
        signal_its_server(signal.SIGKILL)
    time.sleep(60)


def signal_the_server(number):
    signal_its_server(number)
    time.sleep(0.3)
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def read_environment_at_exit(path):
    import atexit

    atexit.register(lambda: Path(path, str(RANK)).write_text(os.environ["RANK"]))


def length(text):
    return len(text)


def stop_the_server():
    signal_its_server(signal.SIGSTOP)
    return "ended"


def seen_by(module):
    """What a module kept of the environment when it was imported; it was, before this."""
    return sys.modules[module].SEEN
