"""An unknown keyword of a constructor is an error with the nearest name, as that of an option is. Torch-free."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

__all__ = ["answers_keywords", "known_keywords"]

F = TypeVar("F", bound=Callable[..., Any])


def known_keywords(init: F) -> F:
    """Decorator of an ``__init__`` without ``**kwargs``: an unknown keyword raises ConfigError, not a TypeError. Its signature stays
    that of ``init``, for readers and for type checkers."""
    return answers_keywords({})(init)


def answers_keywords(answers: Mapping[str, str]) -> Callable[[F], F]:
    """:func:`known_keywords` that also knows keywords of another library. ``answers``: keyword -> what to write in its place."""
    return functools.partial(_checked, answers)


def _checked(answers: Mapping[str, str], init: F) -> F:
    code, name = init.__code__, init.__qualname__.removesuffix(".__init__")
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(init)
    def checked(*args: Any, **given: Any) -> Any:
        for key, value in given.items():
            if key not in known:
                fix = answers.get(key) or did_you_mean(key, known, what=f"arguments of {name}")
                raise ConfigError(f"{name}({key}={value!r:.60})", why="it has no argument of this name", fix=fix)
        return init(*args, **given)

    return checked  # type: ignore[return-value]
