"""Loads what the command line names for a comparison: the model, batches, loss and count; each rank loads them itself.

Mistakes in them become readable errors with the line of the user's code: a file that cannot be imported, a class that
needs arguments, a function that returns something else.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.target import load_target
from shardwise.errors import ConfigError, ShardwiseError, UsageError, first_line
from shardwise.model.calling import line_of
from shardwise.run.pretrained import check_pretrained
from shardwise.verify.draws import streams_kept


@contextlib.contextmanager
def user_errors(given: str, doing: str, fix: str) -> Iterator[None]:
    """Within, an exception of the user's code becomes a ConfigError that says what raised it (``doing``) and where."""
    try:
        yield
    except UsageError as error:
        if "forward=" in error.fix:  # of the Python call
            error.fix = "name the keys of what --batch returns as the arguments of the forward, or say how it is called: --forward pkg.mod:fn"
        raise
    except ShardwiseError:
        raise
    except Exception as error:
        text = first_line(error)
        raise ConfigError(
            given, why=f"{doing} raised {type(error).__name__}: {text}{line_of(error)}", fix=fix
        ) from error


@dataclass(frozen=True)
class Function:
    """A function given by its name, loaded when it is called; ``what``: the option it was given as (``--batch``)."""

    text: str
    what: str

    def __call__(self, *args: Any) -> Any:
        return self.load()(*args)

    def load(self) -> Any:
        """Imports and returns the function."""
        given = f"{self.what}={self.text!r}"
        fix = "correct that line, or install what it imports; then run again"
        # Streams are kept: a rank imports it while building the model, the one process did so earlier.
        with user_errors(given, "importing it", fix), streams_kept():
            function = load_target(self.text, what=self.what)
        if not callable(function) or isinstance(function, nn.Module):
            kind = (
                "a module that is made already"
                if isinstance(function, nn.Module)
                else f"of type {type(function).__name__}"
            )
            raise ConfigError(
                given,
                why=f"it is {kind}, and a function is called",
                fix="name a function, or a class: def build(): return Net(...)",
            )
        return function


@dataclass(frozen=True)
class CountOfLoss:
    """The ``count`` of a loss that was given by its name."""

    loss: Function

    def __call__(self, batch: Mapping[str, Tensor]) -> Any:
        return self.loss.load().count(batch)


@dataclass(frozen=True)
class Model:
    """A module given by the name of its class, or of a function that returns it; built by a call."""

    text: str

    def __call__(self) -> nn.Module:
        given = f"MODEL={self.text!r}"
        make = Function(self.text, "MODEL").load()
        place, _, name = self.text.rpartition(":")
        function = f"def build(): return {name}(...), and give {place}:build"
        with user_errors(given, "calling it", f"if it needs arguments, write a function that has none: {function}"):
            module = make()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                given,
                why=f"it returned {type(module).__name__}, and a torch.nn.Module is compared",
                fix="name a function that returns the module, or the module's class",
            )
        return module


@dataclass(frozen=True)
class Directory:
    """A Hugging Face model directory: the class that its ``config.json`` names, with its weights."""

    folder: str

    def __call__(self) -> nn.Module:
        kind, config = check_pretrained(self.folder, {}, what="MODEL")
        # On the meta device only the structure is needed, and transformers would refuse to load weights.
        if torch.get_default_device().type == "meta":
            return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        import transformers

        shows = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            with user_errors(
                f"MODEL={self.folder!r}", "loading it", "check that its weights are those of its config.json"
            ):
                return kind.from_pretrained(self.folder, config=config, local_files_only=True).train()
        finally:
            if shows:
                transformers.utils.logging.enable_progress_bar()


def named_model(text: str) -> Callable[[], nn.Module]:
    """The model that the command line's MODEL names: a directory, or a function."""
    return Directory(text) if Path(text).is_dir() else Model(text)
