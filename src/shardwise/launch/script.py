"""What ranks are given by the script that starts them: functions and classes of its own, which pickle knows as
``__main__``.

A rank runs the script once more before it unpickles them, under the name ``__mp_main__``, as multiprocessing does: what is
below ``if __name__ == "__main__":`` is not run.
"""

import pickle
import sys
import types
from collections.abc import Sequence
from io import BytesIO
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from shardwise.config.importing import importing
from shardwise.errors import UsageError

Script = dict[str, Any]
"""How the script is run once more, as ``multiprocessing.spawn.prepare`` takes it; empty: nothing in it is needed."""

_GIVEN = "an argument of a function that ranks call"
_FIX = "define it at the top level of a file, and name it"


class _Pickler(pickle.Pickler):
    """Notes which object of ``__main__`` it has met, if any."""

    own: Any = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            self.own = obj
        return NotImplemented


def pickled(args: Sequence[object], given: str = _GIVEN) -> tuple[bytes, Script]:
    """The arguments of a function that ranks call, and the script that ranks must run before they read them.

    Raises:
        UsageError: one of them cannot be sent to another process: a function without a name, or one that was defined in a
            session.
    """
    buffer = BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(tuple(args))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UsageError(
            given,
            why=f"it cannot be sent to another process: {error}",
            fix=f"if it is a lambda or a function inside a function, {_FIX}",
        ) from error
    return buffer.getvalue(), {} if pickler.own is None else _script_of(pickler.own, given)


def _script_of(own: Any, given: str) -> Script:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m pkg.mod
        return {"init_main_from_name": spec.name, "sys_argv": sys.argv}
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise UsageError(
            given,
            why=f"{own.__qualname__} was defined in an interactive session or a notebook, which other processes cannot import",
            fix="define it in a file, and import it from there",
        )
    return {"init_main_from_path": str(Path(file).resolve()), "sys_argv": sys.argv}


def load_script(script: Script) -> None:
    """Runs the script, on a rank; its functions and classes are then those of ``__main__``."""
    if not script:
        return
    with importing(script.get("init_main_from_path") or script["init_main_from_name"]):
        spawn.prepare(dict(script))


# ---- results ---------------------------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """``pickle.dumps``, with tensors by the bytes of their memory. Where nothing has imported torch there are none."""
    if "torch" not in sys.modules:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    from shardwise._torch import pickling

    return pickling.dumps(value)
