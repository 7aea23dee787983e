"""The proof line of a run: three of its steps in fp64, sharded and in one plain process, every gradient compared.

The two sides and the comparison are those of :mod:`shardwise.verify`; here they are given the run's own model, data,
layout, clipping and kind of optimizer, and run inside the ranks there are. The model is in eval mode: dropout would
draw different numbers on the two sides.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardwise.errors import VerifyError

if TYPE_CHECKING:
    from shardwise.config.schema import RunConfig
    from shardwise.world import World

__all__ = ["MOST_PARAMS", "NUM_STEPS", "prove"]

NUM_STEPS = 3
MOST_PARAMS = 5_000_000
"""Larger models are left out: each rank sends its share of every gradient and weight to rank 0, in fp64, per step."""


def prove(config: "RunConfig", world: "World") -> dict[str, Any]:
    """Compares three steps of the run with one plain process; every rank must call it.

    Returns:
        ``largest``, the largest relative difference of a gradient (None: not compared), ``name`` of that parameter, and
        ``text``, the line to show. Equal on every rank.

    Raises:
        VerifyError: something differs by more than rounding; on every rank.
    """
    from shardwise.train.parts import build_plain
    from shardwise.verify import GATES, compare, run_oracle, run_sharded

    task = _task(config, world)
    count = sum(p.numel() for p in build_plain(config).parameters())
    if count > MOST_PARAMS:
        text = f"left out: {count:,} parameters are too many to gather at every step (at most {MOST_PARAMS:,})"
        return {"largest": None, "name": None, "text": text}
    given = config.parallel
    options = {"sharding": given.sharding, "ddp": given.ddp, "remat": given.remat, "compile": given.compile}
    records = world.gather(run_sharded(task, str(world.layout), options))
    outcome: Any = None
    if world.is_main:
        try:
            outcome = compare(task, run_oracle(task), records, gate=GATES[task.dtype]).worst["grad"]
        except VerifyError as error:
            outcome = error  # told on every rank, so that none waits for the others
    outcome = world.broadcast(outcome)
    if isinstance(outcome, VerifyError):
        raise outcome
    text = (
        f"largest gradient difference {outcome.err:.1e} (relative, in {outcome.name}): {NUM_STEPS} steps in fp64, layout "
        f"{world.layout} against one plain process, {len(records[0].steps[0].grads)} gradients each"
    )
    return {"largest": outcome.err, "name": outcome.name, "text": text}


def _task(config: "RunConfig", world: "World") -> Any:
    """What both sides run: the first windows of the run, with the micro-batches of all ranks."""
    import torch

    from shardwise.train.data import Loader
    from shardwise.train.loss import call, count_of, next_token_loss
    from shardwise.train.parts import build_plain, open_data, vocab_of
    from shardwise.verify import Task

    data = config.data
    corpus = open_data(data, vocab=vocab_of(config))
    alone = SimpleNamespace(
        seed=world.seed, device=torch.device("cpu"), axis=lambda name: SimpleNamespace(rank=0, size=1)
    )
    loader = Loader(corpus.train, alone, global_batch=data.global_batch, micro_batch=data.micro_batch)
    windows: list[Any] = []
    while len(windows) < NUM_STEPS:
        for window in loader:
            windows.append(window)
            if len(windows) == NUM_STEPS:
                break
    return Task(
        build=lambda: build_plain(config).eval(),
        windows=windows,
        loss=next_token_loss,
        count=count_of(next_token_loss, None),
        forward=call,
        optimizer=config.optim.name,
        max_grad_norm=config.train.max_grad_norm,
    )
