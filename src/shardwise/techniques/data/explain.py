"""Translates torch's errors about parameters that are not gathered into ShardwiseErrors with a fix."""

import traceback

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import checkpoint

from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.model import module_of_error
from shardwise.techniques.edges import WhenLeft

_PENALTY = (
    "a penalty on weights: sw.parameter_penalty(model, penalty) in `with sw.window(...)`, before or after its loop; in a TrainStep: "
    "weight_decay= of the optimizer. A tensor that is combined with a parameter must be cut alike: start = p.detach().clone(), or the parameter "
    "of a second model that was parallelized in the same way"
)


def translated(root: nn.Module, error: BaseException) -> ShardwiseError | None:
    """The ShardwiseError for ``error``, raised in a forward or backward of ``root``; None if its cause is not known."""
    text = str(error)
    if ("setStorage" in text and "storage of size 0" in text) or "its data is not allocated yet" in text:
        return ungathered(module_of_error(root, error))
    if WhenLeft.__name__ in str(error):  # of the node in the graph
        return UnsupportedError(
            "a block that changes what it is given in place",
            why="its inputs tell when backward has left it, and torch cannot follow a change of them",
            fix="let it make a new tensor: x = x + y and not x += y; or keep parameters whole on every rank: "
            'sw.init("dp_replicate=-1")',
            name=module_of_error(root, error),
        )
    if "donated buffer" in str(error):  # of compiled blocks: torch's message says what to set
        return None
    if "vmap" in str(error) or "functorch" in str(error):
        return UnsupportedError(
            "a transform of torch.func over a sharded model",
            why="units are gathered and reduced by hooks, which run once for all that is mapped over",
            fix='keep parameters whole on every rank: sw.init("dp_replicate=-1")',
            name=module_of_error(root, error),
        )
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    has_units = any(isinstance(child, FSDPModule) for child in root.modules() if child is not root)
    in_forward = _is_in_forward(root, error)
    if in_forward is False or not has_units:  # in the forward of a model with one unit, all parameters are gathered
        return UsageError(
            "a parameter of the model used by code outside of its forward",
            why="it is cut over the ranks there: parameters are gathered only while model(...) runs",
            fix=f"{_PENALTY}; other code that computes with parameters belongs into a forward, which model(...) calls: sw.TaskModel(model, loss)"
            + ' with Sharding(units="none")' * has_units
            + "; within sw.gathered(model) every parameter is whole, for reading",
        )
    return UsageError(
        "a parameter of one unit used by code outside that unit",
        why="it is cut over the ranks there: parameters are gathered only while the module of their unit runs",
        fix=("" if in_forward else f"{_PENALTY}; within a forward, ")
        + 'let both be in one unit: Sharding(units="none"), or units= with the names of modules that hold both; within '
        "sw.gathered(model) every parameter is whole, for reading",
        name=module_of_error(root, error),
    )


def ungathered(name: str | None) -> UnsupportedError:
    """The error for a backward that comes to the parameters of the module ``name`` before they are gathered."""
    return UnsupportedError(
        "a backward that reaches a unit whose parameters are not gathered",
        why="a unit is gathered when a gradient comes to what it returned; it comes from inside it here: a feature that a hook has caught",
        fix='let the block return what the loss needs; or keep parameters whole on every rank: sw.init("dp_replicate=-1")',
        name=name,
    )


def _is_in_forward(root: nn.Module, error: BaseException) -> bool | None:
    """Whether ``error`` was raised in a forward of ``root`` or of a module in it, or in one that a backward runs again.
    None: autograd itself raised it in a backward, for an operation that may be of either."""
    modules = {id(module) for module in root.modules()}
    codes = [(frame.f_code, id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if codes and codes[-1][0].co_name == "_engine_run_backward":
        return None
    return any(
        code.co_filename == checkpoint.__file__ or (code.co_name == "_call_impl" and owner in modules)
        for code, owner in codes
    )
