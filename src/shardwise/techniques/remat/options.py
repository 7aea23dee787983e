"""Options of activation checkpointing: which blocks run again in backward, and what is kept. Torch-free.

>>> remat_of("selective")
Remat(mode='selective', targets='blocks', every=1, save=('matmul', 'attention'), offload=False, budget=None)
>>> remat_of("8GiB").budget
8589934592
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.sizes import is_size, num_bytes
from shardwise.config.torch_options import Replacement
from shardwise.errors import ConfigError
from shardwise.techniques.targets import TARGETS, Targets, settle_targets, word_or_record

_SAVED = ("matmul", "attention")


class Remat(Options, frozen=True, kw_only=True):
    """Activation checkpointing: which blocks run again in backward instead of keeping their activations."""

    patterns: ClassVar[frozenset[str]] = frozenset({"targets"})
    foreign: ClassVar[Mapping[str, str | Replacement]] = {
        "use_reentrant": "blocks always run again by saved-tensor hooks, which is use_reentrant=False: leave it out",
        "preserve_rng_state": "a block always draws the same numbers again: leave it out",
        "checkpoint_impl": "blocks always run again by saved-tensor hooks, which is NO_REENTRANT: leave it out",
        "determinism_check": "what runs again is always compared with the first run: leave it out",
        "check_fn": Replacement(
            "it is called targets here: {}", 'targets=("Block",)', "parallel.remat", "{mode: full, targets: [Block]}"
        ),
        "context_fn": Replacement(
            "what is kept is named: {}",
            'mode="selective", save=("matmul", "attention")',
            "parallel.remat",
            "{mode: selective, save: [matmul, attention]}",
        ),
        "debug": "what runs again is always compared with the first run: leave it out",
    }

    mode: Annotated[
        Literal["full", "selective"],
        doc(
            "full: keep a block's inputs only; selective: also the results named in save, so that they are not run again"
        ),
    ] = "full"
    targets: Annotated[Targets, TARGETS] = "blocks"
    every: Annotated[
        Annotated[int, msgspec.Meta(ge=1)], doc("of the targets in one list, the first of every so many; 1: all")
    ] = 1
    save: Annotated[
        tuple[str, ...],
        doc("with selective: whose results are kept: matmul, attention, or operators as aten.gelu or mylib.op"),
    ] = _SAVED
    offload: Annotated[bool, doc("with full, on cuda: keep the inputs of the blocks in host memory")] = False
    budget: Annotated[
        int | str | None,
        doc(
            "what the blocks may keep of one micro-batch's activations on a rank, as 8GiB or in bytes: what runs again is "
            "chosen by measured bytes and cost at the first optimizer step; none: what mode says"
        ),
    ] = None

    def check(self) -> None:
        settle_targets(self)
        self._settle_budget()
        if self.mode == "full" and self.save != _SAVED:
            raise ConfigError(
                f"Remat(mode='full', save={list(self.save)})",
                why="full runs all of a block again, so save would have no effect",
                fix='remove save, or use mode="selective"',
            )
        if self.mode == "selective" and not all(self.save):
            raise ConfigError("Remat(save=[''])", why="an empty name matches no operator", fix="remove it")
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

    def _settle_budget(self) -> None:
        if self.budget is None:
            return
        budget = num_bytes(str(self.budget), "Remat(budget=)")
        msgspec.structs.force_setattr(self, "budget", budget)
        if self.mode == "selective" or self.offload or self.save != _SAVED:
            other = "mode='selective'" if self.mode == "selective" else "offload=True" if self.offload else "save"
            raise ConfigError(
                f"Remat(budget={budget}, {other})",
                why="a budget chooses by itself what each block keeps",
                fix=f"remove {other.partition('=')[0]}, or budget",
            )


def remat_of(value: str | Remat | None) -> Remat | None:
    """The record for a short word: "full", "selective", or a size, "8GiB"; None and "none" are None."""
    if isinstance(value, str) and is_size(value):
        return Remat(budget=value)
    return word_or_record("remat", value, Remat, _WORDS, also=", or a size that it may keep on each rank (8GiB)")


_WORDS = {"none": None, "full": Remat(), "selective": Remat(mode="selective")}
