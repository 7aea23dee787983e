"""``train.callback``: a function of the user that sees each step's :class:`StepOutput`, and may end the run."""

from typing import Any

from shardwise.config.target import load_target
from shardwise.errors import ConfigError


class Callback:
    """The function that ``train.callback`` names, called as ``fn(out)`` on every rank after every optimizer step.

    Args:
        name: ``pkg.mod:fn``; None: there is none, and a call does nothing.

    Raises:
        ConfigError: it is no function.
    """

    def __init__(self, name: str | None):
        self.name = name
        self._function = None if name is None else load_target(name, what="train.callback")
        if name is not None and not callable(self._function):
            raise ConfigError(
                f"train.callback={name!r}",
                why=f"it is a {type(self._function).__name__}, and is called after each step",
                fix="name a function that takes the step's output: def fn(out): ...",
            )

    def __call__(self, out: Any) -> bool:
        """Whether the run ends after this step, as this rank sees it.

        Raises:
            ConfigError: it returned something else than None, False or True.
        """
        answer = None if self._function is None else self._function(out)
        if answer is None or isinstance(answer, bool):
            return bool(answer)
        raise ConfigError(
            f"train.callback={self.name!r}: it returned {type(answer).__name__} {answer!r:.60} after step {out.step}",
            why="only True ends the run, and None or False continues: another value may be a slip",
            fix="return True, False or nothing: bool(...) makes one of a number or a tensor",
        )
