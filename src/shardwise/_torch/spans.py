"""Spans of a step by name: in traces of torch.profiler, and as lines of the logger ``shardwise`` at the level DEBUG."""

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch.autograd.profiler import record_function

_LOG = logging.getLogger("shardwise")
_NOTHING = contextlib.nullcontext()
_profiles = torch.autograd._profiler_enabled


def span(what: str, name: object) -> contextlib.AbstractContextManager[None]:
    """Context manager: a span "shardwise: WHAT NAME". While nothing profiles and the logger is at another level, as it is by default, it
    is a call and two questions: 0.2 us."""
    if not _profiles() and not _LOG.isEnabledFor(logging.DEBUG):
        return _NOTHING
    return _span(f"{what} {name}")


@contextlib.contextmanager
def _span(text: str) -> Iterator[None]:
    _LOG.debug("%s", text)
    with record_function(f"shardwise: {text}"):
        yield
