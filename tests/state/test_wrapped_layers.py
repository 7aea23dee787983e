"""Weights that are loaded into a model whose layers a transform has wrapped: LoRA by hand, with the layer itself frozen."""

import ast
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, *, frozen: bool):
        super().__init__()
        self.base = base.requires_grad_(not frozen)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self, *, table: bool = False, features: str | None = None):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4)}) for _ in range(2))
        if table:  # drawn, and then written: the same in every construction
            self.table = nn.Embedding(4, 4).requires_grad_(False)
            with torch.no_grad():
                self.table.weight.copy_(torch.arange(16.0).view(4, 4))
        if features == "parameter":
            self.features = nn.Parameter(torch.randn(4), requires_grad=False)
        elif features == "buffer":
            self.register_buffer("features", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["o"](layer["q"](x))
        return x


def adapted(*, frozen: bool = True, numbered: bool = False) -> nn.Module:
    net: nn.Module = Net()
    for i in range(2):
        net.layers[i]["q"] = Adapted(net.layers[i]["q"], frozen=frozen)
    if numbered:  # as ``0``, ``1``: the last part of a layer's name does not tell it from others
        net = nn.Sequential(Adapted(nn.Linear(4, 4), frozen=frozen), nn.Sequential(nn.Linear(4, 4)))
    return net


def stored(*, numbered: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))) if numbered else Net()
    return net.state_dict()


def said_of(call):
    try:
        return call()
    except sw.ShardwiseError as error:
        return error


def carried_out(layout, init, options):
    """What loading says with each strict, and the whole state after what it advised."""
    with sw.init(layout, device="cpu", timeout_s=20) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sw.parallelize(lambda: adapted(**options), world, init=init)
        state = stored(numbered=options.get("numbered", False))
        said = [said_of(lambda s=strict: sw.load_weights(model, state, strict=s)) for strict in (True, False)]
        rules = [ast.literal_eval(re.search(r"rename=(\[\(r.*?\)\])", error.fix)[1]) for error in said]
        assert rules[0] == rules[1]
        sw.load_weights(model, state, strict=False, rename=rules[0])
        return said, sw.full_state_dict(model)


@pytest.mark.quick("{}-load", "{'frozen': False}-None", "{'numbered': True}-None")
@pytest.mark.parametrize("init", ["load", None])
@pytest.mark.parametrize("options", [{}, {"frozen": False}, {"numbered": True}], ids=str)
def test_the_advice_for_wrapped_layers_is_a_rename_that_loads_them(ranks, init, options):
    """It was strict=False alone, which drew the frozen layers at random."""
    state = stored(numbered=options.get("numbered", False))
    (strict, loose), found = ranks.run(carried_out, 2, "dp_shard=2", init, options)[0]
    assert "the layers were wrapped" in strict.fix and "strict=False for what the wrappers add" in strict.fix
    assert "would train on numbers drawn at random" in loose.why and loose.name.endswith("base.weight")
    kept = {
        name.replace("base.", ""): value for name, value in found.items() if "down" not in name and "up" not in name
    }
    assert kept.keys() == state.keys() and all(torch.equal(kept[name], value) for name, value in state.items())


def loaded(layout, init, options, state=None):
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sw.parallelize(lambda: Net(**options), world, init=init)
        return said_of(lambda: str(sw.load_weights(model, stored() if state is None else state, strict=False)))


@pytest.mark.parametrize("init", ["load", None])
def test_frozen_parameters_that_are_not_there_are_refused_where_they_were_drawn(ranks, init):
    (said, _) = ranks.run(loaded, 2, "dp_shard=2", init, {"features": "parameter"})
    assert said.name == "features" and "register_buffer" in said.fix and "1 tensors that are not there" in said.why
    for options in ({"table": True}, {"features": "buffer"}):  # the constructor's own numbers; as the fix says
        assert "missing (1)" in ranks.run(loaded, 2, "dp_shard=2", init, options)[0]


def in_turn(layout, init):
    """A base first, then what is beside it; and values that torch has loaded."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        build = Net(features="parameter").state_dict()
        found = []
        for first in ("sw", "torch"):
            model = sw.parallelize(lambda: Net(features="parameter"), world, init=init if first == "sw" else None)
            if first == "sw":
                sw.load_weights(model, {"features": build["features"]}, strict=False)
            else:
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            found.append(str(sw.load_weights(model, stored(), strict=False)))
        return found


@pytest.mark.parametrize("init", ["load", None])
def test_frozen_parameters_that_were_loaded_before_may_be_missing(ranks, init):
    for text in ranks.run(in_turn, 2, "dp_shard=2", init)[0]:
        assert "missing (1)" in text
