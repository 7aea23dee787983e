"""Values replayed from a recorded constructor: the constructor's own where they are not drawn, its distribution where
they are."""

import functools
import math

import models.constructors as make
import models.unreplayable as unreplayable
import pytest
import torch
from torch import Tensor, nn

from shardwise.parallel.init.build import build_on_meta
from shardwise.parallel.init.sources import all_tensors

D = make.D


def replayed(build, seed: int = 0) -> dict[str, Tensor]:
    module, tape = build_on_meta(build, seed)
    assert module is not None and tape.refused is None, tape.refused
    on_meta = {name: tensor.detach() for name, tensor in all_tensors(module).items()}
    tape.name_draws(on_meta)
    values = {name: tape.values(tensor) for name, tensor in on_meta.items()}
    missing = {n: tape.num_unwritten(on_meta[n], v) for n, v in values.items() if tape.num_unwritten(on_meta[n], v)}
    assert not missing, missing
    return values


def constructed(build, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.detach() for name, tensor in all_tensors(build()).items()}


def assert_like_the_constructor(build, drawn: set[str] | None = None) -> dict[str, Tensor]:
    """Equal bit for bit where two seeds of the constructor agree; the same mean, spread and extent within sampling
    error where they differ."""
    ours, theirs, others = replayed(build), constructed(build, 0), constructed(build, 1)
    assert list(ours) == list(theirs)
    found = set()
    for name, value in ours.items():
        want = theirs[name]
        assert value.dtype == want.dtype and value.shape == want.shape and not value.requires_grad, name
        if torch.equal(want.nan_to_num(), others[name].nan_to_num()):
            assert torch.equal(
                torch.view_as_real(value) if value.is_complex() else value.nan_to_num(),
                torch.view_as_real(want) if want.is_complex() else want.nan_to_num(),
            ), name
            assert torch.equal(value.isnan(), want.isnan()), name
            continue
        found.add(name)
        _assert_same_statistics(name, value.double(), want.double())
    if drawn is not None:
        assert found == drawn
    return ours


def _assert_same_statistics(name: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.numel() < 30:
        return
    spread, error = theirs.std(), theirs.std() / math.sqrt(ours.numel())
    assert abs(ours.mean() - theirs.mean()) < 6 * error, name
    assert abs(ours.std() / spread - 1) < 6 / math.sqrt(ours.numel()), name
    assert abs(ours.abs().max() / theirs.abs().max() - 1) < 0.5, name


def test_standard_layers():
    values = assert_like_the_constructor(make.standard)
    assert values["embedding.weight"][3].abs().sum() == 0  # padding_idx
    assert values["lstm.weight_hh_l1_reverse"].abs().max() <= 1 / math.sqrt(32)
    assert values["attention.in_proj_bias"].abs().sum() == 0
    assert values["batch.running_var"].sum() == 8 and values["batch.num_batches_tracked"] == 0


def test_weights_set_by_apply_have_the_spread_they_were_given():
    values = assert_like_the_constructor(make.NanoGPT)
    assert abs(values["wte.weight"].std() - 0.02) < 0.001  # an embedding's own would be 1
    assert abs(values["blocks.0.1.weight"].std() - 0.02) < 0.001  # a linear's own 0.083
    assert abs(values["blocks.1.2.weight"].std() - 0.02 / math.sqrt(6)) < 0.0006
    assert values["blocks.0.1.bias"].abs().sum() == 0 and "head.weight" not in values  # a tie


def test_initialisers_that_do_nothing_on_meta():
    values = assert_like_the_constructor(make.initialisers)
    assert abs(values["trunc"].std() - 0.02) < 0.001
    assert values["cut"].abs().max() <= 0.5 and values["cut"].std() > 0.2
    torch.testing.assert_close(values["orthogonal"] @ values["orthogonal"].T, torch.eye(D), atol=1e-5, rtol=0)
    torch.testing.assert_close(values["tall"].T @ values["tall"], 4 * torch.eye(D), atol=1e-4, rtol=0)
    assert ((values["sparse"] == 0).sum(0) == D // 2).all()
    assert torch.equal(values["eye"], torch.eye(D)) and values["dirac"].sum() == 8


def test_parameters_made_from_draws():
    values = assert_like_the_constructor(make.gaussians, {"scaled", "shifted", "ints", "order", "coins"})
    assert sorted(values["order"].tolist()) == list(range(D))


def test_constants_are_the_constructors_bit_for_bit():
    values = assert_like_the_constructor(make.constants, set())
    assert values["changed"].tolist() == [0, 2, 4, 6]  # once, not once more in replay
    assert values["made_like"].tolist() == [5, 6]
    assert values["written"][3].tolist() == [5, 7, 7]
    assert values["written"][1].tolist() == [1, 2, 3]


def test_buffers_and_plain_attributes():
    values = assert_like_the_constructor(make.Rope, set())
    assert {"inv_freq", "mask", "inf", "ids", "table", "weight"} == values.keys()


def test_tensors_in_lists_dicts_tuples_and_objects():
    values = assert_like_the_constructor(make.Kept)
    assert list(values) == [
        "linear.weight", "linear.bias", "tables.cos", "tables.more.0", "pair.0", "pair.1", "space.scale",
    ]  # fmt: skip


def test_keys_without_a_name_are_counted():
    values = assert_like_the_constructor(make.ByObject, {"linear.weight", "linear.bias", "tables.0", "tables.1"})
    assert not torch.equal(values["tables.0"], values["tables.1"]) and "tables.last" in values


def test_copies_between_parameters_stay_copies():
    values = assert_like_the_constructor(make.Copies)
    assert torch.equal(values["online.weight"], values["target.weight"])
    assert torch.equal(values["online.bias"], values["frozen.bias"])
    assert torch.equal(values["scaled"], values["online.weight"] / 2)


def test_weight_norm_and_spectral_norm():
    values = assert_like_the_constructor(make.weight_norm)
    norm = values["0.parametrizations.weight.original1"].norm(dim=1, keepdim=True)
    torch.testing.assert_close(values["0.parametrizations.weight.original0"], norm)
    values = replayed(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))
    weight, u, v = (values[f"parametrizations.weight.{n}"] for n in ("original", "0._u", "0._v"))
    torch.testing.assert_close(u @ weight @ v, torch.linalg.matrix_norm(weight, 2), rtol=0.05, atol=0)


def test_dtypes_and_the_default_dtype_of_the_time():
    values = assert_like_the_constructor(make.dtypes)
    assert values["4.doubled"].tolist() == [2, 2, 2] and values["4.doubled"].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_a_method_of_the_users_called_initialize_weights_runs_once():
    assert set(replayed(make.HalvedOnce)["linear.weight"].flatten().tolist()) == {0.5}


# ---- draws -----------------------------------------------------------------------------------------------------------


def test_two_equal_layers_draw_different_numbers_and_another_seed_others():
    values, again, other = replayed(make.two_alike), replayed(make.two_alike), replayed(make.two_alike, seed=1)
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert not any(torch.equal(values[name], other[name]) for name in values)
    weights = [values[f"{i}.weight"] for i in range(3)]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_a_parameters_values_depend_on_its_name_not_on_what_else_there_is():
    alone = replayed(lambda: nn.ModuleDict({"b": nn.Linear(D, D)}))
    beside = replayed(lambda: nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Linear(D, D)}))
    assert torch.equal(alone["b.weight"], beside["b.weight"])


def test_values_do_not_depend_on_the_number_of_threads():
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(replayed(lambda: make.Holder(a=make.parameter(nn.init.orthogonal_, 300, 300))))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0]["a"], found[1]["a"]) and torch.equal(found[0]["a"], found[2]["a"])


def test_building_and_replaying_leave_the_random_state_alone():
    before = torch.get_rng_state()
    replayed(make.initialisers)
    assert torch.equal(torch.get_rng_state(), before)


# ---- what is never written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "complex64", "int64", "int32", "uint8", "int8", "bool"]
)
def test_what_nothing_writes_is_counted(dtype):
    module, tape = build_on_meta(functools.partial(unreplayable.unwritten, dtype), 0)
    tensor = all_tensors(module)["b.late"].detach()
    assert tape.num_unwritten(tensor, tape.values(tensor)) == 6  # of 12
    whole = all_tensors(module)["a.weight"].detach()
    assert tape.num_unwritten(whole, tape.values(whole)) == 0


def test_memory_of_the_legacy_constructor_is_not_taken_for_values():
    module, tape = build_on_meta(unreplayable.unwritten_legacy, 0)
    tensor = module.late.detach()
    assert tape.num_unwritten(tensor, tape.values(tensor)) == 12


def test_numbers_a_constructor_looks_at_are_its_own_where_none_is_drawn():
    assert_like_the_constructor(make.Rates, {"weight"})
    module, _ = build_on_meta(make.Rates, 0)
    built = make.Rates()
    for name in ("items", "listed", "wide"):
        assert getattr(module, name) == getattr(built, name), name


# ---- what cannot be replayed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (unreplayable.from_numpy_random, "draws from numpy.random"),
        (unreplayable.from_python_random, "draws from Python's random"),
        (unreplayable.from_item, "cannot be built on meta"),
        (unreplayable.from_item_of_nothing, "cannot be built on meta"),
        (unreplayable.from_array, "cannot be built on meta"),
        (unreplayable.from_meta_of_before, "values that meta does not keep"),
        (unreplayable.from_own_generator, "draws from a generator of its own"),
        (lambda: nn.Linear(2, 2).no_such_thing, "cannot be built on meta"),
    ],
)
def test_a_constructor_that_cannot_be_replayed_says_why(build, reason):
    _, tape = build_on_meta(build, 0)
    assert reason in tape.refused


def test_numbers_that_come_from_nowhere_change_the_digest():
    def digest(build, seed=0):
        module, tape = build_on_meta(build, seed)
        return tape.digest(all_tensors(module))

    for build in (unreplayable.from_numpy_generator, unreplayable.from_listed_numbers):
        assert digest(build) != digest(build)
    for build in (make.standard, make.constants, unreplayable.with_a_real_draw, make.NanoGPT):
        assert digest(build) == digest(build)
    assert digest(unreplayable.with_a_real_draw) != digest(unreplayable.with_a_real_draw, seed=1)


# ---- size ------------------------------------------------------------------------------------------------------------


def test_work_grows_with_the_number_of_tensors_not_with_its_square():
    module, tape = build_on_meta(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1500))), 0)
    on_meta = all_tensors(module)
    visited = 0
    entries = tape._entries

    class Counting(list):
        def __getitem__(self, index):
            nonlocal visited
            visited += 1
            return list.__getitem__(self, index)

    tape._entries = Counting(entries)
    tape.name_draws(on_meta)
    assert visited < 10 * len(entries)
