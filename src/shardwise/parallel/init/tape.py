"""Records how each tensor of a module built on meta got its values, so that any rank can make any one of them.

While the constructor runs, every tensor operation is recorded on a *tape* (on meta it costs nothing). The values of one
parameter are made later by replaying, on the CPU, only the operations they depend on: its slice of the tape. So
``self.apply(self._init_weights)``, ``trunc_normal_``, ``orthogonal_``, ``Parameter(torch.randn(d) * 0.02)``, weight
norm and RoPE tables need no special rule, and host memory holds one tensor at a time.

Each random draw is seeded by the run's seed and the canonical name of the first tensor that depends on it. So values
are a function of (seed, name), the same under every layout, and tensors that share a draw share it here too. They are
drawn from the constructor's distributions; they are not the numbers the constructor itself would have drawn.

What a tape cannot record sets :attr:`~Tape.refused`: draws from numpy or Python's random, a generator of the
constructor's own, reading values that were drawn. The caller then builds on rank 0 instead; it also does if the ranks'
tapes differ (:meth:`~Tape.digest`), as after a draw from an unknown generator.
"""

import bisect
import contextlib
import hashlib
import heapq
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.init.sentinel import fill_with_sentinel, num_marks
from shardwise.world.fingerprint import described
from shardwise.world.rng import derive_seed, forked_rng


@dataclass(frozen=True)
class _Ref:
    """A tensor as a view of a storage; ``storage`` is the tape's number for it."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Entry:
    """One recorded operation, with references in place of the tensors on the tape."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[_Ref | None, ...]
    draws: bool
    default_dtype: torch.dtype


class Tape:
    """The recorded construction of one module. Make it with :func:`~shardwise.parallel.init.build.build_on_meta`."""

    def __init__(self, seed: int):
        self.seed = seed
        self.refused: str | None = None  # why values cannot be replayed
        self.fault: OSError | None = None  # error of the constructor, which it would raise with real values too
        self._entries: list[_Entry] = []
        self._writers: dict[int, list[int]] = {}  # storage number -> positions of the entries that write it, ascending
        self._numbers: dict[int, int] = {}  # storage identity -> number
        self._alive: list[Any] = []  # storages are kept alive: an id used twice would join two tensors
        self._constants: dict[int, torch.UntypedStorage] = {}  # values that no torch operation on the tape made
        self._draw_names: dict[int, tuple[str, int]] = {}

    # ---- recording -------------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> _Ref:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._alive.append(storage)
        number = self._numbers[storage._cdata]
        return _Ref(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Records one operation, if it makes or changes values."""
        inputs: list[_Ref] = []

        def pack(value: Any) -> Any:
            if isinstance(value, Tensor):
                inputs.append(ref := self.ref(value))
                return ref
            if isinstance(value, torch.Generator):
                self.refused = self.refused or f"its constructor draws from a generator of its own ({op})"
            return value

        packed_args, packed_kwargs = _each(pack, args), _each(pack, kwargs)
        first_output = len(self._numbers)
        outputs = result if isinstance(result, tuple | list) else (result,)
        refs = tuple(self.ref(x) if isinstance(x, Tensor) else None for x in outputs)
        made = {r.storage for r in refs if r is not None and r.storage >= first_output}
        changed = {r.storage for r in _changed(op, packed_args, packed_kwargs)} if inputs else set()
        if made or changed:
            reads = frozenset(r.storage for r in inputs)
            self._write(op, packed_args, packed_kwargs, reads, frozenset(made | changed), refs, draws=is_draw(op))

    def _write(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: frozenset[int],
        writes: frozenset[int],
        outputs: tuple[_Ref | None, ...],
        *,
        draws: bool,
    ) -> None:
        for storage in writes:
            self._writers.setdefault(storage, []).append(len(self._entries))
        self._entries.append(_Entry(op, args, kwargs, reads, writes, outputs, draws, torch.get_default_dtype()))

    def _pack(self, value: Any) -> Any:
        return self.ref(value) if isinstance(value, Tensor) else value

    def note_inputs(self, op: Any, arguments: Any) -> None:
        """Checks the tensors that an operation is about to read or change and that no operation made. Real tensors came
        from a list, numpy or a file: their values are kept. A meta tensor was made of Python values inside torch: those
        are lost."""

        def note(value: Any) -> None:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._numbers:
                    if value.device.type == "meta":
                        self.refused = self.refused or f"its constructor gives {op} values that meta does not keep"
                    else:
                        self._constants[self.ref(value).storage] = storage.clone()

        _each(note, arguments)

    def digest(self, targets: Mapping[str, Tensor]) -> str:
        """Equal for constructions that did the same with the same numbers: operations, arguments, constants, and the
        resulting ``targets`` (name -> tensor)."""
        found = hashlib.sha256()
        for line in self.lines(targets):
            found.update(line.encode() + b"\n")
        return found.hexdigest()

    def lines(self, targets: Mapping[str, Tensor]) -> Iterator[str]:
        """The lines that :meth:`digest` hashes, readable in a message: one for each operation, constant and resulting tensor."""
        for entry in self._entries:
            name = described(entry.op) if isinstance(entry.op, types.FunctionType) else str(entry.op)
            yield f"{name} {described((entry.args, entry.kwargs, entry.outputs, entry.default_dtype))}"
        for number, storage in sorted(self._constants.items()):
            yield f"numbers of the constant {number}: {_bytes_as_text(storage)}"
        for name, tensor in targets.items():
            values = "" if tensor.device.type == "meta" else f", numbers {_bytes_as_text(tensor.untyped_storage())}"
            yield f"{name}: {self.ref(tensor)}{values}"

    # ---- replaying -------------------------------------------------------------------------------------------

    def name_draws(self, targets: Mapping[str, Tensor]) -> None:
        """Names every draw: by the first target, in order, that depends on it, and the number of draws before it."""
        for name, tensor in targets.items():
            ordinal = 0
            for index in self._slice(self.ref(tensor).storage):
                if self._entries[index].draws:
                    self._draw_names.setdefault(index, (name, ordinal))
                    ordinal += 1

    def values(self, tensor: Tensor, *, mark: int = 0) -> Tensor:
        """The values of a meta ``tensor`` of this tape, on the CPU. Elements that no operation wrote hold a mark,
        ``mark`` 0 or 1: see :func:`fill_with_sentinel`."""
        target = self.ref(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), forked_rng(0), _same_on_every_rank():
            for index in self._slice(target.storage):
                self._replay(index, storages, mark)
            return self._unpack(target, storages, mark)

    def is_random(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` are another in a run of another seed: a draw that was overwritten does not count."""
        if not self.has_draws(tensor):
            return False
        values, self.seed = self.values(tensor), self.seed + 1
        try:
            return not torch.equal(values, self.values(tensor))
        finally:
            self.seed -= 1

    def has_draws(self, tensor: Tensor) -> bool:
        """Whether a draw has a part in the values of ``tensor``, or had before they were overwritten."""
        return any(self._entries[index].draws for index in self._slice(self.ref(tensor).storage))

    def settled(self, tensor: Tensor) -> Tensor | None:
        """The values of ``tensor`` if they are equal in every construction: written, and not by a draw. Else None."""
        if self.has_draws(tensor):
            return None
        values = self.values(tensor)
        return None if self.num_unwritten(tensor, values) else values

    def num_unwritten(self, tensor: Tensor, values: Tensor) -> int:
        """How many of the ``values`` of ``tensor`` no operation wrote. A written value may look like a mark, but it is
        the same with either mark."""
        always_shows = values.dtype.itemsize > 1
        if values.numel() == 0 or (always_shows and not num_marks(values)):
            return 0
        if not always_shows and not any(
            "empty" in str(self._entries[i].op) for i in self._slice(self.ref(tensor).storage)
        ):
            return 0 if self._writers.get(self.ref(tensor).storage) or tensor.device.type != "meta" else values.numel()
        again = self.values(tensor, mark=1)
        return int(((values != again) & ~((values != values) & (again != again))).sum())

    def _slice(self, storage: int) -> list[int]:
        """Positions of the operations that ``storage`` depends on, in order."""
        kept, needed = [], {storage}
        waiting = [-index for index in self._writers.get(storage, ())]
        heapq.heapify(waiting)
        while waiting:
            index = -heapq.heappop(waiting)
            if kept and kept[-1] == index:
                continue
            kept.append(index)
            for read in self._entries[index].reads - needed:
                needed.add(read)
                writers = self._writers.get(read, [])
                for earlier in writers[: bisect.bisect_left(writers, index)]:
                    heapq.heappush(waiting, -earlier)
        return kept[::-1]

    def _replay(self, index: int, storages: dict[int, torch.UntypedStorage], mark: int) -> None:
        entry = self._entries[index]
        args, kwargs = _each(
            lambda x: self._unpack(x, storages, mark) if isinstance(x, _Ref) else _on_cpu(x), (entry.args, entry.kwargs)
        )
        if entry.draws:
            place = self._draw_names.get(index, ("?", index))
            torch.default_generator.manual_seed(derive_seed(self.seed, "init", *place))
        if torch.get_default_dtype() != entry.default_dtype:
            torch.set_default_dtype(entry.default_dtype)
        result = entry.op(*args, **kwargs)
        if not entry.outputs:
            return
        outputs = result if isinstance(result, tuple | list) else (result,)
        for ref, value in zip(entry.outputs, outputs, strict=True):
            if ref is not None and isinstance(value, Tensor) and ref.storage not in storages:
                if "empty" in entry.op._schema.name:
                    fill_with_sentinel(value, mark)
                storages[ref.storage] = _storage_like(ref, value)

    def _unpack(self, ref: _Ref, storages: dict[int, torch.UntypedStorage], mark: int) -> Tensor:
        if ref.storage not in storages:
            storages[ref.storage] = self._untouched(ref, mark)
        view = torch.empty(0, dtype=ref.dtype, device="cpu")
        return view.set_(storages[ref.storage], ref.offset, ref.size, ref.stride)

    def _untouched(self, ref: _Ref, mark: int) -> torch.UntypedStorage:
        """A storage that no operation made: a constant, or a real tensor that no operation used."""
        if ref.storage in self._constants:
            return self._constants[ref.storage].clone()
        if self._alive[ref.storage].device.type != "meta":
            return self._alive[ref.storage].clone()
        return fill_with_sentinel(
            torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device="cpu"), mark
        ).untyped_storage()

    def record_init(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Records a whole call of an initialiser that does nothing on meta, because it reads values on its way."""
        known = inspect.signature(function).parameters
        packed = {name: self._pack(value) for name, value in arguments.items() if name in known}
        touched = frozenset(ref.storage for ref in _refs(packed))
        self._write(function, (), packed, touched, touched, (), draws=True)


def is_draw(op: Any) -> bool:
    """Whether ``op`` draws random numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """The arguments of an operation, with ``function(leaf)`` in place of each: they are in tuples, lists and dicts only, of which
    torch's functions for any container take several times as long."""
    if isinstance(value, tuple):
        return tuple([_each(function, item) for item in value])
    if isinstance(value, list):
        return [_each(function, item) for item in value]
    if isinstance(value, dict):
        return {key: _each(function, item) for key, item in value.items()}
    return function(value)


def _refs(value: Any) -> list[_Ref]:
    found: list[_Ref] = []
    _each(lambda x: found.append(x) if isinstance(x, _Ref) else None, value)
    return found


def _changed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Ref]:
    """The arguments that ``op`` writes, by its schema."""
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


def _bytes_as_text(storage: torch.UntypedStorage) -> str:
    """A text of the bytes of a storage, or of their digest, which differs where they do."""
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()  # type: ignore[call-overload]
    return data.hex() if len(data) <= 64 else f"of the digest {hashlib.sha256(data).hexdigest()}"


@contextlib.contextmanager
def _same_on_every_rank() -> Iterator[None]:
    """Context manager: one thread, since the number of threads differs by machine and changes the last bits of a QR or
    a sum; and a default dtype that a replay sets for each operation. Both are restored afterwards."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)
