"""Layers in a Python list are trained by nobody: a warning names them, and no other list of the user's."""

import warnings

import torch
from torch import nn

import shardwise as sw


class Keeps(nn.Module):
    """Keeps something in an attribute ``kept``."""

    def __init__(self, keep):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.kept = keep(self)

    def forward(self, x):
        return self.body(x)


UNTRAINED = {
    "a list of layers": lambda m: [nn.Linear(2, 2), nn.Linear(2, 2)],
    "a dict of heads": lambda m: {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)},
    "parameters": lambda m: (nn.Parameter(torch.ones(2)), [nn.Parameter(torch.ones(2))]),
    "tuples in a list": lambda m: [(nn.Linear(2, 2), "name")],
}
MEANT = {
    "its own layers": lambda m: [m.body],
    "its own parameters": lambda m: [*m.parameters()],
    "a frozen teacher": lambda m: [nn.Linear(2, 2).requires_grad_(False)],
    "tables": lambda m: [torch.ones(2), "text", 3],
    "registered": lambda m: nn.ModuleList([nn.Linear(2, 2)]),
}


def test_trainable_parameters_in_a_python_list_are_warned_of_and_others_are_not():
    found = {}
    with sw.init("dp_shard=1", device="cpu") as world:
        for name, keep in {**UNTRAINED, **MEANT}.items():
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                sw.parallelize(Keeps(keep), world)
            found[name] = [str(each.message) for each in told]
    for name in UNTRAINED:
        (text,) = found[name]
        assert text.startswith("kept.") and "nn.ModuleList" in text, (name, text)
    assert not any(found[name] for name in MEANT), found
