"""Options of the techniques that change how a block runs, and not where its bytes are. Torch-free.

>>> remat_of("selective")
Remat(mode='selective', targets='blocks', every=1, save=('matmul', 'attention'), offload=False)
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

__all__ = ["Compile", "Remat", "compile_of", "remat_of"]

Targets = str | tuple[str, ...]
_TARGETS = doc(
    "blocks: every block of the outermost lists; else patterns of module names or classes, as a list or with commas; in "
    "Python also classes"
)

_SAVED = ("matmul", "attention")


class Remat(Options, frozen=True, kw_only=True):
    """Which blocks run again in backward instead of keeping what they computed in forward (activation checkpointing)."""

    patterns: ClassVar[frozenset[str]] = frozenset({"targets"})

    mode: Annotated[
        Literal["full", "selective"],
        doc(
            "full: keep a block's inputs only; selective: also the results named in save, so that they are not run again"
        ),
    ] = "full"
    targets: Annotated[Targets, _TARGETS] = "blocks"
    every: Annotated[
        Annotated[int, msgspec.Meta(ge=1)], doc("of the targets in one list, the first of every so many; 1: all")
    ] = 1
    save: Annotated[
        tuple[str, ...],
        doc("with selective: whose results are kept: matmul, attention, or operators as aten.gelu or mylib.op"),
    ] = _SAVED
    offload: Annotated[bool, doc("with full, on cuda: keep the inputs of the blocks in host memory")] = False

    def check(self) -> None:
        _settle_targets(self)
        if self.mode == "full" and self.save != _SAVED:
            raise ConfigError(
                f"Remat(mode='full', save={list(self.save)})",
                why="full runs all of a block again, so save would have no effect",
                fix='remove save, or use mode="selective"',
            )
        if self.mode == "selective" and not all(self.save):
            raise ConfigError("Remat(save=[''])", why="an empty name is no operator's", fix="remove it")
        if self.mode == "selective" and not self.save:
            raise ConfigError(
                "Remat(mode='selective', save=[])",
                why="selective keeps the results of some operators, and none is named",
                fix='name some, as save=["matmul"], or use mode="full"',
            )
        if self.mode == "selective" and self.offload:
            raise ConfigError(
                "Remat(mode='selective', offload=True)",
                why="torch keeps the results that selective saves on the device, so only a part would be offloaded",
                fix='use mode="full" with offload, or selective without',
            )


class Compile(Options, frozen=True, kw_only=True):
    """Which blocks are compiled, and how: keywords of ``torch.compile``."""

    patterns: ClassVar[frozenset[str]] = frozenset({"targets"})

    targets: Annotated[Targets, _TARGETS] = "blocks"
    backend: Annotated[str, doc("inductor, or another name of torch.compiler.list_backends")] = "inductor"
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
        doc("what inductor optimises for; null: its default"),
    ] = None
    dynamic: Annotated[
        bool | None, doc("true: one graph for all sizes; false: one for each; null: as sizes turn out to change")
    ] = None
    fullgraph: Annotated[bool, doc("true: a block that is not one graph is an error")] = False
    activation_memory_budget: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
        doc(
            "part of a block's activations that may be kept for backward, the cheapest of the rest run again; null: all"
        ),
    ] = None

    def check(self) -> None:
        _settle_targets(self)
        if not self.backend:
            raise ConfigError("Compile(backend='')", why="no backend has this name", fix='use backend="inductor"')
        if self.mode is not None and self.backend != "inductor":
            raise ConfigError(
                f"Compile(backend={self.backend!r}, mode={self.mode!r})",
                why="modes are those of inductor, so mode would have no effect",
                fix='remove mode, or use backend="inductor"',
            )
        if self.activation_memory_budget is not None and self.backend == "eager":
            raise ConfigError(
                f"Compile(backend='eager', activation_memory_budget={self.activation_memory_budget})",
                why="eager runs the graph as it is, so the budget would have no effect",
                fix='remove it, or use backend="aot_eager" or "inductor"',
            )


def remat_of(value: str | Remat | None) -> Remat | None:
    """The record a short word stands for: "full", "selective"; None and "none" are None.

    Raises:
        ConfigError: for any other word.
    """
    words = {"none": None, "full": Remat(), "selective": Remat(mode="selective")}
    return _record("remat", value, Remat, words)


def compile_of(value: str | Compile | None) -> Compile | None:
    """The record a short word stands for: "blocks"; None and "none" are None.

    Raises:
        ConfigError: for any other word.
    """
    return _record("compile", value, Compile, {"none": None, "blocks": Compile()})


def _record(key: str, value: Any, cls: type, words: dict[str, Any]) -> Any:
    if value is None or isinstance(value, cls):
        return value
    if isinstance(value, str) and value in words:
        return words[value]
    raise ConfigError(
        f"{key}={value!r}",
        why=f"that is neither a word for {key} nor a {cls.__name__} record",
        fix=did_you_mean(str(value), list(words), what="words") + f', or a record: {cls.__name__}(targets=("Block",))',
    )


def _settle_targets(record: Remat | Compile) -> None:
    """A text but "blocks" becomes the patterns it lists; those that mean nothing are refused."""
    if isinstance(record.targets, str) and record.targets != "blocks":
        msgspec.structs.force_setattr(record, "targets", tuple(part.strip() for part in record.targets.split(",")))
    targets = record.targets
    if isinstance(targets, tuple) and not (targets and all(targets)):
        raise ConfigError(
            f"{type(record).__name__}(targets={list(targets)})",
            why="no pattern, or an empty one, means no module",
            fix='name modules, as targets=["blocks.*"] or ["Block"], or leave it at "blocks"',
        )
