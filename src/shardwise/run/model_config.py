"""The section ``model`` of the configuration of ``shardwise train``: what is built, what it starts from, what of it is trained.
Torch-free."""

from typing import Annotated, Any

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.target import looks_like_target
from shardwise.errors import ConfigError

__all__ = ["Model"]


class Model(Options, frozen=True, kw_only=True):
    """Section ``model``: the model and its initial weights."""

    build: Annotated[
        str | None,
        doc("function that returns the nn.Module: pkg.mod:fn or path/to/file.py:fn; null: the reference model"),
    ] = None
    hf: Annotated[
        str | None,
        doc(
            "Hugging Face model directory: the class that its config.json names, and its weights; nothing is downloaded"
        ),
    ] = None
    args: Annotated[
        dict[str, Any], doc("keyword arguments of build; with hf: fields of the configuration that are to be others")
    ] = msgspec.field(default_factory=dict)
    weights: Annotated[
        str | None,
        doc(
            "start from these: a Hugging Face directory, a safetensors or torch file, a DCP directory; null: those of hf"
        ),
    ] = None
    rename: Annotated[
        dict[str, str | None],
        doc("regex -> replacement, for the names in weights, in order; null: leave the tensor out"),
    ] = msgspec.field(default_factory=dict)
    cast: Annotated[
        bool | None,
        doc(
            "weights of another floating dtype than the model stores. null: converted where nothing is rounded, such as bfloat16 to float32; true: "
            "converted; false: refused"
        ),
    ] = None
    strict: Annotated[
        bool,
        doc("false: missing weights are initialised (a new head), extra ones are left out; both are reported"),
    ] = True

    freeze: Annotated[
        tuple[str, ...], doc("parameters that are not trained: names with * and ?, such as model.embed_tokens.*")
    ] = ()
    train_only: Annotated[tuple[str, ...], doc("the only parameters that are trained, named in the same way")] = ()

    def check(self) -> None:
        if self.hf is not None and self.build is not None:
            raise ConfigError(
                f"model.hf={self.hf!r} with model.build={self.build!r}",
                why="each of them says which model is built",
                fix="remove one; a function of your own can start from the weights: model.weights",
            )
        if self.freeze and self.train_only:
            raise ConfigError(
                f"model.freeze={list(self.freeze)} with model.train_only={list(self.train_only)}",
                why="each of them says which parameters are trained",
                fix="remove one",
            )
        for key, default in (("rename", {}), ("cast", None), ("strict", True)):
            # cast=false is what a run without weights wrote into its config.yaml, where false was the default.
            if self.start is None and getattr(self, key) not in (default, False if key == "cast" else default):
                raise ConfigError(
                    f"model.{key}={getattr(self, key)!r} without model.weights or model.hf",
                    why="it says how weights are read, so it would have no effect",
                    fix=f"add model.weights, or remove model.{key}",
                )
        if self.build is not None and not looks_like_target(self.build):
            raise ConfigError(
                f"model.build={self.build!r}",
                why="it does not name a function",
                fix="write pkg.mod:fn, or path/to/file.py:fn",
            )

    @property
    def start(self) -> str | None:
        """Path of the weights that the run starts from; None for new ones."""
        return self.weights or self.hf
