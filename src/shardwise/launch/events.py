"""Events from a rank to the process that launched it: one JSON object a line, on a pipe of its own.

They carry what a display or a log needs while the job runs (step, loss, memory); results and errors do not travel here.
What does travel beside them is a rank's last word, :func:`report_failure`, for code that has to end its process.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping

__all__ = ["open_channel", "open_report", "report_failure", "send_event"]

_lock = threading.Lock()
_channel: int | None = None
_report: Callable[[BaseException], None] | None = None


def open_channel(descriptor: int) -> None:
    """Makes ``descriptor`` the channel of this process; called once, before the rank's own code."""
    global _channel
    _channel = descriptor


def send_event(event: Mapping[str, object]) -> bool:
    """Sends one event to the launching process; any rank may call it, at any time, from any thread.

    Args:
        event: JSON data (numbers, strings, lists, mappings); tensors and arrays are not, pass ``.item()``.

    Returns:
        False where nobody listens: this process was not started by ``launch_local``, or its parent is gone.

    Raises:
        TypeError: the event is not JSON data; also raised where nobody listens, so that it is found early.
    """
    data = json.dumps(dict(event)).encode() + b"\n"
    if _channel is None:
        return False
    try:
        # One event at a time: a long line is written in several pieces.
        with _lock:
            while data:
                data = data[os.write(_channel, data) :]
    except BrokenPipeError:
        return False
    return True


def open_report(report: Callable[[BaseException], None]) -> None:
    """Makes ``report`` the way to tell the process that started this one about an error; called once per process."""
    global _report
    _report = report


def report_failure(error: BaseException) -> bool:
    """Tells the process that started this one that it is about to end with ``error``; from any thread.

    For a thread that ends its process because the main thread cannot (it hangs in a collective): an exit code alone
    would not say why. An error that the main thread raises is reported without this.

    Returns:
        False where nobody listens: this process was not started by ``launch_local`` or a test pool, or its parent is
        gone.
    """
    if _report is None:
        return False
    try:
        _report(error)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
