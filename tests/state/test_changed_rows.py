"""Rows added to a stored table: every box of it has the bits of the whole."""

import pytest
import torch

from shardwise.recipe.boxes import Box, index_of
from shardwise.state.changed_rows import GrownTable, with_added_rows
from shardwise.state.files import OpenFiles
from shardwise.state.stored import InMemoryTensor


def table(rows, dtype, *columns):
    return InMemoryTensor.of(torch.randn(rows, *columns, generator=torch.Generator().manual_seed(rows)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 255, 256, 700])
def test_every_box_has_the_bits_of_the_whole(rows, dtype):
    stored, shape = table(rows, dtype, 37), (rows + 5, 37)
    with OpenFiles() as files:
        whole = with_added_rows(stored, shape, (rows, rows + 5)).load(files)
        assert torch.equal(whole[:rows], stored.tensor) and len({tuple(row.tolist()) for row in whole[rows:]}) == 1
        torch.testing.assert_close(whole[-1].double(), stored.tensor.double().mean(0), rtol=2e-2, atol=1e-3)
        for first, num, column, width in (
            (0, rows + 5, 3, 1),
            (rows - 1, 4, 30, 7),
            (rows, 5, 0, 37),
            (rows + 4, 1, 1, 17),
            (2, 0, 0, 37),
        ):
            box = Box((first, column), (num, width))
            assert torch.equal(with_added_rows(stored, shape, (rows, rows + 5)).load(files, box), whole[index_of(box)])
        bias = table(rows, dtype)
        assert torch.equal(with_added_rows(bias, (rows + 2,), (rows, rows + 2)).load(files)[:rows], bias.tensor)


def test_the_mean_is_rounded_once():
    """In float64, then to the dtype of the model: by way of bfloat16 it would be rounded twice."""
    stored, out = table(300, torch.bfloat16, 8), torch.empty(1, 8)
    with OpenFiles() as files:
        with_added_rows(stored, (301, 8), (300, 301)).read(Box((300, 0), (1, 8)), out, files)
    torch.testing.assert_close(out[0].double(), stored.tensor.double().mean(0), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "rows"), [((8, 4), None), ((9, 4), (7, 9)), ((9, 5), (8, 9)), ((10, 4), (8, 9)), ((8, 4), (8, 9))]
)
def test_what_is_no_table_of_the_vocabulary_stays_as_it_is(shape, rows):
    stored = table(8, torch.float32, 4)
    assert with_added_rows(stored, shape, rows) is stored
    counts = InMemoryTensor.of(torch.zeros(8, 4, dtype=torch.int8))
    assert with_added_rows(counts, (9, 4), (8, 9)) is counts
    assert isinstance(with_added_rows(stored, (9, 4), (8, 9)), GrownTable)
