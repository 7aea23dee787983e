"""A run that loses a peer, or seems to: ``python -m torch.distributed.run ... losses.py CAUSE RANK SECONDS TIMEOUT``.

With ``--launch`` before the words it starts its two ranks itself, by ``launch_local``; with ``--blocked`` the other rank waits in a
collective of its own instead of an exchange of the library's. RANK does what CAUSE says, for SECONDS where it goes on after that, and
prints ``LOST`` and the time just before. With ``--unconnected`` ranks have no connections to each other, as in the first second of a run.
"""

import ctypes
import io
import os
import pdb
import signal
import subprocess
import sys
import time

CAUSES = ("killed", "exits", "stopped", "caught")
ONLY_SLOW = {"lock": 60.0, "debugger": 60.0, "compiles": 120.0, "saves": 60.0, "load": 30.0, "none": 0.0}  # seconds


def main(cause, lost, seconds, timeout_s, is_blocked):
    import torch
    import torch.distributed as dist

    import shardwise as sw

    with sw.init("dp_shard=2", device="cpu", timeout_s=timeout_s) as world:
        torch.manual_seed(0)
        model = sw.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), world)
        fails = []

        def loss(output, batch):
            if fails:
                raise fails.pop()
            return output.sum()

        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-5), loss=loss, count=lambda batch: 2)
        for _ in range(2):
            step([{"x": torch.ones(2, 4)}])
        if world.rank == lost:
            print(f"LOST {time.time():.3f}", flush=True)
            if cause == "caught":
                fails.append(ValueError("a label out of range"))
                _catch(step, torch)
            _do(cause, seconds)
        if is_blocked:
            dist.all_reduce(torch.ones(1))
        for _ in range(500 if cause == "load" else 3):
            step([{"x": torch.ones(2, 4)}])
        world.barrier()
    print(f"DONE {world.rank}", flush=True)


def _catch(step, torch):
    try:
        step([{"x": torch.ones(2, 4)}])
    except ValueError:
        print("went on", flush=True)


def _do(cause, seconds):
    if cause == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif cause == "exits":
        os._exit(0)
    elif cause == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif cause == "lock":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # unlike CDLL it keeps the interpreter's lock
    elif cause == "debugger":
        pdb.Pdb(stdin=_SlowUser(seconds), stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
    elif cause == "load":
        _busy(10, seconds)
    elif cause != "none":
        time.sleep(seconds)  # in C code, or in files, that let other threads run


def _busy(num, seconds):
    """Processes that compute nothing, for so long."""
    program = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    for _ in range(num):
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class _SlowUser(io.StringIO):
    """Thinks, and says "continue"."""

    def __init__(self, seconds):
        super().__init__("continue\n")
        self._seconds = seconds

    def readline(self, *limits):
        time.sleep(self._seconds)
        return super().readline(*limits)


if __name__ == "__main__":
    flags = [word for word in sys.argv[1:] if word.startswith("--")]
    cause, lost, seconds, timeout_s, *_ = [word for word in sys.argv[1:] if not word.startswith("--")]
    words = (cause, int(lost), float(seconds), float(timeout_s), "--blocked" in flags)
    if "--launch" in flags:
        from shardwise.launch import launch_local

        # A stopped rank is seen by the launcher itself: here the ranks are to see it.
        launch_local(f"{__file__}:main", nproc=2, args=words, stopped_s=1e6)
    else:
        if "--unconnected" in flags:
            from shardwise.world import connections

            connections.PeerConnections._connect = lambda self: None
        main(*words)
