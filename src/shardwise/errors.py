"""Every error Shardwise raises on purpose, in one class hierarchy.

A message has three parts. If it is about one module or parameter, it also has that canonical name::

    LayoutError: dp_shard=3 on 4 ranks
      why: the degrees multiply to 3, and every rank needs a place
      fix: use dp_shard=2,dp_replicate=2 or dp_shard=4

Each leaf also inherits the standard exception a Python user would expect to catch (``ValueError``,
``RuntimeError``, ...). All of them can be pickled, because ranks send them to each other.

To add one, subclass :class:`ShardwiseError` and the standard type. ``docs/errors.md`` is generated from the code,
and the build fails for a call that leaves ``given``, ``why`` or ``fix`` empty.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

__all__ = [
    "CheckpointError", "ConfigError", "LayoutError", "NonFiniteError", "PlanError", "RankError", "ShardwiseError",
    "Stopped", "UnsupportedError", "UsageError", "VerifyError", "errors_about", "first_line",
]  # fmt: skip


class ShardwiseError(Exception):
    """Base of all errors raised on purpose.

    Args:
        given: what was given, with its value ("dp_shard=3 on 4 ranks").
        why: why that cannot work.
        fix: what to change, as a call or a setting the user can copy.
        name: canonical name of the module or parameter concerned, if there is one.

    Attributes:
        shown_by: another process ("rank 0") that prints the same error in full; None: this process prints it.
    """

    shown_by: str | None = None

    def __init__(self, given: str, *, why: str, fix: str, name: str | None = None):
        super().__init__(given)
        self.given, self.why, self.fix, self.name = given, why, fix, name

    def __str__(self) -> str:
        where = f"{self.name}: " if self.name else ""
        return f"{where}{self.given}\n  why: {self.why}\n  fix: {self.fix}"

    def in_a_line(self) -> str:
        """The error in one line, for a process that leaves the full text to :attr:`shown_by`."""
        # Another rank is known to have the same error. Another kind of process may not have it, so the reason is added.
        reason = "" if str(self.shown_by).startswith("rank ") else f": {str(self.why).partition(chr(10))[0]}"
        return f"{type(self).__name__}: {self.given}{reason} (shown by {self.shown_by})"

    def __reduce__(self):
        return _rebuild, (type(self), self.__dict__.copy())


@contextlib.contextmanager
def errors_about(name: str) -> Iterator[None]:
    """Context manager: a ShardwiseError raised inside that has no name yet gets ``name``."""
    try:
        yield
    except ShardwiseError as error:
        error.name = error.name or name
        raise


def _rebuild(cls: type[ShardwiseError], state: dict) -> ShardwiseError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["given"])
    error.__dict__.update(state)
    return error


class ConfigError(ShardwiseError, ValueError):
    """A configuration file, an override or an option cannot be understood."""


class LayoutError(ConfigError):
    """The layout does not fit the number of ranks."""


class PlanError(ShardwiseError, ValueError):
    """No recipe can be made for this module, or the recipe belongs to another module."""


class UnsupportedError(ShardwiseError, NotImplementedError):
    """A combination that Shardwise refuses because it would not work correctly."""


class UsageError(ShardwiseError, RuntimeError):
    """Calls in an order that would silently train wrong (stale optimizer, sharded twice, direct unit call)."""


class RankError(ShardwiseError, RuntimeError):
    """Another rank was lost, does not answer, or disagrees.

    Args:
        given, why, fix, name: as for every :class:`ShardwiseError`.
        ranks: the ranks concerned.
    """

    def __init__(self, given: str, *, why: str, fix: str, name: str | None = None, ranks: tuple[int, ...] = ()):
        super().__init__(given, why=why, fix=fix, name=name)
        self.ranks = tuple(ranks)


class NonFiniteError(ShardwiseError, ArithmeticError):
    """The loss or a gradient is NaN or infinite, on any rank.

    Args:
        given, why, fix, name: as for every :class:`ShardwiseError`.
        ranks: the ranks concerned.
    """

    def __init__(self, given: str, *, why: str, fix: str, name: str | None = None, ranks: tuple[int, ...] = ()):
        super().__init__(given, why=why, fix=fix, name=name)
        self.ranks = tuple(ranks)


class CheckpointError(ShardwiseError, OSError):
    """Stored weights or a checkpoint cannot be read or written completely.

    Args:
        given, why, fix, name: as for every :class:`ShardwiseError`.
        misfit: where the files are sound and the model is another one: what does not fit. ``"double"``: two stored tensors
            are for one of the model's. ``"drawn"``: what is missing would stay as it was drawn at random.
        rename: the pattern and the replacement by which names would fit; None: it is not known.
    """

    def __init__(
        self,
        given: str,
        *,
        why: str,
        fix: str,
        name: str | None = None,
        misfit: Literal["names", "shape", "dtype", "double", "drawn"] | None = None,
        rename: tuple[str, str] | None = None,
    ):
        super().__init__(given, why=why, fix=fix, name=name)
        self.misfit, self.rename = misfit, rename


class VerifyError(ShardwiseError, AssertionError):
    """Two runs that must agree do not. The message names the first parameter that differs."""


class Stopped(SystemExit):
    """Ends a run, on every rank, that was asked to stop and has saved. Not a fault, so not one of the errors above.

    No caller needs to catch it: Python ends with exit status :attr:`CODE`, which asks whatever started the program to
    start it again.

    Args:
        reason: who asked, as text ("SIGTERM").
        step: windows trained before the checkpoint.
        checkpoint: where it is.
    """

    CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, try again later

    def __init__(self, reason: str, step: int, checkpoint: str):
        super().__init__(reason, step, checkpoint)
        self.reason, self.step, self.checkpoint = reason, step, checkpoint
        self.code = self.CODE

    def __str__(self) -> str:
        return f"{self.reason}: stopped after step {self.step}, saved in {self.checkpoint}"


def first_line(error: BaseException | None, otherwise: str = "") -> str:
    """The first line of an error's text; ``otherwise`` if it has none."""
    return (str(error).strip().splitlines() or [otherwise])[0]
