"""Micro-batches go to a device by a stream of their own. Here the device and its streams only write down what they are asked for;
``tests/gpu`` has the numbers."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from shardwise.data import batch as module
from shardwise.data.batch import Transfer


class Device:
    """A device of type cuda: notes copies, and by which stream they are made."""

    type = "cuda"

    def __init__(self):
        self.noted: list[tuple] = []
        self.streams = ["the caller's"]
        self.num_streams = 0

    def tensor(self, name: str, *, is_cuda: bool = False):
        def to(device, non_blocking: bool = False):
            assert device is self
            self.noted.append(("copied" if non_blocking else "copied and waited", name, self.streams[-1]))
            return SimpleNamespace(
                name=name, record_stream=lambda stream: self.noted.append(("kept", name, "for", stream.name))
            )

        return SimpleNamespace(name=name, to=to, is_cuda=is_cuda)

    def new_stream(self, device):
        assert device is self
        self.num_streams += 1
        return SimpleNamespace(name="its own")

    @contextmanager
    def on(self, stream):
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def current(self, device):
        assert device is self
        name = self.streams[-1]
        return SimpleNamespace(name=name, wait_stream=lambda other: self.noted.append((name, "waits for", other.name)))


@pytest.fixture
def device(monkeypatch):
    device = Device()
    streams = SimpleNamespace(Stream=device.new_stream, stream=device.on, current_stream=device.current)
    monkeypatch.setattr(module, "torch", mock.Mock(wraps=torch, cuda=streams))
    monkeypatch.setattr(module, "_page_locked", lambda value: device.tensor("locked " + value.name))
    return device


def test_copies_are_made_by_a_stream_of_their_own_for_which_the_callers_waits(device):
    there, host = Transfer(device, pin_memory=True)({"x": device.tensor("x"), "labels": device.tensor("labels")})
    assert device.noted == [
        ("copied", "locked x", "its own"),
        ("copied", "locked labels", "its own"),
        ("the caller's", "waits for", "its own"),
        ("kept", "locked x", "for", "the caller's"),
        ("kept", "locked labels", "for", "the caller's"),
    ]
    assert list(there) == ["x", "labels"] and {name: value.name for name, value in host.items()} == {
        "x": "locked x",
        "labels": "locked labels",
    }


def test_all_micro_batches_are_copied_by_one_stream(device):
    copy = Transfer(device, pin_memory=True)
    for _ in range(3):
        copy({"x": device.tensor("x")})
    assert device.num_streams == 1


def test_what_is_on_a_device_stays_on_the_callers_stream_and_has_no_copy_on_the_host(device):
    batch = {"x": device.tensor("x", is_cuda=True), "labels": device.tensor("labels")}
    there, host = Transfer(device, pin_memory=True)(batch)
    assert ("copied and waited", "x", "the caller's") in device.noted
    assert list(there) == ["x", "labels"] and host is None


def test_without_page_locked_memory_the_host_waits(device):
    _, host = Transfer(device, pin_memory=False)({"x": device.tensor("x")})
    assert device.noted == [("copied and waited", "x", "the caller's")] and host is None
    assert device.num_streams == 0


def test_on_the_cpu_it_is_the_batch_itself():
    batch = {"x": torch.ones(2)}
    assert Transfer(torch.device("cpu"), pin_memory=True)(batch) == (batch, None)
