"""Weights in: bit-exact under every layout, each rank reading its own bytes, and nothing changed where anything is wrong."""

import pickle
import re
from unittest.mock import patch

import pytest
import torch
from layouts import KINDS, every_layout
from models.zoo import ConvNet, Odd
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.parallel.init.values import _Arriving
from shardwise.recipe import Slice
from shardwise.recipe.boxes import whole
from shardwise.state import files as files_module
from shardwise.state import stored
from shardwise.state.files import OpenFiles
from shardwise.state.formats.trees import flatten
from shardwise.state.rounding import copy_checked
from shardwise.state.source import open_source

MODELS = {"odd": Odd, "conv": ConvNet}
EVERY = sw.Sharding(min_unit_bytes=0)


def plain(name, seed, dtype=None):
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype or (torch.bfloat16 if name == "odd" else torch.float32))


def untied(state, model):
    """As Hugging Face stores it: a tied tensor once, under its first name."""
    first = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(id(tensor), name)
    return {name: tensor.clone() for name, tensor in state.items() if name in first.values()}


def write(folder, name, seed=1, **metadata):
    model = plain(name, seed)
    folder.mkdir(exist_ok=True)
    save_file(untied(model.state_dict(), model), folder / "model.safetensors", metadata={"format": "pt", **metadata})
    return model.state_dict()


def sharded(name, layout, init=None):
    world = sw.init(layout, device="cpu")
    build = (lambda: plain(name, 0)) if init == "load" else plain(name, 0)
    return sw.parallelize(build, world, sharding=EVERY, init=init), world


def load(name, layout, source, init=None, expect=None, **options):
    model, world = sharded(name, layout, init)
    with world:
        before = {n: t.clone() for n, t in runtime_of(model).local_tensors().items()}
        try:
            report = sw.load_weights(model, source if source is not None else {}, **options)
        except sw.ShardwiseError as error:
            after = runtime_of(model).local_tensors()
            same = all(torch.equal(after[n].nan_to_num(), t.nan_to_num()) for n, t in before.items())
            return error, same
        return report, sw.full_state_dict(model)


def equal(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


@pytest.mark.combinations("values")
@pytest.mark.parametrize("init", [None, "load"])
@every_layout(*KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_in_a_directory_are_the_models_to_the_last_bit_under_every_layout(ranks, tmp_path, name, layout, init):
    expected = write(tmp_path / "w", name)
    answers = ranks.run(load, layout.num_ranks, name, layout.text, str(tmp_path / "w"), init)
    equal(answers[0][1], expected)
    size = sum(t.numel() * t.itemsize for t in untied(expected, plain(name, 1)).values())
    for report, _ in answers:
        assert (report.missing, report.unexpected) == ((), ())
        assert report.num_tensors == len(untied(expected, plain(name, 1)))
        if "dp_shard=1" in layout.text or layout.text == "dp_replicate=2":
            assert report.num_bytes == size
    if "dp_replicate" not in layout.text:
        model = plain(name, 1)
        whole = sum(b.numel() * b.itemsize for n, b in model.named_buffers() if n in expected)
        own = sum(report.num_bytes - whole for report, _ in answers)
        scalars = sum(p.itemsize for p in model.parameters() if p.dim() == 0)
        assert own == size - whole + (layout.num_ranks - 1) * scalars


def count_wire(name, source):
    model, world = sharded(name, "dp_shard=4")
    sent = []
    with world:
        for call in ("send", "recv", "broadcast", "scatter", "all_gather", "all_gather_into_tensor"):
            kept = getattr(torch.distributed, call)
            setattr(
                torch.distributed, call, lambda *a, kept=kept, call=call, **k: (sent.append(call), kept(*a, **k))[1]
            )
        sw.load_weights(model, source)
        return sent


def test_nothing_travels_where_every_rank_sees_the_files(ranks, tmp_path):
    write(tmp_path / "w", "odd")
    assert ranks.run(count_wire, 4, "odd", str(tmp_path / "w")) == [[]] * 4


def load_from_rank0(name, layout, source, init=None, **options):
    model, world = sharded(name, layout, init)
    with world:
        report = sw.load_weights(model, source if world.is_main else "/nowhere", shared_files=False, **options)
        return report, sw.full_state_dict(model)


@pytest.mark.quick("odd-fsdp-2", "odd-hsdp-2x2", "conv-ddp-2")
@every_layout(*KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_what_rank_0_alone_can_see_is_sent_to_the_others(ranks, tmp_path, name, layout):
    expected = write(tmp_path / "w", name)
    answers = ranks.run(load_from_rank0, layout.num_ranks, name, layout.text, str(tmp_path / "w"))
    equal(answers[0][1], expected)
    assert all(report.num_tensors == answers[0][0].num_tensors for report, _ in answers)


def fail_to_read(name, source, rank, shared):
    model, world = sharded(name, "dp_shard=2")
    with world:
        kept, calls = files_module.OpenFiles.read, [0]

        def broken(self, path, offset, memory, record=None):
            calls[0] += 1
            if world.rank == rank and calls[0] == 3:
                raise sw.CheckpointError(f"the file {path}", why="reading failed: Input/output error", fix="none")
            kept(self, path, offset, memory, record)

        files_module.OpenFiles.read = broken
        told = []
        try:
            for act in (
                lambda: sw.load_weights(model, source, shared_files=shared),
                lambda: model(torch.zeros(2, 3, dtype=torch.long)),
                lambda: sw.full_state_dict(model),
            ):
                try:
                    act()
                except sw.ShardwiseError as error:
                    told.append((type(error).__name__, str(error)))
        finally:
            files_module.OpenFiles.read = kept
        sw.load_weights(model, source)
        return told, sw.full_state_dict(model)


@pytest.mark.parametrize(("rank", "shared"), [(0, True), (1, True), (0, False)])
def test_a_read_that_fails_half_way_is_told_on_every_rank_and_the_model_is_not_used_until_it_is_whole(
    ranks, tmp_path, rank, shared
):
    expected = write(tmp_path / "w", "odd")
    answers = ranks.run(fail_to_read, 2, "odd", str(tmp_path / "w"), rank, shared)
    for told, _ in answers:
        assert [kind for kind, _ in told] == ["CheckpointError", "UsageError", "UsageError"]
        assert "Input/output error" in told[0][1] and "load it again" in told[1][1]
    equal(answers[0][1], expected)


@pytest.mark.quick("conv-True", "odd-False")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["conv", "odd"])
def test_a_flipped_bit_in_a_torch_file_is_refused_by_name_on_every_rank(ranks, tmp_path, name, shared):
    """Also where no rank reads the tensor in one piece, and the model is not used with it."""
    path, expected = tmp_path / "a.pt", plain(name, 1).state_dict()
    torch.save(expected, path)
    assert ranks.run(load, 2, name, "dp_shard=2", path, shared_files=shared)[0][0].num_bytes
    tensors, data = open_source(path).tensors, path.read_bytes()
    for victim in (next(iter(tensors)), max(tensors, key=lambda each: tensors[each].numel)):
        changed = bytearray(data)
        changed[tensors[victim].chunks[0].offset] ^= 1
        path.write_bytes(changed)
        for error, _ in ranks.run(load, 2, name, "dp_shard=2", path, shared_files=shared):
            assert "checksum" in str(error) and victim in str(error) and str(path) in str(error)


def load_less_after_failing(name, source, less, init):
    """The second load does not bring what the first had begun to write."""
    model, world = sharded(name, "dp_shard=2", init)
    with world:
        kept, calls = files_module.OpenFiles.read, [0]

        def broken(self, path, offset, memory, record=None):
            calls[0] += 1
            if calls[0] == 4:
                raise sw.CheckpointError(f"the file {path}", why="reading failed: Input/output error", fix="none")
            kept(self, path, offset, memory, record)

        files_module.OpenFiles.read = broken
        try:
            sw.load_weights(model, source)
        except sw.CheckpointError:
            pass
        finally:
            files_module.OpenFiles.read = kept
        try:
            sw.load_weights(model, less, strict=False)
        except sw.CheckpointError as error:
            told = str(error)
        sw.load_weights(model, source)
        return told, sw.full_state_dict(model)


@pytest.mark.parametrize("init", [None, "load"])
def test_what_a_failed_load_left_half_written_has_to_come_with_the_next_one(ranks, tmp_path, init):
    expected = write(tmp_path / "w", "odd")
    model = plain("odd", 1)
    less = untied(model.state_dict(), model)
    gone = mutate(less, "missing")
    save_file(less, tmp_path / "less.safetensors")
    answers = ranks.run(
        load_less_after_failing, 2, "odd", str(tmp_path / "w"), str(tmp_path / "less.safetensors"), init
    )
    assert all(gone in told and "neither old nor new" in told for told, _ in answers)
    equal(answers[0][1], expected)


def mutate(state, how):
    name = [n for n, t in state.items() if t.dim() == 2 and not n.startswith("frozen")][-1]
    if how == "missing":
        del state[name]
    if how == "unexpected":
        state["stranger"] = torch.ones(2)
    if how == "shape":
        state[name] = state[name][:-1].clone()
    if how == "dtype":
        state[name] = state[name].double()
    if how == "nan":
        state[name][0, 0] = float("nan")
    return name if how != "unexpected" else "stranger"


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "dtype", "nan"])
def test_what_does_not_fit_is_refused_by_name_and_nothing_has_changed(ranks, tmp_path, how):
    model = plain("odd", 1)
    state = untied(model.state_dict(), model)
    name = mutate(state, how)
    save_file(state, tmp_path / "model.safetensors")
    for error, same in ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path), check_finite=how == "nan"):
        assert isinstance(error, sw.CheckpointError) and error.name == name and str(tmp_path) in str(error) and same


def test_not_strict_loads_what_fits_and_tells_the_rest(ranks, tmp_path):
    model = plain("odd", 1)
    state = untied(model.state_dict(), model)
    gone = mutate(state, "missing")
    mutate(state, "unexpected")
    save_file(state, tmp_path / "model.safetensors")
    first = plain("odd", 0).state_dict()
    for init in (None, "load"):
        report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path), init, strict=False)[0]
        assert (report.missing, report.unexpected) == ((gone,), ("stranger",))
        assert "missing (1)" in str(report) and "not in the model (1): stranger" in str(report)
        assert torch.equal(found["embed.weight"], state["embed.weight"])
        if init is None:
            assert torch.equal(found[gone], first[gone])
        else:
            assert bool(found[gone].isfinite().all()) and found[gone].std() > 0


def test_dtypes_are_cast_only_where_that_is_asked_for(ranks, tmp_path):
    model = plain("odd", 1, torch.float32)
    state = untied(model.state_dict(), model)
    save_file(state, tmp_path / "model.safetensors")
    error, same = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path))[0]
    assert "float32" in error.given and "bfloat16" in error.why and "cast=True" in error.fix and same
    report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path), cast=True)[0]
    assert set(report.cast.values()) == {("float32", "bfloat16")} and "from float32 to bfloat16" in str(report)
    assert all(torch.equal(found[n], t.to(found[n].dtype)) for n, t in state.items())


def test_lossless_casts_round_nothing(ranks, tmp_path):
    model = plain("odd", 1, torch.float32)
    state = untied(model.state_dict(), model)
    save_file(state, tmp_path / "model.safetensors")
    error, same = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path), cast="lossless")[0]
    assert "bfloat16" in error.why and "rounded" in error.why and same
    rounded = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in state.items()}
    save_file(rounded, tmp_path / "model.safetensors")
    report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path), cast="lossless")[0]
    assert not report.cast and all(torch.equal(found[n], t.to(found[n].dtype)) for n, t in rounded.items())


@pytest.mark.parametrize(
    ("there", "here", "may"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "float64", True),
        ("bfloat16", "float64", True),
        ("float64", "float32", False),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("int32", "float64", False),
    ],
)
def test_a_cast_is_lossless_if_every_value_of_the_one_dtype_is_in_the_other(there, here, may):
    from shardwise.state.misfits import may_be

    assert may_be(there, here, cast="lossless") is may and not may_be(there, here, cast=False)


def test_numbers_never_become_integers(ranks, tmp_path):
    model = plain("conv", 1)
    state = untied(model.state_dict(), model)
    name = next(n for n, t in state.items() if t.dtype == torch.int64)
    state[name] = state[name].float()
    save_file(state, tmp_path / "model.safetensors")
    error, same = ranks.run(load, 2, "conv", "dp_shard=2", str(tmp_path), cast=True)[0]
    assert error.name == name and same


WRAPPED = {
    "compile": lambda name: f"_orig_mod.{name}",
    "ddp": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "remat": lambda name: re.sub(r"^(blocks\.\d)\.", r"\1._checkpoint_wrapped_module.", name),
    "trainer": lambda name: f"model.{name}",
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_wrappers_add_to_names_is_seen_to(ranks, tmp_path, kind):
    expected = write(tmp_path / "w", "odd")
    model = plain("odd", 1)
    state = {WRAPPED[kind](name): tensor for name, tensor in untied(model.state_dict(), model).items()}
    save_file(state, tmp_path / "one.safetensors")
    report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "one.safetensors"))[0]
    equal(found, expected)
    assert len(report.renamed) == 1


@pytest.mark.parametrize("prefix", ["net", "app.net"])
def test_any_prefix_that_all_names_share_or_lack_is_seen_to(ranks, tmp_path, prefix):
    model = plain("odd", 1)
    state = untied(model.state_dict(), model)
    save_file({f"{prefix}.{name}": tensor for name, tensor in state.items()}, tmp_path / "more.safetensors")
    report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "more.safetensors"))[0]
    equal(found, model.state_dict())
    assert report.renamed == (f"{prefix!r} removed from {len(state)} names",)
    save_file(state, tmp_path / "less.safetensors")
    report, found = ranks.run(load_wrapped, 2, prefix, str(tmp_path / "less.safetensors"))[0]
    assert report.renamed == (f"{prefix!r} put before {len(state)} names",)
    equal({name.removeprefix(f"{prefix}."): tensor for name, tensor in found.items()}, model.state_dict())


class Around(nn.Module):
    def __init__(self, name, inner):
        super().__init__()
        self.add_module(name, inner)

    def forward(self, *args):
        return next(self.children())(*args)


def load_wrapped(prefix, source):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = plain("odd", 0)
        for name in reversed(prefix.split(".")):
            model = Around(name, model)
        model = sw.parallelize(model, world, sharding=EVERY)
        return sw.load_weights(model, source), sw.full_state_dict(model)


def test_a_prefix_of_some_names_is_not_taken_off(ranks, tmp_path):
    model = plain("odd", 1)
    state = {name if i else f"ema.{name}": t for i, (name, t) in enumerate(untied(model.state_dict(), model).items())}
    save_file(state, tmp_path / "a.safetensors")
    error, same = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "a.safetensors"))[0]
    assert isinstance(error, sw.CheckpointError) and "1 there are not in the model: ema." in error.why and same


def test_names_are_mapped_by_the_users_rules_in_their_order(ranks, tmp_path):
    expected = write(tmp_path / "w", "odd")
    model = plain("odd", 1)
    state = {f"net.{n.replace('blocks.', 'h.')}": t for n, t in untied(model.state_dict(), model).items()}
    state["net.old"] = torch.zeros(3)
    save_file(state, tmp_path / "one.safetensors")
    rules = [(r"^net\.", ""), (r"^h\.(\d)", r"blocks.\1"), ("^old$", None)]
    report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "one.safetensors"), rename=rules)[0]
    equal(found, expected)
    assert len(report.renamed) == 3 and "rename leaves it out" in str(report)


@pytest.mark.parametrize(
    ("rules", "text"),
    [([("^nothing", "")], "matches none"), ([("(", "")], "cannot be carried out"), (["x"], "a rule is a pair")],
)
def test_a_rule_that_does_nothing_is_refused(ranks, tmp_path, rules, text):
    write(tmp_path / "w", "odd")
    error, same = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "w"), rename=rules)[0]
    assert isinstance(error, sw.ConfigError) and text in error.why and same


def test_two_names_that_become_one_are_refused(ranks, tmp_path):
    write(tmp_path / "w", "odd")
    rules = [("embed.weight", "blocks.0.first.weight"), ("blocks.1", "blocks.0")]
    error, same = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "w"), rename=rules)[0]
    assert isinstance(error, sw.CheckpointError) and "both end under this name" in error.why and same


def test_both_names_of_a_tie_may_be_there_if_they_are_equal(ranks, tmp_path):
    expected = write(tmp_path / "w", "odd")
    state = {name: tensor.clone() for name, tensor in plain("odd", 1).state_dict().items()}
    save_file(state, tmp_path / "both.safetensors")
    equal(ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "both.safetensors"))[0][1], expected)
    state["head.weight"][-1, -1] += 1
    save_file(state, tmp_path / "other.safetensors")
    for error, same in ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path / "other.safetensors")):
        assert "ties these names" in error.why and error.name == "embed.weight" and same


def load_state(name, layout, num_ranks_with, **options):
    model, world = sharded(name, layout)
    with world:
        state = plain(name, 1).state_dict() if world.rank < num_ranks_with else {}
        try:
            return sw.load_weights(model, state, **options), sw.full_state_dict(model)
        except sw.ShardwiseError as error:
            return error, None


def test_a_state_dict_is_a_source_on_every_rank_or_on_rank_0(ranks):
    for options, held_by in (({}, 4), ({"shared_files": False}, 1)):
        answers = ranks.run(load_state, 4, "odd", "dp_replicate=2,dp_shard=2", held_by, **options)
        equal(answers[0][1], plain("odd", 1).state_dict())
    for error, _ in ranks.run(load_state, 2, "odd", "dp_shard=2", 1):
        assert isinstance(error, sw.CheckpointError) and "on rank 1" in error.given and "it is empty" in error.why
        assert "shared_files=False" in error.fix


def use_before_loading(source):
    model, world = sharded("odd", "dp_shard=2", "load")
    with world:
        told = []
        for act in (lambda: model(torch.zeros(2, 3, dtype=torch.long)), lambda: sw.full_state_dict(model)):
            try:
                act()
            except sw.UsageError as error:
                told.append(str(error))
        on_meta = [n for n, t in runtime_of(model).local_tensors().items() if t.device.type == "meta"]
        return told, on_meta


def test_a_model_made_for_loading_is_not_used_before(ranks):
    for told, on_meta in ranks.run(use_before_loading, 2, None):
        assert len(told) == 2 and all("load_weights" in text for text in told) and on_meta == []


class Rotary(nn.Module):
    """A buffer that no file holds."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)


def load_rotary(source):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(Rotary, world, init="load")
        report = sw.load_weights(model, source)
        return report, model.inv_freq


def test_a_buffer_that_no_file_holds_is_computed_and_one_that_a_file_holds_too_is_not_loaded(ranks, tmp_path):
    torch.manual_seed(0)
    state = {**Rotary().state_dict(), "inv_freq": torch.zeros(4)}
    save_file(state, tmp_path / "model.safetensors")
    report, inv_freq = ranks.run(load_rotary, 2, str(tmp_path))[0]
    assert torch.equal(inv_freq, Rotary().inv_freq)
    assert report.ignored == {"inv_freq": "the model computes it itself"}


def small_buffer(name, layout, source):
    kept, sizes = files_module.OpenFiles.scratch, []

    def scratch(self, num_bytes):
        memory = kept(self, num_bytes)
        sizes.append(len(memory.obj))
        return memory

    files_module.BUFFER = stored.BUFFER = 64
    try:
        with patch.object(files_module.OpenFiles, "scratch", scratch):
            return (*load(name, layout, source, cast=True), max(sizes))
    finally:
        files_module.BUFFER = stored.BUFFER = 8 << 20


def test_a_cast_goes_through_a_buffer_of_bounded_size(ranks, tmp_path):
    model = plain("odd", 1, torch.float32)
    state = untied(model.state_dict(), model)
    save_file(state, tmp_path / "model.safetensors")
    _, found, largest = ranks.run(small_buffer, 2, "odd", "dp_shard=2", str(tmp_path))[0]
    assert largest <= 64 < max(tensor.nbytes for tensor in state.values())
    assert all(torch.equal(found[n], t.to(found[n].dtype)) for n, t in state.items())


WAYS = {
    "files": lambda model, source, state, world: sw.load_weights(model, source),
    "rank 0": lambda model, source, state, world: sw.load_weights(model, source, shared_files=False),
    "full": lambda model, source, state, world: sw.load_full_state_dict(model, state if world.is_main else {}),
    "local": lambda model, source, state, world: sw.load_state_dict(model, state, "LOCAL_STATE_DICT"),
}


def forward_load_forward(layout, source, way, offload):
    """A forward leaves the root's parameters whole; what is loaded then has to be what the next one computes with."""
    with sw.init(layout, device="cpu") as world:
        options = sw.Sharding(engine="fsdp2", min_unit_bytes=0, offload=offload)
        other = sw.parallelize(plain("odd", 1, torch.float32), world, sharding=options)
        model = sw.parallelize(plain("odd", 0, torch.float32), world, sharding=options)
        state = sw.state_dict(other, "LOCAL_STATE_DICT") if way == "local" else sw.full_state_dict(other)
        x = torch.ones(2, 3, dtype=torch.long)
        with torch.no_grad():
            model(x)
            WAYS[way](model, source, state, world)
            with sw.gathered(model):
                same = torch.equal(model.head.weight, plain("odd", 1, torch.float32).head.weight)
            return same, torch.equal(model(x), other(x))


@pytest.mark.quick("rank 0-True", "local-False")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_after_a_forward_is_what_the_next_forward_computes_with(ranks, tmp_path, way, offload):
    model = plain("odd", 1, torch.float32)
    save_file(untied(model.state_dict(), model), tmp_path / "model.safetensors")
    assert ranks.run(forward_load_forward, 2, "dp_shard=2", str(tmp_path), way, offload) == [(True, True)] * 2


def load_in_a_window(source):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(plain("odd", 0), world)
        told = []
        with sw.gathered(model):
            try:
                sw.load_weights(model, source)
            except sw.UsageError as error:
                told.append(str(error))
        return told


def test_values_do_not_change_under_somebody_who_reads_them(ranks, tmp_path):
    write(tmp_path / "w", "odd")
    for told in ranks.run(load_in_a_window, 2, str(tmp_path / "w")):
        assert len(told) == 1 and "within sw.gathered" in told[0]


def load_other_files(layout, folder):
    model, world = sharded("odd", layout)
    with world:
        try:
            sw.load_weights(model, f"{folder}/{world.rank}")
        except sw.CheckpointError as error:
            return str(error)


@every_layout("ddp-2", "hsdp-2x2")
def test_ranks_that_hold_the_same_and_read_other_values_are_told(ranks, tmp_path, layout):
    for rank in range(layout.num_ranks):
        write(tmp_path / str(rank), "odd", seed=rank)
    for told in ranks.run(load_other_files, layout.num_ranks, layout.text, str(tmp_path)):
        assert "different values under the same names" in told


def test_ranks_that_see_other_tensors_are_told_before_anything_is_read(ranks, tmp_path):
    for rank in range(2):
        model = plain("odd", rank)
        state = untied(model.state_dict(), model)
        state |= {"extra": torch.ones(rank + 1)}
        (tmp_path / str(rank)).mkdir()
        save_file(state, tmp_path / str(rank) / "model.safetensors")
    assert all("not in the model" in told for told in ranks.run(load_other_files, 2, "dp_shard=2", str(tmp_path)))


def load_state_of(kind, shared):
    model, world = sharded("odd", "dp_shard=2")
    with world:
        state = plain("odd", 1).state_dict()
        name = "never"
        if kind == "meta":
            state[name] = state[name].to("meta")
        if kind == "sparse":
            state[name] = state[name].float().to_sparse()
        if kind == "nan":
            for tied in ("embed.weight", "head.weight"):
                state[tied] = torch.full_like(state[tied], float("nan"))
        try:
            sw.load_weights(model, state if world.is_main or shared else {}, shared_files=shared)
        except sw.ShardwiseError as error:
            return error.name
        return float(sw.full_state_dict(model).get("embed.weight", torch.zeros(1)).sum())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_a_tensor_without_values_to_copy_is_refused_by_name_on_every_rank(ranks, kind, shared):
    assert ranks.run(load_state_of, 2, kind, shared) == ["never", "never"]


def test_a_tied_tensor_with_nan_in_it_comes_back(ranks):
    first, _ = ranks.run(load_state_of, 2, "nan", False)
    assert first != first


def fault(shared):
    """A fault of the library itself, or of torch: nobody waits for the rank that has it."""
    model, world = sharded("odd", "dp_shard=2")
    with world:
        kept = stored.InMemoryTensor.read
        stored.InMemoryTensor.read = lambda *_: 1 / (world.rank * (1 if shared else 0))
        try:
            sw.load_weights(model, plain("odd", 1).state_dict(), shared_files=shared)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            stored.InMemoryTensor.read = kept


@pytest.mark.parametrize("shared", [True, False])
def test_a_fault_that_nobody_foresaw_leaves_no_rank_alone(ranks, shared):
    (kind, _), (other, told) = ranks.run(fault, 2, shared, timeout_s=30)
    assert kind == "ZeroDivisionError" and other == "RankError" and "ZeroDivisionError" in told


def test_head_and_base_of_a_model_in_a_wrapper(ranks, tmp_path):
    model = plain("odd", 1)
    state = {f"module.model.{name}": tensor for name, tensor in untied(model.state_dict(), model).items()}
    save_file(state, tmp_path / "model.safetensors")
    report, found = ranks.run(load, 2, "odd", "dp_shard=2", str(tmp_path))[0]
    equal(found, model.state_dict())
    assert len(report.renamed) == 2


class Headed(nn.Module):
    """Its class allows weights without the head, as Hugging Face's do."""

    _keys_to_ignore_on_load_missing = (r"head\.",)

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


def load_the_body_after_failing(folder):
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Headed(), world, sharding=EVERY)
        kept, calls = files_module.OpenFiles.read, [0]

        def broken(self, path, offset, memory, record=None):
            calls[0] += 1
            if calls[0] == 4:
                raise OSError("gone")
            kept(self, path, offset, memory, record)

        with patch.object(files_module.OpenFiles, "read", broken), pytest.raises(sw.CheckpointError, match="gone"):
            sw.load_weights(model, f"{folder}/new.safetensors")
        with pytest.raises(sw.CheckpointError, match=r"without 2 tensors that an earlier load left half written"):
            sw.load_weights(model, f"{folder}/body.safetensors")
        with pytest.raises(sw.UsageError, match="not loaded whole"):
            model(torch.ones(1, 4))


def test_what_a_class_excuses_has_to_come_too_where_it_was_left_half_written(ranks, tmp_path):
    new = {name: torch.full_like(tensor, 7.0) for name, tensor in Headed().state_dict().items()}
    save_file(new, tmp_path / "new.safetensors")
    save_file({name: value for name, value in new.items() if "body" in name}, tmp_path / "body.safetensors")
    ranks.run(load_the_body_after_failing, 1, str(tmp_path))


def load_large(source, layout, shared):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(nn.Linear(2, 4, bias=False).to(torch.float16), world, sharding=EVERY)
        try:
            sw.load_weights(model, source if source else {}, cast=True, shared_files=shared)
        except sw.CheckpointError as error:
            return error.name, str(error)
        return sw.full_state_dict(model)


def load_marks(source):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(nn.Linear(2, 4, bias=False).to(torch.bfloat16), world, sharding=EVERY)
        sw.load_weights(model, source, cast=True)
        return sw.full_state_dict(model)


def test_what_stands_for_infinite_in_float32_does_in_bfloat16(ranks, tmp_path):
    save_file({"weight": torch.full((4, 2), torch.finfo(torch.float32).min)}, tmp_path / "w.safetensors")
    found = ranks.run(load_marks, 2, str(tmp_path / "w.safetensors"))[0]
    assert found["weight"].eq(float("-inf")).all()


def test_values_beyond_a_dtype_are_seen_in_every_kind_of_tensor(tmp_path):
    wide = torch.full((3, 3), 1e300, dtype=torch.complex128)
    with pytest.raises(
        sw.CheckpointError, match=r"9 values beyond what complex64(?s:.)*fix: let this tensor keep its dtype"
    ):
        copy_checked(torch.empty(3, 3, dtype=torch.complex64), wide, "x")
    torch.save({"w": torch.full((4, 3), 1e5).t()}, tmp_path / "w.pt")  # strided in the file
    with OpenFiles() as files, pytest.raises(sw.CheckpointError, match="12 values beyond what float16"):
        open_source(tmp_path / "w.pt").tensors["w"].read(whole((3, 4)), torch.empty(3, 4, dtype=torch.float16), files)
    copy_checked(torch.empty(2, dtype=torch.float16), torch.tensor([float("nan"), 1.0]), "x")
    copy_checked(torch.empty(0, dtype=torch.float16), torch.empty(0), "x")
    copy_checked(torch.empty(1, dtype=torch.float8_e4m3fn), torch.ones(1), "x")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_a_cast_that_would_make_values_infinite_is_refused(ranks, tmp_path, held, shared):
    weight = torch.ones(4, 2)
    weight[0, 0], weight[1, 1] = 1e5, float("inf")  # one that is infinite already is nobody's loss
    save_file({"weight": weight}, tmp_path / "w.safetensors")
    source = {"weight": weight} if held else str(tmp_path / "w.safetensors")
    for name, told in ranks.run(load_large, 2, source, "dp_shard=2", shared):
        assert name == "weight" and "1 values beyond what float16 can hold" in told and "up to 1e+05" in told
    weight[0, 0] = 6e4
    save_file({"weight": weight}, tmp_path / "w.safetensors")
    found = ranks.run(load_large, 2, str(tmp_path / "w.safetensors"), "dp_shard=2", shared)[0]
    assert torch.equal(found["weight"], weight.half())


def load_permuted(folder):
    with sw.init("dp_replicate=2", device="cpu") as world:
        model = sw.parallelize(nn.Linear(8, 8, bias=False), world)
        with pytest.raises(sw.CheckpointError, match="different values under the same names"):
            sw.load_weights(model, f"{folder}/{world.rank}.safetensors")


def test_nodes_that_hold_rows_in_another_order_are_told(ranks, tmp_path):
    weight = torch.randn(8, 8)
    for rank, values in enumerate((weight, weight.roll(4, 0))):
        save_file({"weight": values}, tmp_path / f"{rank}.safetensors")
    ranks.run(load_permuted, 2, str(tmp_path))


def load_forms(layout):
    """A mapping is taken as a file by ``torch.save`` of it would be."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 4), world, sharding=EVERY)
        want = {"weight": torch.eye(4), "bias": torch.ones(4)}
        forms = {
            "under a key": {"model": want, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}},
            "in a module": {"app": {"net": want}},
            "deeper": {"net": {"weight": want["weight"]}, "net.bias": want["bias"]},
            "a number as a key": {**want, 3: {"epoch": 1}},
        }
        found = {}
        for kind, form in forms.items():
            sw.load_weights(model, {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)})
            report = sw.load_weights(model, form if world.is_main else {}, shared_files=False)
            found[kind] = report.num_tensors, sw.full_state_dict(model)
        with pytest.raises(sw.UsageError, match="2 NumPy arrays") as caught:
            sw.load_full_state_dict(model, {name: tensor.numpy() for name, tensor in want.items()})
        with pytest.raises(sw.CheckpointError, match="each of them could be the model's weights"):
            sw.load_weights(model, {"model": want, "state_dict": want})
        with pytest.raises(sw.CheckpointError, match="weight: a state dict: it is there, and in 'model' too"):
            sw.load_weights(model, {"model": want, "weight": want["weight"]})
        report = sw.load_full_state_dict(model, {f"old.{n}": t for n, t in want.items()}, rename=[(r"^old\.", "")])
        return found, caught.value.fix, report.num_tensors


def test_mappings_within_a_mapping_are_looked_through_as_those_in_a_file(ranks):
    (found, fix, num_renamed), *_ = ranks.run(load_forms, 2, "dp_shard=2")
    for num_tensors, state in found.values():
        assert num_tensors == 2 and torch.equal(state["weight"], torch.eye(4))
    assert "from_numpy" in fix and num_renamed == 2


def load_part(source):
    with sw.init("dp_shard=2", device="cpu") as world:
        reports = []
        for init in ("load", None):
            model = sw.parallelize(lambda: nn.Linear(4, 4), world, init=init, sharding=EVERY)
            reports.append(str(sw.load_weights(model, source, strict=False)))
        return reports


def test_the_report_says_which_values_the_missing_ones_have(ranks, tmp_path):
    save_file({"weight": torch.eye(4)}, tmp_path / "part.safetensors")
    fresh, used = ranks.run(load_part, 2, str(tmp_path / "part.safetensors"))[0]
    assert "missing (1), with their constructor's values: bias" in fresh
    assert "missing (1), left as they were: bias" in used


def forget_the_directory(folder):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 4), world, sharding=EVERY)
        sw.load_weights(model, f"{folder}/model")
        best = sw.full_state_dict(model)
        sw.load_full_state_dict(model, best)
        sw.save_weights(model, f"{folder}/out")


def test_values_from_memory_leave_the_model_the_directory_it_came_from(ranks, tmp_path):
    (tmp_path / "model").mkdir()
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    ranks.run(forget_the_directory, 2, str(tmp_path))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


class Single(nn.Module):
    """A parameter of one element whose stride is 2: contiguous, and not to be seen as bytes by ``view``."""

    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(1, 2)[:, 0])

    def forward(self, x):
        return self.lin(x) * self.scale


def in_and_out(layout, folder):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(Single(), world)
        optim = torch.optim.AdamW(model.parameters())
        with sw.accumulate(model, is_last=True):
            model(torch.ones(1, 4)).sum().backward()
        optim.step()
        state = sw.full_state_dict(model)
        sw.load_full_state_dict(model, state)
        sw.load_full_optimizer_state_dict(model, optim, sw.full_optimizer_state_dict(model, optim))
        sw.save_weights(model, f"{folder}/{layout}")
        sw.load_weights(model, f"{folder}/{layout}")
        again = sw.full_state_dict(model)
        return all(torch.equal(state[name], again[name]) for name in state), list(state)


@every_layout("one", "ddp-2")
def test_one_element_with_a_wide_stride_goes_every_way(ranks, tmp_path, layout):
    same, names = ranks.run(in_and_out, layout.num_ranks, layout.text, str(tmp_path))[0]
    assert same and "scale" in names


def save_shards(path):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(nn.Linear(4, 4), world, sharding=EVERY)
        if world.is_main:
            torch.save(model.state_dict(), path)


SLIPS = {
    "__0_0.distcp": ("one file of a DCP directory", "name the directory"),
    "run": ("whose weights are in a subfolder", "name .*run/weights"),
    "sharded.pt": ("has one rank's shards", "sw.save_weights"),
    "bare.pkl": ("a bare pickle", "open it with what wrote it"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_common_slips_are_told_with_what_was_meant(ranks, tmp_path, name):
    path = tmp_path / name
    if name == "run":
        (path / "weights").mkdir(parents=True)
        save_file({"a": torch.ones(1)}, path / "weights" / "model.safetensors")
    elif name == "sharded.pt":
        ranks.run(save_shards, 2, str(path))
    else:
        path.write_bytes(pickle.dumps({"a": [1.0]}))
    why, fix = SLIPS[name]
    with pytest.raises(sw.CheckpointError) as caught:
        open_source(path)
    assert why in caught.value.why and re.search(fix, caught.value.fix)


class Remembering(nn.Module):
    """Extra states of every form: none of them is a place for weights."""

    def __init__(self, extra):
        super().__init__()
        self.lin, self.extra = nn.Linear(2, 2), extra

    def forward(self, x):
        return self.lin(x)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def load_own(form):
    within = {"weight": torch.ones(1)}
    within["itself"] = within
    extra = {"same": {1: "a", "1": "b"}, "itself": within}[form]
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Remembering(extra), world, sharding=EVERY)
        sw.load_full_state_dict(model, sw.full_state_dict(model))
        sw.load_full_state_dict(model, {"model": sw.full_state_dict(model), "epoch": 1})
        return model.extra is not None and model.extra.keys() == extra.keys()


@pytest.mark.parametrize("form", ["same", "itself"])
def test_extra_states_are_taken_as_they_are(ranks, form):
    assert ranks.run(load_own, 1, form) == [True]


def test_entries_of_an_extra_state_are_not_walked_over():
    """A vocabulary has many, and time went by their square."""
    words = {str(number): number for number in range(20_000)}
    state = {"model": {"lin.weight": 1, "_extra_state": words}}
    found = flatten(state, "x", max_entries=4, is_leaf=lambda key: key == "_extra_state")
    assert found == {("model", "lin.weight"): 1, ("model", "_extra_state"): words}
    with pytest.raises(sw.CheckpointError, match="a mapping within itself"):
        flatten(state, "x", max_entries=4)


def test_a_piece_that_does_not_come_is_missed_in_types_without_a_mark():
    arriving = _Arriving("codes", torch.zeros(4, dtype=torch.uint8))
    arriving.put(Slice((0,), (3,), (0,)), torch.ones(3, dtype=torch.uint8))
    with pytest.raises(sw.PlanError, match="codes"):
        arriving.check()
    arriving.put(Slice((3,), (1,), (3,)), torch.ones(1, dtype=torch.uint8))
    arriving.check()
