"""Selective activation checkpointing: from words, or from a choice that was measured, to a policy of torch that says
which operators' results are kept."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from shardwise._torch.operators import is_taken_apart, operator_names
from shardwise.config.suggest import did_you_mean
from shardwise.errors import PlanError, UnsupportedError
from shardwise.techniques.remat.choice import GROUPS

# Routing, where almost equal scores could be ordered differently, and reads that wait for the device. Cheap to keep.
_ALWAYS = ("topk", "sort", "argmax", "argsort", "max.dim", "nonzero", "_local_scalar_dense")


@functools.cache
def keep_policy(save: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """A policy that keeps the results of the operators in ``save``, of top-k routing, and of copies to the host; all
    else is recomputed.

    Args:
        save: "matmul", "attention", or operators: "aten.gelu", "gelu" (of aten), "mylib.op", "aten.max.dim".

    Raises:
        PlanError: a name that is not an operator, or an operator whose result cannot be kept.
    """
    return functools.partial(_policy, named_operators(save) | _operators(_ALWAYS))


@functools.cache
def named_operators(save: tuple[str, ...]) -> frozenset[Any]:
    """The operators in ``save``; raises as :func:`keep_policy` does."""
    return frozenset(op for word in save for op in (_operators(GROUPS[word]) if word in GROUPS else _named(word)))


@functools.cache
def _operators(names: tuple[str, ...]) -> frozenset[Any]:
    return frozenset(op for name in names for op in _overloads(name))


def is_attention(op: Any) -> bool:
    return op in _operators(GROUPS["attention"])


def always_kept(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether selective keeps the result of this call whatever was named: a second call could give another."""
    return op in _operators(_ALWAYS) or _copies_to_host(op, args, kwargs)


class KeepChosen:
    """A policy for one run of a block and its repetitions: keeps the results of chosen calls, and of those that are
    always kept.

    Args:
        kept: (operator, number of the call in a run), as ``("aten.mm.default", 0)``.
    """

    def __init__(self, kept: frozenset[tuple[str, int]]):
        self._kept = kept
        # Of the second run too, for PyTorch before 2.13, which asks again there.
        self._num_of: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if self._kept:
            _refuse_unsafe(op)
        num_of = self._num_of[context.is_recompute]
        keep = ((str(op), num_of[op]) in self._kept and not draws(op, args, kwargs)) or always_kept(op, args, kwargs)
        num_of[op] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _policy(operators: frozenset[Any], _context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    _refuse_unsafe(op)
    keep = (op in operators and not draws(op, args, kwargs)) or _copies_to_host(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def is_unsafe(op: Any) -> bool:
    """Whether its results are views that torch does not know as such: what is written through them changes a kept result
    unseen."""
    return str(op).startswith("aten.unsafe_")


def _refuse_unsafe(op: Any) -> None:
    if is_unsafe(op):
        raise UnsupportedError(
            f"selective Remat over {op}",
            why="it gives views that torch does not know as such, so what is written through them (as RNNs do) changes kept "
            "results unseen",
            fix='use Remat(mode="full") for these blocks, or name other targets',
        )


def _copies_to_host(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if str(op) != "aten._to_copy.default" or kwargs.get("device") is None:
        return False
    return torch.device(kwargs["device"]).type == "cpu" and args[0].device.type != "cpu"


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers. If its result were kept, the second run would not draw them, and all
    later draws would differ: other dropout masks, without an error."""
    if not _is_random(op):
        return False
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else None
    if place is None:
        return True
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _overloads(name: str) -> list[Any]:
    """The operators of a name: one overload if the name contains it, else all; empty if this build has none."""
    space, _, rest = (
        name.rpartition(".")
        if name.count(".") == 1 and not hasattr(torch.ops.aten, name.split(".")[0])
        else ("", "", name)
    )
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space or "aten"), packet_name, None)
    if packet is None:
        return []
    return [getattr(packet, each) for each in packet.overloads() if overload in ("", each)]


def _named(word: str) -> list[Any]:
    name = word.removeprefix("aten.")
    found = _overloads(name)
    given = f"Remat(save=({word!r},))"
    if not found:
        known = [*GROUPS, *operator_names(), *(f"aten.{n}" for n in operator_names())]
        raise PlanError(
            given,
            why="it is neither a group of operators nor an operator that is loaded",
            fix=did_you_mean(word, known, what="groups and operators"),
        )
    fixed = [op for op in found if not op._schema.is_mutable]
    if not fixed:
        raise PlanError(given, why="it works in place, so its result does not stay what it was", fix="leave it out")
    if all(is_taken_apart(op) for op in fixed):
        raise PlanError(
            given,
            why="it is taken apart into other operators before it runs, so there is never a result of it to keep",
            fix='name what it is made of: "matmul" and "attention" mean all of their kind',
        )
    if all(_is_random(op) and "dropout_p" not in str(op._schema) for op in fixed):
        raise PlanError(
            given,
            why="a random operator that is not run again leaves its numbers to the next one: other dropout masks in backward",
            fix="leave it out; random numbers of the second run are those of the first anyway",
        )
    return fixed
