"""The proof line of a run: three of its steps in fp64, sharded and in one plain process, every gradient compared.

The two sides and the comparison are those of :mod:`shardwise.verify`, with the run's own model, data, layout and clipping,
inside the run's ranks. The optimizer is of the run's kind, with settings of a proof and all parameters in one group; AdamW
stands in for Muon. The model is in eval mode: dropout would draw different numbers on the two sides.

It runs on the CPU, whatever the run's device, and takes no longer than the run did, or a quarter of a minute; the line
says what it leaves out for that, and what it replaces.
"""

import functools
import math
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardwise.errors import VerifyError

if TYPE_CHECKING:
    from shardwise.run.config import RunConfig
    from shardwise.world import World

NUM_STEPS = 3
MOST_PARAMS = 5_000_000
"""Larger models are not compared: each rank sends its part of every gradient and weight to rank 0, in fp64, per
step."""

_LEAST_S = 15.0
_FLOPS_PER_S = 5e9  # of a CPU in fp64: a low guess, used only to choose the number of micro-batches
_SIDES = 2
_OF_ADAMW = 10
# AdamW divides a gradient by its own size plus 1e-8 (Adafactor likewise): rounding of tiny ones moves the weights of the next step.


def prove(config: "RunConfig", world: "World", *, seconds: float = math.inf) -> dict[str, Any]:
    """Compares three steps of the run with one plain process; every rank must call it.

    Args:
        config: the configuration of the run.
        world: its ranks.
        seconds: how long the run took, the same on every rank: the comparison leaves out steps and micro-batches to
            take no longer.

    Returns:
        ``largest``, the largest relative difference of a gradient (None: not compared), ``name`` of that parameter, and
        ``text``, the line to show. Equal on every rank.

    Raises:
        VerifyError: on every rank; something differs by more than rounding.
    """
    from shardwise.model import read_anatomy
    from shardwise.recipe import DTYPE_BYTES
    from shardwise.run.attention import without_kernels
    from shardwise.run.build import build_plain
    from shardwise.techniques.fold import options_of_proof
    from shardwise.techniques.precision.options import precision_of

    if not config.train.prove:
        return {"largest": None, "name": None, "text": "left out: train.prove=false"}
    config, replaced = without_kernels(config)
    plain = build_plain(config, world)
    count = read_anatomy(plain).numbers
    replaced += _optimizer_replaced(config, plain)
    del plain
    if count > MOST_PARAMS:
        text = f"left out: {count:,} parameters are too many to gather at every step (at most {MOST_PARAMS:,})"
        return {"largest": None, "name": None, "text": text}
    budget = max(seconds, _LEAST_S)
    most, left_out = _micro_batches(config, world, count, budget)
    compute = precision_of(config.parallel.precision).compute or "float32"
    parallel, without = options_of_proof(config.parallel, world.device.type, 8 // DTYPE_BYTES[compute])
    num_steps, start = 1, time.monotonic()
    found = _compared(config, world, parallel, num_steps, most)
    # Equal on every rank: rank 0, which runs both sides, decides whether there is time for all steps.
    if world.broadcast((time.monotonic() - start) * (1 + NUM_STEPS) <= budget):
        num_steps = NUM_STEPS
        found = _compared(config, world, parallel, num_steps, most)
    else:
        left_out.append(f"{NUM_STEPS - 1} more steps, for which the run was too short")
    left_out += without + replaced
    outcome, num_gradients = found
    text = (
        f"largest gradient difference {outcome.err:.1e} (relative, in {outcome.name}): {num_steps} "
        f"step{'s' if num_steps > 1 else ''} in fp64, layout {world.layout} against one plain process, {num_gradients} gradients "
        f"each{'; left out: ' if left_out else ''}{', '.join(left_out)}"
    )
    return {"largest": outcome.err, "name": outcome.name, "text": text}


def _micro_batches(config: "RunConfig", world: "World", num_params: int, budget_s: float) -> tuple[int, list[str]]:
    """The number of micro-batches of each step that there is time for, and texts that say what is left out."""
    data = config.data
    whole = -(-data.global_batch // data.samples_at_least)  # with a budget of tokens, at most so many
    flops = 6.0 * num_params * data.samples_at_least * data.seq_len * _SIDES * NUM_STEPS
    most = max(world.axis("dp").size, int(min(float(whole), budget_s * _FLOPS_PER_S / flops)))
    most = min(most, whole)
    return most, [f"{whole - most} of the {whole} micro-batches of a step"] if most < whole else []


def _compared(config: "RunConfig", world: "World", parallel: Any, num_steps: int, most: int) -> tuple[Any, int]:
    """The largest difference of a gradient in ``num_steps`` steps, and the number of gradients; on every rank."""
    from shardwise.verify import GATES, compare, run_oracle, run_sharded

    task = _task(config, world, num_steps, most)
    records = world.gather(run_sharded(task, str(world.layout), parallel))
    outcome: Any = None
    if world.is_main:
        gate = GATES[task.dtype] * (1 if (config.optim.build, config.optim.name) == (None, "sgd") else _OF_ADAMW)
        try:
            outcome = compare(task, run_oracle(task), records, gate=gate).worst["grad"]
        except VerifyError as error:
            outcome = error  # sent to every rank, so that none waits for the others
    outcome = world.broadcast(outcome)
    if isinstance(outcome, VerifyError):
        raise outcome
    return outcome, len(records[0].steps[0].grads)


def _optimizer(config: "RunConfig") -> Any:
    """The optimizer of both sides: of the kind of the run's, in one group and with the settings of a proof."""
    from shardwise.config.target import load_target

    optim = config.optim
    if optim.name == "muon":
        return "adamw"  # Muon computes in bfloat16, where the last bit of a sum shows: two right runs differ
    if optim.build is None:
        return optim.name
    given = {} if optim.lr is None else {"lr": optim.lr}
    return functools.partial(load_target(optim.build, what="optim.build"), **given, **optim.args)


def _optimizer_replaced(config: "RunConfig", model: Any) -> list[str]:
    """Texts about what the run's optimizer does and that of :func:`_optimizer` does not."""
    from shardwise.step.parameter_groups import has_groups

    optim = config.optim
    given = {
        "muon, in whose place adamw ran": optim.build is None and optim.name == "muon",
        "parameter groups (optim.groups)": bool(optim.groups),
        "parameter groups of the model": has_groups(model),
        f"optim.decay_on={optim.decay_on}": optim.decay_on != "all",
    }
    return [text for text, is_replaced in given.items() if is_replaced]


def _task(config: "RunConfig", world: "World", num_steps: int, most: int) -> Any:
    """The task that both sides run: the first windows of the run, each with at most ``most`` micro-batches of all
    ranks."""
    import torch

    from shardwise.data.loader import Loader
    from shardwise.model.calling import call
    from shardwise.run.build import build_plain, functions_of
    from shardwise.run.datasets import open_data, vocab_of
    from shardwise.run.vocabulary import vocabulary_of
    from shardwise.step.loss import count_of, next_token_loss, with_count
    from shardwise.techniques.fold import with_values_of_proof
    from shardwise.verify import Task
    from shardwise.verify.oracle import cast_batches

    data, functions = config.data, functions_of(config)
    loss = with_count(functions.get("loss", next_token_loss), functions.get("count"))
    corpus = open_data(data, vocab=vocab_of(config), tokenizer=vocabulary_of(config).tokenizer)
    alone = SimpleNamespace(
        seed=world.seed, device=torch.device("cpu"), axis=lambda name: SimpleNamespace(rank=0, size=1)
    )
    loader = Loader(
        corpus.train,
        alone,
        global_batch=data.global_batch,
        micro_batch=data.micro_batch,
        micro_tokens=data.micro_tokens,
        collate=corpus.collate,
    )
    windows: list[Any] = []
    while len(windows) < num_steps:
        for window in loader:
            windows.append(window[:most])
            if len(windows) == num_steps:
                break
    return Task(
        build=lambda: with_values_of_proof(build_plain(config, world)).eval(),
        windows=cast_batches(windows, torch.float64),
        loss=loss,
        count=count_of(loss, functions.get("count")),
        forward=functions.get("forward", call),
        optimizer=_optimizer(config),
        max_grad_norm=config.train.max_grad_norm,
        norm_type=config.train.norm_type,
        clip_grad_value=config.train.clip_grad_value,
        fused=config.train.fused,
    )
