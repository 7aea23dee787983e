"""The shape of the house: imports point down, torch-free rooms stay torch-free, private torch names have one home."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)


def test_the_house_stands():
    assert house.faults(SRC / "shardwise") == []


def test_no_file_imports_itself_by_way_of_others():
    assert house.circles(house.importers(SRC / "shardwise")) == []


def test_a_circle_is_found(tmp_path):
    files = {
        "step/__init__.py": "",
        "step/a.py": "from shardwise.step import b\n",
        "step/b.py": "def f():\n    from shardwise.step.c import g\n",
        "step/c.py": "import shardwise.step.a\n",
        "step/d.py": "from shardwise.step.a import x\n",
    }
    for file, text in files.items():
        build(tmp_path, file, text)
    importing = house.importers(tmp_path / "shardwise")
    assert house.circles(importing) == [{f"shardwise.step.{name}" for name in "abc"}]
    assert importing["shardwise.step.a"] == {"shardwise.step.c", "shardwise.step.d"}
    assert importing["shardwise.step.__init__"] == set()
    assert "circles of files: 1" in house.report(tmp_path / "shardwise")


def test_a_room_that_has_grown_is_named(tmp_path):
    build(tmp_path, "step/__init__.py", "")
    build(tmp_path, "data/__init__.py", "")
    page = tmp_path / "page.md"
    page.write_text(f"before\n```text\n{house.report(tmp_path / 'shardwise')}\n```\n")
    assert house.growth(tmp_path / "shardwise", page) == []
    build(tmp_path, "step/a.py", "x = 1\ny = 2\n")
    assert house.growth(tmp_path / "shardwise", page) == ["step: 0 -> 2 lines", "in all: 0 -> 2 lines"]


def torch_free_modules():
    paths = [path for path in sorted((SRC / "shardwise").rglob("*.py")) if path.name != "__main__.py"]
    modules = [path.relative_to(SRC).with_suffix("").parts for path in paths]
    early = [parts for parts in modules if parts[1] == house.APART and parts[-1] in house.READ_EARLY]
    early += [parts for parts in modules if parts[1] in house.TORCH_FREE]
    return [".".join(parts).removesuffix(".__init__") for parts in early]


@pytest.mark.parametrize("heavy", ["torch", "numpy"])
def test_importing_the_torch_free_rooms_leaves_it_out(heavy):
    code = (
        f"import importlib, sys\nfor name in {torch_free_modules()!r}:\n    importlib.import_module(name)\n"
        f"    assert {heavy!r} not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_pytest_plugin_does_not_import_torch():
    code = "import sys, shardwise.testing.plugin\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def build(tmp_path, file, text):
    path = tmp_path / "shardwise" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return house.faults(tmp_path / "shardwise")


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("config/a.py", "import shardwise.layout\n", "config imports layout"),
        ("state/a.py", "from shardwise.state.checkpoint import keeping\n", "built on top of state"),
        ("state/a.py", "from shardwise.state import checkpoint\n", "built on top of state"),
        ("state/a.py", "from . import checkpoint\n", "built on top of state"),
        ("state/formats/a.py", "from ..checkpoint.commit import SPARE\n", "built on top of state"),
        ("config/a.py", "def f():\n    from shardwise.step import window\n", "config imports step"),
        ("recipe/a.py", "from shardwise import cli\n", "recipe imports cli"),
        ("recipe/a.py", "from shardwise import init\n", "the package's face"),
        ("recipe/a.py", "import shardwise as sw\n", "the package's face"),
        ("recipe/__init__.py", "from ..world import init\n", "recipe imports world"),
        ("recipe/deep/a.py", "from ...world import init\n", "recipe imports world"),
        ("layout.py", "import torch\n", "at module level"),
        ("launch/a.py", "try:\n    from torch import nn\nexcept ImportError:\n    nn = None\n", "at module level"),
        ("launch/a.py", "class A:\n    import torch.nn\n", "at module level"),
        ("cli/a.py", "import numpy as np\n", "at module level"),
        (
            "world/a.py",
            "from torch.distributed import _functional_collectives\n",
            "private names of torch belong in _torch/",
        ),
        ("world/a.py", "import torch.distributed._tensor\n", "private names of torch belong in _torch/"),
        (
            "world/a.py",
            "import torch.distributed as dist\ndist._get_default_group()\n",
            "private names of torch belong in _torch/",
        ),
        (
            "world/a.py",
            "import torch\ndef f():\n    return torch.distributed.fsdp._x.y\n",
            "private names of torch belong in _torch/",
        ),
        ("attic/a.py", "", "has no place in the order"),
        ("techniques/tp/rule.py", "import torch\n", "at module level"),
    ],
)
def test_the_checker_sees_a_fault(tmp_path, file, text, fault):
    found = build(tmp_path, file, text)
    assert len(found) == 1
    assert fault in found[0]
    assert found[0].startswith(f"shardwise/{file}:")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("step/a.py", "from shardwise.config import options\nfrom shardwise import layout\nfrom ..errors import X\n"),
        ("step/a.py", "from . import window\nfrom shardwise.step.loss import f\n"),
        ("launch/a.py", "def f():\n    import torch\n"),
        ("config/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardwise.step import x\n"),
        ("world/a.py", "import torch\nprint(torch.__version__)\nself._x = torch.nn.Module\n"),
        ("_torch/a.py", "from torch.distributed import _x\nfrom shardwise.errors import UsageError\n"),
        ("__init__.py", "from shardwise.cli import main\n"),
    ],
)
def test_the_checker_lets_good_code_through(tmp_path, file, text):
    assert build(tmp_path, file, text) == []


def test_a_technique_that_knows_another_is_a_fault(tmp_path):
    build(tmp_path, "techniques/data/__init__.py", "")
    build(tmp_path, "techniques/targets.py", "")
    good = "from shardwise.techniques.tp.rule import x\nfrom shardwise.techniques.targets import y\n"
    assert build(tmp_path, "techniques/tp/act.py", good) == []
    [fault] = build(tmp_path, "techniques/tp/act.py", f"{good}def f():\n    from ..data.rule import z\n")
    assert "act.py:4: tp imports shardwise.techniques.data.rule" in fault


# --- the outer files ------------------------------------------------------------------------------------------------


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_alone_lists_every_command():
    done = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, timeout=60)
    for target in ("demo", "test", "check", "soak", "gpu", "lint"):
        assert f"  make {target} " in done.stdout


def test_a_machine_without_python_is_told_what_to_install(tmp_path):
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "find_python.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "No Python 3.11 or newer was found on the PATH." in done.stderr


def test_another_pytorch_has_an_environment_of_its_own():
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    command = ["make", "-C", str(ROOT), "-n", "test", "TORCH=torch==2.12.0"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout
    assert "tools/setup_env.py .venv-torch-2.12.0 --torch 'torch==2.12.0'" in shown
    assert ".venv-torch-2.12.0/bin/python -m pytest" in shown


def test_waiting_for_the_installer_is_never_silent(monkeypatch, capsys, tmp_path):
    setup_env = load_tool("setup_env")
    monkeypatch.setattr(setup_env, "BEAT_S", 0.0)
    code = "import time; print('Collecting torch', flush=True); time.sleep(1.2)"
    assert setup_env.run_visibly([sys.executable, "-c", code], "installing", tmp_path / "log") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) >= 2  # one for the line, the others while nothing came
    assert shown[-1].endswith("s  installing: Collecting torch")
    assert (tmp_path / "log").read_text() == "Collecting torch\n"


def test_a_failed_step_shows_its_output_and_its_status(capsys):
    setup_env = load_tool("setup_env")
    assert setup_env.run_visibly([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], "making", None) == 3
    assert "no room" in capsys.readouterr().err
