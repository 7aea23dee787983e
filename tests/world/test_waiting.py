"""The main thread as another thread sees it."""

import gc
import threading
import time

from shardwise.world.waiting import MainThread


class LetsGo:
    """Garbage that lets the main thread run when it is collected, as a process group does."""

    def __init__(self, goes_on: threading.Event):
        self.me, self.goes_on = self, goes_on

    def __del__(self):
        self.goes_on.set()
        time.sleep(0.02)


# By its name it is no user's code, so that all of its frames are walked through. The second has other frames in the same memory.
exec(
    compile(
        "def deep(n, here, go):\n    return deep(n - 1, here, go) if n else (here.set(), go.wait())", "<deep>", "exec"
    )
)
exec(
    compile(
        "def wide(n, a=0.1, b=0.2, c=0.3):\n    f = g = h = n\n    return wide(n - 1) if n else f", "<wide>", "exec"
    )
)


def _look_while_garbage_is_collected(rounds):
    main, found, before = MainThread(threading.main_thread()), [], gc.get_threshold()
    for _ in range(rounds):
        is_deep, goes_on = threading.Event(), threading.Event()

        def look(is_deep=is_deep, goes_on=goes_on):
            is_deep.wait()
            gc.collect()
            LetsGo(goes_on)
            gc.set_threshold(30, 1000, 1000)  # in the middle of the walk over 60 frames
            found.append(main.line())
            gc.set_threshold(*before)
            gc.collect()
            goes_on.set()

        thread = threading.Thread(target=look)
        thread.start()
        deep(60, is_deep, goes_on)  # noqa: F821
        while thread.is_alive():
            wide(80)  # noqa: F821
        thread.join()
    return found, gc.isenabled()


def test_looking_at_its_frames_does_not_crash_when_garbage_is_collected(ranks):
    """Python 3.11 may collect when it makes the object of a frame, and the thread may leave the frame: a segmentation fault."""
    found, collects = ranks.run(_look_while_garbage_is_collected, 1, 10)[0]
    assert len(found) == 10 and all("in _look_while_garbage_is_collected" in line for line in found)
    assert collects
