"""Weights of any kind become any other, bit for bit; nothing half-made is seen, and a killed conversion leaves nothing for good."""

import errno
import fcntl
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from state.good_sources import Good, copied, make_good
from state.sources import loaded, same_bytes

from shardwise.config.keymap import load_map, rules_of
from shardwise.errors import CheckpointError, ConfigError, RankError, UnsupportedError, VerifyError
from shardwise.state import block_copy, staging
from shardwise.state.checkpoint.saved_run import SavedRun
from shardwise.state.convert import Conversion, convert
from shardwise.state.source import open_source
from shardwise.state.targets import dcp as dcp_target
from shardwise.state.targets.plan import Fact
from shardwise.state.targets.torch_file import plan_torch_file

KINDS = {"hf": "out", "safetensors": "out.safetensors", "torch": "out.pt", "dcp": "out", "shardwise": "out"}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    return make_good(tmp_path_factory.mktemp("good"))


def check(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = loaded(open_source(path))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bytes(found[name], tensor), name


def check_with_stock_libraries(path: Path, to: str, tensors: dict[str, torch.Tensor]) -> None:
    if to == "torch":
        assert zipfile.ZipFile(path).testzip() is None
        read = [torch.load(path, weights_only=True, mmap=mapped) for mapped in (False, True)]
    elif to == "dcp":
        found = {
            name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process without a group
            dcp.load(found, checkpoint_id=path, no_dist=True)
            metadata = dcp.FileSystemReader(path).read_metadata()
        assert {n: tuple(entry.size) for n, entry in metadata.state_dict_metadata.items()} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
        read = [found]
    else:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        read = [{name: tensor for file in files for name, tensor in load_file(file).items()}]
    if to == "shardwise":
        with SavedRun(path) as saved:  # whoever wrote a part of it, and when: the checksums fit
            assert saved.verify() == sum(file.stat().st_size for file in path.iterdir()) - len(
                (path / "manifest.json").read_bytes()
            )
    for state in read:
        assert set(state) == set(tensors)
        for name, tensor in tensors.items():
            assert same_bytes(state[name], tensor), name


@pytest.mark.quick("dcp-dcp", "file-safetensors", "file-torch", "folder-dcp", "torch_file-hf", "torch_folder-shardwise")
@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("kind", ["file", "folder", "torch_file", "torch_folder", "dcp"])
def test_every_pair_of_kinds(good, tmp_path, kind, to):
    dest, sizes = tmp_path / KINDS[to], {"hf": 150, "dcp": 150, "shardwise": 150, "safetensors": None, "torch": None}
    with patch.object(block_copy, "BUFFER", 48), patch.object(dcp_target, "CHUNK", 32):  # many blocks, many chunks
        done = convert(Conversion(source=getattr(good, kind), dest=dest, to=to, verify=True, max_shard_bytes=sizes[to]))
        # And back to where it came from.
        convert(Conversion(source=dest, dest=tmp_path / "back.pt", to="torch", verify=True))
    assert done.num_tensors == len(good.tensors)
    assert done.num_files > 1 or to in ("safetensors", "torch")
    check(dest, good.tensors)
    check_with_stock_libraries(dest, to, good.tensors)
    check(tmp_path / "back.pt", good.tensors)
    assert sorted(os.listdir(tmp_path)) == sorted({dest.name, "back.pt"})  # nothing is left beside


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("to", KINDS)
def test_every_dtype(tmp_path, to):
    state = {str(dtype): torch.arange(1, 13).to(dtype).view(3, 4) for dtype in DTYPES}
    if to in ("torch", "dcp"):
        state["wide"] = torch.randn(3, dtype=torch.complex128)
    torch.save(state, tmp_path / "a.pt")
    convert(Conversion(source=tmp_path / "a.pt", dest=tmp_path / KINDS[to], to=to, verify=True))
    check(tmp_path / KINDS[to], state)
    check_with_stock_libraries(tmp_path / KINDS[to], to, state)


def test_a_dtype_that_the_target_lacks_is_refused_by_name(tmp_path):
    torch.save({"a": torch.ones(1), "phase": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match="complex128") as caught:
        convert(Conversion(source=tmp_path / "a.pt", dest=tmp_path / "out", to="hf"))
    assert caught.value.name == "phase"
    assert os.listdir(tmp_path) == ["a.pt"]


def test_ties_are_kept_by_torch_files_and_told_of_otherwise(tmp_path):
    weight = torch.randn(4, 3)
    torch.save({"embed": weight, "head": weight, "other": weight.clone()}, tmp_path / "a.pt")
    convert(Conversion(source=tmp_path / "a.pt", dest=tmp_path / "b.pt", to="torch", verify=True))
    state = torch.load(tmp_path / "b.pt", weights_only=True)
    assert state["embed"].data_ptr() == state["head"].data_ptr() != state["other"].data_ptr()
    done = convert(Conversion(source=tmp_path / "b.pt", dest=tmp_path / "out", to="hf", verify=True))
    assert any(note.startswith("head is embed in the source") for note in done.notes)
    check(tmp_path / "out", {"embed": weight, "head": weight, "other": weight})


def test_what_is_no_weight_is_left_out_and_told(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"step": 3}, "epoch": 1}, tmp_path / "a.pt")
    done = convert(Conversion(source=tmp_path / "a.pt", dest=tmp_path / "b.safetensors", to="safetensors"))
    assert "left out: optimizer: optimizer state" in done.notes
    assert any(note.startswith("left out: epoch") for note in done.notes)


# ---- dtype --------------------------------------------------------------------------------------------------------


def test_floating_tensors_are_rounded_but_for_those_kept(tmp_path):
    state = {
        "w": torch.randn(5, 3),
        "rope.inv_freq": torch.randn(4),
        "ids": torch.arange(3),
        "packed": torch.ones(2).to(torch.float8_e4m3fn),
    }
    save_file(state, tmp_path / "a.safetensors")
    job = Conversion(
        source=tmp_path / "a.safetensors", dest=tmp_path / "b.safetensors", to="safetensors", dtype="bfloat16"
    )
    convert(replace(job, keep=("inv_freq",), verify=True))
    check(tmp_path / "b.safetensors", state | {"w": state["w"].bfloat16()})
    with pytest.raises(ConfigError, match="no tensor has such a name"):
        convert(replace(job, dest=tmp_path / "c.safetensors", keep=("nothing",)))
    done = convert(replace(job, dest=tmp_path / "d.safetensors", dtype="float32"))
    assert any("changes nothing" in note for note in done.notes)


# ---- key maps -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama") / "hf"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("there", "back", "to"),
    [("llama-to-meta", "meta-to-llama", "torch"), ("llama-to-torchtitan", "torchtitan-to-llama", "dcp")],
)
def test_llama_goes_to_other_names_and_back(llama, tmp_path, there, back, to):
    original = loaded(open_source(llama))
    dest = tmp_path / KINDS[to]
    with patch.object(block_copy, "BUFFER", 96):  # blocks that cut heads
        convert(Conversion(source=llama, dest=dest, to=to, rules=load_map(there), verify=True))
    found = loaded(open_source(dest))
    assert {
        "tok_embeddings.weight",
        "output.weight",
        "norm.weight",
        "layers.1.feed_forward.w2.weight",
        "layers.0.attention_norm.weight",
    } <= set(found)
    assert len(found) == len(original)
    for name, heads in (("wq", 4), ("wk", 2)):
        theirs = original[f"model.layers.1.self_attn.{'q' if name == 'wq' else 'k'}_proj.weight"]
        # Pair j of a head is rows (2j, 2j+1) there, and rows (j, j + half) here.
        rows = [head * 4 + half * 2 + pair for head in range(heads) for pair in range(2) for half in range(2)]
        assert torch.equal(found[f"layers.1.attention.{name}.weight"], theirs[rows])
    config = llama / "config.json"
    convert(Conversion(source=dest, dest=tmp_path / "again", to="hf", rules=load_map(back), config=config, verify=True))
    check(tmp_path / "again", original)


def test_heads_that_nothing_tells_are_asked_for(llama, tmp_path):
    convert(Conversion(source=llama, dest=tmp_path / "a.pt", to="torch"))
    job = Conversion(source=tmp_path / "a.pt", dest=tmp_path / "b.pt", to="torch", rules=load_map("llama-to-meta"))
    with pytest.raises(ConfigError, match="--config") as caught:
        convert(job)
    assert (
        caught.value.name == "model.layers.0.self_attn.q_proj.weight"
        or "q_proj" in str(caught.value)
        or "k_proj" in str(caught.value)
    )
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3, "num_key_value_heads": 3}))
    with pytest.raises(ConfigError, match="do not divide"):
        convert(job)


def test_maps_that_match_nothing_or_make_one_name_of_two(good, tmp_path):
    job = Conversion(source=good.file, dest=tmp_path / "b.pt", to="torch")
    with pytest.raises(ConfigError, match="other direction"):
        convert(replace(job, rules=load_map("llama-to-meta")))
    with pytest.raises(ConfigError, match="both would be called w"):
        convert(replace(job, rules=rules_of([{"from": r".*\.weight", "to": "w"}], "map")))
    rules = [{"from": r"(.)\.weight", "to": r"layer_\1.weight"}, {"from": "d.*", "drop": True}]
    done = convert(replace(job, rules=rules_of(rules, "map"), verify=True))
    names = {"layer_a.weight", "layer_b.weight", "layer_c.weight", "e.empty", "f.turned", "g.ids"}
    assert set(loaded(open_source(tmp_path / "b.pt"))) == names
    assert any("e.empty, f.turned, g.ids: no rule" in note for note in done.notes)
    assert any("d.count: left out" in note for note in done.notes)


# ---- Hugging Face directories -------------------------------------------------------------------------------------


def test_configuration_and_tokenizer_files_go_along_and_transformers_opens_the_result(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    convert(Conversion(source=llama, dest=source, to="hf", max_shard_bytes=2000))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.txt").write_text("no companion")
    done = convert(Conversion(source=source, dest=tmp_path / "out", to="hf", dtype="float64", verify=True))
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} == set(
        os.listdir(tmp_path / "out")
    )
    assert any("dtype is float64 now, and was float32" in note for note in done.notes)
    ids = torch.arange(8)[None]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert ours.dtype == torch.float64
    theirs = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


# ---- killed -------------------------------------------------------------------------------------------------------


def _killed(source: Path, dest: Path, to: str) -> None:
    """On a rank, which does not outlive it: a conversion that is killed when half of its values are written."""
    write, left = block_copy.write_at, 4

    def dies(*args):
        nonlocal left
        write(*args)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(block_copy, "write_at", dies):
        convert(Conversion(source=source, dest=dest, to=to))


@pytest.mark.parametrize("to", KINDS)
def test_what_a_killed_conversion_leaves_is_removed_by_the_next_one(ranks, good, tmp_path, to):
    dest = tmp_path / KINDS[to]
    with pytest.raises(RankError, match="signal 9"):
        ranks.run(_killed, 1, good.dcp, dest, to)
    left = os.listdir(tmp_path)
    assert not dest.exists() and left and all(name.startswith(f".{dest.name}.saving-") for name in left)
    convert(Conversion(source=good.dcp, dest=dest, to=to, verify=True))
    check(dest, good.tensors)
    check_with_stock_libraries(dest, to, good.tensors)
    assert os.listdir(tmp_path) == [dest.name]


@pytest.mark.parametrize("to", KINDS)
def test_a_stopped_conversion_leaves_nothing(good, tmp_path, to):
    with patch.object(block_copy, "write_at", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        convert(Conversion(source=good.file, dest=tmp_path / KINDS[to], to=to))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_the_exchange_leaves_the_older_result_or_the_new_one(good, tmp_path, when):
    dest = tmp_path / "out"
    job = Conversion(source=good.file, dest=dest, to="hf", overwrite=True)
    convert(job)
    real, other = staging.exchange, replace(job, dtype="bfloat16", keep=("f",))

    def dies(a, b):
        if when == "after":
            real(a, b)
        raise KeyboardInterrupt

    with patch.object(staging, "exchange", dies), pytest.raises(KeyboardInterrupt):
        convert(other)
    expected = torch.bfloat16 if when == "after" else good.tensors["a.weight"].dtype
    assert loaded(open_source(dest))["a.weight"].dtype == expected
    convert(other)
    assert loaded(open_source(dest))["a.weight"].dtype == torch.bfloat16
    assert os.listdir(tmp_path) == ["out"]


KILLED_OFTEN = """
    import os, random, signal, sys, time
    from pathlib import Path
    from shardwise.state import convert

    source, dest, to = sys.argv[1:]
    job, kills = convert.Conversion(source=Path(source), dest=Path(dest), to=to), 0
    rng = random.Random(to)
    while not Path(dest).exists():
        child = os.fork()
        if not child:
            convert.convert(job)
            os._exit(0)
        time.sleep(rng.uniform(0, 0.02 * (kills + 1)))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    print(kills)
"""


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("to", KINDS)
def test_killed_at_any_moment_again_and_again(tmp_path, to):
    state = {f"layer.{i}": torch.randn(256, 1024) for i in range(40)}
    torch.save(state, tmp_path / "source.pt")
    dest = tmp_path / KINDS[to]
    for _ in range(3):
        words = [sys.executable, "-c", textwrap.dedent(KILLED_OFTEN), tmp_path / "source.pt", dest, to]
        done = subprocess.run(words, timeout=100, check=True, capture_output=True, text=True)
        print(done.stdout)
        check(dest, state)
        check_with_stock_libraries(dest, to, state)
        # A kill between the move and the tidying leaves an empty folder or an older lock, for the next conversion.
        assert {name for name in os.listdir(tmp_path) if ".saving-" not in name} == {dest.name, "source.pt"}
        shutil.rmtree(dest) if dest.is_dir() else dest.unlink()


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_what_stands_there_is_replaced_only_when_asked_and_only_if_it_is_weights(good, tmp_path):
    job = Conversion(source=good.file, dest=tmp_path / "out", to="hf")
    convert(job)
    with pytest.raises(CheckpointError, match="--overwrite"):
        convert(job)
    convert(replace(job, overwrite=True, dtype="bfloat16"))
    assert loaded(open_source(tmp_path / "out"))["a.weight"].dtype == torch.bfloat16
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        convert(replace(job, overwrite=True))
    with pytest.raises(ConfigError, match="it is a directory"):
        convert(replace(job, overwrite=True, to="torch"))
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_places_within_each_other_are_refused(good, tmp_path):
    source = tmp_path / "hf"
    convert(Conversion(source=good.file, dest=source, to="hf"))
    for dest, words in (
        (source, "same place"),
        (source / "sub", "within its source"),
        (tmp_path, "within the destination"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=words):
            convert(
                Conversion(
                    source=source / "model.safetensors" if dest == tmp_path else source,
                    dest=dest,
                    to="hf",
                    overwrite=True,
                )
            )
    check(source, good.tensors)


def test_a_damaged_source_leaves_nothing_behind(good, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(good.file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="cut off"):
        convert(Conversion(source=tmp_path / "a.safetensors", dest=tmp_path / "out", to="hf"))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_places_that_cannot_be_written_are_told(good, tmp_path):
    (tmp_path / "file").write_text("")
    for dest in (tmp_path / "file" / "out.pt", Path("/proc/nothing/out.pt"), tmp_path / "file" / "out"):
        with pytest.raises(CheckpointError, match=str(dest)):
            convert(Conversion(source=good.file, dest=dest, to="torch" if dest.suffix else "hf"))
    assert os.listdir(tmp_path) == ["file"]


def test_the_working_directory_is_not_replaced_under_ones_feet(good, tmp_path, monkeypatch):
    convert(Conversion(source=good.file, dest=tmp_path / "out", to="hf"))
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(CheckpointError, match="working directory"):
        convert(Conversion(source=good.file, dest=Path("."), to="hf", overwrite=True))
    check(tmp_path / "out", good.tensors)


def test_a_full_disk_leaves_nothing_behind(good, tmp_path):
    with (
        patch.object(block_copy, "reserve", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        convert(Conversion(source=good.file, dest=tmp_path / "out", to="hf"))
    assert os.listdir(tmp_path) == []


def test_what_appears_there_in_the_meantime_is_not_replaced(good, tmp_path):
    """As by another conversion to the same place."""
    rest = block_copy.BlockCopy.rest

    def late(self):
        rest(self)
        (tmp_path / "out").mkdir()

    with patch.object(block_copy.BlockCopy, "rest", late), pytest.raises(CheckpointError, match="there already"):
        convert(Conversion(source=good.file, dest=tmp_path / "out", to="hf"))
    assert os.listdir(tmp_path) == ["out"] and not os.listdir(tmp_path / "out")


def test_a_file_system_without_locks_will_do(good, tmp_path):
    with patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))):
        convert(Conversion(source=good.file, dest=tmp_path / "out", to="hf"))
    assert os.listdir(tmp_path) == ["out"]


def test_a_difference_is_found_before_anything_is_moved(good, tmp_path):
    write = block_copy.write_at

    def spoils(descriptor, memory, offset):
        write(descriptor, memory, offset)
        if offset == spoils.at:
            write(descriptor, memoryview(b"\xff"), offset)

    tensors = open_source(good.file).tensors
    spoils.at = tensors["b.weight"].chunks[0].offset
    convert(Conversion(source=good.file, dest=tmp_path / "fine.safetensors", to="safetensors"))
    spoils.at = open_source(tmp_path / "fine.safetensors").tensors["b.weight"].chunks[0].offset
    with patch.object(block_copy, "write_at", spoils), pytest.raises(VerifyError) as caught:
        convert(Conversion(source=good.file, dest=tmp_path / "out.safetensors", to="safetensors", verify=True))
    assert caught.value.name == "b.weight"
    assert not (tmp_path / "out.safetensors").exists()


# ---- sizes --------------------------------------------------------------------------------------------------------


def test_records_beyond_4_gib_are_placed_as_zip_readers_expect(tmp_path):
    facts = {"big": Fact(((4 << 30) + 64,), "uint8"), "small": Fact((3,), "int64"), "last": Fact((2,), "int32")}
    plan = plan_torch_file(facts, "a.pt", {})
    path = tmp_path / "a.pt"
    with path.open("wb") as file:  # with holes: nothing of it takes room
        for _, offset, data in plan.finish([0, 0, 0]):
            file.seek(offset)
            file.write(data)
        file.seek(plan.pieces[1].offset)
        file.write(torch.tensor([1, 2, 3]).numpy().tobytes())
        file.seek(plan.pieces[0].offset + (4 << 30))
        file.write(b"\x07")
    assert path.stat().st_size == plan.num_bytes
    assert all(piece.offset % 64 == 0 for piece in plan.pieces)
    theirs = torch.load(path, weights_only=True, mmap=True)
    assert theirs["small"].tolist() == [1, 2, 3]
    assert (theirs["big"][4 << 30], theirs["big"].numel()) == (7, (4 << 30) + 64)
    tensors = open_source(path).tensors
    assert [tensors[piece.name].chunks[0].offset for piece in plan.pieces] == [piece.offset for piece in plan.pieces]


def _memory(folder: Path) -> list[int]:
    """How much more memory each conversion takes than this process ever had before, in kB."""
    found = []
    for to, name in (("hf", "a"), ("dcp", "b"), ("torch", "c.pt")):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        convert(Conversion(source=folder / "a.pt", dest=folder / name, to=to, dtype="bfloat16", verify=True))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


def test_memory_stays_bounded(fresh_ranks, tmp_path):
    """A tensor of 84 MB, and another whose dtype changes: memory grows by a few buffers."""
    torch.save({"a": torch.ones(20 << 20, dtype=torch.int32), "b": torch.ones(20 << 20)}, tmp_path / "a.pt")
    (found,) = fresh_ranks.run(_memory, 1, tmp_path, timeout_s=100)
    assert all(number < (64 << 10) for number in found), found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"to": "gguf"}, "not written in that kind"),
        ({"dtype": "int8"}, "not rounded to that"),
        ({"dtype": "bfloat16", "keep": ("(",)}, "not a valid regular expression"),
        ({"keep": ("norm",)}, "--keep"),
        ({"to": "torch", "max_shard_bytes": 100}, "torch is one file"),
    ],
)
def test_what_cannot_be_done_is_told_to_python_as_to_the_command_line(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        Conversion(source=tmp_path / "a.pt", dest=tmp_path / "out", **given)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "step.1000", "out"])
def test_a_directory_may_have_a_dot_in_its_name(tmp_path, name):
    assert Conversion(source=tmp_path / "a.pt", dest=tmp_path / name).to == "hf"


def test_hundreds_of_files_are_never_open_at_once(tmp_path):
    tensors = {f"w{number}": torch.full((4,), float(number)) for number in range(150)}
    save_file(tensors, tmp_path / "s.safetensors")
    gc.collect()  # what other tests have left may be closed at any time
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 80, limits[1]))
    synced = set()

    def fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        os_fsync(descriptor)

    os_fsync = os.fsync
    try:
        job = Conversion(source=tmp_path / "s.safetensors", dest=tmp_path / "out", max_shard_bytes=16, verify=True)
        with patch.object(block_copy.os, "fsync", fsync):
            done = convert(job)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert done.num_files == 151 and len(os.listdir("/proc/self/fd")) <= before
    assert {path.stat().st_ino for path in (tmp_path / "out").iterdir()} <= synced, "on disk before it appears"
    check(tmp_path / "out", tensors)


def test_values_that_a_dtype_cannot_hold_are_refused_by_name(tmp_path):
    tensors = {"fine": torch.tensor([6e4, float("inf")]), "large": torch.tensor([1.0, 1e5, -1e6])}
    torch.save(tensors, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"large: .*x\.pt: 2 values beyond what float16 can hold") as caught:
        convert(Conversion(source=tmp_path / "x.pt", dest=tmp_path / "y.pt", dtype="fp16"))
    assert "up to 1e+06" in caught.value.why and not (tmp_path / "y.pt").exists()
    kept = convert(Conversion(source=tmp_path / "x.pt", dest=tmp_path / "y.pt", dtype="fp16", keep=("large",)))
    assert kept.num_tensors == 2
    convert(Conversion(source=tmp_path / "x.pt", dest=tmp_path / "z.pt", dtype="bf16", verify=True))


def test_ties_stay_ties_where_a_map_reorders_their_rows(tmp_path):
    shared = torch.arange(8.0)
    torch.save({"q": shared, "head": shared, "k": shared}, tmp_path / "t.pt")
    (tmp_path / "map.yaml").write_text(
        "- {from: 'q', to: 'wq', permute: halves-to-pairs, heads: 2}\n"
        "- {from: 'head', to: 'out', permute: halves-to-pairs, heads: 2}\n"
    )
    rules = load_map(tmp_path / "map.yaml")
    convert(Conversion(source=tmp_path / "t.pt", dest=tmp_path / "u.pt", rules=rules))
    found = torch.load(tmp_path / "u.pt", weights_only=True)
    places = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert places["wq"] == places["out"] != places["k"] and found["wq"].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_torch_file_is_not_called_as_a_safetensors_file(tmp_path):
    with pytest.raises(ConfigError, match="readers take a file of that name for safetensors"):
        Conversion(source=tmp_path / "a.pt", dest=tmp_path / "b.safetensors", to="torch")


@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("kind", ["torch_file", "dcp"])
@pytest.mark.parametrize("name", ["a.weight", "b.weight", "c.weight", "f.turned", "g.ids"])
def test_a_flipped_bit_in_a_value_is_refused_by_name(good, tmp_path, kind, name, dtype):
    path = copied(getattr(good, kind), tmp_path)
    chunk = open_source(path).tensors[name].chunks[-1]
    data = bytearray(chunk.file.read_bytes())
    data[chunk.offset + 5] ^= 16
    chunk.file.write_bytes(data)
    for blocks in (block_copy.BUFFER, 40):
        with patch.object(block_copy, "BUFFER", blocks), pytest.raises(CheckpointError, match="checksum") as caught:
            convert(Conversion(source=path, dest=tmp_path / "out", to="hf", dtype=dtype))
        assert caught.value.name == name and str(chunk.file) in str(caught.value)
    assert os.listdir(tmp_path) == [path.name]
