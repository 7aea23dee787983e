"""Events from a rank to the process that launched it: one JSON object per line, on their own pipe.

They carry what a display or a log needs while the job runs (step, loss, memory). Results and errors are sent elsewhere;
:func:`report_failure` sends the last error of a rank, for code that has to end its process.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping

_lock = threading.Lock()
_channel: int | None = None
_report: Callable[[BaseException], None] | None = None


def open_channel(descriptor: int) -> None:
    """Makes ``descriptor`` the event pipe of this process; called once, before the rank's own code."""
    global _channel
    _channel = descriptor


def send_event(event: Mapping[str, object]) -> bool:
    """Sends one event to the launching process; any rank may call it, at any time, from any thread.

    Args:
        event: JSON data (numbers, strings, lists, mappings); tensors and arrays are not, pass ``.item()``.

    Returns:
        False where there is no reader: this process was not started by ``launch_local``, or its parent has ended.

    Raises:
        TypeError: the event is not JSON data; also raised where there is no reader, so that the mistake is found early.
    """
    data = json.dumps(dict(event)).encode() + b"\n"
    if _channel is None:
        return False
    try:
        # The lock keeps events apart: a long line is written in several pieces.
        with _lock:
            while data:
                data = data[os.write(_channel, data) :]
    except BrokenPipeError:
        return False
    return True


def open_report(report: Callable[[BaseException], None]) -> None:
    """Registers ``report`` as the function that sends an error to the process that started this one; called once."""
    global _report
    _report = report


def report_failure(error: BaseException) -> bool:
    """Reports to the process that started this one that it is about to end with ``error``; from any thread.

    For a thread that ends its process because the main thread cannot (it hangs in a collective): an exit code alone
    would not say why. An error that the main thread raises is reported without this.

    Returns:
        False where there is no reader: this process was not started by ``launch_local`` or a test pool, or its parent
        has ended.
    """
    if _report is None:
        return False
    try:
        _report(error)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True
