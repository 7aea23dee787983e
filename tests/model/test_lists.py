"""Where outermost block lists are found, whatever containers hold them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.errors import UsageError
from shardwise.model import read_anatomy


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(4, 4) for _ in range(count)]


def lists_of(model: nn.Module) -> list[tuple[str, int]]:
    return [(found.name, len(found.blocks)) for found in read_anatomy(model).lists]


class Holder(nn.Module):
    """A module of named children whose forward is given as text of one style: iterate over everything."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Listed(Holder):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stages(Holder):
    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


class Keyed(Holder):
    def forward(self, x):
        for key in self.blocks:
            x = self.blocks[key](x)
        return x


class Items(Holder):
    def forward(self, x):
        for _key, block in self.blocks.items():
            x = block(x)
        return x


class Called(Holder):
    def forward(self, x):
        return self.blocks(x)


class OwnForward(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class Two(Holder):
    def forward(self, x):
        return self.b(self.a(x))


class One(Holder):
    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Named(nn.Module):
    """Everything in one ModuleDict, as nanoGPT has it: the blocks in a list, the other parts called by their names."""

    def __init__(self, blocks: nn.Module):
        super().__init__()
        first, last = linears(2)
        self.transformer = nn.ModuleDict({"first": first, "h": blocks, "last": last})

    def forward(self, x):
        x = self.transformer.first(x)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.last(x)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: nn.Linear(4, 4), []),
        (lambda: Named(nn.ModuleList(linears(3))), [("transformer.h", 3)]),
        (lambda: Two(a=nn.Linear(4, 4), b=nn.Linear(4, 4)), []),
        (lambda: nn.Sequential(*linears(3)), [("", 3)]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [("", 2)]),
        (lambda: Listed(blocks=nn.ModuleList(linears(3))), [("blocks", 3)]),
        (lambda: Called(blocks=nn.Sequential(*linears(3))), [("blocks", 3)]),
        (lambda: Called(blocks=OwnForward(linears(3))), [("blocks", 3)]),
        (lambda: Keyed(blocks=nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})), [("blocks", 2)]),
        (lambda: Items(blocks=nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})), [("blocks", 2)]),
        (
            lambda: Stages(stages=nn.ModuleList([nn.ModuleList(linears(2)), nn.ModuleList(linears(3))])),
            [("stages", 5)],
        ),
        (lambda: One(parts=nn.ModuleList([nn.Sequential(*linears(3))])), [("parts.0", 3)]),  # a list of one
        (
            lambda: One(parts=nn.ModuleList([Two(a=linears(1)[0], b=linears(1)[0])])),
            [("parts", 1)],
        ),  # a model of one layer
        (lambda: One(parts=nn.ModuleList(linears(1))), []),
        (
            lambda: Two(a=Listed(blocks=nn.ModuleList(linears(2))), b=Called(blocks=nn.Sequential(*linears(4)))),
            [("a.blocks", 2), ("b.blocks", 4)],
        ),
        (
            lambda: Two(a=Two(a=Two(a=nn.Sequential(*linears(2)), b=nn.ReLU()), b=nn.ReLU()), b=nn.ReLU()),
            [("a.a.a", 2)],
        ),
        # only the outermost list counts: its blocks hold lists of their own
        (
            lambda: Listed(blocks=nn.ModuleList([nn.Sequential(*linears(3)), nn.Sequential(*linears(3))])),
            [("blocks", 2)],
        ),
        (lambda: Listed(blocks=nn.ModuleList([OwnForward(linears(2)), nn.Linear(4, 4)])), [("blocks", 2)]),
        (lambda: Listed(blocks=nn.ModuleList([nn.ReLU(), nn.Dropout()])), []),  # nothing to gather
        (lambda: Listed(blocks=nn.ModuleList()), []),
        # elements of the list that are plain lists themselves, with one part to call each
        (
            lambda: Listed(blocks=nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]) for _ in range(3)])),
            [("blocks", 3)],
        ),
        # what nobody can call is not entered: a holder of parameters, a module with other methods than forward
        (lambda: Listed(blocks=nn.ModuleList([nn.ParameterList([torch.ones(2)]) for _ in range(2)])), []),
    ],
)
def test_outermost_lists(build, expected):
    assert lists_of(build()) == expected


def test_a_module_in_two_lists_is_a_block_once():
    blocks = linears(3)
    model = Listed(blocks=nn.ModuleList(blocks), again=nn.ModuleList(blocks))
    assert lists_of(model) == [("blocks", 3)]
    same = nn.Linear(4, 4)
    assert lists_of(Listed(blocks=nn.ModuleList([same, nn.Linear(4, 4), same]))) == [("blocks", 2)]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of torch.jit, as torch.compile loads it
def test_blocks_behind_wrappers_have_the_users_names():
    model = Listed(blocks=nn.ModuleList([checkpoint_wrapper(block) for block in linears(3)]))
    found = read_anatomy(model)
    assert found.lists[0].blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert "blocks.1.weight" in found.params
    compiled = torch.compile(Listed(blocks=nn.ModuleList([torch.compile(block) for block in linears(3)])))
    found = read_anatomy(compiled)
    assert found.module_class == "Listed"
    assert found.lists[0].blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert list(found.params)[:2] == ["blocks.0.weight", "blocks.0.bias"]


class Reversed(Holder):
    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return self.early(x)


def test_an_example_tells_in_which_order_blocks_run():
    model = Reversed(early=nn.Sequential(*linears(2)), blocks=nn.ModuleList(linears(3)))
    found = read_anatomy(model, example={"x": torch.ones(1, 4), "labels": torch.ones(1)}).lists
    assert [item.blocks for item in found] == [("blocks.2", "blocks.1", "blocks.0"), ("early.0", "early.1")]


def test_an_example_that_cannot_be_run_is_refused():
    with pytest.raises(UsageError, match="does not run with it") as caught:
        read_anatomy(Listed(blocks=nn.ModuleList(linears(3))), example={"x": torch.ones(1, 5)})
    assert "example={x}" in caught.value.given


def test_a_users_own_attribute_called_module_keeps_its_name():
    model = Two(a=Holder(module=nn.Linear(4, 4)), b=nn.Linear(4, 4))
    model.a.forward = lambda x: model.a.module(x)
    assert list(read_anatomy(model).params) == ["a.module.weight", "a.module.bias", "b.weight", "b.bias"]
