"""The sharded side of a comparison: the task trained with Shardwise, on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch.autograd import TorchDispatchMode
from shardwise._torch.dtensor import local_tensor
from shardwise.data.batch import MicroBatch
from shardwise.model.calling import call, run_on
from shardwise.parallel import recipe_of, runtime_of, shard
from shardwise.recipe import Recipe
from shardwise.step.model_loss import ModelLoss
from shardwise.step.step import TrainStep
from shardwise.techniques import Parallel
from shardwise.techniques.data.options import Sharding
from shardwise.techniques.technique import Example
from shardwise.verify.oracle import Task, make_optimizer
from shardwise.world import World, init


@dataclass
class RankStep:
    """The results of one step on one rank: loss, norm, and its own shards; of the last step also how many collectives it
    had, by name."""

    loss: float
    grad_norm: float
    num_tokens: float
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    collectives: dict[str, int] = field(default_factory=dict)


@dataclass
class RankRecord:
    """The results of one rank: the recipe, and a record per step."""

    rank: int
    recipe: str
    steps: list[RankStep]


class CountCollectives(TorchDispatchMode):
    """Within: counts collectives by name, so that a comparison cannot pass on a model that was never sharded."""

    supports_higher_order_operators = True  # recomputed compiled blocks consist of them

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise compiled blocks would run uncompiled within this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func._schema.name.endswith("wait_tensor"):
            name = func._schema.name.partition("::")[2].rstrip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def run_sharded(task: Task, layout: str, parallel: Any = None, example: Any = None) -> RankRecord:
    """Trains ``task`` on this rank of ``layout`` with the techniques of a ``Parallel``, whose changes to the module's
    structure ``task.build`` has made already. All ranks must call it.

    Every rank builds the module, ranks other than 0 with another seed, so that a rank that kept its own values is
    found.
    """
    # Inside a training run that is compared, the process group and its timeout are that run's.
    with init(layout, device="cpu", seed=task.seed, timeout_s=None if dist.is_initialized() else 60) as world:
        module = task.make(task.seed + world.rank)
        parallel = Parallel() if parallel is None else parallel
        runs = Example(task.run_once, otherwise=run_on(None)) if example is None else None
        model = shard(module, world, parallel, example=example, runs=runs, is_prepared=True)
        optim = make_optimizer(task, [p for p in model.parameters() if p.requires_grad])
        if task.loss is None:
            model.forward = _Lifted(task, model.forward)
        has_own_loss = isinstance(task.loss, ModelLoss)
        forward = task.loss.forward if has_own_loss and task.forward is call else task.forward  # type: ignore[union-attr]
        step = TrainStep(
            model,
            optim,
            loss=task.loss if task.loss is None or task.fused or has_own_loss else _Lifted(task, task.loss),
            count=task.count,
            forward=call if task.loss is None and task.forward is call else _Lifted(task, forward),
            max_grad_norm=task.max_grad_norm,
            norm_type=task.norm_type,
            clip_grad_value=task.clip_grad_value,
            fused=task.fused,
        )
        # Both sides run what the function returns, which is in eval mode if it draws random numbers in train mode.
        step.eval_mode.is_meant = True
        steps = [_run_step(step, optim, share_of(window, world)) for window in task.windows[:-1]]
        with CountCollectives() as counter:  # in the last step alone: each operation passes through Python here
            last = _run_step(step, optim, share_of(task.windows[-1], world))
        steps.append(replace(last, collectives=counter.counts))
        return RankRecord(world.rank, recipe_of(model).to_json(), steps)


def run_with_both_units(task: Task, layout: str, parallel: Parallel) -> list[RankRecord]:
    """:func:`run_sharded`; and if parameters are sharded by FSDP2, once more with every block a unit. All ranks must
    call it."""
    records = [run_sharded(task, layout, parallel)]
    if Recipe.from_json(records[0].recipe).is_cut:
        by_block = Parallel.of(**{**parallel.options(), "sharding": Sharding(min_unit_bytes=0)})
        try:
            records.append(run_sharded(task, layout, by_block))
        except Exception as error:
            error.add_note("this was the second comparison, with every block a unit; the first one ran to its end")
            raise
    return records


def share_of(window: Any, world: World) -> list[MicroBatch]:
    """This rank's micro-batches of a global window, round robin over the ranks and padded as the loader does."""
    axis = world.axis("dp")
    rounds = -(-len(window) // axis.size)
    mine = []
    for i in range(axis.rank, rounds * axis.size, axis.size):
        source: Mapping[str, Tensor] = window[i] if i < len(window) else (mine[0] if mine else window[0])
        mine.append(MicroBatch(source, index=i, padding=i >= len(window)))
    return mine


def _run_step(step: TrainStep, optim: torch.optim.Optimizer, window: list[MicroBatch]) -> RankStep:
    runtime = runtime_of(step.model)
    grads: dict[str, Tensor | None] = {}

    def keep(*_: Any) -> None:
        for name, param in runtime.parameters.items():
            grads[name] = None if param.grad is None else local_tensor(param.grad).detach().clone()

    handle = optim.register_step_pre_hook(keep)
    try:
        out = step(window)
    finally:
        handle.remove()
    return RankStep(
        loss=out.loss,
        grad_norm=out.grad_norm,
        num_tokens=out.num_tokens,
        grads=grads,
        params={name: local_tensor(p).detach().clone() for name, p in runtime.parameters.items()},
        buffers={name: b.clone() for name, b in runtime.module.named_buffers()},
    )


class _Lifted:
    """A function that runs lifted to the task's dtype (:meth:`Task.lifted`)."""

    def __init__(self, task: Task, function: Any):
        self.task, self.function = task, function
        self.__wrapped__ = function  # its signature shows whether it takes a state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.task.lifted():
            return self.function(*args, **kwargs)
