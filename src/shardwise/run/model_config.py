"""The section ``model`` of the configuration of ``shardwise train``: what is built, what it starts from, what of it is trained.
Torch-free."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.limits import Positive
from shardwise.config.record import Options, doc
from shardwise.config.target import split_target
from shardwise.errors import ConfigError


class Model(Options, frozen=True, kw_only=True):
    """Section ``model``: the model and its initial weights."""

    needless_with_build: ClassVar[tuple[str, ...]] = ("hf",)

    build: Annotated[
        str | None,
        doc("function that returns the nn.Module: pkg.mod:fn or path/to/file.py:fn; null: the reference model"),
    ] = None
    hf: Annotated[
        str | None, doc("Hugging Face directory: the class in its config.json, and its weights; nothing is downloaded")
    ] = None
    args: Annotated[dict[str, Any], doc("keyword arguments of build; with hf: fields of its config.json to change")] = (
        msgspec.field(default_factory=dict)
    )
    weights: Annotated[
        str | None, doc("start from a Hugging Face or DCP directory, a safetensors or torch file; null: those of hf")
    ] = None
    adapter: Annotated[
        str | None, doc("start from these adapters, of PEFT or a run; parallel.lora is as they say, if not given")
    ] = None
    rename: Annotated[
        dict[str, str | None],
        doc("regex -> replacement, for the names in weights, in order; null: leave the tensor out"),
    ] = msgspec.field(default_factory=dict)
    cast: Annotated[
        bool | None, doc("of another dtype. null: converted where nothing is rounded; true: converted; false: refused")
    ] = None
    add_tokens: Annotated[
        str | tuple[str, ...], doc("with hf: special tokens to add, with rows for them; a list, or with commas")
    ] = ()
    vocab: Annotated[
        Positive | Literal["tokenizer"] | None,
        doc(
            "with hf: rows of the embedding and of the head, no fewer than the model has. tokenizer: as many as its tokens need; a number: so many; "
            "null: as the model has, or as add_tokens needs"
        ),
    ] = None
    strict: Annotated[
        bool, doc("false: missing weights are initialised (a new head), extra ones are left out; both are reported")
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
        self._check_vocab()
        if self.freeze and self.train_only:
            raise ConfigError(
                f"model.freeze={list(self.freeze)} with model.train_only={list(self.train_only)}",
                why="each of them says which parameters are trained",
                fix="remove one",
            )
        if self.adapter is not None and self.start is None:
            raise ConfigError(
                f"model.adapter={self.adapter!r} without model.weights or model.hf",
                why="adapters are beside the weights that they were trained beside",
                fix="name these: model.hf=DIRECTORY, or model.weights",
            )
        for key, default in (("rename", {}), ("cast", None), ("strict", True)):
            # cast=false is what a run without weights wrote into its config.yaml, where false was the default.
            if self.start is None and getattr(self, key) not in (default, False if key == "cast" else default):
                raise ConfigError(
                    f"model.{key}={getattr(self, key)!r} without model.weights or model.hf",
                    why="it says how weights are read, so it would have no effect",
                    fix=f"add model.weights, or remove model.{key}",
                )
        if self.build is not None:
            split_target(self.build, f"model.build={self.build!r}")

    def _check_vocab(self) -> None:
        words = self.add_tokens.split(",") if isinstance(self.add_tokens, str) else self.add_tokens
        tokens = tuple(word.strip() for word in words) if isinstance(self.add_tokens, str) else tuple(words)
        tokens = () if tokens == ("",) else tokens
        msgspec.structs.force_setattr(self, "add_tokens", tokens)
        if "" in tokens or len(set(tokens)) < len(tokens):
            raise ConfigError(
                f"model.add_tokens={list(tokens)}",
                why="one is empty" if "" in tokens else "one is named twice",
                fix="name each token once: a list, or with commas",
            )
        key = "add_tokens" if tokens else "vocab" if self.vocab is not None else None
        if key is None:
            return
        if self.hf is None:
            raise ConfigError(
                f"model.{key}={list(tokens) or self.vocab!r} without model.hf",
                why="only the model of a Hugging Face directory says where its embedding and its head are",
                fix=f"remove model.{key}, and build the model with as many rows as it needs"
                + ("" if self.build is not None else ": model.args.vocab for the reference model"),
            )
        if "vocab_size" in self.args:
            raise ConfigError(
                f"model.{key}={list(tokens) or self.vocab!r} with model.args.vocab_size={self.args['vocab_size']!r}",
                why="each of them says how many rows the embedding has",
                fix="remove model.args.vocab_size: the configuration that is saved has the new number",
            )

    @property
    def may_grow(self) -> bool:
        """Whether rows may be added to the embedding."""
        return bool(self.add_tokens) or self.vocab is not None

    @property
    def start(self) -> str | None:
        """Path of the weights that the run starts from; None for new ones."""
        return self.weights or self.hf
