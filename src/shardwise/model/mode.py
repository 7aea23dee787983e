"""Eval mode for a while: afterwards each module is in its own mode again, as a part may be in eval mode on purpose (frozen batch norm)."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def eval_mode(model: nn.Module, *, on: bool = True) -> Iterator[None]:
    """Within, if ``on``: the model is in eval mode. Afterwards each module is in the mode in which it was."""
    modes = {module: module.training for module in model.modules()}
    if on:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
