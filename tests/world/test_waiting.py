"""The main thread as another thread sees it."""

import gc
import threading
import time

from shardwise.world.waiting import MainThread


class EndsSlowly:
    """Garbage that lets other threads run when it is collected, as a process group does."""

    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(1e-4)


# By its name it is no user's code, so that all of its frames are walked through.
exec(compile("def deep(n, last):\n    return deep(n - 1, last) if n else last()", "<deep>", "exec"))


def _last():
    EndsSlowly()
    time.sleep(2e-5)


def _look_while_garbage_is_collected():
    main, stop, found, before = MainThread(threading.main_thread()), threading.Event(), [], gc.get_threshold()

    def look():
        while not stop.is_set():
            found.append(main.line())
            time.sleep(0)

    threads = [threading.Thread(target=look) for _ in range(3)]
    gc.set_threshold(3, 1000, 1000)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            deep(60, _last)  # noqa: F821
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        gc.set_threshold(*before)
    return len(found), gc.isenabled()


def test_looking_at_its_frames_does_not_crash_when_garbage_is_collected(ranks):
    """Python 3.11 may collect when it makes the object of a frame: it was a segmentation fault."""
    num_looks, collects = ranks.run(_look_while_garbage_is_collected, 1)[0]
    assert num_looks > 100
    assert collects
