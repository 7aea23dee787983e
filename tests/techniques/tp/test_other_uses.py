"""What lies between two layers and is used in one more way is not cut, or cut rightly: training is that of one process."""

import models
import pytest
import torch
from techniques.tp import states

import shardwise as sw
from shardwise.model.calling import run_on
from shardwise.techniques.tp.search.cut_search import search

LEFT = {
    "RunningMean": ("blocks.1.mlp.down.weight", "blocks.1.mlp.mean in it is written when it runs"),
    "BiasElsewhere": ("blocks.0.mlp.down.weight", "blocks.0.mlp.up.bias is used outside of its layer too"),
    "ComputedElsewhere": ("blocks.0.mlp.up.weight", "it is computed, and another module than its own uses it"),
    "ComputedAndRead": ("blocks.0.mlp.down.weight", "mixes all of its inputs"),
    "ComputedOfAnother": ("blocks.0.mlp.down.weight", "original1 is used by _weight_norm too"),
    **{
        f"computed, {kind}": (
            "blocks.0.mlp.up.parametrizations.weight.original1",
            "the weight of its layer is computed from it",
        )
        for kind in ("layer", "forward", "two names", "shared", "looked at")
    },
    **{
        f"computed, {kind}": (
            "blocks.0.mlp.up.parametrizations.weight.original",
            "the weight of its layer is computed from it",
        )
        for kind in ("by another", "bias")
    },
    "HookedBackward": ("blocks.0.mlp.down.weight", "blocks.0.mlp.down has a backward hook"),
    "HookedAround": ("blocks.0.mlp.up.0.weight", "the backward mixes what ranks have"),
    "OneBias": ("blocks.0.mlp.down.weight", "blocks.0.mlp.down.bias is used outside of its layer too"),
    "Reversed": ("blocks.0.mlp.down.weight", "in an order that is no even cut: 16 by 1; 16 by 0"),
    "Rotated": ("blocks.0.mlp.down.weight", "index 29 is out of bounds"),
    "Swapped": ("blocks.0.mlp.down.weight", "mixes all of its inputs"),
    "OneByOne": ("blocks.0.mlp.down.weight", "is the weight of layers of two kinds"),
    "TurnedProduct": ("blocks.0.mlp.up.weight", "its weight is also used by matmul"),
    "Measured": ("blocks.0.mlp.down.weight", "the code reads the shape of blocks.0.mlp.up.weight"),
    "Counted": ("blocks.0.mlp.down.weight", "the code reads the shape of blocks.0.mlp.up.bias"),
    "MixedBackward": ("blocks.0.mlp.down.weight", "the backward mixes what ranks have"),
    "LateHalf": ("blocks.2.down.weight", "of 2: "),
    "TrainsElse": ("blocks.0.mlp.down.weight", "in training mode: rank 0 of 2: the input of blocks.0.mlp.down.weight"),
    "NormElsewhere": ("blocks.1.out.weight", "blocks.1.norm.weight is also used outside of blocks.1"),
    "GateInSecondHalf": ("blocks.0.mlp.down.weight", "the outputs of blocks.0.mlp.gate.weight are also used outside"),
    "GateInLoss": ("blocks.0.mlp.down.weight", "the outputs of blocks.0.mlp.gate.weight are also used outside"),
    "LastIsShown": ("blocks.2.down.weight", "reach the output of the model"),
    "LastIsNormed": ("blocks.2.down.weight", "blocks.2.up.weight is used by norm too"),
    "LastIsRead": ("blocks.2.down.weight", "blocks.2.number is also used outside of blocks.2"),
    "LastIsElse": ("blocks.2.down.weight", "are also used by head.weight"),
    "padding index": ("mlp.down.weight", "table.weight is looked up with a padding index"),
    "scaled by frequency": ("mlp.down.weight", "table.weight is looked up with a padding index, or another option"),
    "returns integer": ("mlp.down.weight", "the output of the model has other values"),
    "returns number": ("mlp.down.weight", "the output of the model is off by"),
    "returns object": ("mlp.down.weight", "reach the output of the model"),
}


@pytest.mark.quick("other uses: computed, layer", "other uses: HookedBackward", "other uses: returns integer")
@pytest.mark.parametrize(  # that the same stays whole is seen of each below
    "name",
    [pytest.param(n, marks=pytest.mark.soak if i % 3 else ()) for i, n in enumerate(models.select("other uses"))],
)
def test_training_is_that_of_one_process(ranks, name):
    model = models.get(name)
    report = sw.verify(
        model.build, "tp=2", batches=model.windows(2, 2), loss=model.loss, forward=model.forward, run=ranks.run
    )
    assert report


@pytest.mark.quick(
    "other uses: computed, layer",
    "other uses: computed, by another",
    "other uses: computed, two names",
    "other uses: RunningMean",
    "other uses: BiasElsewhere",
    "other uses: ComputedElsewhere",
    "other uses: HookedBackward",
    "other uses: Reversed",
    "other uses: Swapped",
    "other uses: MixedBackward",
    "other uses: GateInSecondHalf",
    "other uses: GateInLoss",
    "other uses: NormElsewhere",
    "other uses: LastIsElse",
    "other uses: LastIsRead",
    "other uses: LateHalf",
)
@pytest.mark.parametrize("name", models.select("other uses"))
def test_it_stays_whole_and_nothing_else_does(name):
    torch.manual_seed(0)
    found = search(models.get(name).build(), run_on(None), 2)
    weight, why = LEFT[name.removeprefix("other uses: ")]
    assert why in found.left[weight]
    assert weight not in str(found.regions)
    attention = [name for name in found.left if "attention" in name]
    assert attention == []


@pytest.mark.quick("Reversed-None", "Rotated-rank0", "Swapped-None")
@pytest.mark.parametrize("init", [None, "rank0"])
@pytest.mark.parametrize("name", ["Reversed", "Rotated", "Swapped"])
def test_a_model_that_is_built_on_meta_is_tried_with_its_own_indices(ranks, name, init):
    """Integers and booleans decide which way values go; zeros in their place would show another."""
    off, text = ranks.run(states.off_by, 2, f"other uses: {name}", "tp=2", init)[0]
    assert off < 1e-5
    assert "mlp.up" not in "".join(line for line in text.splitlines() if "column-parallel" in line)
