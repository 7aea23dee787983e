"""What parallelize refuses and warns of before it changes a module."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise._torch.dtensor import local_tensor
from shardwise._torch.modules import DDPModule
from shardwise.config.caller import level_of_caller
from shardwise.errors import PlanError, UnsupportedError, UsageError
from shardwise.model.tensors import unregistered_parameters
from shardwise.parallel.part_values import Part
from shardwise.parallel.runtime import Runtime, has_runtime, is_parallelized
from shardwise.parallel.unfit_modules import part_of_another
from shardwise.recipe import Anatomy, Recipe, local_shape
from shardwise.world import World


def warn_of_unregistered(module: nn.Module) -> None:
    """Warns of trained parameters in plain containers, which no optimizer gets."""
    found = unregistered_parameters(module)
    if found:
        first, *others = found
        more = f" and {len(others)} more" if others else ""
        warnings.warn(
            f"{first}{more}: trainable, and in a Python list, tuple or dict, so model.parameters() does not have them: no optimizer gets them, and "
            "nothing shards them, moves them or sums their gradients. Keep modules in nn.ModuleList or nn.ModuleDict, parameters in "
            "nn.ParameterList; or call requires_grad_(False) on what is not to be trained.",
            stacklevel=level_of_caller(),
        )


def refuse_other_shapes(runtime: Runtime) -> None:
    """Raises PlanError if what this rank has of a parameter is not what the recipe says: what is saved, loaded and counted follows the
    recipe, what is computed the tensors."""
    coord = runtime.recipe.grid.coord(runtime.world.rank)
    for name, param in runtime.parameters.items():
        has, said = tuple(local_tensor(param).shape), local_shape(runtime.recipe.params[name], coord)
        if has != said:
            over = ", ".join(f"{cut.axis} (dim {cut.dim})" for cut in runtime.recipe.params[name].cuts)
            raise PlanError(
                f"a parameter of which rank {coord.rank} has a piece of shape {has}",
                why=f"the recipe says {said}: all of it is {runtime.recipe.params[name].shape}, and it is cut over {over or 'no axis'}",
                fix="a technique cuts a tensor otherwise than its rule says: let its act, or the mesh it shards over, follow the recipe",
                name=name,
            )


def refuse_no_world(world: Any) -> None:
    if not isinstance(world, World):
        raise UsageError(
            f"parallelize(model, {world!r})",
            why="the second argument is a World: the ranks and their layout",
            fix=f"world = sw.init({world!r}); model = sw.parallelize(model, world)"
            if isinstance(world, str)
            else 'world = sw.init("dp_shard=-1"); model = sw.parallelize(model, world)',
        )


def refuse_wrapped(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if has_runtime(child):
            raise UsageError(
                "a module that was sharded already" if child is module else "a module that holds a sharded one",
                why="sharding twice would cut its shards again",
                fix="call parallelize once per module; build it anew for another layout, or to put it into another module",
                name=name or None,
            )
    if type(module).__name__ == "OptimizedModule":
        raise UsageError(
            "a module that torch.compile has wrapped",
            why="its parameters lie under other names there, and the hooks that gather them cannot be compiled with it",
            fix='pass the plain module: sw.parallelize(module, world, compile="blocks") compiles its blocks',
        )
    for name, param in module.named_parameters():
        if isinstance(param, DTensor | Part) and is_parallelized(param):
            raise part_of_another(name)
    for name, child in module.named_modules():
        kind = type(child).__name__
        if (
            isinstance(child, FSDPModule | DDPModule | nn.parallel.DistributedDataParallel | nn.DataParallel)
            or kind == "FullyShardedDataParallel"
        ):
            raise UsageError(
                f"a module that holds a {kind}",
                why="another library has sharded or replicated it, so its tensors are not whole",
                fix="pass the plain module, before any fully_shard, DDP, FSDP or DataParallel call",
                name=name or None,
            )
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"a module that torch.jit has made a program of, a {getattr(child, 'original_name', kind)}",
                why="it takes no hooks, by which parameters are gathered and gradients summed",
                fix="train the module itself, and make a program of a copy for use: torch.jit.script(copy.deepcopy(model)); functions may be "
                "programs (torch.jit.script(function))",
                name=name or None,
            )
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise UsageError(
                "a module with a parameter that is sharded already",
                why="another library has cut it, and sharding twice would cut its shards again",
                fix="pass the plain module, with whole parameters",
                name=name,
            )


def _first_difference(anatomy: Anatomy, recipe: Recipe) -> str | None:
    """The first parameter or buffer that differs between the recipe and the module."""

    def facts(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {n: (t.shape, t.dtype, getattr(t, "trainable", None), t.aliases) for n, t in tensors.items()}

    ours = {**facts(recipe.params), **{n: f[:2] for n, f in facts(recipe.buffers).items()}}
    theirs = {**facts(anatomy.params), **{n: f[:2] for n, f in facts(anatomy.buffers).items()}}
    return next((name for name in (*theirs, *ours) if ours.get(name) != theirs.get(name)), None)
