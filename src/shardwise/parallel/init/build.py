"""Builds a module on meta while a tape records it; see :mod:`shardwise.parallel.init.tape`."""

import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch.autograd import TorchDispatchMode
from shardwise._torch.operators import looked_at_on_meta
from shardwise.errors import first_line
from shardwise.model import is_pretrained
from shardwise.parallel.init.tape import Tape, is_draw
from shardwise.world.rng import derive_seed, forked_rng


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        self.num_draws = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.tape.note_inputs(func, (args, kwargs))
        looked_at = looked_at_on_meta(func, args, kwargs)
        if looked_at is not None:
            # Stochastic depth computes its rates by [x.item() for x in torch.linspace(0, rate, depth)].
            values = self.tape.settled(looked_at)
            if values is not None:
                return func(values, *args[1:], **kwargs)
        if not is_draw(func):
            result = func(*args, **kwargs)
        else:  # real numbers, in case the constructor reads them (`.item()`): the same ones on every rank
            self.num_draws += 1
            with forked_rng(derive_seed(self.tape.seed, "construction", self.num_draws)):
                result = func(*args, **kwargs)
        self.tape.record(func, args, kwargs, result)
        return result


class _Literals(TorchFunctionMode):
    """Records what torch skips on meta before it becomes an operation: values and indices given as Python numbers, and
    the initialisers of ``torch.nn.init`` that return early there (``trunc_normal_``, ``orthogonal_``, ``sparse_``)."""

    _FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
    _INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
    _IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FROM_VALUES and kwargs.get("device") is None:
            given = args[0] if args else kwargs.get("data", kwargs.get("obj"))
            if _asks_whether_to_initialise():
                return func(*args, **(kwargs | {"device": "cpu"}))
            if not isinstance(given, Tensor):
                return self._made(func, args, kwargs)
        elif func == torch.Tensor.new_tensor:
            like, *values = args
            return self._made(torch.tensor, values, {"dtype": like.dtype} | kwargs)
        elif func in self._INDEXED:
            args = (args[0], self._index(args[1]), *args[2:])
        if func == self._IS_META:
            caller = _caller_in(torch.nn.init.__name__)
            if caller is not None:
                self.tape.record_init(getattr(torch.nn.init, caller.f_code.co_name), dict(caller.f_locals))
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """The tensor of these values: real first, so that the tape keeps them, then moved to meta."""
        grad = kwargs.pop("requires_grad", False)
        value = func(*args, **(kwargs | {"device": "cpu"}))
        return value.to("meta").requires_grad_(grad)

    def _index(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        return self._made(torch.tensor, (index,), {}) if isinstance(index, list) else index


def _caller() -> types.FrameType | None:
    """The calling frame: the first one above this file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame


def _caller_in(module: str) -> types.FrameType | None:
    frame = _caller()
    return frame if frame is not None and frame.f_globals.get("__name__") == module else None


def _asks_whether_to_initialise() -> bool:
    """Whether a Hugging Face constructor creates a tensor to see if new ones are on meta, where it would skip its
    initialisation. That is before weights are tied. If initialisation were done at the end instead, the head would draw
    its own numbers over the embedding's, with another spread, and over the zeros of its padding."""
    frame = _caller()
    if frame is None or frame.f_back is None or frame.f_code.co_name != "get_torch_context_manager_or_global_device":
        return False
    return frame.f_back.f_code.co_name == "init_weights"


def _for_want_of_values(error: BaseException) -> bool:
    """Whether a file or network error may be a consequence of torch having no values on meta."""
    links, link = [], error.__cause__ or error.__context__
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return any(isinstance(link, RuntimeError | TypeError | ValueError) for link in links)


def build_on_meta(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module | None, Tape]:
    """Runs ``build`` with every new tensor on meta. Returns the module, or None with the reason in ``tape.refused`` if
    it cannot be built there."""
    tape = Tape(seed)
    numpy_before, python_before = np.random.get_state(), random.getstate()
    module = None
    try:
        with warnings.catch_warnings(), torch.device("meta"), _Recorder(tape), _Literals(tape):
            warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model, which is a no-op")
            module = build()
            _initialise_late(module)
    except Exception as error:
        # .item(), .numpy(), a library call: no values on meta. A fault of the constructor itself occurs again, and is
        # raised, when it runs with real values.
        tape.fault = error if isinstance(error, OSError) and not _for_want_of_values(error) else None
        reason = first_line(error, type(error).__name__)
        tape.refused = f"it cannot be built on meta ({reason[:120]})"
    if not _same_state(numpy_before, np.random.get_state()):
        tape.refused = tape.refused or "its constructor draws from numpy.random"
    if python_before != random.getstate():
        tape.refused = tape.refused or "its constructor draws from Python's random"
    return (module if isinstance(module, nn.Module) else None), tape


def _initialise_late(module: Any) -> None:
    """Initialises what a Hugging Face model has left uninitialised on meta, because it checks for meta in a way that is
    not handled here. What has been initialised is left alone."""
    if not isinstance(module, nn.Module):
        return
    if is_pretrained(module):
        module.initialize_weights()  # type: ignore[operator]
        return
    for child in module.children():
        _initialise_late(child)


def _same_state(a: Any, b: Any) -> bool:
    """Of numpy's global generator: a tuple of a Mersenne twister, a dict of another one."""
    return repr(a) == repr(b) if isinstance(a, dict) else a[2:] == b[2:] and bool((a[1] == b[1]).all())
