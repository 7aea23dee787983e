"""Selective activation checkpointing: from words to a policy of torch that says which operators' results are kept."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from shardwise._torch.operators import is_taken_apart, operator_names
from shardwise.config.suggest import did_you_mean
from shardwise.errors import PlanError, UnsupportedError

__all__ = ["keep_policy"]

_GROUPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
}
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
    kept = [op for name in _ALWAYS for op in _overloads(name)]
    for word in save:
        names = _GROUPS.get(word)
        kept += [op for name in names for op in _overloads(name)] if names else _named(word)
    return functools.partial(_policy, frozenset(kept))


def _policy(operators: frozenset[Any], _context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if str(op).startswith("aten.unsafe_"):
        raise UnsupportedError(
            f"selective Remat over {op}",
            why="it gives views that torch does not know as such, so what is written through them (as RNNs do) changes kept "
            "results unseen",
            fix='use Remat(mode="full") for these blocks, or name other targets',
        )
    keep = (op in operators and not _draws(op, args, kwargs)) or _copies_to_host(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _copies_to_host(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if str(op) != "aten._to_copy.default" or kwargs.get("device") is None:
        return False
    return torch.device(kwargs["device"]).type == "cpu" and args[0].device.type != "cpu"


def _draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
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
    """The operators that a user named.

    Raises:
        PlanError: there is none, or its result cannot be kept.
    """
    name = word.removeprefix("aten.")
    found = _overloads(name)
    given = f"Remat(save=({word!r},))"
    if not found:
        known = [*_GROUPS, *operator_names(), *(f"aten.{n}" for n in operator_names())]
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
