"""Units that only the module can tell: by a function, by the model's hint, by its own fully_shard; each with parity."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardwise import Precision, Sharding
from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.parallel import parallelize, recipe_of
from shardwise.step.window import window
from shardwise.world import init


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """As a library writes it: a hint, and a method that shards its layers, every second of which it keeps gathered."""

    _no_split_modules = ["Layer", "NotHere"]  # noqa: RUF012 - as Hugging Face writes it

    def __init__(self, num_layers: int = 4):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def fully_shard(self, *, reshard_after_forward: bool = True, **options) -> None:
        for i, layer in enumerate(self.layers):
            fully_shard(layer, reshard_after_forward=reshard_after_forward and i % 2 == 0, **options)


class Nested(Net):
    """A class on its list holds another one of it."""

    _no_split_modules = ["Linear", "Layer"]  # noqa: RUF012


class Asks(Net):
    """As another library's base class has it: each option by its name, given on to its blocks and kept to be looked at."""

    def fully_shard(self, mesh, reshard_after_forward=True, mp_policy=None, offload_policy=None) -> None:
        GIVEN.append((tuple(mesh.shape), reshard_after_forward, mp_policy, type(offload_policy).__name__))
        options = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}
        for layer in self.layers:
            fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)


GIVEN: list = []


class Own(Net):
    """Policies of its own."""

    policy: dict = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}  # noqa: RUF012

    def fully_shard(self, mesh, **_options) -> None:
        for i, layer in enumerate(self.layers):
            fully_shard(layer, mesh=mesh, **(self.policy if i == 1 else {}))


class OwnHead(nn.Module):
    """Blocks in a head that has a forward, in float32, as a reward model's head is."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), self.Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))

    def fully_shard(self, mesh, **_options) -> None:
        for block in self.head.blocks:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32))


class OwnOffload(Own):
    policy: dict = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}  # noqa: RUF012


class OtherCuts(Net):
    def fully_shard(self, mesh, **_options) -> None:
        fully_shard(self.layers[0], mesh=mesh, ignored_params={self.layers[0].inner.bias})
        fully_shard(self.layers[1], mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))


class Needs(Net):
    def fully_shard(self, mesh, dtype) -> None:
        pass


class Fails(Net):
    def fully_shard(self, mesh, **_options) -> None:
        fully_shard(self.blocks[0], mesh=mesh)


class OnlyWarns(Net):
    def fully_shard(self, **options) -> None:
        pass


def build(cls: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(2)
    return cls().double()


def sharded(cls: type[nn.Module], given, meta: bool = False, **more):
    """Units with what is freed, and the whole gradients; or the error."""
    with init("dp_shard=2", device="cpu", timeout_s=20) as world:
        try:
            model = parallelize(cls if meta else build(cls), world, sharding=Sharding(units=given, **more))
        except (PlanError, UsageError, ConfigError) as error:
            return str(error)
        if meta:
            return {unit.name: unit.reshard for unit in recipe_of(model).units}, None
        with window(model, [{"x": torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)}], count=len) as w:
            for each in w:
                model(each["x"]).pow(2).sum().backward()
        grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        return {unit.name: unit.reshard for unit in recipe_of(model).units}, grads


def even_layers(name: str, module: nn.Module) -> bool:
    return isinstance(module, Layer) and int(name.rpartition(".")[2]) % 2 == 0


ALL = {f"layers.{i}": True for i in range(4)}


@pytest.mark.quick(
    "Net-Layer-units0", "Net-embed, Layer-units1", "Net-no_split-units4", "Nested-no_split-units5", "Net-model-units6"
)
@pytest.mark.parametrize(
    ("cls", "given", "units"),
    [
        (Net, "Layer", ALL),
        (Net, "embed, Layer", {"embed": True, **ALL}),
        (Net, f"{Layer.__module__}.Layer", ALL),
        (Net, even_layers, {"layers.0": True, "layers.2": True}),
        (Net, "no_split", ALL),
        (Nested, "no_split", {"embed": True, **ALL}),
        (Net, "model", {"layers.0": True, "layers.1": False, "layers.2": True, "layers.3": False}),
    ],
)
def test_units_and_gradients(ranks, cls, given, units):
    plain = build(cls)
    for rank in range(2):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).pow(2).sum().backward()
    for found, grads in ranks.run(sharded, 2, cls, given):
        assert found == {**units, "": False}
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


def asking(layout: str):
    """The model's own method under each option that it takes: what it was given, its units, and the whole gradients."""
    told = []
    with init(layout, device="cpu", timeout_s=20) as world:
        for options, precision in (({"reshard_after_forward": False}, None), ({"reshard_after_forward": 2}, None),
                                   ({"offload": True}, "fp64"), ({}, "fp64")):  # fmt: skip
            torch.manual_seed(2)
            GIVEN.clear()
            model = parallelize(
                Asks().double(), world, sharding=Sharding(units="model", **options), precision=precision
            )
            with window(model, [{"x": torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)}], count=len) as w:
                for each in w:
                    model(each["x"]).pow(2).sum().backward()
            found = {unit.name: unit.reshard for unit in recipe_of(model).units if unit.name}
            on_host = world.device.type == "cpu" and recipe_of(model).techniques["data"]["offload"]
            grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
            told.append((GIVEN[0], found, on_host, grads))
    return told


@pytest.mark.quick("dp_replicate=2,dp_shard=2-mesh1")
@pytest.mark.parametrize(("layout", "mesh"), [("dp_shard=4", (4,)), ("dp_replicate=2,dp_shard=2", (2, 2))])
def test_the_models_own_way_is_given_the_options_that_it_asks_for(ranks, layout, mesh):
    plain = build()
    for rank in range(4):
        plain(torch.full((2, 4), 1.0 + rank, dtype=torch.float64)).pow(2).sum().backward()
    over_two = 2 if mesh == (4,) else True
    none = MixedPrecisionPolicy(cast_forward_inputs=False)
    double = MixedPrecisionPolicy(torch.float64, torch.float64, cast_forward_inputs=False)
    expected = [
        ((mesh, False, none, "OffloadPolicy"), False, False),
        ((mesh, 2, none, "OffloadPolicy"), over_two, False),
        ((mesh, True, double, "CPUOffloadPolicy"), True, True),
        ((mesh, True, double, "OffloadPolicy"), True, False),
    ]
    for told in ranks.run(asking, 4, layout):
        for (given, found, on_host, grads), (options, freed, host) in zip(told, expected, strict=True):
            assert (given, found, on_host) == (options, dict.fromkeys(ALL, freed), host)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


OF_HEAD = (
    *({name: "fp32"} for name in ("head.blocks.*", "head.blocks", "head", "Head", "Layer")),
    {"head": "fp16", "head.blocks": "fp32"},  # the innermost counts, whichever comes last
    {"head.blocks": "fp32", "head": "fp16"},
)


def own_policies():
    """A policy of the model's own that says something else than parallelize, or the same."""
    told = []
    with init("dp_shard=1", device="cpu") as world:
        for cls, precision, offload in (
            (Own, None, False),
            (Own, "bf16", False),
            (Own, Precision(compute="bf16", reduce="bf16"), False),
            (Own, Precision(parts={"layers.1": "bf16"}), False),
            *((OwnHead, Precision(compute="bf16", parts=parts), False) for parts in OF_HEAD),
            (OwnOffload, None, False),
            (OwnOffload, None, True),
        ):
            sharding = Sharding(units="model", engine="fsdp2", offload=offload)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    model = parallelize(cls(), world, sharding=sharding, precision=precision)
                except ConfigError as error:
                    told.append(str(error))
                    continue
            said = [str(warning.message) for warning in warned if "fully_shard" in str(warning.message)]
            told.append((len(recipe_of(model).units), said))
    return told


def test_policies_of_the_models_own_agree_with_what_parallelize_says_or_are_refused(ranks):
    other, same, reduced, part, *of_head, on_host, both = ranks.run(own_policies, 1)[0]
    assert "gives 'layers.1' MixedPrecisionPolicy(param_dtype=torch.bfloat16" in other and "parts={'layers.1'" in other
    units, (said,) = same  # torch would leave the other layers in float32
    assert units == 5 and "does not give it to layers.0, layers.2, layers.3, which are treated as the others" in said
    assert "reduce_dtype=torch.bfloat16" in reduced
    assert part == (5, []) and of_head == [(3, [])] * len(OF_HEAD)
    assert "gives 'layers.1' a CPUOffloadPolicy" in on_host and "offload=True" in on_host
    assert both[0] == 5 and "takes offload_policy" in both[1][0]


class TakesNoReshard(Net):
    def fully_shard(self, mesh) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)


class DropsReshard(Net):
    """Of the last layer; the first, whose input is small, is kept whatever is said."""

    def fully_shard(self, mesh, **options) -> None:
        for i, layer in enumerate(self.layers):
            reshard = {0: False, 3: True}.get(i, options["reshard_after_forward"])
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)


RESHARDS = [(TakesNoReshard, False), (TakesNoReshard, 2), (DropsReshard, False), (DropsReshard, 2),
            (TakesNoReshard, True), (TakesNoReshard, 4), (Net, True), (Net, False), (Asks, 2), (DropsReshard, True)]  # fmt: skip


def dropped_reshards():
    told = []
    with init("dp_shard=4", device="cpu") as world:
        for cls, reshard in RESHARDS:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                model = parallelize(cls, world, sharding=Sharding(units="model", reshard_after_forward=reshard))
            said = [str(warning.message) for warning in warned if "reshard" in str(warning.message)]
            told.append(([unit.reshard for unit in recipe_of(model).units if unit.name], said))
    return told


def reshard_of_copies():
    with init("dp_replicate=1", device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("error")
        options = Sharding(units="model", reshard_after_forward=False)
        return recipe_of(parallelize(TakesNoReshard, world, sharding=options)).engine


def test_reshard_after_forward_that_the_models_own_way_does_not_pass_on_is_warned_of(ranks):
    for lacks, lacks_2, drops, drops_2, *fine in ranks.run(dropped_reshards, 4):
        for (freed, (said,)), given in ((lacks, False), (lacks_2, 2)):
            assert freed == [True] * 4
            assert "has no parameter reshard_after_forward to give to layers.0, layers.1, layers.2 and 1 more" in said
            assert f": {given} has no effect there" in said
        assert drops[0] == [False, False, False, True] and drops_2[0] == [False, 2, 2, True]
        for _, (said,) in (drops, drops_2):
            assert "takes reshard_after_forward, and does not give it to layers.3:" in said
        assert [said for _, said in fine] == [[]] * 6
    assert ranks.run(reshard_of_copies, 1) == ["ddp"]


def other_cuts():
    with init("dp_shard=2", device="cpu") as world, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = parallelize(OtherCuts(), world, sharding=Sharding(units="model"))
        params = recipe_of(model).params
        cut = [bool(params[name].cuts) for name in ("layers.0.inner.bias", "layers.1.inner.weight")]
    return cut, [str(warning.message) for warning in warned if "fully_shard" in str(warning.message)]


def test_parameters_that_the_models_own_way_would_cut_otherwise_are_named(ranks):
    for cut, (whole, other) in ranks.run(other_cuts, 2):
        assert cut == [True, True]
        assert (
            "wants layers.0.inner.bias whole on every rank (ignored_params); they are cut along their first dim"
            in whole
        )
        assert "wants layers.1.inner.weight, layers.1.out.weight cut along another dim than their first" in other


def test_the_models_own_way_on_meta(ranks):
    assert ranks.run(sharded, 2, Net, "model", True)[0][0]["layers.1"] is False


def never(name: str, module: nn.Module) -> bool:
    return False


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


@pytest.mark.parametrize(
    ("cls", "given", "more", "text"),
    [
        (Net, never, {}, "true for no module but the root"),
        (Plain, "no_split", {}, "has a list _no_split_modules"),
        (Plain, "model", {}, "it has no method fully_shard"),
        (OnlyWarns, "model", {}, "sharded none of its modules"),
        (Net, "model", {"reshard_every": 2}, "says for each unit when it is freed"),
        (Net, "model", {"reshard_after_forward": {"layers.*": False}}, "says for each unit when it is freed"),
        (Asks, "model", {"reshard_after_forward": 3}, "raised ValueError: If passing reshard_after_forward as an int"),
        (Needs, "model", {}, "fully_shard of Needs needs dtype"),
        (Fails, "model", {}, "it raised AttributeError: 'Fails' object has no attribute 'blocks'"),
        (Net, "torch.nn.Layer", {}, "matches no module's name and no module's class"),
        (Net, "auto", {"reshard_after_forward": {"Lairs": False}, "min_unit_bytes": 0}, "matches no module of a unit"),
        (Net, "auto", {"reshard_after_forward": {"layers.1": False}, "min_unit_bytes": 700}, "a unit is freed as one"),
    ],
)  # fmt: skip
def test_what_names_nothing_is_refused(ranks, cls, given, more, text):
    (said, _) = ranks.run(sharded, 2, cls, given, **more)
    assert text in said
