"""What a save replaces, keeps and refuses: every kind of directory, by every verb that writes one, through every path to it."""

import contextlib
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from disks import mounted
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.config.conversion import Conversion
from shardwise.config.folders import found_in
from shardwise.state import staging
from shardwise.state.convert import convert

KINDS = ("weights", "adapter", "dcp", "checkpoint")
VERBS = ("save_weights", "save_adapter", "convert-hf", "convert-dcp", "convert-shardwise", "convert-file")
OWN = dict(zip(VERBS, ("weights", "adapter", "weights", "dcp", "checkpoint", "weights"), strict=True))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x):
        return self.q(x)


@contextlib.contextmanager
def tiny(value=1.0, lora=True):
    with sw.init("dp_shard=1", device="cpu") as world:
        options = {"lora": sw.LoRA(rank=2, targets=["q"])} if lora else {}
        model = sw.parallelize(Tiny(), world, example={"x": torch.ones(1, 4)}, **options)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        yield model


def one_step(model):
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    step = sw.TrainStep(model, optim, loss=lambda out, batch: out.square().sum(), count=lambda batch: 1)
    step([{"x": torch.ones(1, 4)}])
    return step


def write(verb, model, dest, source=None, overwrite=True):
    if verb.startswith("convert"):
        to = verb.partition("-")[2]
        file = dest / "model.safetensors" if to == "file" else dest
        to = "safetensors" if to == "file" else to
        return convert(Conversion(source=source, dest=file, to=to, overwrite=overwrite))
    return getattr(sw, verb)(model, dest)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(root):
    """A directory of each kind, at ``root / kind / step-00000001``: each has the name that a checkpoint needs."""
    source = root / "source.safetensors"
    save_file({"q.weight": torch.ones(4, 4), "q.bias": torch.ones(4)}, source)
    with tiny() as model:
        for kind, verb in (("weights", "save_weights"), ("adapter", "save_adapter"), ("dcp", "convert-dcp")):
            write(verb, model, root / kind / "step-00000001", source)
        with sw.CheckpointManager(root / "checkpoint", one_step(model), async_save=False) as manager:
            manager.save()
    return source


def matrix(root):
    """Every verb into every other kind, as it is called and through a link and a path with ..: what was said; nothing changes."""
    root = Path(root)
    source, said = made(root), []
    with tiny() as model:
        for verb in VERBS:
            for kind in KINDS:
                dest = root / kind / "step-00000001"
                if kind == OWN[verb]:
                    continue
                before, link = contents(root), root / kind / "link"
                link.symlink_to(dest)
                ways = [dest, link, root / "adapter" / ".." / kind / "step-00000001"]
                for way in [ways[0], ways[2]] if verb.startswith("convert") and verb != "convert-file" else ways:
                    try:
                        write(verb, model, way, source)
                        said.append((verb, kind, "done"))
                    except sw.CheckpointError as error:
                        said.append((verb, kind, str(error)))
                link.unlink()
                assert contents(root) == before, (verb, kind)
    return said


def test_no_verb_writes_into_a_directory_of_another_kind(ranks, tmp_path):
    said = ranks.run(matrix, 1, str(tmp_path))[0]
    assert len(said) == 18 + 9 * 2 + 9
    for verb, kind, text in said:
        place, within = str(tmp_path / kind / "step-00000001"), (verb, kind) == ("convert-file", "checkpoint")
        assert place in text and ("is a checkpoint" if within else f"{place} holds") in text, (verb, kind, text)


def fixes(root):
    """A refusal's fix is followed."""
    root = Path(root)
    made(root)
    with tiny(3.0) as model:
        for verb, kind in (("save_adapter", "weights"), ("save_weights", "adapter"), ("save_weights", "checkpoint")):
            with pytest.raises(sw.CheckpointError) as caught:
                write(verb, model, root / kind / "step-00000001")
            write(verb, model, Path(caught.value.fix.removeprefix("name another folder: ")))
            inner = root / kind / "step-00000001" / "inner"
            if kind == "checkpoint":  # nor in a folder within it
                with pytest.raises(
                    sw.CheckpointError, match="is a checkpoint, which could not be read any more"
                ) as caught:
                    write(verb, model, inner)
                write(verb, model, Path(caught.value.fix.removeprefix("name another folder: ")))
                with pytest.raises(sw.CheckpointError, match="is a checkpoint, which could not be read any more"):
                    convert(Conversion(source=root / "source.safetensors", dest=inner.with_name("more.safetensors")))
        step = one_step(model)
        with sw.CheckpointManager(root / "checkpoint", step) as manager:
            manager.load()
        with pytest.raises(sw.CheckpointError, match="is a checkpoint, which could not be read any more"):
            sw.CheckpointManager(root / "checkpoint" / "step-00000001" / "runs", step)
    return [*(kind for name in ("adapter", "checkpoint") for kind in found_in(root / name / "step-00000001-weights"))]


def test_what_a_refusal_says_works_and_a_checkpoint_stays_whole(ranks, tmp_path):
    assert ranks.run(fixes, 1, str(tmp_path))[0] == ["weights", "weights"]


def merged_over_its_base(folder):
    with tiny(lora=False) as model:
        sw.save_weights(model, folder)
    with tiny() as model:
        sw.load_weights(model, folder)
        with pytest.raises(sw.CheckpointError, match="would be applied twice"):
            sw.save_weights(model, Path(folder, "..", "base"))
        sw.save_weights(model, folder, merge=False)
        sw.save_weights(model, f"{folder}-merged")


def test_merged_weights_do_not_replace_the_base_that_adapters_are_beside(ranks, tmp_path):
    ranks.run(merged_over_its_base, 1, str(tmp_path / "base"))
    assert sorted(os.listdir(tmp_path)) == ["base", "base-merged"]


def pruned(root):
    with tiny() as model:
        step = one_step(model)
        with sw.CheckpointManager(root, step, keep=1, async_save=False) as manager:
            manager.save()
            sw.save_weights(model, Path(root, "step-00000002"))  # by a name that only a checkpoint should have
            for _ in range(2):
                step([{"x": torch.ones(1, 4)}])
            manager.save()
            sw.save_weights(model, Path(root, "step-00000004"))
            step([{"x": torch.ones(1, 4)}])
            with pytest.raises(sw.CheckpointError, match="holds the weights of a model"):
                manager.save()


def test_what_is_no_checkpoint_is_not_pruned_with_them(ranks, tmp_path):
    ranks.run(pruned, 1, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (2, 3, 4)]
    assert load_file(tmp_path / "step-00000002/model.safetensors") and load_file(
        tmp_path / "step-00000004/model.safetensors"
    )


def test_a_path_with_two_points_behind_a_link_is_the_one_that_the_system_means(tmp_path):
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far/away")
    save_file({"a": torch.ones(2)}, tmp_path / "source.safetensors")
    for name in ("out", "out.pt"):
        theirs = tmp_path / name
        theirs.write_text("theirs")
        convert(Conversion(source=tmp_path / "source.safetensors", dest=tmp_path / "link" / ".." / name))
        assert theirs.read_text() == "theirs" and (tmp_path / "far" / name).exists()


@pytest.mark.parametrize("to", ["hf", "shardwise"])
def test_the_tokenizer_of_an_older_directory_stays_where_the_source_has_none(tmp_path, to):
    torch.save({"a": torch.ones(2)}, tmp_path / "first.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "new.pt")
    dest, kept = tmp_path / "dest", {"config.json": "{}", "tokenizer.json": "[1]", "chat_template.jinja": "x"}
    (tmp_path / "hf").mkdir()
    for name, text in kept.items():
        (tmp_path / "hf" / name).write_text(text)
    save_file({"a": torch.ones(2)}, tmp_path / "hf/model.safetensors")
    convert(Conversion(source=tmp_path / "hf", dest=dest, to=to))
    done = convert(Conversion(source=tmp_path / "new.pt", dest=dest, to=to, overwrite=True, verify=True))
    assert {name: (dest / name).read_text() for name in kept} == kept and not load_file(dest / "model.safetensors")[
        "a"
    ].any()
    assert any("kept from the older" in note and "tokenizer.json" in note for note in done.notes)
    if to == "hf":
        with pytest.raises(sw.CheckpointError, match="holds the weights of a model"):
            convert(Conversion(source=tmp_path / "new.pt", dest=dest, to="dcp", overwrite=True))


# ---- the disk, and the end of a process, within a save ---------------------------------------------------------------


def disk_full(small, limit):
    """All verbs over older files, where the disk takes no more, or a file may not be so large."""
    small = Path(small)
    source, said = small.parent / "source.safetensors", {}
    large = small.parent / "large.safetensors"
    save_file({"q.weight": torch.ones(4, 4), "q.bias": torch.ones(4)}, source)
    save_file({"q.weight": torch.ones(512, 512)}, large)
    verbs = ("save_weights", "save_adapter", "convert-hf", "convert-dcp", "convert-shardwise")
    with tiny() as model:
        for verb in verbs:
            write(verb, model, small / verb, source)
        before = contents(small)
        if limit is None:
            with contextlib.suppress(OSError), open(small / "filler", "wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            before["filler"] = (small / "filler").read_bytes()
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        try:
            for verb in verbs:
                try:
                    write(verb, model, small / verb, large if limit is not None else source)
                    said[verb] = "done"
                except sw.CheckpointError as error:
                    said[verb] = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert contents(small) == before, said
        (small / "filler").unlink(missing_ok=True)
        for verb in verbs:
            write(verb, model, small / verb, source)
    left = [path.name for path in small.iterdir() if "saving" in path.name]
    return said, left


@pytest.mark.parametrize("limit", [None, 40], ids=["full", "file-size"])
def test_a_disk_that_takes_no_more_leaves_the_older_files_and_nothing_else(ranks, tmp_path, limit):
    with (
        mounted(tmp_path / "small", "size=256k")
        if limit is None
        else contextlib.nullcontext(tmp_path / "small") as small
    ):
        said, left = ranks.run(disk_full, 1, str(small), limit)[0]
    assert all("writing failed" in text or "No space left" in text for text in said.values()), said
    assert left == []


CHANGES = {"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "open"}


def saved_until(dest, kind, text, number, exchanges):
    """In a process of its own, a save that is killed before the ``number``-th change of the disk; whether it was."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == signal.SIGKILL
    try:
        seen = 0

        def count(event, args):
            nonlocal seen
            if event in CHANGES and str(dest.parent) in str(args[0]):
                seen += 1
                if seen > number:
                    os.kill(os.getpid(), signal.SIGKILL)

        if not exchanges:
            staging.ctypes.CDLL = lambda *a, **k: object()
        sys.addaudithook(count)
        staged = staging.Staged(dest)
        (staged.path / ("model.safetensors" if kind == "weights" else "adapter_model.safetensors")).write_text(text)
        staged.commit(kind)
        staged.close()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize(("kind", "exchanges"), [("weights", False), ("adapter", True)])
def test_killed_at_any_change_of_the_disk_the_next_save_finds_the_older_files_or_the_newer(tmp_path, kind, exchanges):
    dest = tmp_path / "w[1]"
    file = dest / ("model.safetensors" if kind == "weights" else "adapter_model.safetensors")
    for number in range(100):
        shutil.rmtree(dest, ignore_errors=True)
        (dest / "logs").mkdir(parents=True)
        (dest / "notes.md").write_text("kept")
        (dest / "logs" / "a").write_text("kept too")
        file.write_text("older")
        if not saved_until(dest, kind, "newer", number, exchanges):
            break
        if exchanges:
            assert file.read_text() in ("older", "newer"), number
        staging.Staged(dest).close()  # a save that fails: what the killed one has taken away is back
        assert file.read_text() in ("older", "newer"), number
        assert not saved_until(dest, kind, "newest", 10_000, exchanges)
        assert file.read_text() == "newest" and (dest / "notes.md").read_text() == "kept", number
        assert (dest / "logs" / "a").read_text() == "kept too" and os.listdir(tmp_path) == [dest.name], number
    assert 8 < number < 99
