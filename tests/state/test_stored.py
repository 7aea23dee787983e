"""Any box of any tensor, in however many chunks and files, is what torch's slicing gives."""

import itertools
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.recipe.boxes import Box, blocks, common, index_of, row_strides, runs, whole
from shardwise.state import stored as stored_module
from shardwise.state.files import OpenFiles, Record
from shardwise.state.stored import Chunk, FileTensor, InMemoryTensor, compare_sums

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.complex64])


@st.composite
def boxes_of(draw, shape):
    """A box within ``shape``, perhaps an empty one."""
    spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def boxes(draw):
    shape = draw(shapes)
    return shape, draw(boxes_of(shape))


def positions(box: Box, shape: tuple[int, ...]) -> list[int]:
    numel = whole(shape).numel
    return torch.arange(numel).view(shape)[index_of(box)].reshape(-1).tolist() if numel else []


@given(boxes())
def test_runs_are_the_elements_in_order_and_as_long_as_they_can_be(case):
    shape, box = case
    found = list(runs(box, shape))
    assert [i for start, length in found for i in range(start, start + length)] == positions(box, shape)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found))


@given(boxes(), st.integers(1, 40))
def test_blocks_tile_a_box_in_order(case, max_numel):
    shape, box = case
    parts = list(blocks(box, max_numel))
    assert [i for part in parts for i in positions(part, shape)] == positions(box, shape)
    assert all(0 < part.numel <= max_numel for part in parts)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape))))
def test_common_is_the_intersection(case):
    shape, a, b = case
    both = common(a, b)
    wanted = set(positions(a, shape)) & set(positions(b, shape))
    assert set(positions(both, shape) if both is not None else []) == wanted


def tiles(draw, box: Box) -> list[Box]:
    """``box`` cut at random places along random dims."""
    wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not wide or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(wide))
    cut = draw(st.integers(1, box.sizes[dim] - 1))
    parts = []
    for start, size in ((0, cut), (cut, box.sizes[dim] - cut)):
        starts, sizes = list(box.starts), list(box.sizes)
        starts[dim], sizes[dim] = starts[dim] + start, size
        parts += tiles(draw, Box(tuple(starts), tuple(sizes)))
    return parts


@st.composite
def stored_tensors(draw):
    """A tensor, and how it is cut into chunks, each with its file, a gap before it, and the order of its dims there."""
    shape = draw(shapes)
    chunks = tiles(draw, whole(shape)) if whole(shape).numel else []
    placed = [
        (
            box,
            draw(st.integers(0, 2)),
            draw(st.integers(0, 9)),
            draw(st.permutations(range(len(shape)))),
            draw(st.integers(1, 3)),
        )
        for box in chunks
    ]
    return shape, draw(dtypes), placed


def write(folder: Path, tensor: torch.Tensor, placed) -> FileTensor:
    files = [bytearray(b"x" * 3) for _ in range(3)]
    chunks = []
    for box, number, gap, order, step in placed:
        part = tensor[index_of(box)]
        files[number] += b"\xa5" * gap
        offset = len(files[number])
        # The chunk with its dims in another order, and, for a step above 1, only every step-th of the last of them.
        turned = part.permute(order) if order else part
        spread = turned.repeat_interleave(step, -1) if order else turned
        files[number] += bytes(spread.contiguous().reshape(-1).view(torch.uint8).tolist())
        own = row_strides(tuple(spread.shape))
        strides = [0] * len(order)
        for at, dim in enumerate(order):
            strides[dim] = own[at] * (step if at == len(order) - 1 else 1)
        in_rows = tuple(strides) == row_strides(box.sizes)
        chunks.append(Chunk(box, folder / str(number), (0, 0, 0), offset, None if in_rows else tuple(strides)))
    for number, data in enumerate(files):
        (folder / str(number)).write_bytes(data)
    return FileTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(chunks))


@settings(max_examples=400)
@given(
    st.data(),
    stored_tensors(),
    st.booleans(),
    st.sampled_from([None, torch.float64, torch.float32]),
    st.integers(1, 200),
)
def test_any_box_of_any_chunks_is_what_slicing_gives(tmp_path_factory, data, case, spread_out, out_dtype, buffer):
    shape, dtype, placed = case
    folder = tmp_path_factory.getbasetemp() / "stored"
    folder.mkdir(exist_ok=True)
    numel = whole(shape).numel
    tensor = (torch.arange(numel) % 251).to(dtype).view(shape)
    stored = write(folder, tensor, placed)
    box = data.draw(boxes_of(shape))
    out_dtype = dtype if out_dtype is None or dtype.is_complex else out_dtype
    out = torch.full(box.sizes, 77, dtype=out_dtype)
    if spread_out and box.sizes:  # a view into a larger tensor, as a shard in a flat buffer is
        out = torch.full((*box.sizes, 2), 77, dtype=out_dtype)[..., 1].transpose(0, -1).contiguous().transpose(0, -1)
    with (
        patch.object(stored_module, "BUFFER", buffer * 16),
        patch.object(stored_module, "SHORT_RUN", buffer),
        OpenFiles() as files,
    ):
        stored.read(box, out, files)
        held = torch.empty(box.sizes, dtype=dtype)
        InMemoryTensor.of(tensor).read(box, held, files)
    assert torch.equal(out, tensor[index_of(box)].to(out_dtype))
    assert torch.equal(held, tensor[index_of(box)])


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 8))
def test_ranks_share_the_records_to_compare_by_their_bytes(sizes, num_ranks):
    ends = list(itertools.accumulate(sizes))
    records = [Record(Path("a"), end - size, size, 1) for end, size in zip(ends, sizes, strict=True)]
    tensors = {
        str(number): FileTensor((1,), "uint8", (Chunk(whole((1,)), Path("a"), (0, 0, 0), 0, None, record),))
        for number, record in enumerate([*records, records[0]])  # two tensors in one record
    }
    shares = []
    for rank in range(num_ranks):
        shares.append([])
        with OpenFiles() as files, patch.object(files, "compare", shares[-1].append):
            compare_sums(tensors, files, rank, num_ranks)
    assert [record for share in shares for record in share] == records
    assert all(sum(record.size for record in share) <= ends[-1] / num_ranks + max(sizes) for share in shares)
