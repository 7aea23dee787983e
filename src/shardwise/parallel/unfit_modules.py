"""Refuses, before anything is moved, what a module may hold that would train wrongly once it is sharded."""

import contextlib
from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch.autograd import accumulator_is_held, num_hooks
from shardwise._torch.dtensor import on_scalar_read
from shardwise.errors import UnsupportedError, UsageError
from shardwise.model import canonical_modules, dtype_of
from shardwise.model.closures import functions_with_parameters
from shardwise.model.own_methods import has_only_extra_states, own_methods
from shardwise.model.own_state import OwnState
from shardwise.model.shared_memory import overlapping
from shardwise.model.tensors import tensors_of
from shardwise.parallel.runtime import Runtime, is_parallelized
from shardwise.parallel.stale import replaced_name
from shardwise.recipe import Recipe
from shardwise.world import World

_WHOLE = 'keep parameters whole on every rank: sw.init("dp_replicate=-1")'


def refuse_unfit_parts(module: nn.Module, recipe: Recipe, world: World) -> None:
    """Raises UnsupportedError for hooks on parameters that would not run, or would see only a part of the gradient, for
    functions that keep a parameter which is replaced, and for embeddings that write their own weight in forward."""
    parameters = tensors_of(module, "_parameters")
    replaced = {n for n, p in parameters.items() if recipe.is_cut or recipe.params[n].cuts or p.device != world.device}
    if replaced:
        _refuse_shared_memory(module)
    kept = functions_with_parameters(module)
    for name, param in parameters.items():
        if replaced_name(param) is not None:
            raise part_of_another(name)
        if name in replaced:
            _refuse_to_replace(name, param, kept)
        on_tensor, after = num_hooks(param)
        if after and world.size > 1 and is_parallelized(param):  # Shardwise's own hook, of the other model
            raise part_of_another(name)
        if (on_tensor or after) and recipe.params[name].cuts:
            raise UnsupportedError(
                "a hook on a parameter that is cut over the ranks",
                why="gradients come to another tensor: the gathered one, which FSDP2 makes anew, or this rank's part. The hook would never be called",
                fix=f"put it on the module's output or on an activation; or {_WHOLE}",
                name=name,
            )
        if after and world.size > 1:
            raise UnsupportedError(
                f"a post-accumulate hook on a parameter, on {world.size} ranks",
                why="it would see this rank's part of the gradient, before the sum over the ranks",
                fix="change gradients after the window, before optim.step(); param.register_hook is fine for what is linear",
                name=name,
            )
    if world.size > 1 or recipe.is_cut:
        refuse_embeddings(module)


def refuse_embeddings(module: nn.Module) -> None:
    """Raises UnsupportedError for embeddings with sparse gradients, or that write their own weight in forward."""
    for name, child in canonical_modules(module):
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UnsupportedError(
                f"a {type(child).__name__} with sparse=True",
                why="its gradient is a sparse tensor, and gradients are summed over the ranks as dense ones",
                fix="leave sparse out: rows that no rank looked up get a gradient of 0",
                name=name or None,
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            raise UnsupportedError(
                f"a {type(child).__name__} with max_norm={child.max_norm}",
                why="its forward writes the rows that this rank's batch looks up: under FSDP2 that is lost, and replicas "
                "drift apart",
                fix="leave max_norm out, and scale the rows it returns, or the weight after optim.step()",
                name=name or None,
            )


def refuse_to_replace(module: nn.Module) -> None:
    """Raises UnsupportedError for what would go on with the parameters of ``module`` if others took their places."""
    _refuse_shared_memory(module)
    kept = functions_with_parameters(module)
    for name, param in tensors_of(module, "_parameters").items():
        _refuse_to_replace(name, param, kept)


def _refuse_to_replace(name: str, param: Tensor, kept: Mapping[int, str]) -> None:
    if id(param) in kept:
        raise UnsupportedError(
            f"{kept[id(param)]}, a function that keeps a parameter which another one replaces",
            why="it would go on to use the tensor that the parameter was: without a gradient, and never updated",
            fix="let the function take it from its module when it is called (m.weight, not weight); or " + _WHOLE,
            name=name,
        )
    if issubclass(type(param), nn.Parameter) and type(param) is not nn.Parameter:
        raise UnsupportedError(
            f"a parameter of the class {type(param).__name__}",
            why="another tensor takes its place, an nn.Parameter, which has none of the methods of that class, and is no instance of it",
            fix=f"make it an nn.Parameter; what is known of it can be an attribute, weight.is_scale = True, which stays; or {_WHOLE}",
            name=name,
        )
    if accumulator_is_held(param) and not any(
        num_hooks(param)
    ):  # what has put a hook on the tensor may hold the node too
        raise _held_accumulator(name)


def refuse_held_accumulators(runtime: Runtime) -> None:
    """Raises UnsupportedError for a parameter that is cut and has a hook on the node that would accumulate its gradient, put on after parallelize."""
    for name, param in runtime.parameters.items():
        if runtime.recipe.params[name].cuts and accumulator_is_held(param):
            raise _held_accumulator(name)


def _held_accumulator(name: str) -> UnsupportedError:
    return UnsupportedError(
        "something holds the node that accumulates the gradient of a parameter which is replaced, as a hook on it needs",
        why="gradients come to another tensor, so that a hook on the node is never called",
        fix=f"change gradients after the window, before optim.step(), and let go of the node; or {_WHOLE}",
        name=name,
    )


def _refuse_shared_memory(module: nn.Module) -> None:
    """Raises UnsupportedError for a parameter whose memory another parameter, a buffer or an attribute has too: they would get memory of their own."""
    found = overlapping(module)
    if found is None:
        return
    param, beside = found
    layouts = [(each.start, each.tensor.shape, each.tensor.stride()) for each in found]
    is_tie = beside.kind == "parameter" and layouts[0] == layouts[1]
    raise UnsupportedError(
        f"a parameter in the memory of {beside.name}, which is another {beside.kind}"
        if beside.kind == "parameter"
        else f"a parameter whose memory {beside.name}, {'a buffer' if beside.kind == 'buffer' else 'an attribute'}, shares",
        why="each gets memory of its own, and the one would no longer follow the other in training",
        fix=f"tie them as one Parameter: the module of {beside.name} gets it by an assignment, b.weight = a.weight, without .data"
        if is_tie
        else "let forward compute it from the parameter (self.weight.t(), self.weight.detach()); or take a copy: .clone()",
        name=param.name,
    )


def own_state_of(module: nn.Module, recipe: Recipe) -> OwnState | None:
    """What runs the modules' own methods that say what they store; None: there are no such methods. ``module``: not sharded
    yet.

    Raises:
        UnsupportedError: one cannot be run on tensors in full.
    """
    methods = own_methods(module)
    if not methods:
        return None
    found, only_extra = None, has_only_extra_states(methods)
    with contextlib.suppress(*((UnsupportedError,) if only_extra else ())):
        found = OwnState(module, {name: dtype_of(param.storage) for name, param in recipe.params.items()})
    if found is None:
        return None
    for name, made_of in found.extra_states_of().items():
        cut = sorted(other for other in made_of if other in recipe.params and recipe.params[other].cuts)
        if cut:
            raise UnsupportedError(
                f"get_extra_state that gives something of {cut[0]}",
                why="it is called on the sharded module, where each rank has a part of that parameter",
                fix="give plain values there, and store tensors by _save_to_state_dict, which is run on full ones",
                name=name,
            )
    if only_extra:
        return None
    for name, made_of in found.encode().values_of.items():
        raise UnsupportedError(
            f"an entry of the state dict that is no tensor, with something of {min(made_of)} in it",
            why="tensors are stored each under a name of its own",
            fix="store each tensor under a name",
            name=name,
        )
    return found


def part_of_another(name: str) -> UsageError:
    """The error for parameter ``name`` of a module that shares it with another model, sharded before."""
    return UsageError(
        "a part of a model that was parallelized already",
        why="that model cuts this parameter or sums its gradients over the ranks, and a second one would do so again",
        fix="put the models that share it into one module, parallelize that, and call both in its forward; or build it anew for "
        "the second model",
        name=name,
    )


def refuse_numbers_of_parts(world: World) -> None:
    """Makes reading a Python number from a DTensor over the ranks of ``world`` raise UsageError, unless each rank has
    the full value. torch returns the number of this rank's part: a norm that is too small, another step size on each
    rank."""
    for mesh in world.root_meshes():
        on_scalar_read(mesh, _refuse_part)


def _refuse_part(tensor: DTensor) -> None:
    mesh = tensor.device_mesh
    axes = zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), mesh.shape, tensor.placements, strict=True)
    over = [f"{name}={size}" for name, size, placement in axes if size > 1 and not placement.is_replicate()]
    if over:
        raise UsageError(
            f"a Python number (item(), float(), tolist(), a format, ...) of a tensor that is cut over {', '.join(over)}",
            why="each rank would read the number of its own part, and continue with another value than the others",
            fix="take the whole value first, on every rank: grad.norm().full_tensor().item(), (x > 0).any().full_tensor()",
        )
