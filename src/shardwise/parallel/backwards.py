"""Which backwards may come to the parameters of a sharded model: those of a window, and in it those that are summed over the ranks.

A backward outside of windows is an error before it runs: nothing would divide its sum by what all ranks count, and each rank that has
another number of them would wait for the others. Within one, gradients are summed over the ranks. A penalty on weights is the same on
every rank, and would count once for each of them: a backward that comes to parameters past all that the model has computed is an error
too, and :func:`~shardwise.step.penalty.parameter_penalty` is what adds one.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardwise._torch.autograd import Backward, BackwardPath, before_backward, path_of
from shardwise.errors import UnsupportedError, UsageError
from shardwise.parallel.outside_parameters import look_for_outside
from shardwise.parallel.runtime import Runtime, runtimes_in_use
from shardwise.techniques.data.gradients import outside_of_windows

_num_unchecked = 0


def watch_backwards() -> None:
    """Installs, once, what looks at each backward before it runs."""
    before_backward(_look, _check)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Context manager: the backward within is Shardwise's own, as that of a ``TrainStep``."""
    global _num_unchecked
    _num_unchecked += 1
    try:
        yield
    finally:
        _num_unchecked -= 1


def is_unchecked() -> bool:
    """Whether it runs within :func:`unchecked`."""
    return _num_unchecked > 0


def _look(backward: Backward) -> Any:
    """Refuses what may not run. Returns the mark for gradients that are part of a graph: what they are computed from."""
    runtimes = [each for each in runtimes_in_use() if each.world.size > 1]
    _check(backward)
    if _num_unchecked or not runtimes:
        return None
    if not backward.accumulates:
        return path_of(backward.outputs).mark if backward.makes_graph else None
    begun = [each for each in runtimes if each.accumulation is not None]
    is_open = any(each.accumulation.is_open for each in begun)  # type: ignore[union-attr]
    # With a window, those that were sharded since it began.
    closed = [each for each in runtimes if each.accumulation is None and _is_trained(each)] if is_open else runtimes
    # It may pass a model that is frozen, to the inputs of that.
    path = path_of(backward.outputs, past_marks=bool(closed))
    if (reached := _reached(path, closed, backward.inputs)) is not None:
        raise outside_of_windows(reached.runtime.world.axis("loss").size, name=reached.name)
    reached = None if path.mark is not None else _reached(path, begun, backward.inputs)
    if not is_open or (reached is None and path.mark is None):
        return None  # of something else
    for each in begun:
        each.accumulation.has_others = True  # type: ignore[union-attr]
    gives_own = not backward.inputs or _reached(path, begun, backward.inputs) is not None
    if backward.makes_graph and gives_own and any(_sums_in_place(each) for each in begun):
        raise UnsupportedError(
            "backward(create_graph=True) of a model that each rank holds whole",
            why="gradients are summed over the ranks in place, and these would be part of a graph",
            fix="torch.autograd.grad(loss, x, create_graph=True) of what is differentiated again, and one backward() of the sum",
        )
    is_hidden = reached is not None and path.is_compiled and reached.runtime.engine.hides_outputs
    if reached is not None and not reached.is_gathered and not is_hidden:
        raise _penalty(reached)
    return path.mark


def _check(backward: Backward) -> None:
    """Lets techniques look at a backward that adds to gradients, and notes parameters of no model that it comes to."""
    for each in runtimes_in_use() if backward.accumulates else ():
        if each.accumulation is not None and each.accumulation.is_open:
            for check in each.before_backward:
                check(backward)
            if each.accumulation.of != "step" and not (backward.is_inner or _num_unchecked):
                each.accumulation.refuse_edited()
                backward.until_end.callback(each.accumulation.note_left)
            if each.accumulation.of != "another model":
                look_for_outside(each, backward)


def _is_trained(runtime: Runtime) -> bool:
    return any(param.requires_grad for param in runtime.parameters.values())


class _Reached(NamedTuple):
    """A parameter that a backward comes to.

    Attributes:
        is_gathered: it comes to a gathered copy, with which a forward has computed.
    """

    runtime: Runtime
    name: str
    is_gathered: bool


def _sums_in_place(runtime: Runtime) -> bool:
    return not runtime.recipe.is_cut and runtime.world.axis("loss").size > 1


def _reached(path: BackwardPath, runtimes: Sequence[Runtime], inputs: Sequence[Any]) -> _Reached | None:
    """One of the leaves that is a parameter, or of ``inputs`` where there are some."""
    # An edge of the graph may stand for a leaf.
    leaves = {id(getattr(getattr(x, "node", None), "variable", x)) for x in inputs or path.leaves}
    for runtime in runtimes:
        names = {id(param): name for name, param in runtime.parameters.items()}
        for copy, shard in runtime.engine.gathered():
            if id(copy) in leaves:
                return _Reached(runtime, names[id(shard)], True)
        if found := leaves & names.keys():
            return _Reached(runtime, min(names[key] for key in found), False)
    return None


def _penalty(reached: _Reached) -> UsageError:
    runtime = reached.runtime
    num = runtime.world.axis("loss").size
    in_step = runtime.accumulation is not None and runtime.accumulation.of == "step"
    return UsageError(
        "a backward in a window that comes to a parameter through nothing that the model has computed",
        why="only what comes through the model's outputs is rightly summed over the ranks: a penalty on weights, which is the same on each, would count "
        + (f"{num} times" if num > 1 else "once for each rank wherever ranks have parts of a gradient"),
        fix="a penalty on weights: sw.parameter_penalty(model, penalty) in the window, before or after its loop; in a TrainStep: weight_decay= of the "
        "optimizer. A loss of data: add it to the loss before its backward(), or compute it from what the model, or a part of it that is called, "
        "returns"
        + (". A loss of a TrainStep that runs such a backward must do so from the first step on" if in_step else ""),
        name=reached.name,
    )
