"""How a model is run on a batch: the one call that training, evaluation and the check of the loss share; and runs that leave
nothing behind."""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.data.batch import MicroBatch
from shardwise.errors import ConfigError, RankError, UsageError, first_line
from shardwise.launch.failure import is_lost_peer
from shardwise.model.calling import line_of
from shardwise.model.function_state import FunctionState
from shardwise.model.mode import eval_mode
from shardwise.model.pytrees import map_leaves
from shardwise.parallel import Runtime
from shardwise.parallel.runtime import runtimes_in_use
from shardwise.step.loss import Batch, Loss, as_sums
from shardwise.step.mode import without_draws
from shardwise.step.step_state import StepState
from shardwise.world.rng import derive_seed, forked_streams

Forward = Callable[[nn.Module, Batch, StepState], Any]
"""How the model is called: ``forward(model, batch, state)`` -> output, as :func:`~shardwise.step.loss.forward_of` makes it."""


def output_on(runtime: Runtime, forward: Forward, batch: Batch, state: StepState) -> Any:
    """The model's output for a batch, of which it gets this rank's part. What is to be done with the batch of every run, whatever the
    run is for, belongs here."""
    runtime.micro_batch = batch
    try:
        return forward(runtime.module, runtime.for_forward(batch), state)
    finally:
        runtime.micro_batch = None


def sums_on(
    runtime: Runtime, forward: Forward, loss: Loss | None, batch: Batch, state: StepState
) -> tuple[Any, dict[str, Tensor]]:
    """:func:`output_on`, and the sums of the loss: those that the forward has returned where ``loss`` is None."""
    output = output_on(runtime, forward, batch, state)
    mine = batch if loss is None else runtime.for_loss(batch)
    sums = as_sums(output if loss is None else loss(output, mine))
    if loss is not None and runtime.sequence is not None:
        _check_positions(runtime, loss, output, batch, mine, sums)
    share = runtime.share_of_sums
    return output, sums if share == 1 else {name: value * share for name, value in sums.items()}


def _check_positions(
    runtime: Runtime, loss: Loss, output: Any, batch: Batch, mine: Batch, sums: Mapping[str, Tensor]
) -> None:
    """Raises ConfigError, once for each loss and the entries that are cut for it, if it is no sum over positions, of which this rank has some: if what it gives for a half of
    them and for the other half does not add up."""
    memory = runtime.memory(_CheckedLosses)
    cut = {key for key, value in mine.items() if value is not batch.get(key)}
    if any(each is loss and cut <= entries for each, entries in memory.losses):
        return
    sequence = runtime.sequence
    assert sequence is not None
    halves = sequence.halves(output, mine, cut)
    if halves is None:
        return
    try:
        with without_a_trace(runtime, loss):
            parts, is_noisy = drawn(runtime, lambda: [as_sums(loss(*half)) for half in halves])
    except UsageError:  # it joins the positions itself
        memory.losses.append((loss, cut))
        return
    except Exception as error:
        raise ConfigError(
            f"a loss that fails on a part of the positions that it is given, under {runtime.recipe.grid}",
            why=f"{type(error).__name__}: {first_line(error)}{line_of(error)}: it reads something else than outputs of the model and the micro-batch, such "
            "as what the model has kept of its positions, or what forward= has made of its outputs",
            fix="let the model return what the loss reads, forward= return what the model does (a tuple of several forwards, as they are), and the loss be a "
            "sum over positions",
        ) from error
    for name, value in sums.items():
        one, other, both = (float(each.detach()) for each in (parts[0][name], parts[1][name], value))
        allowed = {8: 1e-9, 4: 1e-4}.get(value.element_size(), 2e-2) * max(abs(one), abs(other), abs(both))
        if not is_noisy and abs(one + other - both) > allowed:
            raise ConfigError(
                f"a loss that is no sum over positions, under {runtime.recipe.grid}",
                why=f"of a half of this rank's positions its entry {name!r} is {one:.6g}, of the other half {other:.6g}, and of both {both:.6g}: what "
                "compares positions with each other (a shift of labels, a mean over a sample, a pooled output) is another on parts of a sample",
                fix="shift labels in the data (sw.shift_labels), and return sums over positions; or join the output first, and count it once: "
                'output = sw.join_sequence(model, output), with the loss divided by world.axis("cp").size',
                name=None,
            )
    memory.losses.append((loss, cut))


class _CheckedLosses:
    """The losses of which it is known that they are sums over positions, each with the entries of micro-batches that were cut for it."""

    def __init__(self) -> None:
        self.losses: list[tuple[Any, set[str]]] = []


class TrialRuns:
    """What runs of a model gave, and in which mode; whether they drew random numbers; and what kept one from running."""

    def __init__(self, mode: Any):
        self.mode, self.values, self.is_noisy = mode, list[Any](), False
        self.error: Exception | None = None

    def add(self, runtime: Runtime, run: Callable[[], Any]) -> None:
        try:
            value, has_drawn = drawn(runtime, run, len(self.values))
            self.values.append(value)
            self.is_noisy |= has_drawn
        except Exception as error:  # such as of a model that takes one number of samples only
            if isinstance(error, RankError) or is_lost_peer(error):
                raise
            self.error = error


def run_alone(
    runtime: Runtime,
    forward: Forward,
    batches: Sequence[Batch],
    read: Callable[[int, Any], Any],
    state: StepState,
    functions: Sequence[Any],
    *modes: Any,
) -> TrialRuns:
    """What ``read(i, output)`` returns for a run on each of ``batches``, outside of windows: without a trace, each from the same state,
    with losses computed in float32 or wider. Where code of the model's own draws random numbers in train mode, or fails there,
    in eval mode. All ranks must call it, unless :attr:`Runtime.cannot_run_alone` is set.

    Args:
        functions: what they keep is put back.
        modes: context managers of the model, of which the last one is taken as it is.
    """
    runs = TrialRuns(eval_mode)
    modes = modes or ((without_draws, eval_mode) if state.is_training else (eval_mode,))
    for mode in modes:
        runs, is_last = TrialRuns(mode), mode is modes[-1]
        for i, batch in enumerate(batches):
            untraced, eager = without_a_trace(runtime, *functions), torch.compiler.set_stance("force_eager")
            with untraced, eager, mode(runtime.module), _LossesInFloat32():
                runs.add(
                    runtime, lambda i=i, batch=batch: read(i, output_on(runtime, forward, MicroBatch(batch), state))
                )
            # A rank that cannot run it, as its micro-batch has another size, and the others go on together.
            failed = {"failed": float(runs.error is not None or (runs.is_noisy and not is_last))}
            if float(runtime.world.agreement.sum(failed, "runs of the model alone")["failed"]):
                runs.error = runs.error or ValueError("the model does not run on it on another rank")
                runtime.engine.abandon()
                break
        else:
            break
    return runs


@contextlib.contextmanager
def without_a_trace(runtime: Runtime, *functions: Any) -> Iterator[FunctionState]:
    """Within: no gradients, no warnings (those of torch about shapes would be about copies). Buffers of the models, the Python state beside them, and what ``functions`` keep, are restored afterwards; yields the latter."""
    known = {id(module) for each in runtimes_in_use() for _, module in each.modules}
    state, kept = runtime.module_state(), FunctionState(functions, known)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield kept
    finally:
        state.restore()
        kept.restore()


def drawn(runtime: Runtime, run: Callable[[], Any], number: int = 0) -> tuple[Any, bool]:
    """What ``run()`` returns with random numbers of its own stream, of this step and ``number``; and whether it has drawn any."""
    world, generators = runtime.world, runtime.generators
    seed = derive_seed(world.seed, "trying the loss", runtime.step, number)
    with forked_streams(seed, world.device, generators):
        untouched = _next_numbers(world.device, generators)
    with forked_streams(seed, world.device, generators):
        return run(), _next_numbers(world.device, generators) != untouched


def _next_numbers(device: torch.device, generators: Mapping[str, Any]) -> list[float]:
    def of(generator: Any) -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator, device=generator.device))
        return float(generator.random())

    own = [float(torch.rand((), device=each)) for each in ("cpu", device)]
    return [*own, random.random(), np.random.random(), *map(of, generators.values())]


class _LossesInFloat32(TorchFunctionMode):
    """Within: losses of half precision are computed in float32, where a mean shows next to its rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _LOSSES:
            args, kwargs = map_leaves(_widened, (args, kwargs))
        return func(*args, **kwargs)


_LOSSES = frozenset(name for name in dir(F) if "loss" in name or "cross_entropy" in name) | {"log_softmax", "logsumexp"}


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value
