"""``torch.compile`` of single blocks, in place. Names, class and hooks stay.

The block's ``forward`` is compiled, not the block: ``module.compile()`` also traces the hooks, and the hooks by which
FSDP2 gathers a unit cannot be compiled, so each block breaks into many small graphs (13 frames for a block of two
layers), or is an error with ``fullgraph``. Blocks of equal structure share one compiled function, and so one graph.
Each structure has its own compiled function, so that many kinds of blocks do not use up torch's limit of graphs per
function, after which it falls back to eager.
"""

import functools
import os
import shutil
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise._torch.graphs import compile_with_limit, memory_budget
from shardwise.config.suggest import did_you_mean
from shardwise.errors import PlanError, UnsupportedError, UsageError
from shardwise.model import canonical_modules
from shardwise.recipe import Recipe
from shardwise.techniques.compile.write_check import watch_cast_inputs, watch_compiled
from shardwise.techniques.technique import Act
from shardwise.world import World

_MARK = "_shardwise_compiled"
_GRAPHS = 8  # torch's own limit of graphs per function, here per block


class CompileAct(Act):
    """Compiles blocks with ``torch.compile``, as the recipe says."""

    def check(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        modules = dict(canonical_modules(module))
        for edit in recipe.edits_of("compile"):
            backend = edit.args["backend"]
            known = _backends()
            if backend not in known:
                raise PlanError(
                    f"Compile(backend={backend!r})",
                    why="no backend has this name",
                    fix=did_you_mean(backend, known, what="backends"),
                )
            refuse_graphs(edit.args["mode"], world.device)
            if backend == "inductor" and world.device.type == "cpu" and _compiler() is None:
                raise UnsupportedError(
                    'Compile(backend="inductor") on cpu without a C++ compiler',
                    why="inductor writes C++ for the CPU, and neither CXX, g++ nor clang++ names a program",
                    fix='install g++, or use backend="aot_eager"',
                )
            target = modules[edit.module]
            if _MARK not in vars(target) and _is_compiled(target):
                raise UsageError(
                    "Compile of a block that is compiled already",
                    why="it would be compiled twice over",
                    fix="leave out your own torch.compile, or compile=",
                    name=edit.module,
                )

    def inside(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        """Replaces ``forward`` of each block by its compiled form, in place; skips blocks that are compiled already."""
        edits = recipe.edits_of("compile")
        modules = dict(canonical_modules(module))
        compiled: dict[Any, Callable[..., Any]] = {}
        for edit in edits:
            target = modules[edit.module]
            if _MARK in vars(target):
                continue
            bound = target.forward
            if getattr(bound, "__self__", None) is target:
                function = bound.__func__  # type: ignore[attr-defined]
                key = (function, _structure(target))
                if key not in compiled:
                    made = _compile(function, edit.args, len(edits))
                    compiled[key] = _with_input_in_graph(made) if _is_part_frozen(target) else made
                target.forward = types.MethodType(compiled[key], target)
            else:  # a function that was set on the object as its forward
                target.forward = _compile(bound, edit.args, 1)
            target.__dict__[_MARK] = True
        again = [edit.module for edit in recipe.edits if edit.action == "checkpoint"]
        watch_compiled(module, again, [edit.module for edit in edits])

    def around(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        cast = [edit.module for edit in recipe.edits if edit.action in ("cast", "cast_inputs")]
        watch_cast_inputs(module, cast, [edit.module for edit in recipe.edits_of("compile")])


def refuse_graphs(mode: str | None, device: torch.device) -> None:
    """Raises UnsupportedError for a mode that replays CUDA graphs on ``device``."""
    if device.type == "cuda" and mode in ("reduce-overhead", "max-autotune"):
        raise UnsupportedError(
            f"Compile(mode={mode!r}) on cuda",
            why="it replays CUDA graphs: each block writes its output where it wrote the last one, which is overwritten while the "
            "backward, or the next micro-batch of a window, still needs it",
            fix='use mode="max-autotune-no-cudagraphs", or leave mode out',
        )


def _compile(function: Callable[..., Any], args: Mapping[str, Any], num_blocks: int) -> Callable[..., Any]:
    options: dict[str, Any] = {key: args[key] for key in ("backend", "mode", "dynamic", "fullgraph")}
    compiled = compile_with_limit(_isolated(function), min(_GRAPHS * num_blocks, 256), **options)
    budget = args["activation_memory_budget"]
    if budget is None:
        return compiled

    @functools.wraps(function)
    def within_budget(*args: Any, **kwargs: Any) -> Any:
        with memory_budget(budget):  # graphs are compiled during the call
            return compiled(*args, **kwargs)

    return within_budget


def _is_part_frozen(block: nn.Module) -> bool:
    return len({param.requires_grad for param in block.parameters()}) == 2


def _with_input_in_graph(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A block whose first argument always has a gradient, as those behind the first have where a part of each block is trained and all
    before the blocks is frozen: torch would compile all of it once more, for the first alone."""

    @functools.wraps(compiled)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.is_floating_point() and not x.requires_grad:
            args = (_InGraph.apply(x, x.new_ones(()).requires_grad_()), *args[1:])
        return compiled(module, *args, **kwargs)

    return forward


class _InGraph(torch.autograd.Function):
    """A copy of a tensor that has a gradient, which nothing reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def _isolated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a copy of its code object. torch counts graphs by code object, so blocks of one class but
    different structures would use up each other's limit. (From 2.13 on ``torch.compile`` has ``isolate_recompiles`` for
    that.)"""
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__, own.__qualname__, own.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__module__,
    )
    return own


def _structure(module: nn.Module) -> Any:
    """A key that is equal for two blocks if one graph can serve both."""
    return (
        tuple((name, type(child)) for name, child in module.named_modules()),
        tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()),
    )


def _is_compiled(module: nn.Module) -> bool:
    inner = getattr(module.forward, "_torchdynamo_orig_callable", None)
    return inner is not None or getattr(module, "_compiled_call_impl", None) is not None


@functools.cache
def _backends() -> list[str]:
    return torch.compiler.list_backends(exclude_tags=())


def _compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )
