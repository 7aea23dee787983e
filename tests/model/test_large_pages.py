"""Memory that is written whole is asked for in large pages, and nothing else changes by it."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.model import large_pages
from shardwise.model.large_pages import empty_in_large_pages, in_large_pages
from shardwise.state.checkpoint.writer import memory_in_line

MIB = 1 << 20


def asked_for(address: int) -> bool:
    """Whether the system was asked for large pages at ``address``: "hg" among the flags of its mapping."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            begin, end = (int(word, 16) for word in first.split("-"))
            within = begin <= address < end
        elif within and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"{address:#x} is not mapped")


LARGE_PAGES = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel was built without large pages"
)


def middle(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes // 2


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(1024, 2048), nn.Linear(2048, 1024)
        self.register_buffer("table", torch.ones(1024, 2048))

    def forward(self, x):
        return self.two(self.one(x)) @ self.table


def of_a_model(layout: str, init: str) -> list[bool]:
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(Wide, world, init=init, sharding=sw.Sharding(min_unit_bytes=0))
        held = [*model.parameters(), *model.buffers()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in held]
        return [asked_for(middle(tensor)) for tensor in local if tensor.nbytes >= 4 * MIB]


@LARGE_PAGES
@pytest.mark.parametrize(("layout", "num_tensors"), [("dp_shard=2", 3), ("dp_replicate=2", 3)])
@pytest.mark.parametrize("init", ["load", "seeded"])
def test_a_models_own_memory(ranks, layout, num_tensors, init):
    assert ranks.run(of_a_model, 2, layout, init) == [[True] * num_tensors] * 2


def gathered() -> list[bool]:
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Wide, world, sharding=sw.Sharding(min_unit_bytes=0))
        whole = sw.full_state_dict(model)
        return [asked_for(middle(whole[name])) for name in ("one.weight", "two.weight") if name in whole]


@LARGE_PAGES
def test_whole_tensors_on_rank_0(ranks):
    assert ranks.run(gathered, 2) == [[True, True], []]


@LARGE_PAGES
def test_copies_for_saves_in_the_background():
    assert asked_for(middle(memory_in_line(torch.ones(4 * MIB), 0)))


@LARGE_PAGES
def test_values_that_are_there_stay():
    tensor = torch.arange(4 * MIB)
    in_large_pages([tensor, tensor, nn.Parameter(torch.ones(3))])
    assert asked_for(middle(tensor)) and torch.equal(tensor, torch.arange(4 * MIB))


@pytest.fixture
def calls(monkeypatch):
    seen = []
    monkeypatch.setattr(large_pages, "_ADVICE", 14)
    monkeypatch.setattr(large_pages, "_madvise", lambda: lambda *words: seen.append(words) or -1)  # each is refused
    return seen


def test_a_large_tensor_is_asked_for_in_whole_pages_and_others_are_left_alone(calls):
    block = torch.empty(8 * MIB, dtype=torch.uint8)
    in_large_pages([torch.empty(0), block, torch.ones(5).to_sparse(), torch.empty(9 * MIB, device="meta")])
    (begin, size, _), *others = calls
    assert others == [] and begin <= block.data_ptr() and block.data_ptr() + block.nbytes <= begin + size
    assert begin % 4096 == size % 4096 == 0 and size <= block.nbytes + 8192


def test_neighbours_are_one_stretch(calls):
    block = torch.empty(8 * MIB, dtype=torch.uint8)
    start = -block.data_ptr() % 4096
    with_gap = [part_of(block, start + at, num) for at, num in ((MIB, 2 * MIB), (64, MIB - 4096), (5 * MIB, MIB))]
    in_large_pages(with_gap)
    assert [(begin - block.data_ptr() - start, size) for begin, size, _ in calls] == [(0, 3 * MIB)]


def part_of(block: torch.Tensor, offset: int, num: int) -> torch.Tensor:
    """A tensor whose storage is that part of ``block`` alone."""
    memory = (ctypes.c_uint8 * num).from_address(block.data_ptr() + offset)
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_nothing_is_asked_of_other_systems(calls, monkeypatch):
    monkeypatch.setattr(large_pages, "_ADVICE", None)
    assert empty_in_large_pages([8, MIB], torch.float32).shape == (8, MIB) and calls == []
