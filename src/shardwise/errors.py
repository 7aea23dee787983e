"""Every error Shardwise raises on purpose, in one tree.

A message has three parts and, where there is one, the canonical name of the module or parameter it is about::

    LayoutError: dp_shard=3 on 4 ranks
      why: the degrees multiply to 3, and every rank needs a place
      fix: use dp_shard=2,dp_replicate=2 or dp_shard=4

Each leaf also inherits the standard exception a Python user would expect to catch (``ValueError``,
``RuntimeError``, ...). All of them can be pickled, because ranks send them to each other.

To add one: subclass :class:`ShardwiseError` and the standard type; ``docs/errors.md`` is generated from the code,
and the build fails for a call that leaves ``given``, ``why`` or ``fix`` empty.
"""

import contextlib
from collections.abc import Iterator

__all__ = [
    "CheckpointError",
    "ConfigError",
    "LayoutError",
    "NonFiniteError",
    "PlanError",
    "RankError",
    "ShardwiseError",
    "Stopped",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "errors_about",
]


class ShardwiseError(Exception):
    """Base of all errors raised on purpose.

    Args:
        given: what was given, with its value ("dp_shard=3 on 4 ranks").
        why: why that cannot work.
        fix: what to change, as a call or a setting the user can copy.
        name: canonical name of the module or parameter concerned, if there is one.

    Attributes:
        shown_by: another process ("rank 0") that shows the same error whole; None: whoever has it shows it.
    """

    shown_by: str | None = None

    def __init__(self, given: str, *, why: str, fix: str, name: str | None = None):
        super().__init__(given)
        self.given, self.why, self.fix, self.name = given, why, fix, name

    def __str__(self) -> str:
        where = f"{self.name}: " if self.name else ""
        return f"{where}{self.given}\n  why: {self.why}\n  fix: {self.fix}"

    def in_a_line(self) -> str:
        """What it is, for a process that leaves the rest to :attr:`shown_by`."""
        # Of a rank it is known that it has the same error. Another process may not: why it cannot work is said here too.
        reason = "" if str(self.shown_by).startswith("rank ") else f": {str(self.why).partition(chr(10))[0]}"
        return f"{type(self).__name__}: {self.given}{reason} (shown by {self.shown_by})"

    def __reduce__(self):
        return _rebuild, (type(self), self.__dict__.copy())


@contextlib.contextmanager
def errors_about(name: str) -> Iterator[None]:
    """Within, errors of ours that name nothing are about ``name``."""
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
    """A layout cannot be laid over the ranks there are."""


class PlanError(ShardwiseError, ValueError):
    """A recipe cannot be made for, or does not belong to, this module."""


class UnsupportedError(ShardwiseError, NotImplementedError):
    """A combination Shardwise refuses because it would not be right."""


class UsageError(ShardwiseError, RuntimeError):
    """Calls in an order that would train silently wrong (stale optimizer, sharded twice, direct unit call)."""


class RankError(ShardwiseError, RuntimeError):
    """A peer was lost, stopped answering, or disagrees. ``.ranks`` names the ranks concerned."""

    def __init__(self, given: str, *, why: str, fix: str, name: str | None = None, ranks: tuple[int, ...] = ()):
        super().__init__(given, why=why, fix=fix, name=name)
        self.ranks = tuple(ranks)


class NonFiniteError(ShardwiseError, ArithmeticError):
    """The loss or a gradient is NaN or infinite, on any rank. ``.ranks`` names the ranks concerned."""

    def __init__(self, given: str, *, why: str, fix: str, name: str | None = None, ranks: tuple[int, ...] = ()):
        super().__init__(given, why=why, fix=fix, name=name)
        self.ranks = tuple(ranks)


class CheckpointError(ShardwiseError, OSError):
    """Stored weights or a checkpoint cannot be read or written whole."""


class VerifyError(ShardwiseError, AssertionError):
    """Two runs that must agree do not. The message names the first parameter that differs."""


class Stopped(SystemExit):
    """A run that was asked to stop has saved and ends, on every rank: no fault, so none of the errors above.

    Nobody needs to catch it: Python ends with exit status :attr:`CODE`, which asks whoever started the program to start it
    again.

    Args:
        reason: who asked, in words ("SIGTERM").
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
