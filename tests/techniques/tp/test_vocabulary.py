"""Embeddings and heads that are cut by tokens: training is that of one process, and what cannot be cut stays whole."""

import models
import pytest
import torch
from models.batches import VOCAB

import shardwise as sw
from shardwise.model.calling import run_on
from shardwise.techniques.tp.search.cut_search import search

NAMES = models.select("vocabularies")
WHOLE = {
    "ByFrequency": ("embed.weight", "rows are looked up with a largest norm, or another option"),
    "WithoutHead": ("embed.weight", "the model uses it beside what it is of its own module"),
    "Penalised": ("embed.weight", "its weight is also used by code that is no layer"),
    "Measured": ("head.weight", "the code reads the shape of head.weight"),
    "BiasRead": ("head.weight", "head.bias is used outside of its layer too"),
}


@pytest.mark.quick(
    "vocabularies: tied-dp_shard=2,tp=2",
    "vocabularies: tied, with a bias-tp=2",
    "vocabularies: padding on the last rank-tp=2",
    "vocabularies: Penalised-tp=2",
    "vocabularies: BiasRead-tp=2",
    "vocabularies: untied-tp=2",
)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if layout == "tp=2" or name.endswith("tied") else [pytest.mark.soak])
        for name in NAMES
        for layout in ("tp=2", "dp_shard=2,tp=2", "tp=4")
    ],
)
def test_training_is_that_of_one_process(ranks, name, layout):
    model = models.get(name)
    report = sw.verify(model.build, layout, batches=model.windows(2, 3), max_grad_norm=0.1, run=ranks.run)
    assert report


@pytest.mark.parametrize("name", NAMES)
def test_what_is_cut(name):
    torch.manual_seed(0)
    found = search(models.get(name).build(), run_on(None), 2)
    weights = {table.weight for table in found.tables}
    weight, why = WHOLE.get(name.removeprefix("vocabularies: "), (None, None))
    if weight is not None:
        assert weight not in weights and why in found.left[weight]
    else:
        is_tied = "tied," in name or (name.endswith(("tied", "last rank")) and "untied" not in name)
        assert weights == {"embed.weight"} if is_tied else weights >= {"embed.weight", "head.weight"}


def test_too_few_rows_for_the_ranks():
    """Of 19 rows, 8 ranks would have 3 each, and the last none."""
    assert VOCAB == 19
    found = search(models.get("vocabularies: tied").build(), run_on(None), 8)
    assert found.tables == [] and found.left["embed.weight"] == "it has 19 rows, too few for 8 ranks"
