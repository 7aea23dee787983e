"""A disk without room: refused before the first step with the numbers; at the end, what was trained is kept elsewhere."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from disks import mounted
from safetensors.torch import load_file

import shardwise as sw
from shardwise.config import folders
from shardwise.errors import CheckpointError, ConfigError
from shardwise.run import disk_space, job, output
from shardwise.run.config import load_config
from shardwise.run.metrics import MetricsWriter
from shardwise.state.checkpoint import commit

Usage = namedtuple("Usage", "total used free")
TINY = (
    "--model.args={dim: 32, num_layers: 1, ffn: 48}",
    "--data.seq_len=32",
    "--data.val_fraction=0",
    "--train.steps=2",
    "--train.eval_every=0",
    "--log.plot=false",
    "--launch.device=cpu",
)


def config(folder: Path, *overrides: str):
    given = {word.partition("=")[0] for word in overrides}
    kept = [word for word in TINY if word.partition("=")[0] not in given]
    return load_config(None, [*kept, f"--log.dir={folder}", *overrides]).config


def test_too_little_room_is_refused_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 5 << 20))
    disk_space.check_space(config(tmp_path / "run"))
    disk_space.check_space(config(tmp_path / "run"), {"export": 4 << 20})
    with pytest.raises(ConfigError) as caught:
        disk_space.check_space(config(tmp_path / "run"), {"export": 8 << 20})
    assert str(caught.value) == (
        f"log.dir: '{tmp_path / 'run'}', with 5.00 MiB free on its disk\n"
        "  why: the run will write about 8.07 MiB: 69.47 KiB of metrics, picture and texts, 8.00 MiB of weights\n"
        "  fix: free 3.07 MiB there, or name a folder on another disk: --log.dir=PATH"
    )
    disk_space.check_space(config(tmp_path / "run", "--checkpoint.export=null"), {})
    assert not (tmp_path / "run").exists()


def test_a_disk_on_which_no_checkpoint_fits_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 70 << 20))
    disk_space.check_space(config(tmp_path), {"export": 2 << 20}, 80 << 20)  # it keeps none
    for word in ("--checkpoint.every=1", "--checkpoint.stop_after_s=10"):
        disk_space.check_space(config(tmp_path, word), {"export": 2 << 20}, 3 << 20)
        with pytest.raises(
            ConfigError, match=r"2\.00 MiB of weights, 16\.00 MiB for a checkpoint; 64\.00 MiB stay free"
        ) as caught:
            disk_space.check_space(config(tmp_path, word), {"export": 2 << 20}, 16 << 20)
        assert "free 12.07 MiB there" in caught.value.fix
        assert "--log.dir=PATH; or keep no checkpoints: --checkpoint.every=null" in caught.value.fix


def test_adapters_and_their_base_are_counted_and_their_folders_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 5 << 20))
    words = ("--parallel.lora.rank=2", "--parallel.quantize=nf4", "--checkpoint.base=base")
    sizes = {"export": 2 << 20, "adapter": 1 << 20, "base": 3 << 20}
    with pytest.raises(
        ConfigError, match=r"2\.00 MiB of weights, 1\.00 MiB of adapters, 3\.00 MiB of the base in 4 bits"
    ):
        disk_space.check_space(config(tmp_path, *words), sizes)
    disk_space.check_space(config(tmp_path, *words), sizes | {"base": 1 << 20})
    (tmp_path / "base").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint\.base: '.*base'\n  why: .*base is a file"):
        disk_space.check_folders(config(tmp_path, *words), has_adapters=True)


def test_on_a_small_disk_less_is_left_for_others(tmp_path, monkeypatch):
    """A checkpoint of 14 KiB was refused with 50 MiB free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 << 20, 0, 50 << 20))
    disk_space.check_space(config(tmp_path, "--checkpoint.every=1"), {"export": 2 << 20}, 14 << 10)
    with pytest.raises(ConfigError, match=r"48\.00 MiB for a checkpoint; 2\.00 MiB stay free for others"):
        disk_space.check_space(config(tmp_path, "--checkpoint.every=1"), {"export": 2 << 20}, 48 << 20)
    assert [folders.spare_bytes(size) for size in (100 << 20, 1 << 40)] == [2 << 20, 64 << 20]


def test_the_estimate_of_the_small_files_grows_with_the_lines(tmp_path):
    short, long = (disk_space.small_files_bytes(config(tmp_path, f"--train.steps={steps}")) for steps in (10, 100_010))
    assert long - short == 10_000 * disk_space.METRICS_LINE
    assert disk_space.small_files_bytes(config(tmp_path, "--log.plot=true")) > 256 << 10


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second disk")
def test_weights_on_another_disk_are_counted_there(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9, 0, 0 if "shm" in str(path) else 1 << 40))
    with pytest.raises(ConfigError, match=r"checkpoint.export: '/dev/shm/none', with 0 B free on its disk"):
        disk_space.check_space(config(tmp_path, "--checkpoint.export=/dev/shm/none"), {"export": 1})


def test_a_place_for_weights_that_cannot_be_written_is_refused_early(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint\.export: '.*file'\n  why: .*file is a file"):
        disk_space.check_folders(config(tmp_path, "--checkpoint.export=file"), has_adapters=False)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "other")
    with pytest.raises(CheckpointError, match=rf"it cannot be written: Permission denied: {tmp_path}/other"):
        disk_space.check_folders(
            config(tmp_path, f"--checkpoint.export={tmp_path / 'other/weights'}"), has_adapters=False
        )


# ---- on ranks ------------------------------------------------------------------------------------------------------


def _train(folder, how, *words, full_at=()):
    """Trains with a disk that fails in one way, and gives how it ended, and what rank 0 said was wrong."""
    os.chdir(folder)
    tempfile.tempdir = str(folder / "temp")
    patch, said = pytest.MonkeyPatch(), []
    if how == "no room at the start":
        patch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 80 << 10))
    if how in ("full at the end", "full everywhere"):
        real, save_adapter = output.save_weights, output.save_adapter

        def save(model, dest, real=real, **given):
            if Path(dest).name in ("weights", "adapter") or how == "full everywhere":
                raise CheckpointError(f"weights to {dest}", why="writing failed: the disk is full", fix="free space")
            return real(model, dest, **given)

        patch.setattr(output, "save_weights", save)
        patch.setattr(output, "save_adapter", lambda model, dest: save(model, dest, real=save_adapter))
    if how == "metrics do not fit":

        def write(self, **fields):
            raise self._unwritable(OSError(28, "No space left on device"))

        patch.setattr(MetricsWriter, "write", write)
    fits = commit._Commit._refuse_full

    def refuse_full(self, num_bytes):
        if self.contents.step in full_at:
            patch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 1 << 20))
        try:
            fits(self, num_bytes)
        finally:
            patch.setattr(shutil, "disk_usage", usage)

    usage = shutil.disk_usage
    patch.setattr(commit._Commit, "_refuse_full", refuse_full)
    with patch.context(), sw.init("dp_shard=2", device="cpu", timeout_s=30) as world:
        try:
            run = config(folder / "run", *words)
            job.train(run, world, lambda kind, **fields: said.append(fields["text"]) if kind == "trouble" else None)
        except sw.ShardwiseError as error:
            return type(error).__name__, str(error), said
        finally:
            patch.undo()
            tempfile.tempdir = None
    return "done", "", said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "temp").mkdir()
    return tmp_path


def test_weights_that_do_not_fit_are_refused_before_the_first_step(ranks, folder):
    for kind, text, _ in ranks.run(_train, 2, folder, "no room at the start"):
        assert kind == "ConfigError" and "with 80.00 KiB free on its disk" in text and "KiB of weights" in text
    assert not (folder / "run").exists()


def test_weights_that_cannot_be_written_are_kept_elsewhere_and_where_is_told(ranks, folder):
    first, second = ranks.run(_train, 2, folder, "full at the end")
    assert first[:2] == second[:2]
    (kept,) = folder.glob("shardwise-weights-*/model.safetensors")
    assert first[0] == "CheckpointError"
    assert (
        f"the disk is full; the weights of these 2 steps were written to {kept} instead; the metrics are in "
        in first[1]
    )
    assert load_file(kept) and not list((folder / "temp").iterdir())
    place = folder / "run/weights"
    command = first[1].rpartition("fix: move them from there: ")[2]
    assert command == f"mkdir -p {place} && mv {kept.parent}/* {place}/"
    subprocess.run(command, shell=True, check=True)
    assert load_file(place / "model.safetensors") and not list(kept.parent.iterdir())


def test_adapters_alone_that_cannot_be_written_are_kept_elsewhere_and_where_is_told(ranks, folder):
    words = ("--parallel.lora.rank=2", "--checkpoint.export=null")
    for kind, text, _ in ranks.run(_train, 2, folder, "full at the end", *words):
        (kept,) = folder.glob("shardwise-weights-*/adapter_model.safetensors")
        assert kind == "CheckpointError" and f"the adapters of these 2 steps were written to {kept} instead" in text
        command = text.rpartition("fix: move them from there: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert (
        load_file(folder / "run/adapter/adapter_model.safetensors")
        and (folder / "run/adapter/adapter_config.json").exists()
    )


def test_weights_that_fit_nowhere_are_said_to_be_lost_and_leave_nothing_behind(ranks, folder):
    for kind, text, _ in ranks.run(_train, 2, folder, "full everywhere"):
        assert (
            kind == "CheckpointError"
            and "they could not be written in another place either, so the weights of these 2 steps are lost" in text
        )
        assert str(folder / "run/metrics.jsonl") in text
    assert not list(folder.glob("**/shardwise-weights-*"))


def test_metrics_that_cannot_be_written_do_not_cost_the_training(ranks, folder):
    first, second = ranks.run(_train, 2, folder, "metrics do not fit")
    assert first[0] == second[0] == "CheckpointError"
    assert "No space left on device; the weights are whole, in " in first[1]
    assert load_file(folder / "run/weights/model.safetensors")
    (said,) = first[2]
    assert "training continues, its figures are not kept" in said


def kept(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run/checkpoints").glob("step-*"))


@pytest.mark.quick("true")
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_checkpoint_that_does_not_fit_does_not_end_the_training(ranks, folder, background):
    words = ("--train.steps=5", "--checkpoint.every=1", "--checkpoint.keep=9", f"--checkpoint.background={background}")
    first, second = ranks.run(_train, 2, folder, "", *words, full_at=(2, 3))
    assert first[:2] == second[:2] == ("done", "")
    assert kept(folder) == [1, 4, 5] and load_file(folder / "run/weights/model.safetensors")
    assert [text.partition(":")[0] for text in first[2]] == [
        f"the checkpoint {folder}/run/checkpoints/step-0000000{step}" for step in (2, 3)
    ]
    assert all("1.00 MiB are free" in text and "the next save tries again" in text for text in first[2])


@pytest.mark.quick("false")
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_last_checkpoint_that_does_not_fit_is_an_error_once_the_weights_are_there(ranks, folder, background):
    words = ("--train.steps=4", "--checkpoint.every=2", f"--checkpoint.background={background}")
    first, second = ranks.run(_train, 2, folder, "", *words, full_at=(4,))
    assert first[:2] == second[:2] and first[0] == "CheckpointError" and first[2] == []
    assert f"the checkpoint {folder}/run/checkpoints/step-00000004" in first[1]
    assert f"; the weights are whole, in {folder}/run/weights" in first[1]
    assert kept(folder) == [2] and load_file(folder / "run/weights/model.safetensors")
    again = ranks.run(_train, 2, folder, "", *words)  # the disk has room again
    assert [kind for kind, *_ in again] == ["done", "done"] and kept(folder) == [2, 4]


@pytest.mark.parametrize("export", ["weights", "null"])
def test_a_last_checkpoint_that_does_not_fit_costs_no_adapters(ranks, folder, export):
    words = ("--parallel.lora.rank=2", "--checkpoint.every=2", f"--checkpoint.export={export}")
    what = "adapters are whole, in adapter" if export == "null" else "weights are whole, in weights"
    for kind, text, _ in ranks.run(_train, 2, folder, "", *words, full_at=(2,)):
        assert kind == "CheckpointError" and "1.00 MiB are free" in text
        assert f"; the {what}".replace("in ", f"in {folder}/run/") in text
    assert load_file(folder / "run/adapter/adapter_model.safetensors")


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(ranks, folder):
    words = ("--checkpoint.every=1", "--checkpoint.export=null")
    for kind, text, _ in ranks.run(_train, 2, folder, "no room at the start", *words):
        assert (
            kind == "ConfigError"
            and "KiB for a checkpoint; 64.00 MiB stay free" in text
            and "--checkpoint.every=null" in text
        )
    assert not (folder / "run").exists()


# ---- a real disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB."""
    with mounted(tmp_path / "disk", "size=2m") as folder:
        yield folder


@pytest.mark.timeout(100)
def test_a_disk_that_fills_while_training_leaves_the_weights_beside_and_no_traceback(tmp_path, small_disk):
    (tmp_path / "filler.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from shardwise.run.reference import ReferenceConfig, ReferenceModel\n"
        "class Filler(ReferenceModel):\n"
        "    def forward(self, input_ids):\n"
        "        if self.training and os.environ.get('RANK') == '0' and not Path('disk/ballast').exists():\n"
        "            with open('disk/ballast', 'wb', buffering=0) as file:\n"
        "                try:\n"
        "                    while file.write(bytes(512)): pass\n"
        "                except OSError: pass\n"
        "        return super().forward(input_ids)\n"
        "def build(): return Filler(ReferenceConfig(dim=32, num_layers=1, ffn=48))\n"
    )
    words = ["--model.build=filler.py:build", "--log.dir=disk/run", "--nproc", "2", *TINY[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    (kept,) = tmp_path.glob("shardwise-weights-*/model.safetensors")
    assert load_file(kept)
    assert "No space left on device" in done.stderr and f"were written to {kept} instead" in done.stderr
    assert done.stderr.rstrip().endswith(f"mkdir -p disk/run/weights && mv {kept.parent}/* disk/run/weights/")
    said = " ".join(done.stdout[done.stdout.index("\nkept ") :].split())
    said, _, resumes = said.partition(" resume ")
    assert (
        said.endswith(f"{kept} (weights, safetensors, float32)") and "older" not in said and "not possible" in resumes
    )
    text = (small_disk / "run/metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
