"""What is said where a part of a parameter is used as if it were whole."""

import weakref
from dataclasses import dataclass

from shardwise.errors import UsageError
from shardwise.parallel.part_functions import DRAWS
from shardwise.parallel.runtime import Runtime


@dataclass(frozen=True)
class PartOf:
    """What a tensor is a part of.

    Attributes:
        runtime: of the model.
        name: of the parameter.
        axis: over which it is cut.
        what: ``parameter``, ``gradient``, or ``computed``.
        cuts: dim, counted from the end -> its size here and in the whole.
    """

    runtime: "weakref.ref[Runtime]"
    name: str
    axis: str
    what: str
    cuts: dict[int, tuple[int, int]]


BY_PLACE = "a write by place"
_PLACES = frozenset({"__getitem__", "select", "narrow", "index_select", "gather", "take", "masked_select"})


PUT_BACK = "whole = sw.full_tensor(p); change whole alike on every rank; within torch.no_grad(): p.copy_(sw.shard_like(whole, p))"


def beside_plain(function: str, part: PartOf) -> UsageError:
    """The error for a part that meets a tensor which is not cut as it is."""
    return UsageError(
        f"{function} of a part of a parameter that is cut over {part.axis}, and of a tensor that is not cut as it is",
        why="each rank has a part of the parameter, p.shape is that part's, and a tensor that was not made from a part has other elements at the "
        "same places",
        fix="take a tensor that is cut alike: torch.zeros_like(p), start = p.detach().clone(), a mask by values (p.abs() > 0.1), or the parameter of "
        f"a second model that was parallelized in the same way; or compute with wholes, for reading: sw.full_tensor(p); to write: {PUT_BACK}. "
        "This rank's part, if it is meant: p.detach().to_local()",
        name=part.name,
    )


def refusal(function: str, part: PartOf) -> UsageError:
    """The error for a function that would give a number of a part."""
    what = {
        "parameter": "a parameter",
        "gradient": "the gradient of a parameter",
        "state": "the optimizer's state of a parameter",
        "computed": "what was computed from a parameter, or its gradient,",
    }
    if function.strip("_") in DRAWS:
        return UsageError(
            f"{function} of {what[part.what]} that is cut over {part.axis}, outside of the model's forward",
            why="each rank would draw for its part alone: other numbers than one process has",
            fix="draw the whole from a generator that is seeded alike on every rank: whole = torch.randn(sw.full_tensor(p).shape, generator=g); noise "
            "= sw.shard_like(whole, p)",
            name=part.name,
        )
    return UsageError(
        f"{function} of {what[part.what]} that is cut over {part.axis}, outside of the model's forward",
        why="each rank has a part of it, and would compute with its own: a norm, a mean or a number of a part, another one on each rank, by which "
        "what ranks have whole would drift apart",
        fix=f"write the whole: {PUT_BACK}; a row is also cleared by a mask that is cut alike"
        if function == BY_PLACE
        else f"read the whole, on every rank: sw.full_tensor(p)[0], or sw.full_tensor(p.grad)[0]; to write there: {PUT_BACK}"
        if function in _PLACES
        else 'take the whole first, on every rank: sw.full_tensor(p.grad).norm(); or the norm of each: sw.parameter_norms(model, of="gradients"), of '
        "all gradients together, which clips by it: sw.clip_grad_norm_(model, max_norm), or TrainStep(max_grad_norm=). A penalty on weights: weight_decay= of the optimizer, or, after the window, "
        "p.grad.add_(p.detach(), alpha=0.02). This rank's part, if it is meant: p.detach().to_local()",
        name=part.name,
    )
