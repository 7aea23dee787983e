"""What ranks return: tensors arrive as they were, without an archive for each."""

import copyreg
import io
import pickle
import pickletools

import pytest
import torch
from torch import nn

from shardwise.launch.script import dumps

TENSORS = {
    "plain": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "part of another": torch.arange(40.0)[3:30:4],
    "empty": torch.empty(0, 3),
    "of no dims": torch.tensor(3, dtype=torch.int8),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex128),
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    "sparse": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
    "parameter": nn.Parameter(torch.randn(2), requires_grad=False),
    "with a gradient": torch.randn(2, requires_grad=True),
    "on meta": torch.empty(2, 3, device="meta"),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    given = TENSORS[name]
    found = pickle.loads(dumps({"x": [given]}))["x"][0]
    assert type(found) is type(given)
    assert (found.dtype, found.shape, found.device) == (given.dtype, given.shape, given.device)
    assert found.requires_grad == given.requires_grad and found.is_conj() == given.is_conj()
    if not given.is_sparse:
        assert found.stride() == given.stride()
    if not given.is_meta:
        found, want = (x.detach().to_dense().to(torch.complex128) for x in (found, given))
        assert torch.equal(found, want)


def test_it_has_memory_of_its_own_which_can_grow():
    given = torch.arange(3.0)
    found = pickle.loads(dumps(given))
    found += 1
    assert given.tolist() == [0, 1, 2]
    assert found.resize_(100).shape == (100,)


def test_views_of_one_memory_still_are():
    whole = torch.arange(4.0)
    found, part = pickle.loads(dumps([whole, whole[1:]]))
    found[1] = 7
    assert part.tolist() == [7, 2, 3]


def test_a_model_of_the_users_arrives_whole():
    given = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found = pickle.loads(dumps(given))
    assert all(torch.equal(x, y) for x, y in zip(given.state_dict().values(), found.state_dict().values(), strict=True))


def test_no_archive_is_made_of_it():
    called = {argument for op, argument, _ in pickletools.genops(dumps(torch.ones(3))) if op.name == "SHORT_BINUNICODE"}
    assert "shardwise._torch.pickling" in called and "_load_from_bytes" not in called


class Registered:
    pass


def test_what_others_have_told_pickle_is_kept(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda _: (io.StringIO, ()))
    assert isinstance(pickle.loads(dumps(Registered())), io.StringIO)
