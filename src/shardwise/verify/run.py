"""``sw.verify``: trains the user's model sharded and in one process, and compares the numbers."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise.config.keywords import public_call
from shardwise.config.suggest import did_you_mean
from shardwise.config.user_script import refuse_while_imported
from shardwise.errors import ConfigError, UsageError, VerifyError
from shardwise.launch import launch_local
from shardwise.launch.environment import is_rank
from shardwise.launch.script import pickled
from shardwise.layout import Layout, layout_of, num_ranks_of
from shardwise.model.calling import call
from shardwise.parallel import parallelize
from shardwise.step.loss import count_of, next_token_loss, with_count
from shardwise.techniques import AXES_IN_USE, Parallel
from shardwise.techniques.fold import Prepared, own_draws
from shardwise.verify.compare import Report, compare, counted
from shardwise.verify.draws import drawing_modules, places_of
from shardwise.verify.oracle import Task, cast_batches, run_oracle
from shardwise.verify.sharded import RankRecord, run_sharded

GATES = {torch.float64: 1e-12, torch.float32: 1e-5}


@public_call()
def verify(
    build: Callable[[], nn.Module],
    layout: str,
    *,
    batches: Sequence[Sequence[Mapping[str, Tensor]]],
    loss: Any = next_token_loss,
    count: Any = None,
    forward: Any = call,
    optimizer: Any = "sgd",
    max_grad_norm: float | Literal["half"] | None = "half",
    norm_type: Any = 2.0,
    clip_grad_value: float | None = None,
    fused: bool | str = False,
    dtype: torch.dtype = torch.float64,
    gate: float | None = None,
    num_ranks: int | None = None,
    run: Callable[..., list[RankRecord]] | None = None,
    say: Callable[[str], object] | None = None,
    **options: Any,
) -> Report:
    """Checks that sharded training gives the same numbers as one process: trains a few steps both ways on local CPU
    processes, and compares loss, every gradient, the gradient norm and every updated parameter. Call it from an
    ordinary process; it starts the ranks itself.

    Args:
        build: builds the module; a top-level function, called on every rank. It must be deterministic for a given seed.
        layout: such as ``"dp_shard=2"``; a ``-1`` needs ``num_ranks``.
        batches: per step, the micro-batches of all ranks together, in global order. Give them unequal numbers of valid
            tokens: equal ones hide the most common faults; and let one window have a micro-batch too few for the ranks, as
            the last one of an epoch may.
        loss, count, forward: as :class:`~shardwise.step.step.TrainStep` takes them; top-level functions.
        optimizer: "sgd" (momentum 0.9), "adamw", or a top-level function of the parameters.
        max_grad_norm, norm_type, clip_grad_value: as :class:`~shardwise.step.step.TrainStep` takes them. ``"half"``: half of the
            gradient norm of the first window, so that gradients are clipped.
        fused: as in :class:`~shardwise.step.step.TrainStep`, on the ranks; the one process holds its logits.
        dtype: both sides compute in it, and floating tensors of batches are cast to it; float64 shows faults that
            rounding would hide.
        gate: the largest error allowed; default 1e-12 in float64, 1e-5 in float32.
        num_ranks: needed if the layout has ``-1``.
        run: ``run(function, num_ranks, *args)`` -> results by rank, such as a pool's; default: new processes.
        say: called with a text before each stage.
        options: keyword arguments of ``parallelize``: ``sharding``, ``ddp`` and so on. ``transforms`` change the module
            of both sides.

    Raises:
        UsageError: parallelize does not have the option; a function cannot be sent to another process (a lambda, a function
            inside a function, one of a notebook); it is called at the top level of a script, which ranks run for its functions.
        VerifyError: with the first tensor that differs; and with the modules that draw random numbers, if the ranks draw other
            ones than the one process.

    Example:
        >>> report = verify(build, "dp_shard=2", batches=[[batch, other]])  # doctest: +SKIP
    """
    _refuse_windows(batches)
    _refuse_unknown(options)
    if run is None:
        _refuse_on_a_rank()
        refuse_while_imported("verify")
        _refuse_unsendable(build=build, loss=loss, count=count, forward=forward, optimizer=optimizer, **options)
    grid = _layout(layout, num_ranks)
    example, parallel = options.pop("example", None), Parallel.of(**options)
    task = Task(
        build=Prepared(build, parallel),
        windows=cast_batches(batches, dtype),
        loss=with_count(loss, count),
        count=count_of(loss, count) if loss is not None or count is not None else None,
        forward=forward,
        optimizer=optimizer,
        max_grad_norm=None if max_grad_norm == "half" else max_grad_norm,
        norm_type=norm_type,
        clip_grad_value=clip_grad_value,
        fused=fused,
        dtype=dtype,
    )
    say = say or (lambda text: None)
    reference = Reference(task, say, own_draws(parallel, grid), clips=max_grad_norm == "half")
    say(f"sharded: the same steps on {counted(grid.size, 'rank')} (each loads torch, a few seconds)")
    ranks = (run or in_fresh_processes)(run_sharded, grid.size, reference.task, layout, parallel, example)
    return reference.compared(ranks, gate)


class Reference:
    """The numbers of a task in one plain process, computed when this is made.

    Args:
        task: that the ranks are to run too; :attr:`task` is the one.
        say: called with a text before each stage.
        own_draws: why the ranks draw other random numbers; "" if they draw the same.
        clips: clip gradients to half of the norm that the first window has.
    """

    def __init__(self, task: Task, say: Callable[[str], object], own_draws: str, *, clips: bool):
        self._say, self._own_draws = say, own_draws
        say(f"one plain process: {counted(len(task.windows), 'step')}")
        if clips:
            norm = run_oracle(replace(task, windows=task.windows[:1]))[0].grad_norm
            task = replace(task, max_grad_norm=norm / 2 if 0 < norm < math.inf else None)
        self.task = task
        self._oracle = run_oracle(task)
        say("one plain process once more, its sums in another order")
        self._noise = run_oracle(task, otherwise=True)

    def compared(self, ranks: list[RankRecord], gate: float | None = None) -> Report:
        """Compares what the ranks have computed. ``gate``: the largest error allowed; None: that of the dtype.

        Raises:
            VerifyError: with the first tensor that differs, as :func:`verify` raises it.
        """
        self._say("comparing every tensor")
        gate = GATES[self.task.dtype] if gate is None else gate
        try:
            return compare(self.task, self._oracle, ranks, noise=self._noise, gate=gate)
        except VerifyError as error:
            raise self._explained(error) from None

    def _explained(self, error: VerifyError) -> VerifyError:
        """``error``, extended with the cause if the module draws random numbers that the ranks do not draw."""
        exact = torch.finfo(self.task.dtype).eps ** 0.5
        is_seeded = math.isclose(self._oracle[0].loss, self._noise[0].loss, rel_tol=exact)
        names = drawing_modules(self.task) if self._own_draws or not is_seeded else []
        if not names:
            return error
        why = self._own_draws or "of seeds of its own"
        return VerifyError(
            error.given,
            why=f"random numbers are drawn in {places_of(names)}: other ones in the one process than on the ranks ({why}), so nothing can be equal",
            fix="compare without them: dropout of 0, or a function that returns module.eval(); this says nothing of the layout",
            name=error.name,
        )


def _refuse_windows(batches: Any) -> None:
    if not batches or not all(batches):
        raise ConfigError("verify without batches", why="there is nothing to compare", fix="give at least one window")
    if any(isinstance(window, Mapping) for window in batches):
        raise ConfigError(
            "verify(batches=...) with micro-batches in place of windows",
            why="a window is the list of micro-batches of one optimizer step",
            fix="give a list of such lists: batches=[[micro_batch, micro_batch], ...]",
        )


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    known = [name for name, p in inspect.signature(parallelize).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise UsageError(
                f"verify({name}=...)",
                why="neither verify nor parallelize has such an option",
                fix=did_you_mean(name, known, what="options of parallelize"),
            )


def _refuse_on_a_rank() -> None:
    if is_rank():
        raise UsageError(
            "verify in a process that is a rank (RANK and WORLD_SIZE are set, as by torchrun)",
            why="it starts the ranks that it compares, and each rank would start its own",
            fix="start the script by python script.py; in a rank of your own, pass run=, which uses ranks that are there",
        )


def _refuse_unsendable(**given: Any) -> None:
    """Refuses what no rank could be sent, before the one process computes."""
    for name, value in given.items():
        pickled((value,), f"verify({name}={getattr(value, '__name__', type(value).__name__)})")


def _layout(layout: str, given: int | None) -> Layout:
    """``layout`` with the number of ranks to start for it.

    Raises:
        ConfigError: it has a ``-1`` and no number of ranks was given, or it does not fit that number.
    """
    size = num_ranks_of(layout) if given is None else given
    if size is None:
        raise ConfigError(
            f"verify(layout={layout!r})", why="-1 and node need a number of ranks", fix="pass num_ranks=2"
        )
    return layout_of(layout, size, size, AXES_IN_USE)  # all ranks are on this node


def in_fresh_processes(function: Any, num_ranks: int, *args: Any) -> list[Any]:
    """Runs ``function(*args)`` on new local ranks and returns their results. They are not forked from one process, so
    that a model that depends on the order of a set differs between ranks, as on a cluster."""
    return launch_local(f"{function.__module__}:{function.__qualname__}", nproc=num_ranks, args=args)
