"""Casts floating tensors by hooks: the inputs and outputs of the whole model, and the inputs of parts with their own
precision, whose outputs are cast back to the surrounding dtype. Parameters are gathered in their dtype; buffers are
never cast.

If the model returns the output of a part unchanged, such as the logits of a float32 head, it is returned uncast. If a
part changes its input in place, the change is written back.
"""

import contextlib
import functools
import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise._torch.graphs import look_in_graph, mark_in_graph
from shardwise.config.caller import level_of_caller
from shardwise.model import canonical_modules, dtype_of
from shardwise.model.pytrees import Replaced, leaves_of, map_leaves
from shardwise.recipe import Recipe
from shardwise.techniques.precision.casts import ForwardCasts
from shardwise.techniques.precision.dtype_errors import explain_dtypes
from shardwise.techniques.precision.rule import PrecisionEntry
from shardwise.techniques.technique import Act
from shardwise.world import World


def cast_floating_tensors(value: Any, dtype: torch.dtype) -> Any:
    return map_leaves(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value)


class PrecisionAct(Act):
    """Registers the casts of mixed precision on the model, its units and its parts."""

    def around(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        """Registers the casts on the modules, in place, after FSDP2's own hooks: those gather a unit for the backward
        of its output, so they must see the output itself and not its cast."""
        _cast_root(module, recipe)
        modules, edits = dict(canonical_modules(module)), recipe.edits_of("precision")
        leaving, told = _UncastOutputs(), set[str]()
        for edit in edits:
            args = edit.args
            if edit.action == "cast_inputs" and world.is_main:
                look = _CastWarning(edit.module, dtype_of(args["compute"]), told)
                modules[edit.module].register_forward_pre_hook(look.before, with_kwargs=True)
            back = None if args["back"] is None else dtype_of(args["back"])
            part = _Part(dtype_of(args["compute"]), back, leaving if args["leaves"] else None)
            modules[edit.module].register_forward_pre_hook(part.enter, with_kwargs=True)
            modules[edit.module].register_forward_hook(part.leave, with_kwargs=True)
        if any(edit.args["leaves"] for edit in edits):
            module.register_forward_pre_hook(leaving.begin, prepend=True)
            module.register_forward_hook(leaving.end, prepend=True)  # before FSDP2's hook on the output of the model

    def begin(self, runtime: Any) -> None:
        module, recipe = runtime.module, runtime.recipe
        if recipe.entry("precision", PrecisionEntry).compute is not None or recipe.edits_of("precision"):
            runtime.chosen["dtypes"] = ForwardCasts(module, recipe)
            runtime.explainers.append(functools.partial(explain_dtypes, weakref.ref(module)))


def _cast_root(module: nn.Module, recipe: Recipe) -> None:
    """Casts the inputs of the whole model to its compute dtype, and its outputs to the requested one."""
    said = recipe.entry("precision", PrecisionEntry)
    if said.cast_inputs != "none" and said.compute is not None:
        inputs = _RootInputs(dtype_of(said.compute))
        module.register_forward_pre_hook(inputs.cast, with_kwargs=True)
        module.register_forward_hook(inputs.put_back, always_call=True)
    if said.output is not None:
        output = dtype_of(said.output)
        module.register_forward_hook(lambda _m, _a, result: cast_floating_tensors(result, output))


class _RootInputs:
    """The casts of the inputs of the whole model, in the caller's containers while it runs."""

    def __init__(self, compute: torch.dtype):
        self._compute, self._cast = compute, list[Replaced]()

    def cast(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def cast(x: Any) -> Any:
            return x.to(self._compute) if isinstance(x, Tensor) and x.is_floating_point() else x

        self._cast.append(Replaced(cast, (args, kwargs)))
        return self._cast[-1].value

    def put_back(self, *_: Any) -> None:
        if self._cast:
            self._cast.pop().undo()


class _Part:
    """The casts of one part with its own precision."""

    def __init__(self, compute: torch.dtype, back: torch.dtype | None, leaving: "_UncastOutputs | None"):
        self._compute, self._back, self._leaving = compute, back, leaving
        self._replaced = list[Replaced]()  # of the calls that run
        self._casts = WeakIdKeyDictionary()  # cast input -> (input, version of the cast one, None in inference mode)

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == self._compute:
                return x
            made = x.to(self._compute)
            if torch.compiler.is_compiling():
                mark_in_graph(made)
            else:
                self._casts[made] = x, None if made.is_inference() else made._version
            return made

        if torch.compiler.is_compiling():
            return map_leaves(cast, args), map_leaves(cast, kwargs)
        self._replaced.append(Replaced(cast, (args, kwargs)))
        return self._replaced[-1].value

    def leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        for x in leaves_of((args, kwargs)):
            if not torch.compiler.is_compiling():
                self._write_back(x)
            elif isinstance(x, Tensor):
                look_in_graph(module, x)
        if self._replaced and not torch.compiler.is_compiling():
            self._replaced.pop().undo()
        return result if self._back is None else map_leaves(self._cast_back, result)

    def _write_back(self, x: Any) -> None:
        """Writes an in-place change of a cast input back to the input: the code around the part relies on it."""
        if isinstance(x, Tensor) and x in self._casts:
            given, version = self._casts.pop(x)
            if x._version != version if version is not None else not torch.equal(x, given.to(x.dtype)):
                given.copy_(x)

    def _cast_back(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == self._back:
            return x
        cast = x.to(self._back)
        if self._leaving is not None:
            self._leaving.note(cast, x)
        return cast


class _CastWarning:
    """Warns, in the first forward of a unit, of inputs whose values the cast changes; once per argument name."""

    def __init__(self, unit: str, compute: torch.dtype, told: set[str]):
        self._unit, self._compute, self._told, self._has_looked = unit, compute, told, False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._has_looked or torch.compiler.is_compiling():
            return
        self._has_looked = True
        names: list[str] = []
        with contextlib.suppress(ValueError, TypeError):  # of the class: a checkpointed block has another on the object
            names = [*inspect.signature(type(module).forward).parameters][1:]
        given = {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(args)} | kwargs
        for name, value in given.items():
            if name in self._told:
                continue
            changes = [found for x in leaves_of(value) if (found := self._change(x)) is not None]
            if changes:
                change, dtype, size = max(changes)
                self._told.add(name)
                warnings.warn(
                    f"cast_inputs='units' casts the input {name!r} of unit {self._unit!r} from {dtype} to "
                    f"{str(self._compute).removeprefix('torch.')}: values change by up to {change:.2g} (the largest is {size:.4g}). "
                    "cast_inputs='root' casts nothing inside of the model",
                    stacklevel=level_of_caller(),
                )

    def _change(self, x: Any) -> tuple[float, str, float] | None:
        """By how much casting changes it, its dtype and its largest finite value; None where it does not change it."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.is_meta or not x.numel():
            return None
        x = x.detach()
        back = x.to(self._compute).to(x.dtype)
        off = torch.where((x == back) | x.isnan(), 0, (x - back).abs()).max().item()
        size = x.abs().nan_to_num(0, posinf=0).max().item()
        return (off, str(x.dtype).removeprefix("torch."), size) if off else None


class _UncastOutputs:
    """The outputs of parts outside of blocks in this forward, cast and uncast: the model returns them uncast."""

    def __init__(self) -> None:
        self._exact: dict[int, tuple[Tensor, Tensor, Tensor | int]] = {}
        self._runs = False

    def begin(self, _module: nn.Module, _args: Any) -> None:
        self._exact, self._runs = {}, True

    def note(self, cast: Tensor, exact: Tensor) -> None:
        if self._runs:  # the cast tensor is held too, so that its id is not reused
            self._exact[id(cast)] = cast, exact, cast.clone() if cast.is_inference() else cast._version

    def end(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        known, self._exact, self._runs = self._exact, {}, False

        def uncast(x: Any) -> Any:
            if id(x) not in known:
                return x
            _, exact, before = known[id(x)]
            same = x._version == before if isinstance(before, int) else torch.equal(x, before)
            return exact if same else x.to(exact.dtype)  # changed in place, as by ``logits += bias``

        return map_leaves(uncast, result)
