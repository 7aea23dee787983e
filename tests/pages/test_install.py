"""README, "Install": what `python -m build` makes trains in an environment of its own, far from the source."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What `python -m build` does, without an environment of its own for setuptools: an sdist of the source, a wheel of the sdist.
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
GIVEN = """import torch
from shardwise.run.reference import build
build_model = lambda: build(dim=32, num_layers=2, ffn=48)
dataset = [torch.arange(i, i + 17) % 256 for i in range(192)]
"""
SEES = """
print(step.num_steps, torch.isfinite(torch.tensor(out.loss)).item(), sw.__file__)
world.close()
"""


def run(*words: str | Path, folder: Path) -> str:
    env = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src" / "shardwise", source / "src" / "shardwise", ignore=shutil.ignore_patterns("__pycache__")
    )
    sdist = run(sys.executable, "-c", BUILD, "build_sdist", folder, folder=source).splitlines()[-1]
    with tarfile.open(folder / sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since 3.11.4
    unpacked = folder / sdist.removesuffix(".tar.gz")
    return folder / run(sys.executable, "-c", BUILD, "build_wheel", folder, folder=unpacked).splitlines()[-1]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """With the wheel in it; what the wheel needs is that of the present one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "env/bin/python", "install")
    run(*pip, "--no-deps", "--no-index", "--quiet", "--no-compile", "--disable-pip-version-check", wheel, folder=folder)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n"
    )  # behind the wheel, without its .pth files
    return folder


def test_the_page_names_the_wheel(wheel):
    assert README.count(f"dist/{wheel.name}") == 2 and "python -m build" in README


def test_the_wheel_has_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {
        p.relative_to(source).as_posix() for p in (source / "shardwise").rglob("*") if p.suffix in (".py", ".yaml")
    }
    with zipfile.ZipFile(wheel) as archive:
        assert files <= set(archive.namelist())


def test_nothing_else_changes_where_pytorch_is_installed(wheel, tmp_path):
    """Whatever build of torch is there stays: pip would install the package alone."""
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report")
    run(*pip, tmp_path / "alone.json", "--ignore-installed", "--no-deps", wheel, folder=tmp_path)
    (needed,) = [
        requirement
        for each in json.loads((tmp_path / "alone.json").read_text())["install"][0]["metadata"]["requires_dist"]
        if (requirement := Requirement(each)).name == "torch"
    ]
    builds = ("2.11.0+cu128", "2.12.1+rocm7.0", "2.13.0+cpu", "2.14.1+cu130")
    assert needed.marker is None and all(needed.specifier.contains(build) for build in builds)
    assert not needed.specifier.contains("2.10.0")
    run(*pip, tmp_path / "all.json", wheel, folder=tmp_path)
    planned = json.loads((tmp_path / "all.json").read_text())["install"]
    assert {each["metadata"]["name"] for each in planned} <= {"shardwise"}


@pytest.mark.soak
def test_the_five_lines_train_from_the_wheel(environment):
    lines = README.partition("given build_model and dataset -->\n```python\n")[2].partition("```")[0]
    (environment / "five.py").write_text(GIVEN + lines + SEES)
    steps, finite, file = run(environment / "env/bin/python", "five.py", folder=environment).split()
    assert (steps, finite) == ("3", "True") and Path(file).is_relative_to(environment)


def test_the_command_trains_from_the_wheel(environment):
    words = "--nproc 1 --train.steps=2 --train.eval_every=0 --train.prove=false --log.plot=false --data.val_fraction=0.001 --data.global_batch=4 --data.micro_batch=2"
    small = "--model.args={dim: 32, num_layers: 1, ffn: 48}"
    printed = run(environment / "env/bin/shardwise", "train", *words.split(), small, folder=environment)
    assert "after 2 steps" in printed
    assert (environment / "runs/latest/weights/model.safetensors").exists()
