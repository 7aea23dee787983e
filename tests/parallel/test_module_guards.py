"""What torch does with modules of a sharded model: right, or refused when it is called, by name; what a fix says is done."""

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwise as sw
from shardwise.errors import ShardwiseError

pytestmark = [pytest.mark.timeout(60)]

LAYOUTS = ("dp_shard=2", "dp_replicate=2", "tp=2")
X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
call = torch.func.functional_call


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()


def sharded(world: sw.World, seed: int = 0) -> nn.Module:
    return sw.parallelize(build(seed), world, example={"input": X})


def said_of(function: Any) -> ShardwiseError | str:
    try:
        function()
    except ShardwiseError as error:
        return error
    return "done"


def cast_and_moved(layout: str) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world)
        refused = [
            said_of(lambda: model.half()),
            said_of(lambda: model.to(torch.float32)),
            said_of(lambda: model[2].float()),
            said_of(lambda: nn.Sequential(model).bfloat16()),
            said_of(lambda: model.type(torch.float16)),
            said_of(lambda: model.to("meta")),
        ]
        for unchanged in (model.double, model.cpu, lambda: model.to("cpu", torch.float64)):
            unchanged()
        return refused, said_of(model.share_memory), model(X).detach(), sw.full_state_dict(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_casts_and_moves_are_refused_when_they_are_called(ranks, layout):
    """They passed without a word, and the next step was refused; share_memory() ended ranks with SIGSEGV under dp_shard."""
    refused, of_sharing, output, state = ranks.run(cast_and_moved, 2, layout)[0]
    *of_casts, of_move = refused
    for error in of_casts:
        assert "was torch.float64 when the module was sharded, and would be torch." in error.given, error
        assert "Precision(" in error.fix and error.name in {"0.weight", "2.weight"}
    assert of_casts[2].name == "2.weight"
    assert "from cpu to meta" in of_move.given
    if layout == "dp_replicate=2":
        assert of_sharing == "done"
    else:
        assert of_sharing.given == "share_memory() of a sharded model" and "sw.full_state_dict(model)" in of_sharing.fix
    torch.testing.assert_close(output, build()(X).detach(), rtol=1e-12, atol=1e-13)
    plain = build(1)
    plain.load_state_dict(state)  # as the fix says
    assert all(p.is_shared() for p in plain.share_memory().parameters())


def copied(layout: str) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world)
        part = model[0]
        pickles = [said_of(lambda: pickle.dumps(part)), said_of(lambda: torch.save(part, io.BytesIO()))]
        copies = [said_of(lambda: copy.copy(part)), said_of(lambda: copy.deepcopy(part))]
        whole = said_of(lambda: copy.copy(model))
        copy.deepcopy(model[1])  # without parameters
        fix = pickles[0].fix.partition("on every rank: ")[2].partition(" for the values of this part")[0]
        return pickles, copies, whole, eval(fix, {"sw": sw, "model": model})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_model_are_not_pickled_and_copied_only_where_they_are_whole(ranks, layout):
    """A pickle was torch's AttributeError about a local object; a deepcopy refused to run under dp_shard, and was torch's error of
    shapes under tp; copy.copy was said to be a pickle."""
    pickles, copies, whole, values = ranks.run(copied, 2, layout)[0]
    for error in pickles:
        assert error.given == "torch.save or pickle of a part of a sharded module" and error.name == "0", error
    assert {n: v.shape for n, v in values.items()} == {"0.weight": (8, 4), "0.bias": (8,)}
    assert torch.equal(values["0.weight"], build()[0].weight)
    assert whole.given == "copy.copy of a sharded module" and "parallelize a second model" in whole.fix
    if layout == "dp_replicate=2":
        assert copies == ["done", "done"]
    else:
        assert [each.given for each in copies] == [
            f"{how} of a part of a sharded module" for how in ("copy.copy", "deepcopy")
        ]


def called(layout: str) -> tuple:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model, values = sharded(world), build(7).state_dict()

        def outputs() -> list[Tensor]:
            own = {name: 2 * param for name, param in model.named_parameters()}
            ways = [(model, values), (model, own), (nn.Sequential(model), {f"0.{n}": v for n, v in values.items()})]
            return [call(module, given, (X,)).detach() for module, given in ways]

        found: list[Any] = []
        for _ in range(2):  # before and after a forward
            try:
                found.append(outputs())
            except ShardwiseError as error:
                found.append(error)
            model(X)
        found.append(call(model, dict(model.named_parameters()), (X,)).detach())  # its own
        other = sharded(world, 3)
        sw.load_full_state_dict(other, values)  # as the fix says
        return found, other(X).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functional_call_with_other_values_is_right_or_refused(ranks, layout):
    """dp_shard=2: the values were not used, and the output was 0.52 from one process; tp=2: 0.086."""
    (first, second, own), loaded = ranks.run(called, 2, layout)[0]
    wanted = build(7)(X).detach()
    torch.testing.assert_close(loaded, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(own, build()(X).detach(), rtol=1e-12, atol=1e-13)
    doubled = call(build(), {name: 2 * param for name, param in build().named_parameters()}, (X,)).detach()
    for found in (first, second):
        if layout == "dp_replicate=2":
            for output, want in zip(found, (wanted, doubled, wanted), strict=True):
                torch.testing.assert_close(output, want, rtol=1e-12, atol=1e-13)
        else:
            assert found.given.startswith("functional_call of a sharded model") and found.name == "0.weight"
            assert 'sw.init("dp_replicate=-1")' in found.fix and "sw.load_full_state_dict(other, values)" in found.fix


def wrapped(layout: str) -> list:
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model = sharded(world)
        wraps = [nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel]
        said = [said_of(functools.partial(wrap, outer)) for wrap in wraps for outer in (model, nn.Sequential(model))]
        plain = said_of(lambda: sw.parallelize(nn.DataParallel(build()), world))
        return [*said, plain]


def composed(layout: str) -> tuple:
    """What torch's own functions say of a sharded model; then what their errors say to write instead, and a plain model by hand."""
    with sw.init(layout, device="cpu", timeout_s=20) as world:
        model, mesh = sharded(world), world.mesh[world.mesh.mesh_dim_names[0]]
        before = sw.full_state_dict(model)
        by_function = {
            "fully_shard": lambda each: fully_shard(each, mesh=mesh),
            "replicate": lambda each: replicate(each, device_mesh=mesh),
            "distribute_module": lambda each: distribute_module(each, mesh),
        }
        said = [
            (name, [said_of(functools.partial(function, each)) for each in (model, model[2], nn.Sequential(model))])
            for name, function in by_function.items()
        ]
        said.append(("fully_shard", [said_of(lambda: fully_shard([model[0], model[2]], mesh=mesh))]))
        said.append(("replicate", [said_of(lambda: replicate_with_fsdp(model[0], mesh=mesh))]))
        said.append(("distribute_module", [said_of(lambda: parallelize_module(model[0], mesh, ColwiseParallel()))]))
        assert all(torch.equal(value, before[name]) for name, value in sw.full_state_dict(model).items())
        assert said_of(lambda: getattr(model, "_distribute_module_applied", None)) == "done"
        by_hand = [function(build()) for function in by_function.values()]
        outer = sw.parallelize(nn.Sequential(build()), world, example={"input": X})
        return said, len(by_hand), outer(X).detach()


@pytest.mark.quick("dp_shard=2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_of_torch_that_would_shard_it_once_more_are_refused_at_the_call(ranks, layout):
    """Most passed without a word, `fully_shard` under dp_shard with an AssertionError of torch. Models by hand are left alone."""
    said, num_by_hand, outer = ranks.run(composed, 2, layout)[0]
    words = {"fully_shard": "dp_shard=-1", "replicate": "dp_replicate=-1", "distribute_module": "tp=-1"}
    for name, errors in said:
        for error in errors:
            assert error.given.startswith(f"torch's {name}") and f'sw.init("{words[name]}")' in error.fix
    assert [error.name for error in said[0][1]] == [None, "2", None] and num_by_hand == 3
    torch.testing.assert_close(outer, build()(X).detach(), rtol=1e-12, atol=1e-13)  # as the fix says


@pytest.mark.parametrize("layout", ["dp_shard=-1", "dp_replicate=-1", "tp=-1"])
def test_the_layout_does_what_the_functions_of_torch_would(ranks, layout):
    output = ranks.run(cast_and_moved, 2, layout)[0][2]
    torch.testing.assert_close(output, build()(X).detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrappers_of_torch_around_a_sharded_model_are_refused(ranks, layout):
    """DDP around replicas summed gradients twice, in a loop of one's own without a word."""
    *said, plain = ranks.run(wrapped, 2, layout)[0]
    for error in said:
        assert "around a model that parallelize has made parallel" in error.given and "do not wrap it" in error.fix
    assert plain.given == "a module that holds a DataParallel" and "pass the plain module" in plain.fix


def initialised():
    """What initialisers say of parameters that are cut over tp, and what their whole is after the error's own fix."""
    with sw.init("tp=2", device="cpu", timeout_s=30) as world:
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        model = sw.parallelize(model, world, example={"input": torch.randn(2, 16)})
        said = [
            said_of(act)
            for act in (
                lambda: nn.init.kaiming_normal_(model[2].weight),
                lambda: nn.init.xavier_uniform_(model[2].weight),
                lambda: model[2].reset_parameters(),
            )
        ]
        state = sw.full_state_dict(model)
        if world.is_main:
            nn.init.xavier_uniform_(state["2.weight"])
        sw.load_full_state_dict(model, state)
        sw.full_state_dict(model)
        return (
            said,
            nn.init.xavier_uniform_(torch.empty(4, 4)).shape,
            said_of(lambda: sw.parallelize(nn.Linear(2, 2), world, example=torch.ones(2, 2))),
        )


def test_initialisers_do_not_take_the_fan_of_a_part(ranks):
    for said, shape, example in ranks.run(initialised, 2):
        assert all(str(each).startswith("2.weight: an initialiser that counts the inputs") for each in said[:2])
        assert str(said[2]).startswith("2.weight: kaiming_uniform_ of a parameter that is cut over tp")
        assert shape == (4, 4) and "parallelize(example=Tensor)" in str(example)


def two_models(layout: str) -> tuple:
    """Two models that share an activation, as those of some libraries do; the second is saved before it is sharded."""
    activation = nn.GELU()
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        first, second = (nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4)) for _ in range(2))
        sw.parallelize(first, world, sharding=sw.Sharding(min_unit_bytes=0), example={"input": torch.randn(2, 4)})
        is_cut = "replicate" not in layout  # else the activation has hooks of the first, which no pickle takes
        said = said_of(lambda: torch.save(second, io.BytesIO())) if is_cut else "done"
        other = said_of(
            lambda: sw.parallelize(
                second, world, sharding=sw.Sharding(min_unit_bytes=0), example={"input": torch.randn(2, 4)}
            )
        )
        return said, other


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2", "tp=2"])
def test_models_that_share_an_activation_do_not_meet(ranks, layout):
    assert all(said == ("done", "done") for said in ranks.run(two_models, 2, layout))
