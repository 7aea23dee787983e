"""Whatever stretches ranks write, in whatever order: the file has the bytes, and the sums are those of its blocks."""

import itertools
import os
import random

import numpy as np
import pytest
import torch

from shardwise.state.checkpoint import writer
from shardwise.state.checkpoint.writer import WINDOW, BlockWriter, memory_in_line
from shardwise.state.integrity.sums import BLOCK, Sums, block_sizes, put_together, sum_of


def cut(rng: random.Random, size: int, pieces: int) -> list[tuple[int, int]]:
    ends = sorted({0, size, *(rng.randrange(size) for _ in range(pieces))})
    return list(itertools.pairwise(ends))


# Sizes, and in how many places they are cut: stretches of many blocks with ragged ends as well as many in one block.
CUTS = [(1, 0), (4095, 400), (BLOCK, 40), (3 * BLOCK + 17, 3), (WINDOW + 5, 12), (2 * WINDOW + BLOCK // 2, 40)]


@pytest.mark.combinations("values")
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("seed", range(12))
def test_the_parts_of_ranks_add_up(tmp_path, monkeypatch, seed, direct):
    rng = random.Random(seed)
    if not direct:
        monkeypatch.setattr(writer.os, "O_DIRECT", 1 << 30)  # a flag that no file system takes
    size, num_cuts = CUTS[seed // 2]
    data = rng.randbytes(size)
    path = tmp_path / "file"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    stretches = cut(rng, size, num_cuts)
    if seed // 2 % 2:
        rng.shuffle(stretches)
    # Odd seeds: in memory that lies as the file does, from which whole blocks are written without a window.
    large = torch.empty(max(size, BLOCK), dtype=torch.uint8)
    where = (memory_in_line(large, 0) if seed % 2 else large)[:size].numpy()
    where[:] = np.frombuffer(data, np.uint8)
    told = []
    for rank in range(3):
        sums = Sums()
        with BlockWriter(sums) as out:
            for _ in range(2):  # its windows are used again, with other bytes in them
                with out.file(path, "other", size):
                    out.write(0, memoryview(rng.randbytes(size)))
            sums = out._sums = Sums()
            with out.file(path, "file", size):
                for number, (begin, end) in enumerate(stretches):
                    if number % 3 == rank:
                        out.write(begin, where.data[begin:end])
        told.append(sums.partial_sums())
        # The file is what ranks before and this one have written; what others will is not there yet.
        content = path.read_bytes()
        for number, (begin, end) in enumerate(stretches):
            assert number % 3 != rank or content[begin:end] == data[begin:end]
    whole = put_together({"file": size}, told)["file"]
    begins = range(0, size, BLOCK)
    assert [int(found) for found in whole] == [sum_of(data[begin : begin + BLOCK]) for begin in begins]
    assert [len(data[begin : begin + BLOCK]) for begin in begins] == block_sizes(size)


@pytest.mark.parametrize("offset", [0, 5 * 4096, BLOCK - 64, 12345 * 4])
def test_memory_in_line_needs_no_window_for_whole_blocks(tmp_path, monkeypatch, offset):
    values = memory_in_line(torch.empty(3 * WINDOW // 4, dtype=torch.float32), offset)
    values.copy_(torch.arange(len(values)))
    size, put = offset + 4 * len(values), []
    real = writer._Window.put
    monkeypatch.setattr(
        writer._Window, "put", lambda self, begin, part, *rest: (put.append(len(part)), real(self, begin, part, *rest))
    )
    (tmp_path / "file").write_bytes(bytes(size))
    sums = Sums()
    with BlockWriter(sums) as out, out.file(tmp_path / "file", "file", size):
        out.write(offset, values.numpy().view(np.uint8).data)
    assert sum(put) < 2 * BLOCK
    assert (tmp_path / "file").read_bytes()[offset:] == values.numpy().tobytes()
