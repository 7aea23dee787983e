"""Checksums of tensors: of each by itself, and of many at once."""

import pytest
import torch

from shardwise.model.tensors import change_marks, checksum, checksums


def many() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    made = [torch.randn(n, generator=numbers).to(torch.float64 if n % 3 else torch.float32) for n in range(1, 20)]
    made += [
        torch.randint(0, 9, (5,), dtype=torch.int8, generator=numbers),
        torch.zeros(0),
        torch.tensor(3),
        torch.ones(4) > 0,
    ]
    return [
        *made,
        torch.randn(30_000, generator=numbers),
        torch.randn(6, 8, generator=numbers).t(),
        torch.ones(3, dtype=torch.bfloat16),
    ]


def test_many_at_once_are_those_of_each():
    tensors = many()
    assert checksums(tensors).tolist() == [int(checksum(tensor)) for tensor in tensors]
    assert checksums(tensors[::-1]).tolist() == checksums(tensors).tolist()[::-1]
    assert checksums([]).tolist() == [] and checksums(tensors[:1]).shape == (1,)


@pytest.mark.parametrize("of_each", [checksums, change_marks])
@pytest.mark.parametrize("which", range(0, 26, 2))
def test_one_changed_number_changes_one_checksum(which, of_each):
    tensors = many()
    if not tensors[which].numel():
        return
    before = of_each(tensors)
    assert torch.equal(of_each(tensors), before)
    flat = tensors[which].view(-1) if tensors[which].is_contiguous() else tensors[which].t().view(-1)
    flat[-1] = 0 if flat[-1] else 1
    assert (of_each(tensors) != before).nonzero().flatten().tolist() == [which]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_marks_of_any_dtype_and_of_nothing(kind):
    values = torch.arange(7).remainder(2).to(kind)
    assert change_marks([values, values[:0]]).tolist() == [change_marks([values.clone()]).item(), 0]
    assert change_marks([]).tolist() == []
    assert change_marks([values]).dtype == torch.int64


def test_marks_of_every_second_number():
    values = torch.arange(12.0)
    before = change_marks([values[::2]])
    values[1::2] = 7
    assert torch.equal(change_marks([values[::2]]), before)
    values[10] = 7
    assert not torch.equal(change_marks([values[::2]]), before)


def test_the_order_of_bytes_counts():
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
