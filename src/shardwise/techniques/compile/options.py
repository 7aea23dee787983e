"""Options of ``torch.compile``: which blocks are compiled, and how. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.torch_options import Replacement
from shardwise.errors import ConfigError
from shardwise.techniques.targets import TARGETS, Targets, settle_targets, word_or_record


class Compile(Options, frozen=True, kw_only=True):
    """Options for compiling blocks: which blocks, and keywords of ``torch.compile``."""

    patterns: ClassVar[frozenset[str]] = frozenset({"targets"})
    foreign: ClassVar[Mapping[str, str | Replacement]] = {
        "options": "mode and activation_memory_budget are the options here; others are torch._inductor.config's",
        "disable": Replacement("leave compile out, or write {}", 'compile="none"', "parallel.compile", "none"),
        "model": Replacement(
            "blocks are named by targets: {}", 'targets=("Block",)', "parallel.compile", "{targets: [Block]}"
        ),
    }

    targets: Annotated[Targets, TARGETS] = "blocks"
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
        settle_targets(self)
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


def compile_of(value: str | Compile | None) -> Compile | None:
    """The record for a short word: "blocks"; None and "none" are None."""
    return word_or_record("compile", value, Compile, _WORDS)


_WORDS = {"none": None, "blocks": Compile()}
