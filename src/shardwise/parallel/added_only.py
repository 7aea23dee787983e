"""Shows what the forwards of a window do with buffers, in their operators: whether they only add to those of the policy "sum", and whether
what they compute depends on a range or a mean that they write.

A buffer that a forward sets anew has the values of the last micro-batch, and one that it reads has other values on each rank: neither is
a sum of what the ranks have added.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise._torch.autograd import TorchDispatchMode
from shardwise._torch.pytrees import tree_flatten

_ADDS = frozenset({
    "add", "add_", "sub", "sub_", "index_add", "index_add_", "scatter_add", "scatter_add_", "addcmul", "addcmul_",
    "addcdiv", "addcdiv_", "_foreach_add_", "__iadd__",
})  # fmt: skip
_ADDS_PRODUCTS = frozenset(
    f"{word}{end}" for word in ("addmm", "addmv", "addr", "addbmm", "baddbmm") for end in ("", "_")
)  # beta times the buffer, plus a product
_KEEPS = frozenset({
    "clone", "detach", "_to_copy", "alias", "view", "contiguous", "expand", "select", "slice", "index", "index_select",
    "gather",
})  # fmt: skip
_PUTS = frozenset(
    {"copy_", "index_put_", "index_copy_", "scatter_", "masked_scatter_", "select_scatter", "slice_scatter"}
)
_HOST_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})  # methods that are no operators
_SHAPES = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full", "rand_like",
})  # fmt: skip


class AddedOnly(TorchDispatchMode):
    """Context manager: within, what is done with some buffers is noted."""

    supports_higher_order_operators = True

    def __init__(self, buffers: Mapping[str, Tensor]):
        super().__init__()
        self._homes: dict[int, tuple[str, Tensor]] = {}  # address of memory -> whose value plus something is there
        self._wrong: dict[str, str] = {}  # name -> what was done with it
        for name, buffer in buffers.items():
            self._note(name, buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        held = [name for leaf in leaves if isinstance(leaf, Tensor) and (name := self._name_of(leaf)) is not None]
        output = func(*args, **kwargs)
        for name in dict.fromkeys(held):
            self._look(name, func, args, kwargs, output)
        return output

    def wrong_use(self, buffers: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """The name of one of the buffers, as they are now, that was set anew or read, and what was done; None: there is none."""
        for name, buffer in buffers.items():
            if self._name_of(buffer) != name:
                self._wrong.setdefault(name, "replaces it by another tensor")
        return next(iter(self._wrong.items()), None)

    def note_read(self, tensor: Tensor, word: str) -> None:
        """Called for a tensor that is read without an operator."""
        if (name := self._name_of(tensor)) is not None:
            self._wrong.setdefault(name, f"reads it ({word})")

    def _look(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        word = _word(func)
        targets = _written(func, args, kwargs)
        is_sum = word in _ADDS or (word in _ADDS_PRODUCTS and kwargs.get("beta", 1) == 1)
        if is_sum and not self._is_one_term(name, word, args, kwargs):
            self._wrong.setdefault(name, f"adds what it has computed with it ({word})")
        elif not targets:
            if is_sum or word in _KEEPS or getattr(func, "is_view", False):
                for made in _tensors(output):
                    self._note(name, made)
            elif word not in _SHAPES:
                self._wrong.setdefault(name, f"computes with it ({word})")
        elif not any(self._name_of(target) == name for target in targets):
            self._wrong.setdefault(name, f"computes with it ({word})")
        elif not is_sum and not (word in _PUTS and self._is_put(name, word, args)):
            self._wrong.setdefault(name, f"sets it anew ({word})")

    def _is_one_term(self, name: str, word: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the buffer is one term of a sum, with its own sign and size: nothing else in the sum is made of it."""
        own = [leaf for leaf in _tensors((args, dict(kwargs))) if self._name_of(leaf) == name]
        is_first = any(self._name_of(leaf) == name for leaf in _tensors(args[:1]))
        return len(own) == 1 and (is_first or (word == "add" and kwargs.get("alpha", 1) == 1))

    def _is_put(self, name: str, word: str, args: Sequence[Any]) -> bool:
        """Whether what is written into a part of the buffer is its own value plus something, or is added."""
        if word == "index_put_" and len(args) > 3 and args[3]:
            return True
        return any(self._name_of(source) == name for source in _tensors(args[1:]))

    def _name_of(self, tensor: Tensor) -> str | None:
        found = self._homes.get(_address(tensor))
        return None if found is None else found[0]

    def _note(self, name: str, tensor: Tensor) -> None:
        self._homes.setdefault(_address(tensor), (name, tensor))  # alive, so that its memory is not another's later


class ReadWhereWritten(TorchDispatchMode):
    """Context manager: within, shows the buffers that forwards write, and that results depend on: what is made of them meets a tensor with a
    gradient, or is read as a number."""

    supports_higher_order_operators = True

    def __init__(self, buffers: Mapping[str, Tensor]):
        super().__init__()
        self._homes = {_address(buffer): name for name, buffer in buffers.items()}
        self._made_of = {_address(buffer): (frozenset([name]), buffer) for name, buffer in buffers.items()}
        self._read: set[str] = set()
        self._written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        names = self._names_in(given)
        output = func(*args, **kwargs)
        targets = _written(func, args, kwargs)
        self._written.update(self._homes[at] for target in targets if (at := _address(target)) in self._homes)
        if names:
            if _word(func) == "_local_scalar_dense":
                self.note_read(given[0], "item")
            elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
                self._read |= names
            for made in (*_tensors(output), *targets):
                self._made_of[_address(made)] = (
                    self._names_in([made]) | names,
                    made,
                )  # alive: its memory is not another's
        return output

    def found(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """The names of those that were both written, or replaced, and read. ``buffers``: as they are now."""
        written = {n for n, b in buffers.items() if self._homes.get(_address(b)) != n} | self._written
        return sorted(written & self._read)

    def note_read(self, tensor: Tensor, word: str) -> None:
        """Called for a tensor that is read without an operator."""
        if tensor.dtype != torch.bool:
            self._read |= self._names_in([tensor])

    def _names_in(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        held = (self._made_of.get(_address(tensor)) for tensor in tensors)
        return frozenset().union(*(each[0] for each in held if each is not None))


class HostReads(TorchFunctionMode):
    """Context manager: within, watches note tensors that are read without an operator, as by ``tolist()``."""

    def __init__(self, watches: Sequence[AddedOnly | ReadWhereWritten]):
        super().__init__()
        self._watches = watches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (word := getattr(func, "__name__", "")) in _HOST_READS:
            for watch in self._watches:
                watch.note_read(args[0], word)
        return func(*args, **(kwargs or {}))


def _word(func: Any) -> str:
    """The name of an operator, without its overload."""
    packet = getattr(func, "overloadpacket", None)
    return str(func) if packet is None else packet.__name__


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return id(tensor)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    schema = getattr(func, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return found
