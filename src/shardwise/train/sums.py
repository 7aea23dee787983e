"""Whether a loss returns sums: tried on a micro-batch put behind itself, a sum doubles and a mean stays."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, RankError, ShardwiseError
from shardwise.parallel import Runtime
from shardwise.parallel.trees import map_leaves
from shardwise.train.batch import MicroBatch
from shardwise.train.loss import Batch, Loss, as_sums

__all__ = ["SumCheck", "agreed_problem"]

_NEAR = {"loss": 0.1}  # how near to 1 the ratio of a mean is: a task's forward may draw other random numbers for it
_NEAR_METRIC = 0.01  # closer: sums of either sign may come near to each other by chance


class SumCheck:
    """Tells for each entry of a loss, once, whether it is a sum; all ranks take part alike.

    An entry that is 0 tells nothing, so it is tried until it was told on some rank: ``"loss"`` in every window, another
    entry in the first window and then ever more rarely, since it may stay 0 for ever. A window in which something is to
    be told runs the loss a second time in each of its micro-batches, paddings too, whatever this rank has found
    meanwhile: a loss may hold a collective (a sharded teacher), and then every rank must run it equally often.

    Attributes:
        is_due: whether this window tries the loss; equal on every rank.
    """

    def __init__(self) -> None:
        self.settled: set[str] = set()  # entries told on some rank: equal on every rank
        self.names: set[str] = set()  # entries the loss was seen to return
        self.found: set[str] = set()  # entries told on this rank in this window
        self.problem: ConfigError | None = None  # the first that this rank found in this window
        self.is_due = True

    def begin(self, num_steps: int) -> None:
        """A window starts (in an evaluation, a batch), after ``num_steps`` others."""
        self.found, self.problem = set(), None
        is_metric_due = num_steps & (num_steps - 1) == 0  # 0, 1, 2, 4, 8, ...
        self.is_due = "loss" not in self.settled or (is_metric_due and not self.names <= self.settled)

    def entry(self, names: list[str]) -> Tensor:
        """For the exchange: what this rank has told of ``names``."""
        return torch.tensor([float(name in self.found) for name in names])

    def agree(self, names: list[str], summed: Tensor) -> None:
        """Takes what all ranks have told of ``names``."""
        self.names = set(names)
        self.settled |= {name for name, told in zip(names, summed.tolist(), strict=True) if told}

    def try_loss(self, loss: Loss, output: Any, batch: Batch, once: Mapping[str, Tensor], *, counts: bool) -> None:
        """Runs ``loss`` on a micro-batch put behind itself, if this window is due.

        Args:
            loss: the loss function.
            output: the model's output for ``batch``; tensors in it that have the batch's first dim are doubled with it.
            batch: the micro-batch.
            once: what the loss returned for it.
            counts: False for a padding: it runs as on the other ranks, and tells nothing.
        """
        self.names |= once.keys()
        size = _batch_size(batch)
        if size is None or not self.is_due:
            return
        with torch.no_grad():
            try:
                twice = as_sums(loss(_doubled(output, size), _doubled(dict(batch), size)))
            except Exception as error:  # an output that can be used once, a distribution of a fixed size
                if not once.keys() <= self.found:
                    _warn_unchecked(error)
                self.found |= once.keys()
                return
        if counts:
            self._compare(once, twice)

    def try_task(self, model: nn.Module, batch: Batch) -> None:
        """The same for a module that returns its loss: its forward runs on the micro-batch, and on it twice over. All
        ranks must call it alike."""
        size = _batch_size(batch)
        if size is not None:
            once, twice = (as_sums(model(b)) for b in (batch, MicroBatch(_doubled(dict(batch), size))))
            self._compare(once, twice)

    def _compare(self, once: Mapping[str, Tensor], twice: Mapping[str, Tensor]) -> None:
        for name in (name for name in once if name in twice and name not in self.settled):
            a, b = float(once[name].detach()), float(twice[name])
            if a == 0.0 or a != a:
                continue
            self.found.add(name)
            if abs(b / a - 1) < _NEAR.get(name, _NEAR_METRIC):
                self.problem = self.problem or _mean(name, a, b)


def agreed_problem(runtime: Runtime, problem: ShardwiseError | None) -> ShardwiseError:
    """The fault of the loss to raise on this rank: its own, else what the ranks that have one found. All ranks call it."""
    found = runtime.world.agreement.gather(problem, "naming a fault of the loss")
    ranks = tuple(rank for rank, error in enumerate(found) if error is not None)
    error = problem or found[ranks[0]]
    if problem is not None or isinstance(error, ConfigError):  # a mean is one on every rank, whoever could tell
        return error
    return RankError(
        f"rank {', '.join(map(str, ranks))} could not run backward",
        why=error.given,
        fix="see the error of that rank",
        ranks=ranks,
    )


def _mean(name: str, once: float, twice: float) -> ConfigError:
    if name == "loss":
        return ConfigError(
            "a loss that takes a mean",
            why=f"the micro-batch twice over gives {twice:.6g}, once {once:.6g}: a sum would double. Means of "
            "unequal micro-batches and ranks cannot be combined into the right gradient",
            fix='use reduction="sum"; Shardwise divides by the tokens of all ranks',
        )
    return ConfigError(
        f"a loss whose {name!r} is a mean, or another value that is no sum",
        why=f"the micro-batch twice over gives {twice:.6g}, once {once:.6g}: a sum would double. Every entry is added up "
        "over micro-batches and ranks and divided by the tokens of all, so this one would be reported wrong",
        fix=f"return the sum: {{{name!r}: (...).sum()}} instead of .mean(); leave out what is no sum over tokens",
    )


def _doubled(value: Any, size: int) -> Any:
    """``value`` with every tensor of first dim ``size`` in it put behind itself, in mappings, lists and dataclasses too."""
    return map_leaves(
        lambda x: torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() and x.shape[0] == size else x, value
    )


def _batch_size(batch: Batch) -> int | None:
    """Size of the first dim of a micro-batch's first tensor; None where there is none."""
    first = next(iter(batch.values()), None)
    return first.shape[0] if isinstance(first, Tensor) and first.dim() else None


def _warn_unchecked(error: Exception) -> None:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    warnings.warn(
        f"the loss could not be tried on a micro-batch twice over ({text}), so nothing tells whether it is a sum: a mean "
        'would train wrong (use reduction="sum")',
        stacklevel=2,
    )
