"""Decides for the blocks of a model what each keeps for backward, when all ranks take their first optimizer step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.errors import UsageError
from shardwise.recipe import human_bytes
from shardwise.techniques.remat.choice import Choice, Measured, among_ranks, in_words, selective, within_budget
from shardwise.techniques.remat.measure import Measurement
from shardwise.techniques.remat.operators import named_operators


class Selection:
    """Of one model. Until it is decided each block runs again whole, which keeps least; its first run is measured.

    All ranks must choose alike, as a block that runs again repeats its collectives (of ``tp``, of a nested unit). They
    measure different micro-batches, so they exchange what they found, and the largest counts.

    Args:
        names: of the blocks.
        save: what ``Remat(save=)`` names.
        budget: bytes; None: the results of ``save`` are kept.
    """

    def __init__(self, names: Sequence[str], save: tuple[str, ...], budget: int | None):
        self._names, self._budget = tuple(names), budget
        self._named = named_operators(save)
        self._seen: dict[int, StorageWeakRef] = {}
        self._measured: dict[str, Measured] = {}
        self.choices: dict[str, Choice] | None = None  # None: not decided yet

    def measurement(self, name: str, inputs: Sequence[Tensor]) -> Measurement | None:
        """For the run of a block that starts; None: it is known."""
        if self.choices is not None or name in self._measured:
            return None
        return Measurement(self._named.__contains__, inputs, self._seen)

    def ran(self, name: str, measurement: Measurement) -> None:
        """Called when the run has ended."""
        self._measured[name] = measurement.result()

    def choice(self, name: str) -> Choice | None:
        """What was decided for a block; None: nothing yet."""
        return None if self.choices is None else self.choices.get(name)

    def decide(self, runtime: Any) -> str:
        """Exchanges what was measured, and decides. All ranks must call it. Returns what was chosen, for people.

        Raises:
            UsageError: the blocks' inputs alone take more than the budget.
        """
        place = "the first optimizer step, choosing what blocks keep for backward"
        by_rank = runtime.world.agreement.gather(self._measured, place)
        self._seen.clear()
        found = {name: among_ranks([rank.get(name) for rank in by_rank]) for name in self._names}
        blocks = {name: measured for name, measured in found.items() if measured is not None}
        if self._budget is None:
            chosen: list[Choice] | None = [selective(block) for block in blocks.values()]
        else:
            chosen = within_budget(list(blocks.values()), self._budget)
        if chosen is None:
            least = sum(block.input_bytes for block in blocks.values())
            raise UsageError(
                f"Remat(budget={self._budget}), that is {human_bytes(self._budget or 0)}",
                why=f"with every block run again, their inputs alone take {human_bytes(least)} in a micro-batch",
                fix="give at least that, or make micro-batches smaller",
            )
        self.choices = dict(zip(blocks, chosen, strict=True))
        never_run = len(self._names) - len(blocks)
        rest = f"; {never_run} that had not run keep their inputs only" if never_run else ""
        return in_words(list(blocks.values()), chosen) + rest
