"""A penalty on parameters in a window: a term that counts once, whatever the number of ranks."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import path_of
from shardwise.config.keywords import public_call
from shardwise.errors import UsageError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.backwards import unchecked
from shardwise.parallel.stale import replaced_name
from shardwise.techniques.data.gradients import add_to_gradient


@public_call()
def parameter_penalty(model: nn.Module, penalty: Tensor) -> None:
    """Adds the gradient of a penalty on parameters to those of a window, once: ``penalty.backward()`` of one process. All ranks
    must call it.

        with sw.window(model, batches) as w:
            sw.parameter_penalty(model, 0.01 * sum(p.square().sum() for p in model.parameters()))
            for b in w:
                (loss(model(b["input_ids"]), b) / w.num_tokens).backward()

    Each rank computes the penalty of the parameters that it has, which are the same on all: a sum over the ranks would count it once
    for each. Where ranks hold full copies, the mean of what they compute is added. So a factor in it must be equal on all ranks: none of
    a rank's own data. With ``tp`` a sum over a parameter that is cut is refused: use the optimizer's weight decay. Under replicas a call
    before the loop costs least: after it, most gradients were sent already, and are summed a second time.

    Args:
        model: from :func:`~shardwise.parallel.compose.parallelize`, in a window: before or after its loop, as a penalty in the loop
            would count once for each micro-batch; or within one of a step's ``sw.accumulate`` blocks, as it counts once for each call.
        penalty: 0-dim, computed from parameters of the model alone, outside of its forward. Its graph is freed.

    Raises:
        UsageError: called outside of a window, or within a micro-batch of it; a penalty that no parameter goes into, that goes
            through what the model has computed, or that something else which is trained goes into.
        RankError: when the window is left: other ranks have called it more or less often.
    """
    runtime = runtime_of(model)
    _refuse_place(runtime)
    path = path_of([penalty]) if isinstance(penalty, Tensor) and penalty.requires_grad else None
    names = {id(param): name for name, param in runtime.parameters.items()}
    if path is None or (path.mark is None and not any(id(leaf) in names for leaf in path.leaves)) or penalty.dim():
        raise UsageError(
            f"parameter_penalty with {_described(penalty)}",
            why="it is one number, which is computed from parameters of the model, with gradients",
            fix="sw.parameter_penalty(model, 0.01 * sum(p.square().sum() for p in model.parameters()))",
        )
    if path.mark is not None or (path.is_compiled and runtime.engine.hides_outputs):
        raise UsageError(
            "parameter_penalty with something that the model has computed",
            why="that comes from the data of a rank, which has to be summed over the ranks, and a penalty counts once",
            fix="add it to the loss of the micro-batch, inside the loop of the window"
            + ("; a penalty alone is computed outside of what torch.compile compiles" if path.mark is None else ""),
        )
    if (other := next((leaf for leaf in path.leaves if id(leaf) not in names), None)) is not None:
        raise UsageError(
            f"parameter_penalty with another tensor that is trained, of shape {tuple(other.shape)}",
            why="it adds the gradients of this model's parameters, and that one would get none",
            fix="call it for each model, with .detach() of what belongs to others",
            name=replaced_name(other),
        )
    _add(runtime, penalty, [name for leaf in path.leaves if (name := names.get(id(leaf))) is not None])


def _refuse_place(runtime: Runtime) -> None:
    gradients = runtime.accumulation
    if gradients is None or not gradients.is_open:
        raise UsageError(
            "parameter_penalty outside of a window of the model",
            why="its gradient is added to those of a window, before they are summed over the ranks",
            fix="call it inside `with sw.window(model, batches) as w:`, before or after the loop over w",
        )
    if gradients.of == "step" or gradients.in_micro_batch:
        raise UsageError(
            f"parameter_penalty within a {'TrainStep' if gradients.of == 'step' else 'micro-batch'}",
            why="a penalty counts once for each optimizer step, and how many micro-batches a rank has depends on the layout",
            fix="call it in the with block of the window, before or after the loop; with TrainStep: weight_decay= of the optimizer",
        )


def _add(runtime: Runtime, penalty: Tensor, names: list[str]) -> None:
    params = [runtime.parameters[name] for name in names]
    gradients = runtime.accumulation
    assert gradients is not None
    with unchecked(), _counted(runtime, gradients.is_padding):
        grads = torch.autograd.grad(penalty, params, allow_unused=True)
    gradients.refuse_edited()
    gradients.num_penalties += 1
    added = []
    for name, param, grad in zip(names, params, grads, strict=True):
        if grad is not None:
            if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
                grad = grad.redistribute(param.device_mesh, param.placements)
            add_to_gradient(param, grad.detach() * _share(runtime, name))
            added.append(param)
    runtime.engine.note_added(added)
    gradients.note_left()


@contextlib.contextmanager
def _counted(runtime: Runtime, is_padding: bool) -> Iterator[None]:
    """Context manager: gradients count, also beside a micro-batch that is a padding."""
    runtime.engine.set_padding(False)
    try:
        yield
    finally:
        runtime.engine.set_padding(is_padding)


def _share(runtime: Runtime, name: str) -> float:
    """One over the ranks whose gradients of a parameter are summed when the window ends."""
    world = runtime.world
    num = 1 if runtime.recipe.is_cut and name not in runtime.replicated else world.axis("loss").size
    for axis, partial in runtime.partial.items():
        num *= world.axis(axis).size if name in partial else 1
    return 1 / num


def _described(penalty: object) -> str:
    if not isinstance(penalty, Tensor):
        return f"a {type(penalty).__name__}"
    if penalty.dim():
        return f"a tensor of shape {tuple(penalty.shape)}"
    return "a tensor that no parameter of the model goes into"
