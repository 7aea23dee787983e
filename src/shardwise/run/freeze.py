"""Parameters that a run does not train: ``model.freeze`` and ``model.train_only``."""

from fnmatch import fnmatchcase

from torch import nn

from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError
from shardwise.model.names import canonical_tensors
from shardwise.run.config import Model


def freeze_parameters(module: nn.Module, given: Model) -> None:
    """Calls ``requires_grad_(False)`` on the parameters that the config names. One that is shared is named by each of its
    names.

    Raises:
        ConfigError: a pattern names no parameter; no parameter would be left to train.
    """
    patterns = given.freeze or given.train_only
    if not patterns:
        return
    key = "freeze" if given.freeze else "train_only"
    params = {name: owner._parameters[attr] for name, owner, attr in canonical_tensors(module, "_parameters")}
    named: set[int] = set()
    for pattern in patterns:
        found = [id(param) for name, param in params.items() if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(
                f"model.{key}: {pattern!r}",
                why="it names no parameter of the model",
                fix=did_you_mean(pattern, list(params), what="parameters"),
            )
        named |= set(found)
    for param in params.values():
        if param is not None and (id(param) in named) == bool(given.freeze):
            param.requires_grad_(False)
    if not any(param is not None and param.requires_grad for param in params.values()):
        raise ConfigError(
            f"model.{key}={list(patterns)}",
            why="no parameter would be left to train",
            fix="name fewer parameters" if given.freeze else "name parameters that the model trains",
        )
