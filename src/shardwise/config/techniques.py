"""Options of the techniques that change how a block runs, and not where its bytes are. Torch-free.

>>> remat_of("selective")
Remat(mode='selective', targets='blocks', every=1, save=('matmul', 'attention'), offload=False)
"""

from typing import Annotated, Any, Literal

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.suggest import did_you_mean
from shardwise.errors import ConfigError

__all__ = ["Compile", "Remat", "compile_of", "remat_of"]

Targets = Literal["blocks"] | tuple[str, ...]

_SAVED = ("matmul", "attention")


class Remat(Options, frozen=True, kw_only=True):
    """Which blocks run again in backward instead of keeping what they computed in forward (activation checkpointing)."""

    mode: Annotated[
        Literal["full", "selective"],
        doc(
            "full: keep a block's inputs only; selective: also the results named in save, so that they are not run again"
        ),
    ] = "full"
    targets: Annotated[
        Targets, doc("blocks: every block of the outermost lists; or patterns of module names or class names")
    ] = "blocks"
    every: Annotated[
        Annotated[int, msgspec.Meta(ge=1)], doc("of the targets in one list, the first of every so many; 1: all")
    ] = 1
    save: Annotated[
        tuple[str, ...],
        doc("with selective: whose results are kept: matmul, attention, or operators as aten.gelu or mylib.op"),
    ] = _SAVED
    offload: Annotated[bool, doc("with full, on cuda: keep the inputs of the blocks in host memory")] = False

    def check(self) -> None:
        _check_targets("Remat", self.targets)
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

    targets: Annotated[
        Targets, doc("blocks: every block of the outermost lists; or patterns of module names or class names")
    ] = "blocks"
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
        _check_targets("Compile", self.targets)
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


def _check_targets(record: str, targets: Any) -> None:
    if isinstance(targets, tuple) and not (targets and all(targets)):
        raise ConfigError(
            f"{record}(targets={list(targets)})",
            why="no pattern, or an empty one, means no module",
            fix='name modules, as targets=["blocks.*"] or ["Block"], or leave it at "blocks"',
        )
