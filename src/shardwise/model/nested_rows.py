"""The proof that rows of sequences may be cut once more: on a rank's rows by context parallelism, of which each rank of tensor parallelism has
some between its layers. What the outer cut does is known by then, and is done here, without being proved again: so its rows are the
sequences of the inner proof, of the number that this rank has.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from shardwise.model.attend import SDPA, Attention
from shardwise.model.own_positions import kind_of
from shardwise.model.positions import Rows
from shardwise.model.products import second_of
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.row_facts import Facts, Plan, Whole
from shardwise.model.row_runs import run_mode
from shardwise.model.stream_rows import StreamFacts, StreamRows
from shardwise.model.trial import Trial


class Exchanges(Rows):
    """What a cut does in a run: cuts arguments, makes positions, exchanges keys. What it exchanges is compared, and nothing else."""

    def _is_same(self, mine: Any, full: Any) -> bool:
        return False

    def _is_own_code(self) -> bool:
        return not self._is_busy and not (self._hooked and self._hooked[-1])


class NestedRows(StreamRows):
    """A run on rows of an outer cut (``rows`` None), or on some of these."""

    def __init__(
        self,
        outer: Exchanges,
        trial: Trial,
        whole: Whole,
        plan: Plan,
        rows: Tensor | None,
        known: Facts | None = None,
    ):
        assert outer._rows is not None
        super().__init__(trial, whole, plan, len(outer._rows), rows, known)
        self._outer = outer

    @property
    def rows_of_masks(self) -> Tensor | None:
        return self._outer.rows_of_masks

    def in_hooks(self, *, begins: bool) -> None:
        self._outer.in_hooks(begins=begins)
        super().in_hooks(begins=begins)

    def before(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = self._outer.before(name, args, kwargs)
        self._follow((args, kwargs), given)
        return super().before(name, *given)

    def after(self, name: str, output: Any) -> Any:
        mine = super().after(name, output)
        output = self._outer.after(name, mine)
        self._follow(mine, output)
        return output

    def attend(self, call: Attention) -> Any:
        with self.busy():
            result = self._outer.attend(call)
        if self._rows is not None:
            self._label(SDPA, [call.q, call.k, call.v], result)
        return result

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind_of(func) is not None and self._is_own_code():
            return self._outer.other(func, args, kwargs)
        return super().other(func, args, kwargs)

    def _product(self, frame: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with self.busy():
            given = self._outer._product(self._outer.frames[-1], func, args, kwargs)
        self._follow(second_of(func, args, kwargs), second_of(func, *given))
        return given

    def _follow(self, before: Any, after: Any) -> None:
        """What the outer cut has put in the place of tensors is of rows, or whole, as these were."""
        of_before = dict(keyed_leaves(before))
        for path, x in keyed_leaves(after):
            old = of_before.get(path)
            if isinstance(x, Tensor) and isinstance(old, Tensor) and x is not old and self._rows is not None:
                self._set(x, self._label_of(old))


def run_nested(
    trial: Trial,
    outer: Callable[[], Exchanges],
    plan: Plan,
    parts: Sequence[Tensor],
    known: Facts,
) -> Iterator[StreamFacts]:
    """Runs the model as ranks with these parts of one rank's rows would.

    Args:
        trial: of the model.
        outer: makes what the outer cut does of a run.
        plan: of the inner cut.
        parts: of the rows, as numbers among them.
        known: facts that the inner cut follows.
    """
    whole = Whole()
    run_mode(trial, NestedRows(outer(), trial, whole, Plan(), None))
    for rows in parts:
        mode = NestedRows(outer(), trial, whole, plan, rows, known)
        run_mode(trial, mode)
        yield mode.facts
