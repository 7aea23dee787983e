"""Large pages for memory that is about to be written completely.

The system provides new memory page by page, and the time depends on the number of pages: one large page replaces 512
small ones. On most systems Linux gives them to programs that ask (madvise(2), MADV_HUGEPAGE; its documentation on
transparent huge pages).
"""

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

_LARGE = 2 << 20  # bytes; a shorter range has no room for a large page
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def in_large_pages(tensors: Iterable[Tensor]) -> None:
    """Asks for large pages for plain CPU tensors that nothing has written yet; others are left alone, and all of them
    on a system without large pages. Values and addresses stay.

    Only for memory that will be written completely: a large page takes all of its memory with the first byte.
    """
    if _ADVICE is None:
        return
    for begin, end in _stretches(tensors):
        if end - begin >= _LARGE:
            # It may be refused (no large pages here, unmapped memory between two tensors): the pages stay small then.
            _madvise()(begin, end - begin, _ADVICE)


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor on the CPU in large pages, to be written completely."""
    tensor = torch.empty(shape, dtype=dtype)
    in_large_pages([tensor])
    return tensor


def _stretches(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address ranges in whole pages; neighbours are joined, as a large page may lie under several tensors."""
    plain = (t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided)
    memory = [t.untyped_storage() for t in plain if t.device.type == "cpu"]
    page = mmap.PAGESIZE
    found: list[tuple[int, int]] = []
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in memory):
        begin, end = start // page * page, -(-(start + size) // page) * page
        if found and begin <= found[-1][1] + page:  # between them is only malloc's own data
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif size:
            found.append((begin, end))
    return found


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
