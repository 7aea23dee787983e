"""Modules that answer for their state themselves: weights go in and out as the plain module's own methods read and write them."""

import functools
import threading
import warnings

import pytest
import torch
from layouts import LAYOUTS, RankLayout
from models.storing import STORING, Net, build_storing, older_state
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.state.convert import Conversion, convert
from shardwise.state.to_rank0 import gather_tensors

EVERY = sw.Sharding(min_unit_bytes=0)
X = torch.arange(12.0, dtype=torch.float64).view(2, 6) / 12


def outputs(model):
    with torch.no_grad():
        return model(X)


def held(model):
    """What the model holds, on rank 0."""
    runtime = runtime_of(model)
    names = list(runtime.recipe.params)
    whole = gather_tensors(runtime, ((name, runtime.local_tensor_of(name)) for name in names))
    found = dict(zip(names, whole, strict=True))
    return found | {name: buffer.clone() for name, buffer in runtime.buffers().items()}


def sharded(name, world, seed, engine="auto"):
    return sw.parallelize(
        build_storing(name, seed), world, example={"x": X}, sharding=sw.Sharding(min_unit_bytes=0, engine=engine)
    )


class Run:
    """What a checkpoint needs of a step."""

    def __init__(self, model):
        self.model, self.optim, self.num_steps = model, torch.optim.Adam(model.parameters()), 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def check_state_dict(self, state):
        pass


def every_way(name, layout, engine, state, older, root):
    """Loads what a plain model gave, in every way, and saves what was loaded, in every way."""
    warnings.simplefilter("ignore")
    with sw.init(layout, device="cpu") as world:
        found = {}
        for way, given in (("state dict", state), ("older", older), ("file", f"{root}/plain.pt")):
            model = sharded(name, world, 5, engine)
            report = sw.load_weights(model, given)
            assert (report.missing, report.unexpected) == ((), ()), report
            found[way] = outputs(model)
        model = sharded(name, world, 5, engine)
        sw.load_full_state_dict(model, state if world.is_main else {})
        found["full"] = outputs(model)
        if name != "dropped":  # what is not stored is drawn anew there
            empty = sw.parallelize(functools.partial(build_storing, name, 5), world, init="load", example={"x": X})
            sw.load_weights(empty, state)
            found["memory only"] = outputs(empty)
        sw.save_weights(model, f"{root}/weights")
        again = sharded(name, world, 6, engine)
        sw.load_weights(again, f"{root}/weights", strict=name != "dropped")
        if name != "counted":  # its extra state is no tensor
            found["weights"] = outputs(again)
        full = sw.full_state_dict(model)
        with torch.no_grad():
            for param in model.parameters() if name != "derived" else ():  # its table is not stored
                param.mul_(1.1)  # numbers that no method has rounded yet
        with sw.CheckpointManager(f"{root}/run", Run(model), async_save=world.size > 1) as checkpoints:
            checkpoints.save()
        again = sharded(name, world, 6, engine)
        sw.load_weights(again, f"{root}/run", strict=name != "dropped", shared_files=False)
        if name not in ("counted", "dropped"):  # what is not stored as a tensor is not weights
            assert (outputs(again) - outputs(model)).abs().max() < 1e-12
        return found, full, held(model), outputs(model)


def resumed(name, layout, root):
    warnings.simplefilter("ignore")
    with sw.init(layout, device="cpu") as world:
        model = sharded(name, world, 7)
        with sw.CheckpointManager(f"{root}/run", Run(model)) as checkpoints:
            assert checkpoints.load() == 0
        return held(model), outputs(model)


TP = RankLayout("tp=2", 2)
NEXT = {  # what is saved under a layout is resumed under the other
    "one-fsdp2": (LAYOUTS["one-fsdp2"], LAYOUTS["fsdp-2"]),
    "fsdp-2": (LAYOUTS["fsdp-2"], LAYOUTS["one"]),
    "ddp-2": (LAYOUTS["ddp-2"], TP),
    "tp-2": (TP, LAYOUTS["fsdp-2"]),
}


@pytest.mark.quick(
    "logarithm-one-fsdp2",
    "packed-fsdp-2",
    "pair-tp-2",
    "stripped-one-fsdp2",
    "hooked-one-fsdp2",
    "derived-one-fsdp2",
    "renamed-one-fsdp2",
)
@pytest.mark.parametrize("layout", NEXT)
@pytest.mark.parametrize("name", STORING)
def test_weights_go_in_and_out_as_the_modules_own_methods_have_them(ranks, tmp_path, name, layout):
    plain = build_storing(name, 3)
    state, older = plain.state_dict(), older_state(name, build_storing(name, 3))
    torch.save(state, tmp_path / "plain.pt")
    expected = outputs(plain)
    given, other = NEXT[layout]
    told = ranks.run(every_way, given.num_ranks, name, given.text, given.engine, state, older, str(tmp_path))
    for found, *_ in told:
        for way, out in found.items():
            if name == "counted" and way == "file":  # a file's extra state is no tensor
                continue
            assert (out - expected).abs().max() < 1e-12, way
    _, full, kept, last = told[0]
    assert list(full) == list(state)
    for key, value in state.items():
        same = (
            torch.allclose(full[key], value, rtol=0, atol=1e-12)
            if isinstance(value, torch.Tensor)
            else full[key] == value
        )
        assert same, key
    twin = build_storing(name, 8)
    twin.load_state_dict(full)
    assert (outputs(twin) - expected).abs().max() < 1e-12
    twin = build_storing(name, 8)
    if name not in ("turned", "counted"):  # plain safetensors have no versions, and no extra state
        twin.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
        assert (outputs(twin) - expected).abs().max() < 1e-12
    exact, out = ranks.run(resumed, other.num_ranks, name, other.text, str(tmp_path))[0]
    assert exact.keys() == kept.keys() and all(torch.equal(exact[n], kept[n]) for n in kept)
    assert (out - last).abs().max() < 1e-12


# ---- versions ---------------------------------------------------------------------------------------------------


def converted(root, layout):
    with sw.init(layout, device="cpu") as world:
        found = {}
        for file in ("hf", "back.safetensors"):
            model = sharded("turned", world, 5)
            sw.load_weights(model, f"{root}/{file}")
            found[file] = outputs(model)
        return found


def test_versions_of_modules_stay_with_weights_that_are_converted(ranks, tmp_path):
    plain = build_storing("turned", 3)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    convert(Conversion(source=tmp_path / "plain.pt", dest=tmp_path / "hf", to="hf", max_shard_bytes=600))
    convert(Conversion(source=tmp_path / "hf", dest=tmp_path / "back.safetensors", to="safetensors"))
    for out in ranks.run(converted, 2, str(tmp_path), "dp_shard=2")[0].values():
        assert (out - outputs(plain)).abs().max() < 1e-12


def test_a_file_that_says_no_versions_is_upgraded_as_by_the_plain_module(ranks, tmp_path):
    older = build_storing("turned", 3).state_dict()
    older["middle.weight"] = older["middle.weight"].t().contiguous()
    save_file(older, tmp_path / "back.safetensors")
    (tmp_path / "hf").mkdir()
    save_file(older, tmp_path / "hf" / "model.safetensors")
    for out in ranks.run(converted, 2, str(tmp_path), "dp_shard=2")[0].values():
        assert (out - outputs(build_storing("turned", 3))).abs().max() < 1e-12


def told_of_versions(root):
    with sw.init("dp_shard=2", device="cpu") as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = sharded("turned", world, 3)
        sw.save_weights(model, root)
        full = sw.full_state_dict(model)
        if world.is_main:
            torch.save(full, f"{root}/full.pt")  # as the warning says
        return [str(warning.message) for warning in seen]


def test_files_whose_readers_must_know_versions_are_told_of(ranks, tmp_path):
    first, others = ranks.run(told_of_versions, 2, str(tmp_path))
    assert len(first) == 1 and first[0].startswith("middle: loads by its version") and not others
    twin = build_storing("turned", 8)
    twin.load_state_dict(torch.load(tmp_path / "full.pt", weights_only=True))
    assert torch.equal(outputs(twin), outputs(build_storing("turned", 3)))


# ---- what is refused, when the model is sharded ------------------------------------------------------------------


class Sparse(nn.Module):
    """Stores what is not zero: what that is, values say."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "kept"] = self.weight.detach()[self.weight.detach() != 0]


class Looking(Sparse):
    """Stores another name where the weight is large."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + ("large" if self.weight.detach().max() > 1 else "small")] = self.weight.detach()


class Tuple(Sparse):
    """Stores tensors in a tuple."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "both"] = (self.weight.detach(), 2)


class Largest(Sparse):
    """Its extra state is computed from its weight."""

    _save_to_state_dict = nn.Module._save_to_state_dict

    def get_extra_state(self):
        return {"largest": self.weight.detach().max()}

    def set_extra_state(self, state):
        pass


class Locked(Sparse):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


REFUSED = {
    "sparse": (Sparse, "_save_to_state_dict", "depends on the values of middle.weight"),
    "looking": (Looking, "_save_to_state_dict", "depends on the values of middle.weight"),
    "tuple": (Tuple, "no tensor", "under a name of its own"),
    "largest": (Largest, "get_extra_state", "a part of that parameter"),
    "locked": (Locked, "_save_to_state_dict", "copy.deepcopy fails"),
}


def refuse(name):
    with sw.init("dp_shard=2", device="cpu") as world:
        try:
            sw.parallelize(Net(REFUSED[name][0]()), world, sharding=EVERY)
        except sw.UnsupportedError as error:
            return error
        return None


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_cannot_be_run_is_refused_when_the_model_is_sharded(ranks, name):
    _, method, why = REFUSED[name]
    for error in ranks.run(refuse, 2, name):
        assert error is not None and error.name.startswith("middle")
        assert method in error.given and why in error.why


def shards_of_what_is_held():
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sharded("logarithm", world, 3)
        try:
            sw.state_dict(model, "SHARDED_STATE_DICT")
        except sw.UnsupportedError as error:
            return error.name, sw.state_dict(model, "FULL_STATE_DICT")  # the fix
        return None


def test_shards_of_what_a_module_holds_are_refused_as_its_state_dict(ranks):
    (name, full), *_ = ranks.run(shards_of_what_is_held, 2)
    assert name == "middle"
    assert torch.allclose(full["middle.scale"], build_storing("logarithm", 3).state_dict()["middle.scale"], rtol=1e-12)


# ---- what a load does not do -------------------------------------------------------------------------------------


def load_in_part(state, strict):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sharded("packed", world, 3)
        before = outputs(model)
        try:
            report = sw.load_weights(model, state, strict=strict)
        except sw.CheckpointError as error:
            return error, torch.equal(before, outputs(model))
        return report, torch.equal(before, outputs(model))


def test_what_is_missing_is_told_and_nothing_has_changed(ranks):
    state = build_storing("packed", 5).state_dict()
    del state["middle.qk"]
    state["other"] = torch.ones(2)
    for error, is_same in ranks.run(load_in_part, 2, state, True):
        assert "middle.qk" in error.why and "other" in error.why and is_same
    for report, is_same in ranks.run(load_in_part, 2, state, False):
        assert report.missing == ("middle.qk",) and report.unexpected == ("other",) and not is_same


def test_a_dtype_that_a_computed_tensor_is_made_of_is_compared_too(ranks):
    state = {name: value.float() for name, value in build_storing("packed", 5).state_dict().items()}
    state |= {name: value.double() for name, value in state.items() if name != "middle.qk"}
    for error, is_same in ranks.run(load_in_part, 2, state, True):
        assert error.misfit == "dtype" and error.name == "middle.q" and is_same


class KeepsActivation(nn.Module):
    """Stores another number than it holds, and keeps what its last forward computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.zeros(8)), []

    def forward(self, x):
        self.last = x * self.scale.exp()
        self.seen = [self.last]
        return self.last

    def _save_to_state_dict(self, dest, prefix, keep):
        dest[prefix + "scale"] = self.scale.detach().exp()

    def _load_from_state_dict(self, state, prefix, *rest):
        super()._load_from_state_dict({prefix + "scale": state[prefix + "scale"].log()}, prefix, *rest)


def saved_after_a_step(kind, layout):
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        torch.manual_seed(0)
        middle = KeepsActivation() if kind == "kept" else nn.utils.spectral_norm(nn.Linear(8, 8))
        model = sw.parallelize(nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3)).double(), world)
        with sw.window(model, [{"x": torch.ones(2, 6).double()}], count=lambda b: 2) as w:
            for b in w:
                model(b["x"]).sum().backward()
        return sw.full_state_dict(model)


@pytest.mark.parametrize("kind", ["kept", "spectral norm"])
@pytest.mark.parametrize(("layout", "num"), [("dp_shard=1", 1), ("dp_shard=2", 2), ("dp_replicate=2", 2)])
def test_a_model_that_keeps_what_a_forward_computed_is_saved_after_training(ranks, kind, layout, num):
    state = ranks.run(saved_after_a_step, num, kind, layout)[0]
    assert torch.equal(state["1.scale"], torch.ones(8).double()) if kind == "kept" else "1.weight_orig" in state


# ---- buffers that are no longer as the module had them when it was sharded -------------------------------------------


class Table(nn.Module):
    """Has a persistent buffer that training replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        return x + self.rows.sum()


class Doubled(Table):
    """Stores it twice as large, and takes a table of any length."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "double"] = self.rows * 2

    def _load_from_state_dict(self, state, prefix, *rest):
        self.rows = state[prefix + "double"] // 2


class Beside(Table):
    """Stores it beside a number that is made of it."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.rows.sum()

    def _load_from_state_dict(self, state, prefix, *rest):
        self.rows = state[prefix + "rows"].clone()
        self.total = state[prefix + "total"]


TABLES = {"plain": Table, "doubled": Doubled, "beside": Beside}
GROWN = {
    "longer": torch.arange(5.0, dtype=torch.float64),
    "of two dims": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "of whole numbers": torch.tensor([7, 8]),
    "empty": torch.zeros(0, dtype=torch.float64),
    "of many dims": torch.ones(1000, 1, 1, 1, 1, 1, dtype=torch.float64),  # so that the header of a file is longer too
}


def tabled(kind, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), TABLES[kind](), STORING["logarithm"]().middle, nn.Linear(8, 3)).double()
    nn.init.normal_(model[2].scale)
    return model


def saved_when_grown(kind, value, layout, who, root):
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def make(seed=0):
            policy = {} if who == "all" else {"*.rows": "own"}
            sharding = sw.Sharding(min_unit_bytes=0, buffers=policy) if policy else EVERY
            return sw.parallelize(tabled(kind, seed), world, sharding=sharding, example={"x": X})

        model, plain = make(), tabled(kind)
        if who in ("all", world.rank):
            model[1].rows = GROWN[value].clone()
        is_grown = who in ("all", 0)
        plain[1].rows = GROWN[value].clone() if is_grown else plain[1].rows
        expected = plain.state_dict()
        full = sw.full_state_dict(model)
        sw.save_weights(model, root / "weights")
        files = load_file(root / "weights" / "model.safetensors")
        for found in [files, full] if world.is_main else [files]:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[n], v) and found[n].dtype == v.dtype for n, v in expected.items())
        with sw.CheckpointManager(root / "run", Run(model), async_save=False) as checkpoints:
            checkpoints.save()
        fresh, again = make(1), make(2)
        again[1].rows = model[1].rows.clone()
        for other in (fresh, again):
            with sw.CheckpointManager(root / "run", Run(other), async_save=False) as checkpoints:
                checkpoints.load()
            assert torch.equal(other[1].rows, plain[1].rows) and other[1].rows.dtype == plain[1].rows.dtype
            assert (outputs(other) - outputs(plain)).abs().max() < 1e-12
        sw.load_weights(again, expected)  # as the plain one that was grown alike does
        assert torch.equal(again[1].rows, plain[1].rows) and (outputs(again) - outputs(plain)).abs().max() < 1e-12


@pytest.mark.quick("longer-doubled", "of two dims-plain", "of whole numbers-beside", "empty-plain")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("value", GROWN)
def test_a_buffer_is_saved_as_it_is_now(ranks, tmp_path, kind, value):
    layout, num_ranks = {"plain": ("dp_shard=2", 2), "doubled": ("tp=2", 2), "beside": ("dp_replicate=2", 2)}[kind]
    ranks.run(saved_when_grown, num_ranks, kind, value, layout, "all", tmp_path)


@pytest.mark.quick("0-plain", "1-doubled", "1-beside")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_buffer_that_one_rank_has_replaced_is_saved_as_rank_0_has_it(ranks, tmp_path, kind, rank):
    ranks.run(saved_when_grown, 2, kind, "of many dims", "dp_shard=2", rank, tmp_path)


# ---- how a method writes ---------------------------------------------------------------------------------------------


class Written(nn.Module):
    """Stores its weight by one way, and takes it by another that undoes it."""

    def __init__(self, how, columns, dtype):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(6, columns, dtype=dtype))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "stored"] = WRITES[self.how][0](self.weight.detach())

    def _load_from_state_dict(self, state, prefix, *rest):
        with torch.no_grad():
            WRITES[self.how][1](self.weight, state[prefix + "stored"])


def turn(weight):
    return weight.t().contiguous()


def in_chunks(weight, stored):
    for mine, given in zip(weight.chunk(2), stored.chunk(2)[::-1], strict=True):
        mine.copy_(given)


def in_steps(weight, stored):
    weight[::2].copy_(stored[:3])
    weight[1::2] = stored[3:]


def twice(weight, stored):
    weight.copy_(stored)
    weight.t().copy_(stored.t().flip(0))


WRITES = {
    "a transposed view": (turn, lambda w, v: w.t().copy_(v)),
    "a transposed view of its data": (turn, lambda w, v: w.data.T.copy_(other=v)),
    "swapped dims, one by one": (turn, lambda w, v: [row.copy_(given) for row, given in zip(w.T, v, strict=True)]),
    "other strides": (turn, lambda w, v: w.as_strided(v.shape, (1, w.shape[1])).copy_(v)),
    "as one row": (lambda w: w.flatten(), lambda w, v: w.view(-1).copy_(v)),
    "chunks, changed about": (lambda w: w.roll(3, 0), in_chunks),
    "every second row": (lambda w: torch.cat([w[::2], w[1::2]]), in_steps),
    "from the last to the first": (lambda w: w.flip(0), lambda w, v: w.copy_(v.flip(0))),
    "whole, then through a view": (lambda w: w.flip(1), twice),
    "many at once, stored as a view": (lambda w: w.t(), lambda w, v: torch._foreach_copy_([w.t()], [v])),
    "one row for all": (lambda w: w[0].clone(), lambda w, v: w.copy_(v)),
    "conjugated": (lambda w: w.conj(), lambda w, v: w.copy_(v.conj())),
    "its data, replaced": (turn, lambda w, v: setattr(w, "data", v.t())),
    "its data, replaced by a copy": (lambda w: 2 * w, lambda w, v: setattr(w, "data", v / 2)),
    "as it is": (lambda w: w, lambda w, v: w.copy_(v)),
}


def written(columns, dtype, layout):
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how in WRITES:
            torch.manual_seed(1)
            source, plain, begin = (
                nn.Sequential(nn.Linear(6, 6).double(), Written(how, columns, dtype)) for _ in range(3)
            )
            state = source.state_dict()
            plain.load_state_dict(state)
            model = sw.parallelize(begin, world, sharding=EVERY, example={"input": X})
            sw.load_full_state_dict(model, state)
            assert (outputs(model) - outputs(plain)).abs().max() < 1e-12, how
            again = sw.full_state_dict(model)
            for name, value in plain.state_dict().items() if world.is_main else ():
                assert torch.equal(again[name], value), (how, name)


@pytest.mark.quick("6-dtype0-dp_replicate=2", "4-dtype1-dp_shard=2", "6-dtype2-dp_shard=2")
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize(("columns", "dtype"), [(6, torch.float64), (4, torch.float64), (6, torch.complex128)])
def test_a_method_may_write_through_any_view(ranks, columns, dtype, layout):
    ranks.run(written, 2, columns, dtype, layout)
