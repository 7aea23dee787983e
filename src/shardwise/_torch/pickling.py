"""Pickles tensors by the bytes of their memory. Torch makes an archive for each, which takes several times as long to write and
to read."""

import copyreg
import ctypes
import io
import pickle
from collections import ChainMap
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage


def dumps(value: Any) -> bytes:
    """``pickle.dumps``, with tensors as bytes; ``pickle.loads`` reads it."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    own: dict[type, Any] = {TypedStorage: _of_typed, UntypedStorage: _of_untyped}
    pickler.dispatch_table = ChainMap(own, copyreg.dispatch_table)
    pickler.dump(value)
    return file.getvalue()


def _of_typed(storage: TypedStorage) -> Any:
    return _typed, (storage._untyped_storage, storage.dtype)


def _typed(memory: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def _of_untyped(memory: UntypedStorage) -> Any:
    if memory.device.type != "cpu":
        return memory.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _untyped, (ctypes.string_at(memory.data_ptr(), memory.nbytes()),)


def _untyped(data: bytes) -> UntypedStorage:
    memory = UntypedStorage(len(data))
    ctypes.memmove(memory.data_ptr(), data, len(data))
    return memory
