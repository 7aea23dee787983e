"""Checksums of a file's blocks, combined from those of the parts that each rank has written.

CRC-32C is affine over xor: the checksum of a block, xor that of as many zeros, is the xor of the same for each rank's
part of the block, with zeros in place of all that the rank does not write. So each rank sums what it writes, in any
order and divided anywhere, and no file is read again. The polynomial is Castagnoli's (IEEE Trans. Comm. 41(6), 1993;
RFC 3720): it finds every burst of up to 32 bits, every odd number of flipped bits, and all but one in 2**32 of other
damage.
"""

import functools
from collections.abc import Iterable, Mapping

import numpy as np
from crc32c import crc32c as sum_of

BLOCK = 256 << 10  # bytes: the least that is read to verify one byte
PartialSums = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""File -> the numbers of blocks (uint32) and the partial checksum of each (uint32)."""


@functools.lru_cache(maxsize=64)
def _sum_of_zeros(num_bytes: int) -> int:
    return sum_of(bytes(num_bytes))


class Sums:
    """The partial checksums of the blocks that one rank has written."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, int]] = {}

    def add(self, file: str, block: int, image: memoryview | bytes) -> None:
        """Adds a part of a block. ``image``: the block, with zeros outside this part. May be called several times per
        block."""
        found = self._found.setdefault(file, {})
        found[block] = found.get(block, 0) ^ sum_of(image) ^ _sum_of_zeros(len(image))

    def add_part(self, file: str, size: int, offset: int, memory: memoryview) -> None:
        """Adds ``memory``, which is at ``offset`` of a file of ``size`` bytes."""
        position = 0
        while position < len(memory):
            block, inside = divmod(offset + position, BLOCK)
            part = memory[position : position + BLOCK - inside]
            whole = min(BLOCK, size - block * BLOCK)
            self.add(
                file,
                block,
                part if len(part) == whole else bytes(inside) + part.tobytes() + bytes(whole - inside - len(part)),
            )
            position += len(part)

    def partial_sums(self) -> PartialSums:
        """The partial checksums as arrays, for the rank that combines those of all."""
        return {
            file: (np.fromiter(found, np.uint32, len(found)), np.fromiter(found.values(), np.uint32, len(found)))
            for file, found in self._found.items()
        }


def put_together(sizes: Mapping[str, int], told: Iterable[PartialSums]) -> dict[str, np.ndarray]:
    """Combines the ranks' partial checksums: file -> checksum (uint32) of each of its blocks.

    Args:
        told: :meth:`Sums.partial_sums` of every rank that wrote.
    """
    zeros = {file: [_sum_of_zeros(size) for size in block_sizes(size)] for file, size in sizes.items()}
    totals = {file: np.array(sums, dtype=np.uint32) for file, sums in zeros.items()}
    for found in told:
        for file, (blocks, values) in found.items():
            totals[file][blocks] ^= values
    return totals


def block_sizes(num_bytes: int) -> list[int]:
    """Sizes of a file's blocks: all equal except for the last."""
    whole, rest = divmod(num_bytes, BLOCK)
    return [BLOCK] * whole + ([rest] if rest else [])
