"""A run that is asked to stop saves after the same window on every rank, ends, and goes on as if it had never stopped."""

import contextlib
import os
import signal
import threading
import time

import pytest
from state.runs import Average, Texts, equal, make, run, state

import shardwise as sw
from shardwise.launch.stop_signals import terminable
from shardwise.world import termination
from shardwise.world.signals import StopRequest

OURS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stopped(root, how: str, layout: str = "dp_shard=2", until: int = 6, **options) -> dict:
    """A run in which rank 1 is asked to stop during its second window."""
    world, model, step = make(layout)
    average, found = Average(), {"handlers": [signal.getsignal(number) for number in OURS]}
    with world:
        manager = sw.CheckpointManager(root, step, extra={"average": average}, **options)
        loader = sw.Loader(Texts(), world, global_batch=12, micro_batch=1)
        try:
            with manager:
                for window in manager.resume(loader):
                    if world.rank == world.size - 1 and step.num_steps == 1:
                        ask(manager, how)
                    out = step(window)
                    average.add(out.loss)
                    manager.save_every(100, out)
                    if step.num_steps == until:
                        break
        except sw.Stopped as stop:
            found |= {"stop": str(stop), "code": stop.code, "reason": stop.reason, "step": stop.step}
        found["steps"], found["last"] = step.num_steps, state(model, step.optim)
        found["given back"] = [signal.getsignal(number) for number in OURS] == found.pop("handlers")
    return found


def ask(manager, how: str) -> None:
    if how == "call":
        manager.stop()
    elif how == "time":
        time.sleep(1.2)
    elif how == "worker":  # a signal to a process that was forked from the rank
        begun, begins = os.pipe()
        worker = os.fork()
        if not worker:
            os.write(begins, b".")
            for _ in range(600):  # one long sleep would not see a signal that comes just before it
                time.sleep(0.1)
            os._exit(0)
        os.read(begun, 1)  # Python drops signals that come while it forks
        os.kill(worker, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGTERM
    else:
        os.kill(os.getpid(), getattr(signal, how))


HOWS = {
    "SIGTERM": "SIGTERM",
    "SIGUSR1": "SIGUSR1",
    "SIGHUP": "SIGHUP",
    "call": "a call of stop()",
    "time": "the time limit",
}


@pytest.fixture(scope="module")
def whole(ranks) -> dict:
    return ranks.run(run, 2, "dp_shard=2", None, 6)[0]


@pytest.mark.quick("SIGUSR1-True", "time-True", "SIGTERM-False")
@pytest.mark.parametrize(("how", "background"), [*((how, True) for how in HOWS), ("SIGTERM", False)])
def test_every_rank_stops_after_the_same_window_and_the_run_goes_on_exactly(ranks, tmp_path, whole, how, background):
    options = {"async_save": background, **({"stop_after_s": 1.0} if how == "time" else {})}
    found = ranks.run(stopped, 2, tmp_path, how, **options)
    if how == "time" and found[0]["steps"] == 1:  # a slow machine: the limit was over in the first window
        assert [one["steps"] for one in found] == [1, 1]
        return
    for one in found:
        # Asked between two exchanges, it is known by the next: the second window, which begins just after, is the last.
        assert (one["steps"], one["step"], one["code"], one["reason"]) == (2, 2, 75, HOWS[how])
        assert f"saved in {tmp_path / 'step-00000002'}" in one["stop"]
        assert one["given back"]
    rest = ranks.run(run, 2, "dp_shard=2", tmp_path, 6, async_save=False)[0]
    assert rest["began"] == 2 and equal(rest["last"], whole["last"])


def saved_on_the_way(root, how: str, *, when: int, every: int | None = 100, **options) -> dict:
    """A run of 4 windows in which one rank alone is asked for a checkpoint after ``when`` of them."""
    world, model, step = make("dp_shard=2")
    average, made = Average(), []
    before = signal.getsignal(signal.SIGUSR1)
    if how == "early":  # a launcher keeps it back until there is a manager
        os.environ["SHARDWISE_SIGNALS_BLOCKED_AT_START"] = str(int(signal.SIGUSR1))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    with world:
        with sw.CheckpointManager(root, step, extra={"average": average}, **options) as manager:
            for window in manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)):
                out = step(window)
                average.add(out.loss)
                if world.rank == 1 and step.num_steps == when:
                    manager.save_soon() if how == "call" else os.kill(os.getpid(), signal.SIGUSR1)
                path = manager.save_every(every, out)
                made += [] if path is None else [path.name]
                if step.num_steps == 4:
                    break
        given_back = signal.getsignal(signal.SIGUSR1) == before
        if how == "early":
            assert not given_back
            os.kill(os.getpid(), signal.SIGUSR1)  # one that comes too late ends nothing
            given_back = True
        return {"made": made, "given back": given_back, "last": state(model, step.optim)}


@pytest.mark.quick("signal-1-100-made0", "call-2-100-made3")
@pytest.mark.parametrize(
    ("how", "when", "every", "made"),
    [
        ("signal", 1, 100, ["step-00000002"]),
        ("signal", 1, None, ["step-00000002"]),
        pytest.param("signal", 1, 2, ["step-00000002", "step-00000004"], marks=pytest.mark.soak),
        ("call", 2, 100, ["step-00000003"]),
        ("early", 0, 100, ["step-00000001"]),
        pytest.param("signal", 4, 100, [], marks=pytest.mark.soak),  # after the last window: closing saves it
    ],
)
def test_a_run_that_is_asked_for_a_checkpoint_saves_and_goes_on(ranks, tmp_path, how, when, every, made):
    alone = ranks.run(run, 2, "dp_shard=2", None, 4)[0]
    options = {} if how == "call" else {"sigusr1": "save"}
    found = ranks.run(saved_on_the_way, 2, tmp_path, how, when=when, every=every, **options)
    assert all((one["made"], one["given back"]) == (made, True) for one in found)
    assert equal(found[0]["last"], alone["last"])
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == (made or ["step-00000004"])
    rest = ranks.run(run, 2, "dp_shard=2", tmp_path, 4, async_save=False)[0]
    assert rest["began"] == int(kept[-1][-1]) and equal(rest["last"], alone["last"])


def test_another_word_for_sigusr1_is_refused(ranks, tmp_path):
    with pytest.raises(sw.RankError, match="ConfigError: sigusr1='ignore'"):
        ranks.run(saved_on_the_way, 2, tmp_path, "call", when=1, sigusr1="ignore")


def test_a_signal_to_a_worker_of_a_rank_is_the_workers_own(ranks, tmp_path):
    found = ranks.run(stopped, 2, tmp_path, "worker", until=3)
    assert [one["steps"] for one in found] == [3, 3] and "stop" not in found[0]


def own_handler(root, ignore: bool) -> tuple:
    """With a handler of the program's own for SIGTERM."""
    seen: list[int] = []
    handler = signal.SIG_IGN if ignore else lambda number, frame: seen.append(number)
    signal.signal(signal.SIGTERM, handler)
    found = stopped(root, "SIGTERM", until=3)
    return found["steps"], "stop" in found, seen, signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("ignore", [True, False])
def test_a_handler_of_the_program_stays_in_charge(ranks, tmp_path, ignore):
    found = ranks.run(own_handler, 2, tmp_path, ignore)
    assert found[0] == (3, False, [], True)
    assert found[1] == (3, False, [] if ignore else [signal.SIGTERM], True)


def under_terminable(root) -> dict:
    """Where this library itself has seen to it that SIGTERM is heard."""
    with terminable():
        return stopped(root, "SIGTERM")


def test_what_only_ends_the_process_gives_way(ranks, tmp_path):
    found = ranks.run(under_terminable, 2, tmp_path)
    assert [(one["steps"], one["given back"]) for one in found] == [(2, True), (2, True)]


def closed_within() -> tuple[int, int]:
    """A world that is closed while a manager is open, and another one after it: how SIGTERM ends a fork of this process."""
    with sw.init() as world:
        with StopRequest().handle_stop_signals(None):
            world.close()
        ends = [ended_by_sigterm()]
    with sw.init() as world:
        # The world listens again: a fork is told from the rank, and ends.
        ends.append(ended_by_sigterm())
        listens = termination._listener is not None and world.watch in termination._listener.watches
    assert listens
    return tuple(ends)


def ended_by_sigterm() -> int:
    """Exit code of a fork of this process that sends itself SIGTERM."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_sigterm_ends_a_process_whose_world_was_closed_while_its_manager_was_open(ranks):
    assert ranks.run(closed_within, 2) == [(-signal.SIGTERM, -signal.SIGTERM)] * 2


def stopped_into_a_full_disk(root) -> tuple:
    """The save before the stop fails on one rank; then there is room."""
    from shardwise.state.checkpoint import writer

    world, _, step = make("dp_shard=2")
    real, seen = writer.pwrite, []
    with world:

        def fails(descriptor, memory, offset):
            raise OSError(28, "No space left on device")

        with sw.CheckpointManager(root, step, extra={"average": Average()}) as manager:
            try:
                for window in manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)):
                    manager.stop()
                    writer.pwrite = fails if world.rank == 1 and not seen else real
                    try:
                        manager.save_every(100, step(window))
                    except sw.CheckpointError as error:
                        seen.append(str(error))
            except sw.Stopped as stop:
                return stop.step, seen
            finally:
                writer.pwrite = real
    return None, seen


def test_a_stop_whose_save_fails_is_an_error_and_no_end(ranks, tmp_path):
    for step, seen in ranks.run(stopped_into_a_full_disk, 2, tmp_path):
        assert step == 2 and len(seen) == 1 and "No space left on device" in seen[0]


def asked_for_into_a_full_disk(root, **options):
    """Where a call of ``save_every`` fails, and what is on disk when one that was asked for returns."""
    from shardwise.state.checkpoint import writer

    world, _, step = make("dp_shard=2")
    real, seen, there = writer.pwrite, [], []

    def fails(descriptor, memory, offset):
        raise OSError(28, "No space left on device")

    with world, sw.CheckpointManager(root, step, extra={"average": Average()}, **options) as manager:
        try:
            for window in manager.resume(sw.Loader(Texts(), world, global_batch=4, micro_batch=1)):
                writer.pwrite = fails if step.num_steps < 3 else real
                out = step(window)
                if step.num_steps in (1, 4):
                    manager.save_soon()
                try:
                    path = manager.save_every(None, out)
                    there += [] if path is None else [(step.num_steps, (path / "manifest.json").exists())]
                except sw.CheckpointError as error:
                    seen.append((step.num_steps, "No space left on device" in str(error)))
        finally:
            writer.pwrite = real
    return seen, there


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_that_was_asked_for_is_on_disk_or_fails_once(ranks, tmp_path, background):
    """In the background it was called saved before it was, and an error came with the next save, if there was one; else it was tried again after
    every step."""
    for seen, there in ranks.run(asked_for_into_a_full_disk, 2, tmp_path, async_save=background):
        assert seen == [(2, True)] and there == [(5, True)]


@pytest.mark.parametrize("limit", [0, -1.0, True, float("nan")])
def test_a_limit_that_is_none_is_refused(ranks, tmp_path, limit):
    with pytest.raises(sw.RankError, match="ConfigError: stop_after_s="):
        ranks.run(stopped, 1, tmp_path, "call", "dp_shard=1", stop_after_s=limit)


def closed(root) -> tuple[str, list[int]]:
    """What a save after the end says, and how many threads each of several managers has left behind."""
    world, _, step = make("dp_shard=2")
    threads = []
    with world:
        for number in range(7):
            with sw.CheckpointManager(f"{root}/{number}", step, extra={"average": Average()}) as manager:
                manager.save()
            threads.append(len(os.listdir("/proc/self/task")))
        try:
            manager.save()
        except sw.UsageError as error:
            return str(error), threads
    return "", threads


def test_a_closed_manager_saves_no_more_and_leaves_no_threads(ranks, tmp_path):
    for told, threads in ranks.run(closed, 2, str(tmp_path)):
        assert "after its manager was closed" in told
        assert threads[-1] <= threads[0] + 2, threads  # one that was told to end may still be there


def asked_late(root, saves: bool) -> tuple[str, int]:
    """A run that is asked to stop behind its last window, on one rank."""
    world, _, step = make("dp_shard=2")
    try:
        with world, sw.CheckpointManager(root, step, extra={"average": Average()}) as manager:
            for window, _ in zip(
                manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)), range(2), strict=False
            ):
                step(window)
            if saves:
                manager.save()
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except sw.Stopped as stop:
        return stop.reason, stop.step
    return "", 0


@pytest.mark.parametrize("saves", [True, False])
def test_a_request_behind_the_last_window_is_heard_at_the_end(ranks, tmp_path, capfd, saves):
    assert ranks.run(asked_late, 2, tmp_path, saves) == [("SIGTERM", 2), ("SIGTERM", 2)]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    told = f"shardwise: SIGTERM: stopped after step 2, saved in {tmp_path / 'step-00000002'}"
    assert sum(told in text for text in capfd.readouterr()) == 1  # rank 0 alone: Python says nothing of a SystemExit


def asked_without_a_figure(root, loop: str) -> tuple[str, int, int]:
    """A run with ``best=`` by a figure that only evaluations have; it is asked to stop in its second window."""
    world, _, step = make("dp_shard=2")
    try:
        with world, sw.CheckpointManager(root, step, extra={"average": Average()}, best="val_loss") as manager:
            for window in manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1)):
                if step.num_steps == 1 and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                out = step(window)
                if loop == "save_every":
                    manager.save_every(None, out)
                elif loop == "save" and step.num_steps % 2:
                    manager.save(metrics={"val_loss": 1.0} if step.num_steps == 1 else None)
                if step.num_steps == 4:
                    break
    except sw.Stopped as stop:
        return stop.reason, stop.step, step.num_steps
    return "", 0, step.num_steps


@pytest.mark.quick("save_every-2-[2]", "none-4-[4]")
@pytest.mark.parametrize(
    ("loop", "last", "kept"),
    [("save_every", 2, [2]), ("save", 3, [1, 3]), ("none", 4, [4])],
    ids=lambda given: str(given),
)
def test_a_save_for_a_stop_needs_no_figure_of_best(ranks, tmp_path, capfd, loop, last, kept):
    """Nothing that was trained since the last save is lost; a loop that does not ask is told what it waits for."""
    assert ranks.run(asked_without_a_figure, 2, tmp_path, loop) == [("SIGTERM", last, last)] * 2
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == kept
    waits = "".join(capfd.readouterr()).count("SIGTERM: this loop goes on until its next manager.save()")
    assert waits == (loop != "save_every")
    # The figure that is there stays the best, and a run goes on from the newest.
    with pytest.raises(sw.RankError, match="best='val_loss' and a save without val_loss"):
        ranks.run(saved_without_a_figure, 2, tmp_path)


def saved_without_a_figure(root) -> None:
    world, _, step = make("dp_shard=2")
    with world, sw.CheckpointManager(root, step, extra={"average": Average()}, best="val_loss") as manager:
        windows = manager.resume(sw.Loader(Texts(), world, global_batch=12, micro_batch=1))
        step(next(iter(windows)))
        manager.save()


def asked_again(root) -> tuple[object, float]:
    """SIGTERM, its echo, and SIGTERM again where no window comes any more."""
    world, _, step = make("dp_shard=1")
    with world:
        manager = sw.CheckpointManager(root, step, extra={"average": Average()})
        try:
            for seconds in (0.0, 0.1, 2.2):
                time.sleep(seconds)
                os.kill(os.getpid(), signal.SIGTERM)
            return None, seconds
        except SystemExit as end:
            return end.code, seconds
        finally:
            world.stop.settle()
            manager.close()


def test_sigterm_again_ends_the_process(ranks, tmp_path):
    assert ranks.run(asked_again, 1, tmp_path) == [(143, 2.2)]
