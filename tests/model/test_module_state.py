"""What a forward writes into modules goes back whole: buffers as the objects they were, and the Python state beside them, deep."""

import itertools
import types
from array import array
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import UnsupportedError
from shardwise.model.module_state import ModuleState, plain_values


@dataclass(slots=True)
class Slots:
    rows: int = 0
    parts: list[int] = field(default_factory=list)


class Length:
    """A plain object of the user's own."""

    def __init__(self) -> None:
        self.rows, self.inner = 0, {"parts": [1, 2]}


class Keeper(nn.Module):
    """State of many kinds beside a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("absent", None, persistent=False)
        self.rows, self.name = 0, "a"
        self.nested = {"by": [{"deep": (1, [2])}], "set": {1}}
        self.queue, self.counter, self.ordered = deque([1], maxlen=3), Counter("ab"), OrderedDict(x=[1])
        self.array, self.length, self.space = np.zeros(3), Length(), types.SimpleNamespace(step=[0])
        self.slots, self.typed, self.bytes = Slots(), array("l", [1, 2]), bytearray(b"ab")
        self.deep = [[[[[[[[[[1]]]]]]]]]]
        self.loose, self.listed = torch.ones(2), [torch.ones(2)]

    @cached_property
    def angles(self) -> Tensor:
        return torch.ones(3)

    def write(self) -> None:
        self.table += 1
        self.absent = torch.ones(2)
        self.rows, self.name, self.new = 5, "b", [3]
        self.nested["by"][0]["deep"][1].append(7)
        self.nested["by"].append("x")
        self.nested["set"].add(9)
        self.queue.append(4)
        self.counter["c"] += 2
        self.ordered["x"] += [2]
        self.array += 1
        self.length.rows = 8
        self.length.inner["parts"] = [3]
        self.space.step[0] += 1
        self.slots.rows = 7
        self.slots.parts.append(1)
        self.typed.append(5)
        self.bytes[0] = 0
        self.deep[0][0][0][0][0][0][0][0][0][0] = 2
        self.loose += 1
        self.listed[0] += 1
        _ = self.angles
        del self.nested["set"]


def seen(module: Keeper):
    told = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    told |= {"length": vars(module.length), "space": vars(module.space)}
    return repr({key: told[key] for key in sorted(told)}), repr(dict(module._buffers))


def test_all_of_it_goes_back_and_objects_stay_the_same():
    module = Keeper()
    before, objects = seen(module), (module.table, module.nested, module.nested["by"][0], module.length, module.loose)
    state = ModuleState([module])
    for _ in range(2):  # may be restored again
        module.write()
        assert seen(module) != before
        state.restore()
        assert seen(module) == before
    now = (module.table, module.nested, module.nested["by"][0], module.length, module.loose)
    assert all(a is b for a, b in zip(objects, now, strict=True))


@pytest.mark.parametrize(
    "how", ["in place", "data", "replaced", "registered", "removed", "resized", "persistence", "kernel"]
)
def test_however_a_buffer_is_written_the_state_beside_it_goes_back(how):
    module = Keeper()
    module.norm = nn.BatchNorm1d(2)
    before = module.table.clone()
    state = ModuleState(module.modules())
    module.rows = 9
    if how == "in place":
        module.table[0] = 3
    elif how == "data":
        module.table.data.add_(1)  # changes no version
    elif how == "replaced":
        module.table = torch.ones(7)
    elif how == "registered":
        module.register_buffer("later", torch.ones(1))
    elif how == "removed":
        del module.table
    elif how == "resized":
        module.table.resize_(9).fill_(2)
    elif how == "persistence":
        module.register_buffer("absent", torch.ones(1))
    else:
        module.norm(torch.randn(4, 2))  # torch's kernel; the norm keeps no Python state, its parent's goes back
    state.restore()
    assert module.rows == 0
    assert torch.equal(module.table, before) and not hasattr(module, "later") and module.absent is None
    assert "absent" in module._non_persistent_buffers_set
    assert torch.equal(module.norm.running_mean, torch.zeros(2)) and module.norm.num_batches_tracked == 0


def test_modules_of_which_no_buffer_was_written_go_back_too():
    writer, other = Keeper(), Keeper()
    state = ModuleState([writer, other])
    writer.write()
    other.rows = 4
    state.restore()
    assert (writer.rows, other.rows) == (0, 0)


class Holder(nn.Module):
    """Knows how much of a buffer is filled that a module below it has, registered or not."""

    def __init__(self, where: str, cache: nn.Module) -> None:
        super().__init__()
        self.rows, self.where = 0, where
        if where == "child":
            self.cache = cache
        elif where == "in a list of modules":
            self.caches = nn.ModuleList([nn.Sequential(nn.Identity(), cache)])
        elif where == "in a plain list":
            self.caches = [cache]
        elif where == "hidden in an object":
            self.space = types.SimpleNamespace(caches=({"a": nn.Sequential(cache)},))
        else:
            self.inner = Holder("child", cache)


@pytest.mark.parametrize(
    "where", ["child", "in a list of modules", "in a plain list", "hidden in an object", "two levels below"]
)
@pytest.mark.parametrize("kind", [Keeper, lambda: nn.BatchNorm1d(2)], ids=["own", "norm"])
def test_state_of_what_holds_a_written_buffer_goes_back_with_it(where, kind):
    cache = kind()
    module, beside = Holder(where, cache), Holder("child", Keeper())
    state = ModuleState(nn.ModuleList([module, beside]).modules())
    buffer = next(cache.buffers())
    before = buffer.clone()
    buffer += 1
    module.rows = beside.rows = 5
    state.restore()
    assert module.rows == 0 and torch.equal(buffer, before)
    assert beside.rows == 0  # though its buffers were not written


ITERATORS = {
    "count": lambda: itertools.count(3, 2),
    "floats": lambda: itertools.count(0.5, 0.25),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "list": lambda: iter([1, 2, 3, 4, 5, 6, 7, 8, 9]),
    "range": lambda: iter(range(1, 20, 2)),
    "text": lambda: iter("abcdefghi"),
    "cycle of pairs": lambda: itertools.cycle(zip([1, 2, 3], itertools.count(), strict=False)),
    "numbered": lambda: enumerate([5, 6, 7, 8, 9, 10, 11, 12]),
    "chain": lambda: itertools.chain([1, 2], map(str, range(9))),
    "sums": lambda: itertools.accumulate(range(9)),
}


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("passed", [0, 2, 4])
def test_an_iterator_goes_on_from_where_it_was(kind, passed):
    module = Keeper()
    module.steps, plain = ITERATORS[kind](), ITERATORS[kind]()
    for _ in range(passed):
        assert next(module.steps) == next(plain)
    module.also, module.within = module.steps, {"deep": [module.steps]}
    state = ModuleState([module])
    for _ in range(2):
        module.table += 1
        next(module.steps), next(module.steps)
        state.restore()
        assert module.steps is module.also is module.within["deep"][0]
    assert [next(module.steps) for _ in range(4)] == [next(plain) for _ in range(4)]


def test_a_generator_that_has_run_is_refused():
    module = Keeper()
    module.steps = (i for i in range(3))
    next(module.steps)
    state = ModuleState([module])
    module.table += 1
    state.restore()
    assert not module.table.any()
    next(module.steps)
    module.table += 1
    with pytest.raises(UnsupportedError, match="a generator in a Keeper"):
        state.restore()


def test_a_buffer_with_two_names_stays_one():
    first, second = Keeper(), Keeper()
    second.table = first.table
    state = ModuleState([first, second])
    first.table += 1
    state.restore()
    assert first.table is second.table and not first.table.any()


def test_what_a_running_backward_has_saved_is_not_written():
    """A buffer that no one has written keeps its version."""
    module = Keeper()
    x = torch.ones(4, requires_grad=True)
    loss = (x * module.table).sum()
    ModuleState([module]).restore()
    loss.backward()
    assert torch.equal(x.grad, module.table)


def test_numbers_are_named_by_their_path():
    module = Keeper()
    before = dict(plain_values(module))
    module.length.rows, module.nested["by"][0]["n"] = 3, 1.5
    changed = {
        name for name, value in plain_values(module) if type(value) in (int, float) and before.get(name) != value
    }
    assert changed == {"length.rows", "nested.by.0.n"}
    assert "training" not in before


class Bare(nn.Module):
    """State of its own, and neither a buffer nor a module that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.loose, self.rebound = 0, torch.zeros(2), torch.zeros(2)
        self.listed, self.array, self.length = [torch.zeros(1)], np.zeros(2), Length()

    def write(self) -> None:
        self.rows += 1
        self.loose += 1
        self.rebound = self.rebound + 1
        self.listed[0] += 1
        self.listed.append(torch.ones(1))
        self.array += 1
        self.length.rows += 1

    def read(self) -> list[float]:
        tensors = [self.loose, self.rebound, *self.listed]
        return [self.rows, self.length.rows, *self.array, *(float(x) for tensor in tensors for x in tensor)]


def test_the_state_of_a_module_without_a_buffer_goes_back():
    module = nn.Sequential(Bare(), nn.Linear(1, 1))
    loose, state = module[0].loose, ModuleState(module.modules())
    before = module[0].read()
    for _ in range(2):
        module[0].write()
        assert module[0].read() != before
        state.restore()
        assert module[0].read() == before and module[0].loose is loose
