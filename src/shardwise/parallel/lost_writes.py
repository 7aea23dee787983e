"""Writes into a part of a tensor that is cut over dp_shard, ``w[0].zero_()``: torch would write into a copy of it."""

import sys

from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise._torch.lost_writes import DRAWS_IN_PLACE, Kind, Origin, on_lost_write, origin_of
from shardwise.errors import UsageError
from shardwise.parallel.runtime import runtimes_in_use
from shardwise.world import World

_WHOLE = "whole = sw.full_tensor(w); whole[0].zero_(); w.copy_(sw.shard_like(whole, w))"

# What draws, other than a method in place -> the method that draws such numbers.
_METHODS = {"randn_like": "normal_", "normal": "normal_", "rand_like": "uniform_", "randint_like": "random_"}


def refuse_lost_writes(world: World) -> None:
    """Makes writes into a row, a slice, or places of a DTensor over the ranks of ``world`` raise UsageError, where torch would
    lose them or has no rule for them."""
    for mesh in world.root_meshes():
        on_lost_write(mesh, _refuse)


def _refuse(operator: str, origin: Origin, kind: Kind) -> None:
    what, name = _of(origin)
    if kind == "draw":
        if what != "a parameter" and (drawn_for := _orthogonal()) is not None:
            operator, (what, name) = "orthogonal_", _of(origin_of(drawn_for))
        method = _METHODS.get(operator, operator if operator in DRAWS_IN_PLACE else "bernoulli_")
        empty = "torch.empty(w.shape, dtype=w.dtype)"
        whole = (
            f"nn.init.orthogonal_({empty}, generator=g)"
            if operator == "orthogonal_"
            else f"{empty}.{method}(..., generator=g)"
        )
        raise UsageError(
            f"{operator}() of {what} that is cut over the ranks",
            why="each rank would draw for its part alone: other numbers than one process has, and others in each replica of it",
            fix=f"draw the whole from a generator that is seeded alike on every rank: whole = {whole}; noise = sw.shard_like(whole, w), into a "
            "parameter by w.copy_(noise) within torch.no_grad(); or draw in the module's constructor, which parallelize runs or has run",
            name=name,
        )
    if kind == "view":
        raise UsageError(
            f"{operator}() of {what} that is cut over the ranks",
            why="each rank has some of its rows, and torch cannot give what this view would be of them",
            fix="take the whole first, on every rank: sw.full_tensor(w).unbind(). If an optimizer does it that flattens parameters, as "
            'torch.optim.LBFGS: parameters that are whole on every rank, sw.init("dp_replicate=-1"), or another optimizer, such as AdamW',
            name=name,
        )
    if operator == "data":
        raise UsageError(
            f"an assignment to .data of {what} that is a DTensor",
            why="what it replaces is not what this rank's shard is: the new values would be lost",
            fix="write in place, within torch.no_grad(): p.copy_(values), of values that are cut in the same way, as p * 0.9 is; what is to be "
            "put back later is a copy: before = p.detach().clone()",
            name=name,
        )
    if name is None:
        raise UsageError(
            f"{operator}() into a DTensor that each rank has a part of, and that is no parameter of the model",
            why="each rank has some of its rows, or a part of a sum; torch gathers them and writes into the copy, or has no rule for it",
            fix="let the operator make a new tensor: x.clamp(), not x.clamp_(); or take the whole first, on every rank: sw.full_tensor(x)",
        )
    raise UsageError(
        f"{operator}() into {what} that is cut over the ranks, or into a row or a slice of it",
        why="each rank has some of its rows. torch gathers them and writes into the copy, so that the write is lost, or has no rule for it",
        fix=f"write the whole, on every rank, within torch.no_grad(): {_WHOLE}. To clear rows, without gathering: w.mul_(sw.shard_like(mask, w)), of "
        "a mask of zeros and ones of the whole shape. Columns, w[:, 0].zero_(), are written as they are; what is read from "
        "its own rows is taken as a copy: w.add_(w[0].clone())",
        name=name,
    )


def _orthogonal() -> Tensor | None:
    """The tensor that torch's orthogonal initialiser, if it runs, draws for: into a tensor of its own."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not nn.init.orthogonal_.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["tensor"]


def _of(origin: Origin) -> tuple[str, str | None]:
    """What has the local piece at ``origin``, and the parameter's name."""
    address, memory = origin
    named = [(name, param) for runtime in runtimes_in_use() for name, param in runtime.parameters.items()]
    for name, param in named:
        for what, tensor in (("a parameter", param), ("the gradient of a parameter", param.grad)):
            local = None if tensor is None else local_tensor(tensor)
            if local is not None and 0 <= address - local.data_ptr() < local.nbytes:
                return what, name
        if not local_tensor(param).nbytes and origin_of(param)[1] == memory:  # a rank without rows
            return "a parameter", name
    return "a tensor", None
