"""Measures, in one run of a block under ``torch.utils.checkpoint``, what plain autograd would keep of it and what each
call of an operator takes: bytes as they are, costs from shapes, so that all ranks and later runs come to the same."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import flop_registry

from shardwise._torch.autograd import TorchDispatchMode, hooks_of_saved_tensors
from shardwise._torch.pytrees import tree_flatten
from shardwise.techniques.remat.choice import Call, Measured
from shardwise.techniques.remat.operators import always_kept, draws, is_attention, is_unsafe

_FLOPS_PER_BYTE = 100
"""What moving a byte costs, in floating-point operations: between the ratios of CPUs (some 20) and of GPUs (A100 in bf16:
312 TFLOP/s to 2.0 TB/s)."""


class Measurement:
    """Of one run of a block.

    Args:
        is_named: whether the user's options name an operator, of which results are kept.
        inputs: the tensors that the block was given.
        seen: address -> memory that blocks before it were given; it is added to.
    """

    def __init__(self, is_named: Callable[[Any], bool], inputs: Sequence[Tensor], seen: dict[int, StorageWeakRef]):
        self._is_named = is_named
        self._calls: list[Call] = []
        self._made: dict[int, tuple[int, StorageWeakRef]] = {}  # address of memory -> the call that took it
        self._changed: set[int] = set()  # calls whose results are changed in place
        self._num_of: Counter[str] = Counter()
        self._kept: dict[tuple[int, int], int] = {}  # (call, address) that autograd keeps -> bytes; call -1: an input
        self._is_unsafe = False  # no single result can be kept
        self._num_needed = 0  # calls that came before the last tensor that autograd keeps
        self._inputs = {}
        for tensor in inputs:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in seen and not seen[address].expired():
                continue
            seen[address] = StorageWeakRef(storage)
            self._inputs[address] = storage.nbytes()

    def result(self) -> Measured:
        """What was seen, when the run is over."""
        calls = [
            _unkept(call) if self._is_unsafe or i in self._changed else call
            for i, call in enumerate(self._calls[: self._num_needed])
        ]
        return Measured(tuple(calls), sum(self._kept.values()), sum(self._inputs.values()))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within: operators and what autograd keeps are noted. The hooks that ``checkpoint`` has set go on working."""
        hooks = hooks_of_saved_tensors()
        assert hooks is not None, "called inside of torch.utils.checkpoint, which sets hooks"
        pack, unpack = hooks

        def pack_noted(tensor: Tensor) -> Any:
            self._keeps(tensor)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack_noted, unpack), _Calls(self._called):
            yield

    def _keeps(self, tensor: Tensor) -> None:
        self._num_needed = len(self._calls)
        address, num_bytes = _memory(tensor)
        if address in self._inputs:
            self._kept[-1, address] = num_bytes
        elif (call := self._maker(address)) is not None:
            self._kept[call, address] = num_bytes

    def _maker(self, address: int) -> int | None:
        """The call that took this memory; None: none did, or what it took is gone, and others have the address now."""
        call, memory = self._made.get(address, (None, None))
        return None if memory is None or memory.expired() else call

    def _called(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if op in SAC_IGNORED_OPS:
            return
        given = dict(_memory(tensor) for tensor in _tensors((args, kwargs)))
        results = _tensors(result)
        fresh = {at: size for at, size in map(_memory, results) if at not in given}
        place, name = len(self._calls), str(op)
        self._is_unsafe |= is_unsafe(op)
        for address in _written(op, args, kwargs) if op._schema.is_mutable else ():
            if (call := self._maker(address)) is not None:
                self._changed.add(call)
        can_be_kept = bool(fresh) and not (
            op._schema.is_mutable
            or any(type(tensor) is not Tensor for tensor in results)
            or any(_memory(tensor)[0] in given for tensor in results)
            or draws(op, args, kwargs)
        )
        self._calls.append(
            Call(
                name,
                self._num_of[name],
                sum(fresh.values()),
                cost_of(op, args, kwargs, result),
                can_be_kept,
                self._is_named(op),
                always_kept(op, args, kwargs),
            )
        )
        self._num_of[name] += 1
        self._made |= {
            _memory(tensor)[0]: (place, StorageWeakRef(tensor.untyped_storage()))
            for tensor in results
            if type(tensor) is Tensor and _memory(tensor)[0] in fresh
        }


class _Calls(TorchDispatchMode):
    """Calls ``note(op, args, kwargs, result)`` after each operator."""

    def __init__(self, note: Callable[..., None]):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result


def cost_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Of one call, in floating-point operations: its own, as ``torch.utils.flop_counter`` counts them, and
    ``_FLOPS_PER_BYTE`` for each byte that it reads or writes. 0 for a view."""
    given, results = _tensors((args, kwargs)), _tensors(result)
    read, written = dict(map(_memory, given)), dict(map(_memory, results))
    if not op._schema.is_mutable and written.keys() <= read.keys():
        return 0
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *results))
    count = flop_registry.get(op._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=result)) + _FLOPS_PER_BYTE * moved
    if is_attention(op) and len(given) > 1:
        query, key = given[0], given[1]
        return 4 * query.numel() * key.shape[-2] + _FLOPS_PER_BYTE * moved
    return _FLOPS_PER_BYTE * moved


def _unkept(call: Call) -> Call:
    return Call(call.operator, call.nth, call.num_bytes, call.cost, False, call.is_named, call.is_always_kept)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the memory behind a tensor. A tensor without memory of its own (a subclass) counts for
    itself."""
    try:
        storage = tensor.untyped_storage()
        if address := storage.data_ptr():
            return address, storage.nbytes()
    except (RuntimeError, NotImplementedError):
        pass
    return id(tensor), tensor.numel() * tensor.element_size()


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Addresses of the memory that a call changes in place."""
    found = []
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [_memory(tensor)[0] for tensor in _tensors(value)]
    return found
