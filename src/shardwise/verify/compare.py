"""Compares the ranks' shards with the full tensors of one process (the oracle), and names the first that differs.

``err(p) = max|a - b| / max(max|b|, 1e-6 * M)`` with M the largest ``|b|`` over all tensors of its kind: gradients that
are zero in exact arithmetic (a key's bias) would otherwise count as different. Shards are assembled only by the
recipe's ``extents``, and copies on several ranks must be equal to the last bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.errors import VerifyError
from shardwise.recipe import Buffer, Recipe, extents, owners
from shardwise.recipe.records import STATISTICS
from shardwise.verify.oracle import StepRecord, Task
from shardwise.verify.sharded import RankRecord, RankStep

_FLOOR = 1e-6  # share of the largest tensor; below it a relative error means nothing
# In units of rounding: more is not rounding, but a gradient that does not follow what the loss is divided by.
_MOST_NOISE = 1e9


@dataclass(frozen=True)
class Difference:
    """A difference between the two runs: its kind, error, tensor or rank, step (from 1), and the error allowed there."""

    kind: str
    err: float
    name: str
    step: int
    allowed: float = 0.0

    @property
    def place(self) -> str:
        """Where it is, as text: "in embed.weight, step 2", or "on rank 0, step 1"."""
        return f"{'on' if self.name.startswith('rank ') else 'in'} {self.name}, step {self.step}"


@dataclass(frozen=True)
class Report:
    """The result of a comparison. ``worst``: the largest difference of each kind: loss, grad, grad_norm, param,
    buffer. ``left_out``: what it says nothing of."""

    layout: str
    engine: str
    num_ranks: int
    num_steps: int
    gate: float
    worst: dict[str, Difference]
    collectives: dict[str, int]  # counts by name, of rank 0 in the last step
    num_units: int
    bytes_per_rank: tuple[int, ...]
    num_statistics: int = 0  # buffers that are compared between the ranks only
    looked_at: tuple[str, ...] = ()  # of what training may do and these steps need not, as texts
    left_out: tuple[str, ...] = ()

    @property
    def err(self) -> float:
        """The largest error over all kinds."""
        return max(difference.err for difference in self.worst.values())

    def __str__(self) -> str:
        worst = max(self.worst.values(), key=lambda difference: difference.err)
        at = f" ({worst.kind} {worst.place})" if worst.err else ""
        return (
            f"equal: {counted(self.num_ranks, 'rank')}, layout {self.layout}, {self.engine}, {counted(self.num_units, 'unit')}, "
            f"{counted(self.num_steps, 'step')}\n"
            f"       largest difference {worst.err:.1e}{at}, allowed {max(self.gate, worst.allowed):.0e}{self._of_statistics()}"
            f"{_listed('compared too', self.looked_at)}{_listed('NOT compared', self.left_out)}"
        )

    def _of_statistics(self) -> str:
        if not self.num_statistics:
            return ""
        return (
            f"\n       {counted(self.num_statistics, 'running statistic')} of norms compared between the ranks only: one process updates them "
            "in every micro-batch, a rank in its own, so evaluation and saved weights depend on the layout"
        )


def _listed(what: str, texts: Sequence[str]) -> str:
    return f"\n       {what}: {'; '.join(texts)}" if texts else ""


def counted(number: int, noun: str) -> str:
    """A count as text: ``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def compare(
    task: Task,
    oracle: Sequence[StepRecord],
    ranks: Sequence[RankRecord],
    *,
    gate: float,
    noise: Sequence[StepRecord] | None = None,
) -> Report:
    """Compares every step of the two runs; raises VerifyError, which names the first tensor that differs.

    Args:
        task: the run that both sides did.
        oracle: its records in one process.
        ranks: the ranks' records, in rank order.
        gate: the largest error allowed.
        noise: records of one process with its sums in another order. A tensor may differ from the oracle by 8 times the
            difference of these two (a bias before batch norm has a gradient that is only rounding).
    """
    recipe = Recipe.from_json(ranks[0].recipe)
    worst: dict[str, Difference] = {}
    own = _rounding_noise(task, oracle, noise or oracle)
    for number in range(1, len(oracle) + 1):
        steps = [rank.steps[number - 1] for rank in ranks]
        for difference in _step_differences(task, recipe, oracle[:number], steps):
            noise_here = 8 * own.get((difference.kind, difference.name), 0.0)
            allowed = max(gate, min(noise_here, _MOST_NOISE * torch.finfo(task.dtype).eps))
            if difference.err > worst.get(difference.kind, Difference("", -1.0, "", 0)).err:
                worst[difference.kind] = replace(difference, allowed=allowed)
            if not difference.err <= allowed:
                raise _error(difference, recipe, len(ranks), allowed)
    looked_at, left_out = _coverage(task, oracle, recipe.grid.degree("dp"))
    return Report(
        layout=str(recipe.grid),
        engine=recipe.engine,
        num_ranks=len(ranks),
        num_steps=len(oracle),
        gate=gate,
        worst=worst,
        collectives=ranks[0].steps[-1].collectives,
        num_units=len({param.unit for param in recipe.params.values()}),  # a root without parameters gathers nothing
        bytes_per_rank=tuple(recipe.at(rank).num_bytes() for rank in range(len(ranks))),
        num_statistics=sum(map(_is_statistic, oracle[0].buffers)) if len(ranks) > 1 else 0,
        looked_at=tuple(looked_at),
        left_out=tuple(left_out),
    )


def _coverage(task: Task, oracle: Sequence[StepRecord], num_readers: int) -> tuple[list[str], list[str]]:
    """What training may do and these steps have done, and what they have not, as texts. ``num_readers``: ranks that read different data."""
    looked_at, left_out = [], []
    limit, num_steps = task.max_grad_norm or math.inf, counted(len(oracle), "step")
    if num_clipped := sum(step.grad_norm > limit for step in oracle):
        looked_at.append(f"gradient clipping, to a norm of {limit:.2g}, in {num_clipped} of {num_steps}")
    else:
        left_out.append("gradient clipping: no gradient norm was above a max_grad_norm")
    if num_padded := sum(len(window) % num_readers > 0 for window in task.windows):
        looked_at.append(
            f"a padding (the copy that a rank with a micro-batch fewer runs, which must not count), in {num_padded} of {num_steps}"
        )
    elif num_readers > 1:
        left_out.append("a padding (the copy that a rank with a micro-batch fewer runs): all ranks had as many")
    if not all(step.in_training for step in oracle):
        left_out.append("train mode, with its dropout and batch norm: the model was in eval mode")
    return looked_at, left_out


def assemble(recipe: Recipe, name: str, pieces: Sequence[Tensor | None]) -> Tensor | None:
    """The full tensor of ``name``, assembled from every rank's local one; None if no rank has it."""
    param = recipe.params[name]
    if all(piece is None for piece in pieces):
        return None
    if any(piece is None for piece in pieces):
        without = [rank for rank, piece in enumerate(pieces) if piece is None]
        raise VerifyError(
            f"no gradient on rank {without}, but on the others",
            why="a parameter is used by a window, or not, on all ranks alike",
            fix="this is a fault of Shardwise: please report it with the model",
            name=name,
        )
    dtype = pieces[0].dtype  # type: ignore[union-attr]
    # Of bytes a missing one is another value.
    missing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    whole = torch.full(param.shape, missing, dtype=dtype)
    for rank, local in enumerate(pieces):
        coord = recipe.grid.coord(rank)
        for piece, holders in zip(extents(param, coord), owners(param, coord), strict=True):
            value = local[piece.local_index]  # type: ignore[index]
            if rank == holders[0]:
                whole[piece.full_index] = value
            elif not torch.equal(whole[piece.full_index], value):
                raise VerifyError(
                    f"rank {rank} and rank {holders[0]} hold different values of the same piece",
                    why="replicas must stay equal to the last bit, or they drift apart",
                    fix="look for a collective that one of them missed",
                    name=name,
                )
    return whole


def _rounding_noise(
    task: Task, oracle: Sequence[StepRecord], noise: Sequence[StepRecord]
) -> dict[tuple[str, str], float]:
    """(kind, name) -> the largest difference, over all steps, of one process from itself with sums in another order."""
    found: dict[tuple[str, str], float] = {}
    for number, (expected, other) in enumerate(zip(oracle, noise, strict=True), start=1):
        grads = _tensors("grad", other.grads, expected.grads, number)
        params = _tensors("param", *_comparable(task, other.params, oracle[:number]), number)
        for difference in (*grads, *params):
            key = (difference.kind, difference.name)
            found[key] = max(found.get(key, 0.0), difference.err)
    return found


def _comparable(task: Task, params: Mapping[str, Tensor | None], steps: Sequence[StepRecord]):
    """The parameters of both sides after the last of ``steps``, to be compared. AdamW's first steps are like a sign: where the
    gradient is tiny, rounding decides the direction. So for AdamW only elements are kept that have had a larger gradient
    in every step."""
    return _where_gradients_count(params, steps) if task.optimizer == "adamw" else (params, steps[-1].params)


def _step_differences(task: Task, recipe: Recipe, oracle: Sequence[StepRecord], steps: list[RankStep]):
    """Differences after the last step of ``oracle``, which ``steps`` are by rank."""
    expected, number = oracle[-1], len(oracle)
    if expected.num_tokens:  # else the step is left out, before there are gradients to look at
        grads = {name: assemble(recipe, name, [step.grads[name] for step in steps]) for name in recipe.params}
        yield from _tensors("grad", grads, expected.grads, number)
    params = {name: assemble(recipe, name, [step.params[name] for step in steps]) for name in recipe.params}
    yield from _tensors("param", *_comparable(task, params, oracle), number)
    known = {n: b for first, b in recipe.buffers.items() for n in (first, *b.aliases)}
    yield from _buffers(known, expected, steps, number)
    for rank, step in enumerate(steps):  # after the tensors: the name of a tensor is more useful than a rank
        if not math.isclose(step.num_tokens, expected.num_tokens, rel_tol=1e-12):  # a count may be a sum of weights
            yield Difference("num_tokens", float("inf"), f"rank {rank}", number)
        if expected.num_tokens:  # else it is NaN
            yield Difference("loss", _relative(step.loss, expected.loss), f"rank {rank}", number)
        yield Difference("grad_norm", _relative(step.grad_norm, expected.grad_norm), f"rank {rank}", number)


def _tensors(kind: str, found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], number: int):
    numbers = (t for t in wanted.values() if t is not None and t.numel() and (t.is_floating_point() or t.is_complex()))
    largest = max((float(t.abs().max()) for t in numbers), default=0.0)
    for name, value in found.items():
        reference = wanted[name]
        if (value is None) != (reference is None):
            yield Difference(f"{kind} (None on one side)", float("inf"), name, number)
        elif value is not None and reference is not None and value.numel():
            scale = max(float(reference.abs().max()), _FLOOR * largest)
            diff = float((_wide(value) - _wide(reference)).abs().max())
            yield Difference(kind, diff / scale if scale else diff, name, number)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float64, or complex128, so that imaginary parts are compared too."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _reals(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, which Adam updates separately; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _where_gradients_count(params: Mapping[str, Tensor | None], steps: Sequence[StepRecord]):
    found, wanted = {}, {}
    largest = [
        max((float(g.abs().max()) for g in step.grads.values() if g is not None and g.numel()), default=0.0)
        for step in steps
    ]
    for name, value in params.items():
        if value is None:
            continue
        real, reference = _reals(value), _reals(steps[-1].params[name])
        mask = torch.ones_like(real, dtype=torch.bool)
        for step, most in zip(steps, largest, strict=True):
            grad = step.grads[name]
            mask &= True if grad is None or not step.num_tokens else _reals(grad).abs() > _FLOOR * most
        found[name], wanted[name] = real[mask], reference[mask]
    return found, wanted


def _buffers(known: Mapping[str, Buffer], expected: StepRecord, steps: list[RankStep], number: int):
    """Differences of the buffers: between the ranks, and from the oracle. Running statistics are compared only between
    the ranks: they follow the recipe's option, while the oracle updates them in one micro-batch after another. What is each
    rank's own is not compared."""
    for name, reference in expected.buffers.items():
        if name not in known or known[name].policy == "own":
            continue
        for rank, step in enumerate(steps):
            same = torch.equal(step.buffers[name], steps[0].buffers[name])
            yield Difference("buffer", 0.0 if same else float("inf"), f"{name} (rank {rank} against rank 0)", number)
        if len(steps) == 1 or not _is_statistic(name):
            if (found := steps[0].buffers[name]).shape != reference.shape:
                yield Difference("buffer", float("inf"), name, number)
                continue
            diff = (_wide(found) - _wide(reference)).abs()
            err = float(diff.max()) / max(float(_wide(reference).abs().max()), 1e-30) if diff.numel() else 0.0
            yield Difference("buffer", err, name, number)


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def _relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-30) if found != wanted else 0.0


def _error(difference: Difference, recipe: Recipe, num_ranks: int, gate: float) -> VerifyError:
    return VerifyError(
        f"{difference.kind} differs at step {difference.step}: error {difference.err:.3e}, allowed {gate:.0e}",
        why=f"{num_ranks} ranks on layout {recipe.grid} ({recipe.engine}) did not compute what one process computes",
        fix="do not train with this layout; if the model is deterministic, please report it",
        name=difference.name,
    )
