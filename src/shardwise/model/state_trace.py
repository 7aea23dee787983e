"""Notes, while a module's own methods run, what each tensor is made of; they may run without values."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.model.pytrees import leaves_of
from shardwise.model.tensors import version_of


class NeedsValuesError(BaseException):
    """A method looked at values of tensors that have none. Not an Exception: the method must not catch it."""

    def __init__(self, names: frozenset[str]):
        super().__init__(names)
        self.names = names


class StateTrace(TorchFunctionMode):
    """Within: notes what each tensor is made of, by the storage that it is in.

    Args:
        given: name -> tensor, of those that others are made of.
        foreign: storages that no function may use.
    """

    def __init__(self, given: Mapping[str, Tensor], foreign: set[int]):
        super().__init__()
        self._foreign = foreign
        self._kept: list[Any] = [*given.values()]  # alive, so that no storage is another's later
        self._given = {storage_key(t): (name, _layout(t)) for name, t in reversed(list(given.items()))}
        self._made_of = {key: frozenset([name]) for key, (name, _) in self._given.items()}
        self._copied: dict[int, Tensor] = {}  # a storage that was written whole -> the tensor that was copied to it
        self._written: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in leaves_of([args, kwargs]) if isinstance(x, Tensor)]
        for tensor in given:
            self.refuse_foreign(tensor)
        made_of = frozenset().union(*map(self.made_of, given))
        versions = list(map(version_of, given))
        try:
            found = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if made_of and any(tensor.is_meta for tensor in given):
                raise NeedsValuesError(made_of) from error
            raise
        for tensor, version in zip(given, versions, strict=True):
            if version_of(tensor) != version:
                self._note_written(tensor, made_of, _source(args, kwargs) if func is Tensor.copy_ else None)
        for tensor in leaves_of(found):
            if isinstance(tensor, Tensor):
                self._kept.append(tensor)
                self._made_of.setdefault(storage_key(tensor), made_of)
        return found

    def _note_written(self, tensor: Tensor, made_of: frozenset[str], copied: Tensor | None) -> None:
        key = storage_key(tensor)
        self._written.add(key)
        self._copied.pop(key, None)
        if copied is not None and copied.shape == tensor.shape and self._is_whole(tensor):
            self._made_of[key], self._copied[key] = self.made_of(copied), copied
        else:
            self._made_of[key] = self._made_of.get(key, frozenset()) | made_of

    def _is_whole(self, tensor: Tensor) -> bool:
        """Whether it is all of the memory that it is in, in the order of the given tensor there: not that one's transpose."""
        _, whole = self._given.get(storage_key(tensor), ("", _layout(tensor)))
        return tensor.nbytes == tensor.untyped_storage().nbytes() and _layout(tensor) == whole

    def made_of(self, tensor: Tensor) -> frozenset[str]:
        return self._made_of.get(storage_key(tensor), frozenset())

    def was_written(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._written

    def copied_from(self, tensor: Tensor) -> Tensor | None:
        return self._copied.get(storage_key(tensor))

    def origin(self, tensor: Tensor) -> str | None:
        """The name of the given tensor that ``tensor`` is all of, in its order, unless it was written."""
        name, whole = self._given.get(storage_key(tensor), (None, None))
        return name if _layout(tensor) == whole and not self.was_written(tensor) else None

    def is_in_place(self, name: str, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in the memory of the given tensor of that name, and not, by ``data =`` or ``set_``, in another."""
        return self._given.get(storage_key(tensor), (None, None))[0] == name

    def refuse_foreign(self, tensor: Tensor) -> None:
        if storage_key(tensor) in self._foreign:
            raise RuntimeError("it uses a tensor of the module by itself, not through the module that it is given")


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """What its elements are of the memory that it is in: equal for two tensors in one memory, so are their values."""
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _source(args: Any, kwargs: Any) -> Any:
    """What ``copy_`` is given; None: no tensor."""
    source = args[1] if len(args) > 1 else kwargs.get("other")
    return source if isinstance(source, Tensor) else None


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
