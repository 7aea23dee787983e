"""What a function on a rank is given and returns, between its process and the one that called it there."""

import pickle
import sys
from typing import Any


def dumps(value: Any) -> bytes:
    """``pickle.dumps``, with tensors by the bytes of their memory. Where nothing has imported torch there are none."""
    if "torch" not in sys.modules:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    from shardwise._torch import pickling

    return pickling.dumps(value)
