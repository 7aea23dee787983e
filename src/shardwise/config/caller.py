"""Where a warning points to: the user's line. Torch-free."""

import sys


def level_of_caller() -> int:
    """``stacklevel`` of the user's line, for a warning of the calling function: above the frames of Shardwise and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("shardwise", "torch"):
        frame, level = frame.f_back, level + 1
    return level
