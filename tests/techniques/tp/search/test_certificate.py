"""A region that is wrong in one thing is refused: each of what the gradients found, changed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import models
import pytest
import torch

from shardwise.model.trial import Trial
from shardwise.recipe.records import Part
from shardwise.techniques.tp.search.certificate import certify
from shardwise.techniques.tp.search.cut_search import find_certified
from shardwise.techniques.tp.search.region_records import Region, Whole

MODELS = [
    *("apart", "kv-1", "qkv", "qkv-kv-2", "qkv-kv-1", "per-head", "grouped", "turned-weights", "lora", "norm-of-heads"),
    *("sinks", "from-the-width", "latent", "slopes", "table", "norm-of-width"),
]


def _trial(name: str, device: str = "cpu") -> Trial:
    torch.manual_seed(0)
    model = models.get(name)
    batch = model.windows(1, 1)[0][0]
    with torch.device(device):
        module = model.build()
    return Trial(module, lambda module: model.forward(module, batch))


def _with_norms(name: str) -> Trial:
    """One that takes norms over the whole width for layers."""
    plain = _trial(name)
    norms = frozenset(
        key for key, module in plain.module.named_modules() if key.endswith((".attention.norm", ".mlp.norm"))
    )
    model = models.get(name)
    batch = model.windows(1, 1)[0][0]
    return Trial(model.build(), lambda module: model.forward(module, batch), norms=norms)


def _without(mapping: dict, key) -> dict:
    return {other: value for other, value in mapping.items() if other != key}


def mutants(region: Region, degree: int) -> Iterator[tuple[str, Region]]:
    """Each change that can be made to one thing of a region, with a name."""
    for name, cut in region.columns.items():
        total = sum(part.size for part in cut)
        others = {
            "one part": (Part(size=total),),
            "two parts": (Part(size=total // 2), Part(size=total // 2)),
            "heads of 4": tuple(Part(size=4) for _ in range(total // 4)),
            "as many parts as ranks": tuple(Part(size=total // degree) for _ in range(degree)),
            "kept whole": (Part(size=total, replicas=degree),),
            "parts the other way round": cut[::-1],
            "no replicas": tuple(Part(size=part.size) for part in cut),
        }
        for how, other in others.items():
            if other != cut and total % degree == 0:
                yield f"{name}: {how}", replace(region, columns={**region.columns, name: other})
        rest = _without(region.columns, name)
        yield f"{name}: left out", replace(region, columns=rest)
        yield f"{name}: whole", replace(region, columns=rest, whole=(*region.whole, name))
    for name in region.rows:
        yield f"{name}: no row", replace(region, rows=tuple(other for other in region.rows if other != name))
    for kind in ("whole", "inner"):
        for name in getattr(region, kind):
            rest = tuple(other for other in getattr(region, kind) if other != name)
            yield f"{name}: not {kind}", replace(region, **{kind: rest})
    for name in set(region.columns) - {*region.inner}:
        yield f"{name}: inner", replace(region, inner=(*region.inner, name))
    for kind in ("tensors", "arguments"):
        held = getattr(region, kind)
        for name, cut in held.items():
            yield f"{name}: left out", replace(region, **{kind: _without(held, name)})
            for dim in range(3):
                cuts = (Part(size=4),) if isinstance(cut, Whole) else cut[1]
                if not isinstance(cut, tuple) or cut[0] != dim:
                    yield f"{name}: cut along {dim}", replace(region, **{kind: {**held, name: (dim, cuts)}})
            if isinstance(cut, tuple):
                yield f"{name}: whole", replace(region, **{kind: {**held, name: Whole()}})
    for place in {(0,)} - region.arguments.keys():
        yield f"{place}: an argument", replace(region, arguments={**region.arguments, place: Whole()})
    for (name, attr), value in region.settings.items():
        for other in (value + 1, 2 * value, value * degree, max(value // 2, 1)):
            if other != value:
                settings = {**region.settings, (name, attr): other}
                yield f"{attr}: {value} -> {other}", replace(region, settings=settings)
        yield f"{attr}: as it was", replace(region, settings=_without(region.settings, (name, attr)))
    if region.module.endswith("attention"):
        yield "head_dim: 2 too", replace(region, settings={**region.settings, (region.module, "head_dim"): 2})
    for place in region.narrowed:
        yield f"{place}: not narrowed", replace(region, narrowed=())


SOME = ("qkv-kv-1", "turned-weights", "latent", "slopes", "norm-of-width")


@pytest.mark.parametrize(
    ("names", "degree", "most"),
    [
        pytest.param(SOME, 4, 70, id="some-4"),
        *(pytest.param(MODELS, degree, 150, id=f"all-{degree}", marks=pytest.mark.soak) for degree in (2, 4)),
    ],
)
def test_a_region_that_is_wrong_in_one_thing_is_refused(names, degree, most):
    """By itself, or when the model runs to its end."""
    passed, tried = set(), 0
    for name in names:
        of_width = name == "norm-of-width"
        trial = (_with_norms if of_width else _trial)(f"linears: {name}")
        for region in find_certified(trial, degree).regions[: 4 if of_width else 2]:
            assert certify(trial, [region], degree) == ""
            for what, mutant in mutants(region, degree):
                tried += 1
                if not (certify(trial, [mutant], degree) or certify(trial, [mutant], degree, jointly=True)):
                    passed.add(f"{name}: {what.removeprefix(region.module + '.')}")
    assert tried > most
    assert passed == set(), (tried, passed)


def test_what_cannot_be_cut_stays_and_says_why():
    left = {
        "norm-of-width": ("blocks.0.mlp.down.weight", "mixes all of its inputs"),
        "steered-residual": ("blocks.0.mlp.up.weight", "argument 0 of blocks.0.mlp is also used outside of its layers"),
        "keeps": ("mlp.down.weight", "outputs of mlp.up.weight reach the output of the model, or what it keeps"),
        "looks-at-weight": ("blocks.0.mlp.up.weight", "is used by norm too"),
    }
    for name, (weight, why) in left.items():
        found = find_certified(_trial(f"linears: {name}"), 2)
        assert why in found.left[weight], found.left
    grouped = find_certified(_trial("linears: grouped"), 4)
    assert "in an order that is no even cut: 4 by 0; 4 by 1; 8 by 0,1" in grouped.left["blocks.0.attention.out.weight"]
    three = find_certified(_trial("linears: apart"), 3)
    why = "blocks.0.attention.num_heads is 4, which 3 ranks do not divide (works: 2, 4)"
    assert three.left["blocks.0.attention.out.weight"] == why
    assert "its 32 inputs are not divisible by 3" in three.left["blocks.0.mlp.down.weight"]


@pytest.mark.parametrize("name", ["linears: apart", "linears: slopes", "linears: latent"])
def test_a_search_changes_nothing_in_the_module(name):
    model = models.get(name)
    batch = model.windows(1, 1)[0][0]
    module = model.build()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    numbers = [sorted((k, v) for k, v in vars(m).items() if type(v) is int) for m in module.modules()]
    classes, mode = [type(m) for m in module.modules()], module.training
    find_certified(Trial(module, lambda m: model.forward(m, batch)), 2)
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())
    assert numbers == [sorted((k, v) for k, v in vars(m).items() if type(v) is int) for m in module.modules()]
    assert classes == [type(m) for m in module.modules()] and module.training is mode
    assert all(param.grad is None for param in module.parameters())
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_no_weights_are_needed():
    for name in ("linears: qkv", "linears: sinks"):
        on_meta = find_certified(_trial(name, "meta"), 2).regions
        assert len(on_meta) == 4
        assert on_meta == find_certified(_trial(name), 2).regions


def test_layers_whose_inputs_or_outputs_are_cut_are_no_others():
    for name, degree in itertools.product(("linears: chain", "linears: lora", "linears: value-residual"), (2, 4)):
        regions = find_certified(_trial(name), degree).regions
        rows = [row for region in regions for row in region.rows]
        columns = [column for region in regions for column in (*region.columns, *region.whole)]
        assert regions and len({*rows, *columns}) == len(rows) + len(columns)
