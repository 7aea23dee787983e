"""What loggers keep: handlers, and the records and texts in those."""

import logging
import types
from collections.abc import Iterable
from typing import Any

from shardwise.model.places import Space, is_opaque

NAME = "a handler of a logger"
_OF_OTHERS = frozenset({"_cache", "manager", "parent", "root"})  # attributes of a logger that say nothing of its own


class LoggerState(Space):
    """The attributes of a logger or of one of its handlers; not the file that a handler opens when it is first used."""

    def content(self) -> dict[str, Any]:
        left = {"stream"} if isinstance(self.home, logging.FileHandler) else _OF_OTHERS
        return {name: value for name, value in super().content().items() if name not in left}


class NewLoggers(Space):
    """The loggers that there are. New ones stay, as modules do that are imported, but for handlers that keep something."""

    def __init__(self) -> None:
        super().__init__(logging.root.manager.loggerDict)

    def put(self, content: dict[str, Any]) -> None:
        for name, logger in self.content().items():
            if name not in content and isinstance(logger, logging.Logger):
                logger.handlers[:] = [each for each in logger.handlers if not _keeps(each)]


def _keeps(handler: logging.Handler) -> bool:
    if not is_opaque(type(handler).__module__) or isinstance(handler, logging.BufferingFormatter):
        return True
    return hasattr(handler, "buffer") or hasattr(getattr(handler, "stream", None), "getvalue")


def names_loggers(value: Any) -> bool:
    """Whether a value is a function of :mod:`logging`, such as ``getLogger``, which any logger may be reached by."""
    return isinstance(value, types.FunctionType) and value.__module__ == "logging"


def loggers() -> list[tuple[str, Any]]:
    every = (logging.root, *logging.root.manager.loggerDict.values())
    return [(f"the logger {each.name!r}", each) for each in every if isinstance(each, logging.Logger)]


def within_logger(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, logging.Logger):
        return [
            *((NAME, handler) for handler in value.handlers),
            *((NAME, each) for each in (value.handlers, value.filters)),
            *([] if value.parent is None else [("the logger above", value.parent)]),
        ]
    return [(f"{NAME}.{key}", item) for key, item in vars(value).items() if key not in ("lock", "formatter")]
