"""Models of other packages: the numbers of one process, and the constructor's values, under every layout.

Most of it is soak: each rank must import a model's code, and that takes seconds."""

import importlib.metadata
import math
import warnings
from dataclasses import replace

import models
import pytest
from layouts import FOREIGN
from models.written import gpt
from parallel.values import constructed, unlike, value_faults, values_of
from verify.held import compare

SAMPLE = ("nanogpt", "basic-resnet", "lstm", "plain-unet", "sparse-moe", "tcn")  # that take a second or two

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def model(request) -> models.Model:
    """A model by name; one whose package is not there fails, since a skip would not be seen."""
    found = models.get(request.param)
    if found.package:
        try:
            importlib.metadata.version(found.package)
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(f"{found.package} is not installed: pip install torch==2.13.0 {found.package}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own code
        found.build()
    return found


def _each(names):
    return pytest.mark.parametrize("model", list(names), indirect=True)


@pytest.mark.quick("nanogpt", "lstm")
@_each(SAMPLE)
def test_model_equals_one_process(ranks, model):
    compare(model, ranks.run, "fsdp-2")


@pytest.mark.soak
@pytest.mark.parametrize("layout", FOREIGN)
@_each(models.select("foreign"))
def test_model_equals_one_process_under_every_layout(ranks, model, layout):
    compare(model, ranks.run, layout)


@pytest.mark.soak
@_each(models.select("foreign"))
def test_model_starts_from_the_same_values_under_every_layout_and_they_are_the_constructors(ranks, model):
    how, faults = value_faults(model, ranks.run)
    assert faults == []
    assert (how == "rank 0") == (model.name in FALLS_BACK), how


FALLS_BACK = {  # the callable cannot be replayed: why, as its warning says
    "itransformer": "its constructor draws from Python's random",
}


def test_nanogpt_starts_as_its_script_says(ranks):
    wide = replace(models.get("nanogpt"), build=_wide_gpt)
    how, faults = value_faults(wide, ranks.run)
    assert how == "seeded" and faults == []
    values, told = values_of(wide, ranks.run, "fsdp-2")
    assert told == []
    for name, value in values.items():
        if name.endswith("c_proj.weight"):
            wanted = 0.02 / math.sqrt(2 * 3)
        elif value.dim() == 2:
            wanted = 0.02  # a Linear's own would be 0.072
        else:
            continue
        assert abs(float(value.std()) / wanted - 1) < 6 / math.sqrt(value.numel()), name


def _wide_gpt():
    return gpt(64)


def test_values_that_differ_from_the_constructors_are_told():
    first, second = (constructed(models.get("mistral").build, seed) for seed in (0, 1))
    assert unlike(first, first, second) == []
    name, table = "model.layers.0.self_attn.q_proj.weight", "model.rotary_emb.inv_freq"
    wrong = {**first, name: first[name] * 3.6, table: first[table] * 2}  # a Linear's own spread; a table left alone
    told = unlike(wrong, first, second)
    assert any(text.startswith(f"{name}: std") for text in told)
    assert f"{table}: not the constant of the constructor" in told
