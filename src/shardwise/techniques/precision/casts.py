"""Casts where floating dtypes meet in a forward: a float32 buffer, or what is computed in float32, and bfloat16 weights.

torch's layers and products take one dtype; plain mixed precision (autocast) casts what they are given. Here nothing is
looked at in most forwards: the first run of each module, and each forward of the model with other kinds of arguments,
runs in a ``TorchFunctionMode`` that looks at the dtypes of layers and products, and makes the casts. Afterwards only
modules in which something was cast run in such a mode; of the others nothing is left.

The mode is entered by ``forward``, replaced on the object, so that it lies inside of all hooks and outside of
activation checkpointing, which enters the modes of a first run for the second one too. At most one is active: that of
the innermost module. A compiled block always runs in one: its casts are part of the graph, and cost nothing at run time.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch.autograd import function_modes
from shardwise.model import canonical_modules, dtype_name, dtype_of
from shardwise.model.module_state import REPLACES
from shardwise.model.names import module_of_error
from shardwise.model.pytrees import leaves_of, map_leaves
from shardwise.recipe import Recipe
from shardwise.recipe.targets import innermost
from shardwise.techniques.precision.dtype_errors import is_of_dtypes, unfit_dtypes
from shardwise.techniques.precision.functions import FUNCTIONS, cast_of, floating_dtypes
from shardwise.techniques.precision.rule import PrecisionEntry


class _Casts(TorchFunctionMode):
    """Within: arguments of layers and products whose dtypes differ are cast.

    Args:
        compute: dtype of products; None: theirs are left as they are.
        note: called with the name of the function, the dtypes that were cast, and the one they were cast to.
    """

    def __init__(self, compute: torch.dtype | None, note: Callable[[str, tuple[torch.dtype, ...], torch.dtype], None]):
        super().__init__()
        self.compute, self.note = compute, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS:
            cast = cast_of(FUNCTIONS[func], args, kwargs, self.compute)
            if cast is not None:
                args, kwargs = cast.args, cast.kwargs
                if torch.compiler.is_compiling():
                    _note_in_graph(FUNCTIONS[func].name, cast.before, cast.dtype)
                else:
                    self.note(FUNCTIONS[func].name, cast.before, cast.dtype)
        return func(*args, **kwargs)


_active: list[_Casts] = []  # innermost last


@torch.compiler.assume_constant_result
def _note_in_graph(name: str, before: tuple[torch.dtype, ...], dtype: torch.dtype) -> bool:
    """Called while a graph is made. The mode itself is not an argument: equal blocks would not share a graph."""
    _active[-1].note(name, before, dtype)
    return True


class ForwardCasts:
    """The casts in the forwards of a sharded model. As text: what is cast, and where."""

    def __init__(self, root: nn.Module, recipe: Recipe):
        self._root = root
        compute = recipe.entry("precision", PrecisionEntry).compute
        casts = [edit for edit in recipe.edits_of("precision") if edit.action == "cast"]
        self._parts = {edit.module: dtype_of(edit.args["compute"]) for edit in casts}
        self._around = None if compute is None else dtype_of(compute)
        self._found: dict[str, dict[tuple[str, str], None]] = {}  # module -> function, and what was cast to what
        self._kinds: set[Any] = set()  # of arguments that the model was called with
        self._watched: set[str] = set()  # modules that run in a mode until they have run once
        self._ran: set[str] = set()  # those of them that have run
        self._kept: set[str] = set()  # modules that run in a mode for good
        self._modules: dict[str, nn.Module] = {}
        self._forwards: dict[str, tuple[Callable[..., Any], Any]] = {}  # as replaced, and what the object had before
        self._place([edit.module for edit in recipe.edits_of("compile")])

    def _place(self, compiled: list[str]) -> None:
        """Replaces ``forward`` of the model for good, and in and of compiled blocks."""
        known: set[int] = set()
        for name, module in canonical_modules(self._root):
            if id(module) in known or not _has_forward(module):
                continue
            known.add(id(module))
            block = innermost(name, compiled)
            if name in compiled:
                self._replace(name, module, self._in_graphs(name, module))
            elif block is None:
                self._modules[name] = module
            elif isinstance(module, nn.RNNBase):
                self._replace(name, module, self._recurrent(name, module))
        if "" in self._modules:
            self._root.__dict__["forward"] = self._of_root(self._root.forward)

    def _compute(self, name: str) -> torch.dtype | None:
        part = name if name in self._parts else innermost(name, self._parts) or ""
        return self._parts.get(part, self._around)

    def _replace(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._forwards[name] = forward, module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def _note(self, module: str, function: str, before: tuple[torch.dtype, ...], dtype: torch.dtype) -> None:
        text = f"{' and '.join(map(dtype_name, before))} to {dtype_name(dtype)}"
        self._found.setdefault(module, {})[function, text] = None

    # ---- what forward becomes --------------------------------------------------------------------------------

    def _of_root(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The model's: modules are watched in the first run with each kind of arguments."""
        watched = self._in_mode("", self._root, run)

        @_replaces(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return run(*args, **kwargs)
            kind = (self._root.training, *map(_kind, args), *((key, _kind(value)) for key, value in kwargs.items()))
            if kind not in self._kinds:
                self._watch()
            try:
                output = watched(*args, **kwargs)
            except (RuntimeError, ValueError) as error:
                if is_of_dtypes(error):
                    raise unfit_dtypes(module_of_error(self._root, error), error) from error
                raise
            self._kinds.add(kind)
            self._settle()
            return output

        return forward

    def _in_mode(self, name: str, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """A module's, while it is watched, or where something is cast."""
        mode = _Casts(self._compute(name), functools.partial(self._note, name))

        @_replaces(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not (name in self._watched or name in self._kept):
                return run(*args, **kwargs)
            if name in self._watched:
                self._ran.add(name)
            if isinstance(module, nn.RNNBase):
                args, kwargs = _recurrent(module, args, kwargs, mode.note)
            has_one = type(module) in _FUSED and _has_one_dtype(module, args, kwargs)
            with _alone(None if has_one else mode):
                return run(*args, **kwargs)

        return forward

    def _in_graphs(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """That of a compiled block. Which part a product is in is not known there, if it has some."""
        parts = [
            part for part in self._parts if part.startswith(f"{name}.") and self._parts[part] != self._compute(name)
        ]
        mode, run = _Casts(None if parts else self._compute(name), functools.partial(self._note, name)), module.forward

        @_replaces(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                with _alone(mode):
                    return run(*args, **kwargs)
            except (RuntimeError, ValueError) as error:
                if is_of_dtypes(error):
                    raise unfit_dtypes(name, error, is_compiled=True) from error
                raise

        return forward

    def _recurrent(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """That of a recurrent layer in a compiled block."""
        run, note = module.forward, functools.partial(self._note, name)

        @_replaces(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _recurrent(module, args, kwargs, note)  # type: ignore[arg-type]
            return run(*args, **kwargs)

        return forward

    # ---- which modules run in a mode -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watches all modules until they have run."""
        for name, module in self._modules.items():
            if name and name not in self._forwards:
                self._replace(name, module, self._in_mode(name, module, module.forward))
        self._watched = set(self._modules)
        self._ran.clear()

    def _settle(self) -> None:
        """Leaves nothing of the watched modules that have run and in which nothing was cast."""
        if not self._ran:
            return
        self._kept = {*self._found} & {*self._modules}
        for name in [*self._kept]:  # else they would compute what is in them without a call of it
            while name and self._is_fused(name := name.rpartition(".")[0]):
                self._kept |= {name} & {*self._modules}
        for name in self._ran:  # in a mode around them parts would have another dtype, and fused modules other kernels
            if name in self._parts or type(self._modules[name]) in _FUSED:
                self._kept |= {name} if "" in self._kept or innermost(name, self._kept) is not None else set()
        for name in self._ran - self._kept - {""}:
            forward, before = self._forwards.pop(name)
            attributes = self._modules[name].__dict__
            if attributes.get("forward") is forward:
                del attributes["forward"]
                if before is not None:
                    attributes["forward"] = before
        self._watched -= self._ran
        self._ran.clear()

    def _is_fused(self, name: str) -> bool:
        """Whether it is such a module, or a list of them."""
        return name not in self._modules or type(self._modules[name]) in _FUSED

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for module, casts in self._found.items():
            for function, text in casts:
                key = re.sub(r"\b\d+\b", "*", module), function, text
                groups.setdefault(key, []).append(module or "(root)")
        told = [
            f"{names[0] if len(names) == 1 else f'{pattern} ({len(names)} modules)'}: {function}, {text}"
            for (pattern, function, text), names in groups.items()
        ]
        return f"cast where they differ in forward: {'; '.join(told)}" if told else ""


_FUSED: tuple[type[nn.Module], ...] = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that compute without their children in evaluation, by other kernels, unless a ``TorchFunctionMode`` is active."""


def _has_one_dtype(module: nn.Module, args: Any, kwargs: Any) -> bool:
    return len({dtype for x in (*leaves_of((args, kwargs)), *module.parameters()) for dtype in floating_dtypes(x)}) < 2


def _replaces(run: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of what takes the place of a ``forward``; it is no state of the module."""

    def mark(forward: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(forward, run)
        forward.__dict__[REPLACES] = True
        return forward

    return mark


@contextlib.contextmanager
def _alone(mode: _Casts | None) -> Iterator[None]:
    """Context manager: ``mode`` is active, or none, in place of that of the module around."""
    modes = function_modes()
    outer = modes[-1] if modes and isinstance(modes[-1], _Casts) else None
    if outer is not None:
        outer.__exit__(None, None, None)
    try:
        if mode is None:
            yield
            return
        _active.append(mode)
        with mode:
            yield
    finally:
        if mode is not None:
            _active.pop()
        if outer is not None:
            outer.__enter__()


def _recurrent(module: nn.RNNBase, args: Any, kwargs: Any, note: Callable[..., None]) -> tuple[Any, Any]:
    """What a recurrent layer is called with, in the dtype of its weights: it refuses others before any function is called."""
    dtype = module._flat_weights[0].dtype  # type: ignore[union-attr]

    def cast(x: Any) -> Any:
        before = floating_dtypes(x) if isinstance(x, Tensor) else []
        if before in ([], [dtype]):
            return x
        if not torch.compiler.is_compiling():
            note(type(module).__name__, tuple(before), dtype)
        return x.to(dtype)

    return map_leaves(cast, args), map_leaves(cast, kwargs)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _kind(item)) for key, item in value.items())
    return value.dtype if isinstance(value, Tensor) else type(value)
