"""Labels of a micro-batch on a device are counted on the host, by the copy that its Loader has kept; what was changed since is not."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.data.batch import MicroBatch
from shardwise.step import token_count


def copied(labels: Tensor) -> MicroBatch:
    """A micro-batch as a Loader makes it for a device: here the device's memory is other memory of the CPU."""
    host = {"input": torch.ones(len(labels), 4), "labels": labels}
    return MicroBatch({name: value.clone() for name, value in host.items()}, host=host)


def test_what_it_was_copied_from_is_there_without_a_read():
    labels = torch.tensor([1, -100, 2])
    batch = copied(labels)
    found = batch.on_host()
    assert found is not None and found["labels"] is labels and batch["labels"] is not labels


def replaced(batch: MicroBatch) -> None:
    batch["labels"] = batch["labels"].clone()


def written(batch: MicroBatch) -> None:
    batch["labels"][0] = -100


def grown(batch: MicroBatch) -> None:
    batch["weights"] = torch.ones(3)


def shrunk(batch: MicroBatch) -> None:
    del batch["input"]


@pytest.mark.parametrize("change", [replaced, written, grown, shrunk])
def test_a_micro_batch_that_was_changed_has_no_copy(change):
    batch = copied(torch.tensor([1, -100, 2]))
    change(batch)
    assert batch.on_host() is None


def test_a_micro_batch_that_was_made_from_another_has_none():
    batch = copied(torch.tensor([1, -100, 2]))
    assert MicroBatch(batch, padding=True).on_host() is None
    assert MicroBatch({"labels": torch.zeros(3)}).on_host() is None


def trained(change: str, on_device: bool) -> float:
    """The token count of a step, with labels that were changed in a way."""
    torch.manual_seed(0)
    counts = mock.patch.object(token_count, "_counts_copies", lambda runtime, counter: on_device)
    with sw.init("dp_shard=1", device="cpu", timeout_s=30) as world, counts:
        model = sw.parallelize(nn.Linear(4, 3), world)
        step = sw.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch["labels"], reduction="sum"),
            forward=lambda model, batch: model(batch["input"]),
        )
        window = [copied(torch.tensor([1, 2, 0])), copied(torch.tensor([1, -100, 2]))]
        if change == "in place":
            window[0]["labels"][0] = -100
        if change == "through data":
            window[0]["labels"].data[0] = -100
        return step(window).num_tokens


@pytest.mark.parametrize("on_device", [False, True])
def test_labels_are_counted_as_they_are(ranks, on_device):
    assert ranks.run(trained, 1, "", on_device)[0] == 5
    assert ranks.run(trained, 1, "in place", on_device)[0] == 4


def test_labels_that_only_the_device_has_are_refused(ranks):
    with pytest.raises(sw.RankError, match=r"window 1: 4 valid labels on the device, and 5 on the host"):
        ranks.run(trained, 1, "through data", True)
