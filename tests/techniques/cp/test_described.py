"""What ``describe`` says of exchanges between rows, beside what is counted; and how even the ranks' work is."""

import re

import pytest
import torch
from techniques.cp.on_ranks import parallel as parallel_of_cp
from techniques.cp.sequences import batch, count, loss_of
from techniques.tp.counted import Sums
from techniques.tp.streams import batch as batch_of_tp
from techniques.tp.streams import count as count_of_tp
from techniques.tp.streams import loss_of as loss_of_tp
from techniques.tp.streams import parallel as parallel_of_tp

import shardwise as sw
from shardwise._torch.collectives import group_name
from shardwise.model.rows import imbalance

DOCUMENTS = torch.cat([torch.arange(n) for n in (300, 12, 200, 512)])[None]


@pytest.mark.parametrize(
    ("positions", "degree", "order", "expected"),
    [
        (torch.arange(1024)[None], 2, "contiguous", 1.4995),
        (torch.arange(1024)[None], 4, "contiguous", 1.7493),
        (torch.arange(1024)[None], 8, "contiguous", 1.8741),
        (torch.arange(1024)[None], 8, "zigzag", 1.0),
        (torch.zeros(1, 1024).long(), 4, "contiguous", 1.0),
    ],
)
def test_imbalance(positions, degree, order, expected):
    assert imbalance(positions, degree, order) == pytest.approx(expected, abs=1e-4)


def test_imbalance_of_documents_is_that_of_their_keys():
    """Counted one by one: 1,024 positions in four documents over two ranks, in zigzag."""
    positions = DOCUMENTS[0].tolist()
    work = [
        sum(p + 1 for i, p in enumerate(positions) if (i // 256 in (0, 3)) == is_first) for is_first in (True, False)
    ]
    expected = max(work) / (sum(work) / 2)
    assert imbalance(DOCUMENTS, 2, "zigzag") == pytest.approx(expected) and expected > 1.01


class Sent(Sums):
    """Within: counts the bytes that this rank sends, by the name of the group."""

    def __init__(self):
        super().__init__()
        self.num_bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        is_of_tokens = bool(args) and isinstance(args[0], torch.Tensor) and args[0].shape[:1] == (31,)  # logits
        if (
            func.namespace == "_c10d_functional"
            and not is_of_tokens
            and name in ("all_gather_into_tensor", "reduce_scatter_tensor")
        ):
            size = args[1] if name.startswith("all_gather") else args[2]
            times = size - 1 if name.startswith("all_gather") else (size - 1) / size
            sent = int(args[0].numel() * args[0].element_size() * times)
            self.num_bytes[args[-1]] = self.num_bytes.get(args[-1], 0) + sent
        return super().__torch_dispatch__(func, types, args, kwargs)


def sent(layout):
    """Axis -> bytes that a rank sends in a micro-batch as the example's, for each block; and what ``describe`` says."""
    with sw.init(layout, device="cpu") as world:
        if "tp" in layout:
            model = parallel_of_tp(
                "", world, torch.float32, **({"context_parallel": "gather"} if "cp" in layout else {})
            )
            given, loss, num = batch_of_tp(1, 24), loss_of_tp, count_of_tp
        else:
            model, given, loss, num = (
                parallel_of_cp("packed", world, context_parallel="gather"),
                batch(1, 24, "packed"),
                loss_of,
                count,
            )
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss, count=num)
        step([given])
        with Sent() as counted:
            step([given])
        axes = {axis: group_name(world.axis(axis).group) for axis in ("cp", "tp") if f"{axis}=" in layout}
        text = sw.describe(model)
        return {axis: counted.num_bytes[name] // 2 for axis, name in axes.items()}, text


@pytest.mark.quick("cp=2", "tp=2")
@pytest.mark.parametrize("layout", ["cp=2", "tp=2", "cp=2,tp=2"])
def test_bytes_of_describe_are_those_that_are_sent(ranks, layout):
    for counted, text in ranks.run(sent, 4 if "," in layout else 2, layout):
        said = {}
        for axis, words in (("cp", "attention sends"), ("tp", "these exchanges send")):
            found = re.search(rf"\(2 samples of 24 positions\) {words} ([0-9,]+) bytes", text)
            said |= {axis: int(found[1].replace(",", ""))} if found else {}
        assert said == counted
        if layout == "cp=2":
            assert "under a causal mask within its documents the most loaded rank of cp computes" in text
