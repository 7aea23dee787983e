"""Scripts that end badly, as whole programs: run as ``python endings.py`` it forks the ranks of one scenario a line.

Each rank is a process that runs its scenario at top level and ends as an interpreter ends (exception hook, exit handlers),
with nothing around it that a launcher would add; torch, and what a step imports, is imported once for all of them.
"""

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import shardwise as sw
import shardwise.verify.preload  # each rank would import it itself: some seconds
from shardwise.launch import held_port
from shardwise.world import connections, watchdog

RANK = 0
_LIMIT_S = 40.0


def _world(timeout_s=8):
    return sw.init("dp_shard=2", device="cpu", timeout_s=timeout_s)  # a wait of a quarter of it is reported: of 2 s


def _patient_world(layout="dp_shard=2"):
    """Where a rank says why it ends: on a busy machine it may be silent for seconds before."""
    return sw.init(layout, device="cpu", timeout_s=60)


def _connected_world():
    """Where each rank is connected to its neighbours, which a thread does after ``init``: one that ends before is noticed by its
    silence alone."""
    world = _patient_world()
    end = time.monotonic() + _LIMIT_S / 2
    while not world.watch.connections.is_complete and time.monotonic() < end:
        time.sleep(0.01)
    return world


def _step(model, rank_that_fails=None, error=None):
    def loss(output, batch):
        if rank_that_fails == RANK:
            raise error
        return output.sum()

    return _train_step(model, loss)([{"x": torch.ones(2, 4) * (RANK + 1)}])


def _train_step(model, loss):
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.TrainStep(model, optim, loss=loss, count=lambda batch: 2)


def _model(world):
    torch.manual_seed(0)
    return sw.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), world)


def out_of_memory():
    """In user code, inside a window, on one rank, without a with block."""
    world = _patient_world()
    model = _model(world)
    _step(model)
    _step(model, 1, torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB"))


def out_of_memory_on_the_keeper():
    """The same on rank 0, which keeps the store the word is left in."""
    world = _patient_world()
    _step(_model(world), 0, RuntimeError("out of memory"))


def out_of_memory_in_with():
    with _patient_world() as world:
        _step(_model(world), 1, RuntimeError("out of memory"))


def _mean_twice(world):
    """An error that every rank has."""

    def mean(output, batch):
        return torch.nn.functional.mse_loss(output, batch["y"])

    model = _model(world)
    step = sw.TrainStep(model, torch.optim.SGD(model.parameters()), loss=mean, count=lambda batch: len(batch["y"]))
    step([{"x": torch.randn(4, 4), "y": torch.randn(4, 4) + RANK}])


def error_of_all():
    _mean_twice(_patient_world())


def error_of_all_in_with():
    with _patient_world() as world:
        _mean_twice(world)


def _bare_loop(world, where):
    """A loop without windows or steps of ours: rank 1 fails in forward, in the loss, or in backward."""
    model = _model(world)
    for i in range(2):
        if i and RANK == 1:
            _fail_in(model, where)
        with sw.accumulate(model, is_last=True):
            loss = model(torch.ones(2, 4) * (RANK + 1)).sum()
            if i and RANK == 1 and where == "loss":
                raise ValueError("a label out of range")
            loss.backward()


def _fail_in(model, where):
    def fail(*_):
        raise ValueError("a label out of range")

    if where == "forward":
        model[0].register_forward_pre_hook(fail)
    elif where == "backward":
        model[1].register_full_backward_pre_hook(fail)


def killed():
    """Once ranks are connected: before that a lost one is named by its silence, in other words."""
    world = _connected_world()
    world.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def killed_keeper():
    world = _patient_world()
    if RANK == 0:
        world.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
    dist.all_reduce(torch.ones(1))  # a collective of its own


def exits():
    """Without a word, as if all were well."""
    world = _connected_world()
    if RANK == 1:
        os._exit(0)
    world.barrier()


def killed_beside_a_child():
    """A process that was forked, as a loader's workers are, has copies of its rank's connections."""
    world = _connected_world()
    if RANK == 1:
        if os.fork() == 0:
            time.sleep(1.1 * _LIMIT_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def _block(world, seconds):
    """In C++ code that no handler of a signal can interrupt, while a timer sends SIGTERM."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().wait(["nobody sets this"], timedelta(seconds=60))


def sigterm_after_a_loss():
    world = _patient_world()
    watchdog._GRACE_S = 1e6  # nothing but the signal ends it
    world.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _block(world, 3.0)  # by then it is known that rank 1 is lost, on a busy machine too


def sigterm_while_all_is_well():
    world = _patient_world()
    world.barrier()
    if RANK == 0:
        _block(world, 0.2)
    world.barrier()


def killed_without_connections():
    """As behind a firewall."""

    def refuse(master):
        raise OSError("the firewall says no")

    connections._own_address = refuse
    world = _world(12)
    world.barrier()
    if RANK == 1:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def sigterm_to_all():
    """As when a job is cancelled."""
    world = _patient_world()
    world.barrier()
    _block(world, 0.2 + 0.3 * RANK)


def caught():
    """Rank 1 goes on after an exception of its own, for longer than the others wait without a word."""
    world = _world(12)
    step = _train_step(_model(world), lambda output, batch: output.sum())
    step([{"x": torch.ones(2, 4)}])
    with contextlib.suppress(ValueError):
        if RANK == 1:
            raise ValueError("a label out of range")
        step([{"x": torch.ones(2, 4)}])
    if RANK == 1:
        time.sleep(4.5)
        step([{"x": torch.ones(2, 4)}])
    print("done")


def lock_held():
    """Longer than the others wait without a word: no thread of rank 1 runs."""
    world = _world()
    for _ in range(2):
        world.barrier()
        if RANK == 1:
            ctypes.PyDLL(None).usleep(2_500_000)  # unlike CDLL it keeps the interpreter's lock
    world.barrier()
    print("done")


def stopped():
    """While rank 0 is inside a collective of its own, which nobody can interrupt."""
    _world(5)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def stopped_keeper():
    """The process that keeps the store does not answer any more."""
    world = _world(5)
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.barrier()


def left_by_exit():
    world = _world()
    world.barrier()
    if RANK == 1:
        sys.exit(0)
    world.barrier()


def left_by_exit_keeper():
    world = _world()
    world.barrier()
    if RANK == 0:
        sys.exit(0)
    world.barrier()


def never_closed():
    """In order: rank 0 is done much earlier, and has the store that rank 1's watch reads."""
    world = _world()
    world.barrier()
    if RANK == 1:
        time.sleep(1.0)
    print("done", flush=True)


def never_closed_and_looked_at():
    """A thread that is in a call of the store while the interpreter ends aborts the process."""

    def threads():
        print(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise")))

    atexit.register(threads)  # before the world's own, and called after it
    _world().barrier()


def fails_and_looked_at():
    """The same where the program ends by an error that every rank has, and the world is closed for that reason."""
    never_closed_and_looked_at()
    raise ValueError("no such file")


def fewer_windows():
    with _world() as world:
        step = _train_step(_model(world), lambda output, batch: output.sum())
        for _ in range(2 - RANK):
            step([{"x": torch.ones(2, 4)}])


def _become(rank, port, path):
    global RANK
    RANK = rank
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    output = os.open(path, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)


def _collect(pids, may_hang):
    """Exit codes by rank, below 0: a signal, None: it had to be killed."""
    codes, deadline = {}, time.monotonic() + _LIMIT_S
    while len(codes) < len(pids) and time.monotonic() < deadline and not (codes and may_hang):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes |= {rank: os.waitstatus_to_exitcode(status)} if ended else {}
        time.sleep(0.02)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(rank) for rank in range(len(pids))]


def _fork(port, folder):
    """The ranks' process ids; in a rank an empty list."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            _become(rank, port, f"{folder}/{rank}")
            return []
        pids.append(pid)
    return pids


def _text(path):
    with open(path, errors="replace") as file:
        return file.read()


def _bare(layout, where, is_closed):
    def scenario():
        world = _patient_world(layout)
        with world if is_closed else contextlib.nullcontext():
            _bare_loop(world, where)

    return scenario


BARE = {
    f"bare {layout} {where}{' in with' if is_closed else ''}": _bare(layout, where, is_closed)
    for layout, where, is_closed in (
        ("dp_shard=2", "forward", False),
        ("dp_shard=2", "loss", True),
        ("dp_shard=2", "backward", False),
        ("dp_replicate=2", "forward", True),
        ("dp_replicate=2", "loss", False),
    )
}


def _serve():
    """Answers scenario names on stdin with what became of the ranks; in a rank it returns the scenario."""
    for line in sys.stdin:
        name, folder = line.strip(), tempfile.mkdtemp()
        with held_port() as port:
            pids = _fork(port, folder)
            if not pids:
                return BARE.get(name) or globals()[name]
            codes = _collect(pids, may_hang=name.startswith("stopped"))
        texts = [_text(f"{folder}/{rank}") for rank in range(2)]
        shutil.rmtree(folder)
        print(json.dumps({"codes": codes, "texts": texts}), flush=True)
    return lambda: None


if __name__ == "__main__":
    _serve()()
