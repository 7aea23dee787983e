"""A pool of warm gloo ranks: torch is imported once per session, a run on two ranks costs milliseconds.

    with RankPool() as pool:
        results = pool.run(function, 2, argument, timeout_s=30)     # one result per rank

How it works: one helper process imports torch and forks ranks on demand (:mod:`shardwise.launch.forkserver`). A run
sends the same call to the first ``world_size`` ranks, each with the environment torchrun would give it, and collects
one answer from each. Afterwards every rank cleans itself; a rank that died, that hangs, or that does not come back
after a peer failed is killed and a fresh one takes its place, so nothing is inherited by the next run.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from shardwise.errors import RankError, UsageError
from shardwise.launch.environment import variables_of
from shardwise.launch.failure import Failure, rank_error, root_cause
from shardwise.launch.process import held_port
from shardwise.launch.script import dumps
from shardwise.testing.calls import Call, call_of
from shardwise.testing.processes import Helper, Worker

_SETTLE_S = 0.5
_HEAD_START_S = 0.004


class RankPool:
    """Warm ranks for tests; a context manager. Nothing starts before the first run.

    Args:
        preload: modules imported once, before any rank exists. List slow imports of your tests here.
        env: variables for every rank, added to this process's environment (``OMP_NUM_THREADS=1`` unless set).
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
        env: Mapping[str, str] | None = None,
    ):
        self._preload, self._env = tuple(preload), dict(env or {})
        self._helper: Helper | None = None
        # By rank. A process always has the same rank: torch caches process groups by the shape of the mesh only.
        self._workers: dict[int, Worker] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks that exist now, in rank order."""
        return tuple(self._workers[rank].pid for rank in sorted(self._workers))

    def run(
        self, fn: Callable[..., object], world_size: int, *args: object, timeout_s: float = 60.0, **kwargs: object
    ) -> list:
        """Calls ``fn(*args, **kwargs)`` on ``world_size`` ranks and returns their results in rank order.

        Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
        the same seeds, one thread, and no process group: the function makes its own (``shardwise.init``). What ranks
        print appears on this process's stdout with ``[rank 1] `` before each line.

        Args:
            fn: a module-level function; arguments and results are pickled (tensors on the CPU are fine).
            world_size: number of ranks, at least 1.
            timeout_s: seconds until ranks that have not answered are killed.

        Raises:
            RankError: a rank failed, died or hung: ``.ranks`` has its number, ``__cause__`` its exception if that can
                be rebuilt here, and the text its traceback. Of several failures, it is the one that caused the others.
            UsageError: the function cannot be sent to a rank.
        """
        call = _call(fn, args, kwargs)
        if world_size < 1:
            raise UsageError(f"world_size={world_size}", why="a run needs at least one rank", fix="use 1 or more")
        with self._lock, held_port() as port:
            workers = self._ready(world_size)
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                for rank, worker in enumerate(workers):
                    if rank == 1:
                        # Rank 0 opens the store; a rank that is earlier retries only after half a second.
                        time.sleep(_HEAD_START_S)
                    worker.send(replace(call, env={**address, **variables_of(rank, world_size)}))
                answers = self._collect(workers, timeout_s)
            except BaseException:
                # Ctrl-C or a test's own time limit: a call that still runs must not overlap with the next run.
                self._discard(workers)
                raise
            for rank, worker in enumerate(workers):
                worker.show_output(rank)
            self._discard([worker for rank, worker in enumerate(workers) if not _is_reusable(answers[rank])])
            for worker in workers:
                if worker in self._workers.values():
                    worker.send("clean")
        return _results(answers)

    def close(self) -> None:
        """Ends every rank and the helper process. The pool may be used again; it then starts new ones."""
        with self._lock:
            self._discard(list(self._workers.values()))
            if self._helper is not None:
                self._helper.close()
            self._helper = None

    def _ready(self, world_size: int) -> list[Worker]:
        ranks = range(world_size)
        used = [worker for rank, worker in self._workers.items() if rank in ranks]
        self._discard([worker for worker in used if not worker.is_clean()])
        if self._helper is None or not self._helper.is_alive():
            self.close()
            self._helper = Helper(self._preload, self._env)
        fresh = [rank for rank in ranks if rank not in self._workers]
        for rank in fresh:
            self._workers[rank] = Worker(self._helper)
        for worker in [self._workers[rank] for rank in fresh]:
            if not worker.is_clean():
                why = worker.tail() or "it was not ready in time"
                self._discard([self._workers[each] for each in fresh])
                raise RankError("a rank of the test pool did not start", why=why, fix="see its output above")
        return [self._workers[rank] for rank in ranks]

    def _discard(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
        self._workers = {rank: worker for rank, worker in self._workers.items() if worker not in workers}

    def _collect(self, workers: list[Worker], timeout_s: float) -> dict[int, bytes | Failure]:
        """Waits for one answer per rank: its pickled result, or its failure. A rank that hangs gets a failure that says
        so."""
        answers: dict[int, bytes | Failure] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(answers) < len(workers):
            waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in answers}
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for connection in wait(list(waiting), timeout=left):
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = workers[rank].answer(rank)
            if not failed and any(isinstance(answer, Failure) for answer in answers.values()):
                # The others fail within moments or are stuck in a collective for ever: waiting longer is of no use.
                failed, deadline = True, min(deadline, time.monotonic() + _SETTLE_S)
        late = [rank for rank in range(len(workers)) if rank not in answers]
        for rank in late:
            killed = Failure(rank=rank, what="was still waiting for its peers and was killed", weight=9)
            answers[rank] = killed if failed else workers[rank].hung(rank, timeout_s)
        return answers


def _call(fn: Callable[..., object], args: tuple, kwargs: dict) -> Call:
    module, name, file = call_of(fn)
    payload = dumps((args, kwargs))
    return Call(module=module, qualname=name, file=file, env={}, path=tuple(sys.path), cwd=os.getcwd(), payload=payload)


def _is_reusable(answer: bytes | Failure) -> bool:
    return not isinstance(answer, Failure) or answer.reported


def _results(answers: dict[int, bytes | Failure]) -> list:
    failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
    if failures:
        cause = root_cause(failures)
        alike = [failure.rank for failure in failures if failure.hung and cause.hung]
        raise rank_error(cause, others=[failure.rank for failure in failures if failure.reported], alike=alike)
    return [pickle.loads(answers[rank]) for rank in sorted(answers)]  # type: ignore[arg-type]
