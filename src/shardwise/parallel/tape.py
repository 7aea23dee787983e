"""Builds a module on meta and remembers how each tensor got its values, so that any rank can make any one of them.

While the constructor runs, every tensor operation is written on a *tape* (on meta it costs nothing). The values of
one parameter are made later by replaying, on the CPU, only the operations they depend on: its slice of the tape. So
``self.apply(self._init_weights)``, ``trunc_normal_``, ``orthogonal_``, ``Parameter(torch.randn(d) * 0.02)``, weight norm and
RoPE tables need no rule of their own, and host memory holds one tensor at a time.

Each random draw is seeded by the run's seed and the canonical name of the first tensor that depends on it. So values are a
function of (seed, name), the same under every layout, and tensors that share a draw share it here too. They are drawn
from the constructor's distributions; they are not the numbers the constructor itself would have drawn.

What a tape cannot hold makes it :attr:`~Tape.refused`: draws from numpy or Python's random, a generator of the
constructor's own, values asked for on meta. The caller then builds on rank 0 instead.
"""

import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._compat import TorchDispatchMode, tree_any, tree_map
from shardwise.world.rng import derive_seed

__all__ = ["Tape", "build_on_meta"]


@dataclass(frozen=True)
class _Ref:
    """A tensor by what it shows of a storage; ``storage`` is the tape's number for it."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Entry:
    """One operation: with references for the tensors that live on the tape."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[_Ref | None, ...]
    draws: bool


class Tape:
    """The recorded construction of one module. Make it with :func:`build_on_meta`."""

    def __init__(self, seed: int):
        self.seed = seed
        self.refused: str | None = None  # why values cannot be replayed
        self._entries: list[_Entry] = []
        self._numbers: dict[int, int] = {}  # storage identity -> number
        self._alive: list[Any] = []  # storages are kept alive: an identity used twice would join two tensors
        self._constants: dict[int, torch.UntypedStorage] = {}  # values that came from outside torch's operations
        self._draw_names: dict[int, tuple[str, int]] = {}

    # ---- recording -------------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> _Ref:
        """The reference of ``tensor``."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._alive.append(storage)
        number = self._numbers[storage._cdata]
        return _Ref(number, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Writes one operation, if it makes or changes values."""
        if tree_any(lambda x: isinstance(x, torch.Generator), (args, kwargs)):
            self.refused = self.refused or f"its constructor draws from a generator of its own ({op})"
        known = len(self._numbers)
        packed_args, packed_kwargs = tree_map(self._pack, (args, kwargs))
        inputs = _refs((packed_args, packed_kwargs))
        first_output = len(self._numbers)
        outputs = result if isinstance(result, tuple | list) else (result,)
        refs = tuple(self.ref(x) if isinstance(x, Tensor) else None for x in outputs)
        made = {r.storage for r in refs if r is not None and r.storage >= first_output}
        changed = {r.storage for r in _changed(op, packed_args, packed_kwargs)}
        self._note_constants(args, kwargs, known)
        if made or changed:
            reads = frozenset(r.storage for r in inputs)
            draws = torch.Tag.nondeterministic_seeded in op.tags
            entry = _Entry(op, packed_args, packed_kwargs, reads, frozenset(made | changed), refs, draws)
            self._entries.append(entry)

    def _pack(self, value: Any) -> Any:
        return self.ref(value) if isinstance(value, Tensor) else value

    def _note_constants(self, args: Any, kwargs: Any, known: int) -> None:
        """A real tensor never seen before came from outside (a list, numpy, a file): its values are kept."""

        def note(value: Any) -> Any:
            if isinstance(value, Tensor) and self.ref(value).storage >= known and value.device.type != "meta":
                self._constants[self.ref(value).storage] = value.untyped_storage().clone()
            return value

        tree_map(note, (args, kwargs))

    # ---- replaying -------------------------------------------------------------------------------------------

    def name_draws(self, targets: Mapping[str, Tensor]) -> None:
        """Gives every draw its name: the first target, in order, that depends on it, and how many came before."""
        for name, tensor in targets.items():
            ordinal = 0
            for index in self._slice(self.ref(tensor).storage):
                if self._entries[index].draws:
                    self._draw_names.setdefault(index, (name, ordinal))
                    ordinal += 1

    def values(self, tensor: Tensor) -> Tensor:
        """The values of a meta ``tensor`` of this tape, on the CPU. What no operation wrote is NaN (integers: the
        smallest number of their type)."""
        target = self.ref(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _kept_rng():
            for index in self._slice(target.storage):
                self._replay(index, storages)
            return self._unpack(target, storages).clone()

    def _slice(self, storage: int) -> list[int]:
        """Positions of the operations that ``storage`` depends on, in order."""
        needed, kept = {storage}, []
        for index in range(len(self._entries) - 1, -1, -1):
            entry = self._entries[index]
            if entry.writes & needed:
                kept.append(index)
                needed |= entry.reads
        return kept[::-1]

    def _replay(self, index: int, storages: dict[int, torch.UntypedStorage]) -> None:
        entry = self._entries[index]
        args, kwargs = tree_map(
            lambda x: self._unpack(x, storages) if isinstance(x, _Ref) else _on_cpu(x), (entry.args, entry.kwargs)
        )
        if entry.draws:
            torch.manual_seed(derive_seed(self.seed, "init", *self._draw_names.get(index, ("?", index))))
        result = entry.op(*args, **kwargs)
        if not entry.outputs:
            return
        outputs = result if isinstance(result, tuple | list) else (result,)
        for ref, value in zip(entry.outputs, outputs, strict=True):
            if ref is not None and isinstance(value, Tensor) and ref.storage not in storages:
                if "empty" in entry.op._schema.name:
                    mark_unwritten(value)
                storages[ref.storage] = _storage_like(ref, value)

    def _unpack(self, ref: _Ref, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        if ref.storage not in storages:
            if ref.storage in self._constants:
                storages[ref.storage] = self._constants[ref.storage].clone()
            else:
                unwritten = mark_unwritten(torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device="cpu"))
                storages[ref.storage] = unwritten.untyped_storage()
        view = torch.empty(0, dtype=ref.dtype, device="cpu")
        return view.set_(storages[ref.storage], ref.offset, ref.size, ref.stride)

    def record_init(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Writes a whole call of an initialiser that does nothing on meta, because it looks at values on its way."""
        packed = {name: self._pack(value) for name, value in arguments.items()}
        touched = frozenset(ref.storage for ref in _refs(packed))
        self._entries.append(_Entry(function, (), packed, touched, touched, (), draws=True))


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.tape.record(func, args, kwargs, result)
        return result


class _Literals(TorchFunctionMode):
    """What torch drops on meta before it becomes an operation: values given as Python numbers, and the initialisers of
    ``torch.nn.init`` that return early there (``trunc_normal_``, ``orthogonal_``, ``sparse_``)."""

    _FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
    _IS_META = torch.Tensor.is_meta.__get__

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self._FROM_VALUES and kwargs.get("device") is None and not isinstance(args[0], Tensor):
            grad = kwargs.pop("requires_grad", False)
            value = func(*args, **(kwargs | {"device": "cpu"}))
            return value.to("meta").requires_grad_(grad)
        if func == self._IS_META:
            caller = _caller_in(torch.nn.init.__name__)
            if caller is not None:
                self.tape.record_init(getattr(torch.nn.init, caller.f_code.co_name), dict(caller.f_locals))
        return func(*args, **kwargs)


def _caller_in(module: str) -> types.FrameType | None:
    """The frame that asked, if it is code of ``module``: the first above this file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame if frame is not None and frame.f_globals.get("__name__") == module else None


def build_on_meta(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module | None, Tape]:
    """Runs ``build`` with every new tensor on meta. Returns the module, or None with ``tape.refused`` saying why it
    cannot be built there."""
    tape = Tape(seed)
    numpy_before, python_before = np.random.get_state(), random.getstate()
    module = None
    try:
        with torch.device("meta"), _Recorder(tape), _Literals(tape):
            module = build()
            _initialise_late(module)
    except (NotImplementedError, RuntimeError) as error:  # .item(), a library call: no values on meta
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        tape.refused = f"it cannot be built on meta ({reason[:120]})"
    if not _same_state(numpy_before, np.random.get_state()):
        tape.refused = tape.refused or "its constructor draws from numpy.random"
    if python_before != random.getstate():
        tape.refused = tape.refused or "its constructor draws from Python's random"
    return (module if isinstance(module, nn.Module) else None), tape


def _initialise_late(module: Any) -> None:
    """Hugging Face models leave out their initialisation on meta; on the tape it costs nothing."""
    if not isinstance(module, nn.Module):
        return
    if callable(getattr(module, "initialize_weights", None)):
        module.initialize_weights()
        return
    for child in module.children():
        _initialise_late(child)


def mark_unwritten(tensor: Tensor) -> Tensor:
    """Fills ``tensor`` in place with what no initialisation writes."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.zero_()
    return tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)


def has_unwritten(tensor: Tensor) -> bool:
    """Whether a mark of :func:`mark_unwritten` is left (a bool tensor has no value to spare and never shows one)."""
    if tensor.numel() == 0 or tensor.dtype is torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    info = torch.iinfo(tensor.dtype)
    return bool((tensor == (info.min if tensor.dtype.is_signed else info.max)).any()) and tensor.dtype.itemsize > 1


def _refs(value: Any) -> list[_Ref]:
    found: list[_Ref] = []
    tree_map(lambda x: found.append(x) if isinstance(x, _Ref) else None, value)
    return found


def _changed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Ref]:
    """The arguments that ``op`` writes into, by its schema."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _refs(value)


def _storage_like(ref: _Ref, value: Tensor) -> torch.UntypedStorage:
    """The storage of ``value`` laid out as ``ref`` was on meta: a CPU kernel may choose other strides."""
    if tuple(value.stride()) == ref.stride and value.storage_offset() == ref.offset:
        return value.untyped_storage()
    room = ref.offset + 1 + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True)) if value.numel() else 0
    flat = torch.empty(room, dtype=ref.dtype, device="cpu")
    flat.as_strided(ref.size, ref.stride, ref.offset).copy_(value)
    return flat.untyped_storage()


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _same_state(a: Any, b: Any) -> bool:
    return a[2:] == b[2:] and bool((a[1] == b[1]).all())


class _kept_rng:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None:
        self.state = torch.get_rng_state()

    def __exit__(self, *exc: object) -> None:
        torch.set_rng_state(self.state)
