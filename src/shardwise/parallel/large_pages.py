"""Large pages under memory that is about to be written from end to end.

New memory comes from the system a page at a time, and the time goes by the number of pages: one large page stands for 512
small ones. Linux gives them, on most systems, to those who ask (madvise(2), MADV_HUGEPAGE; its documentation on transparent
huge pages).
"""

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["empty_in_large_pages", "in_large_pages"]

_LARGE = 2 << 20  # bytes; what is shorter has no room for one
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone


def in_large_pages(tensors: Iterable[Tensor]) -> None:
    """Asks for large pages under plain CPU tensors that nothing was written to so far; others are left alone, and all of them
    on a system that has none. Values and addresses stay.

    Only for what will be written whole: a large page takes all of its memory with the first byte.
    """
    if _ADVICE is None:
        return
    for begin, end in _stretches(tensors):
        if end - begin >= _LARGE:
            # It may be refused (no large pages here, something between two tensors is not mapped): they stay small then.
            _madvise()(begin, end - begin, _ADVICE)


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New memory on the CPU, to be written whole."""
    tensor = torch.empty(shape, dtype=dtype)
    in_large_pages([tensor])
    return tensor


def _stretches(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """First address and the one after the last, in whole pages: neighbours as one, as a large page may lie under several."""
    plain = (t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided)
    memory = [t.untyped_storage() for t in plain if t.device.type == "cpu"]
    page = mmap.PAGESIZE
    found: list[tuple[int, int]] = []
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in memory):
        begin, end = start // page * page, -(-(start + size) // page) * page
        if found and begin <= found[-1][1] + page:  # between them is no more than malloc's own words
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif size:
            found.append((begin, end))
    return found


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
