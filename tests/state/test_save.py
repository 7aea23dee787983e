"""Weights out: every rank writes its own bytes, the directory is whole or not there, and stock libraries open it."""

import contextlib
import errno
import json
import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from disks import mounted
from layouts import KINDS, LAYOUTS, TRIPS, every_layout
from models.zoo import ConvNet, Odd
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.state import staging, writing
from shardwise.state.file_layout import file_layout_of, parts_of


def conv16():
    """Parameters in bf16 beside running statistics in fp32."""
    model = ConvNet()
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model


MODELS = {"odd": Odd, "conv": ConvNet, "conv16": conv16}
EVERY = sw.Sharding(min_unit_bytes=0)


def plain(name, seed):
    torch.manual_seed(seed)
    model = MODELS[name]()
    return model.to(torch.bfloat16) if name == "odd" else model


def stored(folder):
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save(name, layout, dest, seed=1, **options):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(plain(name, seed), world, sharding=EVERY)
        try:
            return sw.save_weights(model, dest, **options)
        except sw.ShardwiseError as error:
            return error


def load(name, layout, source):
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(lambda: plain(name, 0), world, sharding=EVERY, init="load")
        sw.load_weights(model, source)
        return sw.full_state_dict(model)


@pytest.mark.quick("one-fsdp-4-odd", "ddp-2-hsdp-2x2-conv", "fsdp-2-one-conv16")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("first", "seconds"), TRIPS)
def test_weights_go_from_any_layout_to_any_other_to_the_last_bit(ranks, tmp_path, name, first, seconds):
    layout, num_ranks, _ = LAYOUTS[first]
    paths = ranks.run(save, num_ranks, name, layout, str(tmp_path / "w"), max_shard_bytes=700)
    assert {path.name for path in paths} == {"model.safetensors.index.json"}
    expected = plain(name, 1).state_dict()
    found = stored(tmp_path / "w")
    assert all(torch.equal(found[n], expected[n]) and found[n].dtype == expected[n].dtype for n in found)
    for layout, num_ranks, _ in (LAYOUTS[second] for second in seconds):
        state = ranks.run(load, num_ranks, name, layout, str(tmp_path / "w"))[0]
        assert list(state) == list(expected)
        assert all(torch.equal(state[n], value) and state[n].dtype == value.dtype for n, value in expected.items())


def test_files_are_split_at_a_size_and_the_index_names_each_tensor_once(ranks, tmp_path):
    ranks.run(save, 2, "odd", "dp_shard=2", str(tmp_path / "w"), max_shard_bytes=500)
    index = json.loads((tmp_path / "w/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "w").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found = stored(tmp_path / "w")
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in found.values())
    for file in files:
        tensors = load_file(tmp_path / "w" / file)
        size = sum(t.numel() * t.itemsize for t in tensors.values())
        assert size <= 500 or len(tensors) == 1


def written_by(name, layout, block):
    from shardwise.state import file_layout as file_layout_module

    file_layout_module.BLOCK = block
    try:
        with sw.init(layout, device="cpu") as world:
            model = sw.parallelize(plain(name, 1), world, sharding=EVERY)
            runtime = runtime_of(model)
            file_layout = file_layout_of(runtime, max_shard_bytes=1 << 30)
            return [
                [(part.tensor.name, part.stored) for part in parts_of(runtime, file_layout, rank)]
                for rank in range(world.size)
            ]
    finally:
        file_layout_module.BLOCK = 32 << 20


@pytest.mark.combinations("values")
@pytest.mark.parametrize("name", MODELS)
@every_layout(*KINDS)
def test_every_element_is_written_once_and_what_several_hold_is_shared_among_them(ranks, name, layout):
    plans = ranks.run(written_by, layout.num_ranks, name, layout.text, 64)
    assert all(plan == plans[0] for plan in plans)
    times = {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in plain(name, 1).state_dict().items()}
    counts = [0] * layout.num_ranks
    for rank, parts in enumerate(plans[0]):
        for tensor, box in parts:
            times[tensor][tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] += 1
            counts[rank] += box.numel
    stored_names = {tensor for parts in plans[0] for tensor, _ in parts}
    assert all(bool((times[n] == 1).all()) for n in stored_names)
    assert layout not in (LAYOUTS["ddp-2"], LAYOUTS["hsdp-2x2"]) or max(counts) < 2.2 * min(counts), counts


def counting() -> nn.Module:
    """No two of its values are equal."""
    model, first = nn.Sequential(nn.Linear(5, 13), nn.Linear(13, 7)), 1
    for param in model.parameters():
        param.data = torch.arange(first, first + param.numel(), dtype=torch.float32).view_as(param)
        first += param.numel()
    return model


def saved_in_blocks(layout: str, root: Path, block: int) -> None:
    from shardwise.state import file_layout

    whole_block, file_layout.BLOCK = file_layout.BLOCK, block
    try:
        with sw.init(layout, device="cpu") as world:
            model = sw.parallelize(counting(), world, sharding=EVERY)
            sw.save_weights(model, root / "weights")
            optim = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
            for param in model.parameters():
                param.grad = -param.detach()
            optim.step()
            with sw.CheckpointManager(root / "run", sw.TrainStep(model, optim), async_save=False) as manager:
                manager.save()
    finally:
        file_layout.BLOCK = whole_block


@pytest.mark.parametrize("layout", ["one", "ddp-2", "fsdp-2"])
def test_each_block_of_a_tensor_is_written_with_its_own_values(ranks, tmp_path, layout):
    text, num_ranks, _ = LAYOUTS[layout]
    ranks.run(saved_in_blocks, num_ranks, text, tmp_path, 64)  # the weights have 5 and 6 of them
    expected = counting().state_dict()
    checkpoint = tmp_path / "run" / "step-00000000"
    for found in (stored(tmp_path / "weights"), stored(checkpoint)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    momenta = load_file(checkpoint / "training" / "optimizer.safetensors")
    assert momenta.keys() == {f"{name}/momentum_buffer" for name in expected}
    assert all(torch.equal(momenta[f"{name}/momentum_buffer"], -value) for name, value in expected.items())


def test_an_older_directory_is_replaced_and_what_others_keep_in_it_stays(ranks, tmp_path):
    dest = tmp_path / "w"
    ranks.run(save, 2, "conv", "dp_shard=2", str(dest), max_shard_bytes=2000)
    (dest / "README.md").write_text("mine")
    (dest / "tokenizer.json").write_text("{}")
    (dest / "logs").mkdir()
    (dest / "logs" / "a.txt").write_text("a")
    ranks.run(save, 2, "odd", "dp_shard=2", str(dest))
    assert sorted(os.listdir(dest)) == ["README.md", "logs", "model.safetensors", "tokenizer.json"]
    assert (dest / "README.md").read_text() == "mine" and (dest / "logs" / "a.txt").read_text() == "a"
    assert os.listdir(tmp_path) == ["w"]
    assert torch.equal(stored(dest)["frozen.weight"], plain("odd", 1).frozen.weight)


def test_where_two_names_cannot_change_places_at_once_they_do_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda *a, **k: object())
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "model.safetensors").write_text("old")
    staged = staging.Staged(tmp_path / "w")
    (staged.path / "model.safetensors").write_text("new")
    staged.commit("weights")
    staged.close()
    assert (tmp_path / "w" / "model.safetensors").read_text() == "new" and os.listdir(tmp_path) == ["w"]


def test_a_cast_is_of_parameters_in_the_file_only(ranks, tmp_path):
    ranks.run(save, 2, "conv", "dp_shard=2", str(tmp_path / "w"), dtype="bfloat16")
    found, model = stored(tmp_path / "w"), plain("conv", 1)
    for name, param in model.named_parameters():
        assert torch.equal(found[name], param.detach().bfloat16()), name
    for name, buffer in model.named_buffers():
        assert found[name].dtype == buffer.dtype and torch.equal(found[name], buffer)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"dtype": "int8"}, "floating"), ({"dtype": "quarter"}, "floating"), ({"max_shard_bytes": 0}, "1 or more")],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(ranks, tmp_path, options, text):
    for error in ranks.run(save, 2, "conv", "dp_shard=2", str(tmp_path / "w"), **options):
        assert isinstance(error, sw.ConfigError) and text in error.why
    assert not os.listdir(tmp_path)


def save_elsewhere(name, layout, dest, absent):
    real = staging.sees_token
    rank = int(os.environ["RANK"])
    staging.sees_token = lambda folder, token: rank not in absent and real(folder, token)
    writing.BUFFER = 100
    try:
        return save(name, layout, dest)
    finally:
        staging.sees_token, writing.BUFFER = real, 8 << 20


@pytest.mark.quick("absent0", "absent2")
@pytest.mark.parametrize("absent", [(1,), (1, 2, 3), (2, 3)])
def test_ranks_that_do_not_see_the_directory_send_their_pieces_in_small_messages(ranks, tmp_path, absent):
    ranks.run(save_elsewhere, 4, "odd", "dp_replicate=2,dp_shard=2", str(tmp_path / "w"), absent)
    found, expected = stored(tmp_path / "w"), plain("odd", 1).state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in found.items()) and len(found) > 10


def fail_to_write(name, dest, rank, call):
    """A disk that is full for one rank, when it has written for a while."""
    real, calls = writing.write_at, [0]

    def full(descriptor, memory, offset):
        calls[0] += 1
        if int(os.environ["RANK"]) == rank and calls[0] == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, memory, offset)

    writing.write_at = full
    try:
        return save(name, "dp_shard=2", dest)
    finally:
        writing.write_at = real


@pytest.mark.quick("0-3", "1-2")
@pytest.mark.parametrize(("rank", "call"), [(0, 1), (0, 3), (1, 2)])
def test_a_disk_that_gets_full_is_told_on_every_rank_and_the_older_weights_are_whole(ranks, tmp_path, rank, call):
    ranks.run(save, 2, "odd", "dp_shard=2", str(tmp_path / "w"), 7)
    for error in ranks.run(fail_to_write, 2, "odd", str(tmp_path / "w"), rank, call):
        assert isinstance(error, sw.CheckpointError) and "No space left" in error.why
    assert os.listdir(tmp_path) == ["w"]
    expected = plain("odd", 7).state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in stored(tmp_path / "w").items())


def test_a_real_full_disk_is_found_before_a_byte_of_the_weights_is_written(ranks, tmp_path):
    with mounted(tmp_path / "small", "size=4k") as small:
        for error in ranks.run(save, 2, "conv", "dp_shard=2", str(small / "w")):
            assert isinstance(error, sw.CheckpointError) and "No space left" in error.why
        assert os.listdir(small) == []


def test_a_read_only_place_is_told_on_every_rank(ranks, tmp_path):
    with contextlib.ExitStack() as until_told:
        if os.geteuid() == 0:  # who may write anywhere, but for a file system that takes nothing
            place = until_told.enter_context(mounted(tmp_path / "place", "ro"))
        else:
            place = tmp_path / "place"
            place.mkdir(mode=0o555)
            until_told.callback(place.chmod, 0o755)
        for error in ranks.run(save, 2, "conv", "dp_shard=2", str(place / "w")):
            assert isinstance(error, sw.CheckpointError)
            assert "Read-only file system" in error.why or "Permission denied" in error.why


@pytest.mark.parametrize("where", ["file", "cwd", "parent"])
def test_a_place_where_no_directory_can_appear_is_refused_with_a_better_one(ranks, tmp_path, where):
    (tmp_path / "file").write_text("a file")
    dest = {"file": tmp_path / "file", "cwd": Path.cwd(), "parent": Path.cwd().parent}[where]
    for error in ranks.run(save, 2, "conv", "dp_shard=2", str(dest)):
        assert isinstance(error, sw.CheckpointError) and str(dest) in error.given
    assert (tmp_path / "file").read_text() == "a file"


def killed_in_a_save(dest, rank, call, told):
    """The rank is killed when it has written a part; the other writes down what it is told."""
    with sw.init("dp_shard=2", device="cpu", timeout_s=20) as world:
        torch.manual_seed(1)
        model = sw.parallelize(Odd().to(torch.bfloat16), world, sharding=sw.Sharding(min_unit_bytes=0))
        real, calls = writing.write_at, [0]

        def write_at(descriptor, memory, offset):
            calls[0] += 1
            if world.rank == rank and calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            real(descriptor, memory, offset)

        with patch.object(writing, "write_at", write_at):
            try:
                sw.save_weights(model, dest)
            except sw.RankError as error:
                told.write_text(str(error))
                raise


@pytest.mark.parametrize(("rank", "call"), [(0, 4), pytest.param(1, 2, marks=pytest.mark.soak)])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_older_weights_whole(ranks, tmp_path, rank, call):
    dest = tmp_path / "w"
    ranks.run(save, 2, "odd", "dp_shard=2", str(dest), 7)
    with pytest.raises(sw.RankError, match="SIGKILL"):
        ranks.run(killed_in_a_save, 2, str(dest), rank, call, tmp_path / "told")
    assert f"rank {rank}" in (tmp_path / "told").read_text()
    expected = plain("odd", 7).state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in stored(dest).items())
    ranks.run(save, 2, "odd", "dp_shard=2", str(dest), 8)  # and the next save leaves nothing of it
    assert sorted(path.name for path in tmp_path.iterdir() if "saving" in path.name) == []


def test_a_save_that_goes_on_elsewhere_is_not_taken_for_a_left_over(tmp_path):
    first = staging.Staged(tmp_path / "w")
    second = staging.Staged(tmp_path / "w")
    assert first.path.exists() and second.path.exists()
    first.close()
    second.close()
    assert not os.listdir(tmp_path)


def test_two_jobs_that_save_to_one_directory_do_not_take_each_others_for_left_over(tmp_path, monkeypatch):
    """Between one job's exchange and its cleaning, the other begins, and looks for left-overs."""
    dest = tmp_path / "w"
    dest.mkdir()
    (dest / "model.safetensors").write_text("old")
    first = staging.Staged(dest)
    (first.path / "model.safetensors").write_text("first")
    kept = staging.sync_folder

    def meanwhile(path):
        kept(path)
        monkeypatch.setattr(staging, "sync_folder", kept)
        second = staging.Staged(dest)
        (second.path / "model.safetensors").write_text("second")
        second.commit("weights")
        second.close()

    monkeypatch.setattr(staging, "sync_folder", meanwhile)
    first.commit("weights")
    first.close()
    assert (dest / "model.safetensors").read_text() in ("first", "second") and os.listdir(tmp_path) == ["w"]


def test_what_comes_into_the_older_directory_meanwhile_goes_along_at_any_depth(tmp_path, monkeypatch):
    dest = tmp_path / "w[1]"
    (dest / "logs").mkdir(parents=True)
    (dest / "logs" / "a").write_text("a")
    dest.chmod(0o2770)
    staged = staging.Staged(dest)
    (staged.path / "model.safetensors").write_text("new")
    kept = staging.exchange

    def late(a, b):
        (dest / "logs" / "b").write_text("b")
        (dest / "c").write_text("c")
        kept(a, b)

    monkeypatch.setattr(staging, "exchange", late)
    staged.commit("weights")
    staged.close()
    assert sorted(str(p.relative_to(dest)) for p in dest.rglob("*")) == [
        "c",
        "logs",
        "logs/a",
        "logs/b",
        "model.safetensors",
    ]
    assert dest.stat().st_mode & 0o7777 == 0o2770, "who may read it may read it"


def test_the_left_over_of_a_killed_save_is_removed_by_the_next(tmp_path):
    pid = os.fork()
    if pid == 0:
        staging.Staged(tmp_path / "w[1]")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and len(os.listdir(tmp_path)) == 2
    staging.Staged(tmp_path / "w[1]").close()
    assert os.listdir(tmp_path) == []


def count_syncs(dest):
    synced, real = [], os.fsync
    os.fsync = lambda descriptor: (synced.append(os.readlink(f"/proc/self/fd/{descriptor}")), real(descriptor))[1]
    try:
        save("conv", "dp_shard=2", dest, max_shard_bytes=3000)
    finally:
        os.fsync = real
    return synced


def test_every_file_is_on_disk_before_it_appears(ranks, tmp_path):
    for rank, synced in enumerate(ranks.run(count_syncs, 2, str(tmp_path / "w"))):
        names = {Path(path).name for path in synced if ".saving-" in path}
        weights = {path.name for path in (tmp_path / "w").glob("*.safetensors")}
        assert weights - names == set() or (rank and names), (weights, names)
        assert rank or "model.safetensors.index.json" in names


@pytest.mark.parametrize("dest", ["loop", "nul"])
def test_a_name_that_cannot_be_is_told_on_every_rank(ranks, tmp_path, dest):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = str(tmp_path / "loop" / "w") if dest == "loop" else str(tmp_path / "n\0l")
    for error in ranks.run(save, 2, "conv", "dp_shard=2", path):
        assert isinstance(error, sw.CheckpointError)


def test_headers_end_at_a_multiple_of_8_and_tensors_at_one_of_their_element():
    from shardwise.state.formats.safetensors import place_tensors

    for count in range(1, 12):
        tensors = {"x" * i: ((i,), ("float32", "bfloat16", "uint8", "float64")[i % 4]) for i in range(1, count + 1)}
        head, placed, _ = place_tensors(tensors)
        assert len(head) % 8 == 0
        widths = {"float32": 4, "bfloat16": 2, "uint8": 1, "float64": 8}
        assert all(tensor.offset % widths[tensor.dtype] == 0 for tensor in placed)


def test_a_turned_view_reads_and_writes_what_lies_there():
    from shardwise.recipe.boxes import Box, index_of
    from shardwise.state.files import OpenFiles
    from shardwise.state.stored import InMemoryTensor
    from shardwise.state.stored_parts import Assembled, view_at

    whole = torch.arange(2 * 3 * 5).view(2, 3, 5)
    parts = []
    for expert in range(2):
        stored = whole[expert].t()  # as a file may hold it: turned, experts apart
        view = view_at("w", (2, 3, 5), stored.storage_offset(), tuple(stored.shape), tuple(stored.stride()))
        assert view.shape == (5, 3) and torch.equal(view.turned(whole[expert : expert + 1]), stored)
        parts.append((view, InMemoryTensor.of(stored.contiguous())))
    with OpenFiles() as files:
        both = Assembled((2, 3, 5), "int64", tuple(parts))
        assert torch.equal(both.load(files), whole)
        box = Box((0, 1, 2), (2, 2, 2))
        assert torch.equal(both.load(files, box), whole[index_of(box)])
    assert view_at("w", (2, 3, 5), 0, (3, 2), (2, 1)) is None


class Packed(nn.Module):
    """A layer whose weight is stored in one byte, with a scale beside it."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 3.0))


def save_packed(dest):
    with sw.init("dp_shard=1", device="cpu") as world:
        sw.save_weights(sw.parallelize(Packed(), world), dest, dtype="bfloat16")


def test_numbers_of_one_byte_are_not_made_wider_as_if_they_had_no_scale(ranks, tmp_path):
    ranks.run(save_packed, 1, str(tmp_path / "w"))
    found = load_file(tmp_path / "w" / "model.safetensors")
    assert (found["packed"].dtype, found["scale"].dtype) == (torch.float8_e4m3fn, torch.bfloat16)


def refusals(folder):
    world = sw.init("dp_shard=1", device="cpu")
    with world:
        model = sw.parallelize(torch.nn.Linear(4, 4), world)
        told = []
        for dest, options in (("w.safetensors", {}), ("w", {"dtype": "float8_e4m3fn"}), ("w", {"dtype": "int8"})):
            try:
                sw.save_weights(model, Path(folder) / dest, **options)
            except sw.ConfigError as error:
                told.append(str(error))
        sw.save_weights(model, Path(folder) / "here")
        try:
            sw.load_weights(
                model, {name: t.to(torch.float8_e4m3fn) for name, t in model.state_dict().items()}, cast=True
            )
        except sw.CheckpointError as error:
            told.append(str(error))
    return told


def test_what_would_be_a_wrong_name_or_lose_a_scale_is_refused(ranks, tmp_path):
    file, byte, integer, narrow = ranks.run(refusals, 1, str(tmp_path))[0]
    assert "is the name of a file" in file and "w/model.safetensors" in file
    assert (
        "wants a scale beside each tensor" in byte
        and "use one of" in integer
        and "float8" not in integer.splitlines()[2]
    )
    assert "dtype float8_e4m3fn" in narrow
    assert os.listdir(tmp_path) == ["here"]


def save_to_different_names(folder):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(lambda: nn.Linear(4, 4), world, sharding=EVERY)
        mine = f"{folder}/w" if world.is_main else f"{folder}/other.safetensors"
        found = [str(sw.save_weights(model, mine))]
        for name in ("w.safetensors", "w.pt"):
            try:
                sw.save_weights(model, f"{folder}/{name}" if world.is_main else f"{folder}/x")
            except sw.ConfigError as error:
                found.append(str(error))
        return found


def test_the_name_that_counts_is_rank_0s(ranks, tmp_path):
    for path, *told in ranks.run(save_to_different_names, 2, str(tmp_path)):
        assert path == str(tmp_path / "w" / "model.safetensors")
        assert len(told) == 2 and all("this is the name of a file" in text for text in told)
    assert os.listdir(tmp_path) == ["w"]


def save_large(folder, absent):
    with sw.init("dp_shard=2", device="cpu") as world:
        module = nn.Linear(2, 4)  # the first of two tensors is too large: rank 0 waits for the second one
        nn.init.constant_(module.weight, 1.0)
        model = sw.parallelize(module, world, sharding=EVERY)
        sw.save_weights(model, folder, dtype="bf16")
        with torch.no_grad():
            model.weight.mul_(1e5)
        kept = staging.sees_token
        staging.sees_token = lambda *given: world.rank not in absent and kept(*given)
        try:
            sw.save_weights(model, folder, dtype="fp16")
        except sw.CheckpointError as error:
            return error.name, str(error)
        finally:
            staging.sees_token = kept


@pytest.mark.parametrize("absent", [(), (1,)])
def test_a_dtype_that_cannot_hold_the_values_is_refused_and_the_older_weights_stay(ranks, tmp_path, absent):
    for name, told in ranks.run(save_large, 2, str(tmp_path / "w"), absent):
        assert name == "weight" and "beyond what float16 can hold" in told
    assert os.listdir(tmp_path) == ["w"]
    assert torch.equal(stored(tmp_path / "w")["weight"], torch.ones(4, 2, dtype=torch.bfloat16))
