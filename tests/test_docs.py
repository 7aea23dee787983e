"""What the pages say is run: every Python example, every command, every error shown, every link.

A marker stands on the line before a block, as an HTML comment: ``run`` (the block is a script), ``run: 2 ranks`` (on that
many), ``prints`` (a command after ``$`` and all that it prints), ``output`` (what the script before it prints), ``file`` and
``diff`` (files, which tests/pages compares).
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "examples/README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "index",
            "first-hour",
            "layout",
            "tensor-parallel",
            "context-parallel",
            "units",
            "remat",
            "init",
            "recipe",
            "training",
            "loss",
            "data",
            "precision",
            "parity",
            "weights",
            "convert",
            "checkpoint",
            "benchmarks",
            "torch-versions",
            "moving",
            "from-plain",
            "from-accelerate",
            "from-trainer",
            "other-systems",
            "from-fabric",
            "from-fsdp2",
            "from-torchtune",
            "adapters",
            "launching",
            "glossary",
        )
    ),
)

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    marker: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found, start = [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = lines[start - 1] if start else ""
        marker = above.removeprefix("<!-- ").removesuffix(" -->") if above.startswith("<!-- ") else ""
        text = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(page, start + 1, marker, lines[start].removeprefix("```"), text))
        start = None
    return found


ALL = [block for page in PAGES for block in blocks(page)]
INLINE = re.compile(r"`((?:make|shardwise|torchrun|python) [^`]+)`")


def examples() -> list[tuple[Block, str | None]]:
    """Python blocks with the output that is shown after each."""
    shown = [*ALL, *(block for block in blocks("docs/finetuning.md") if block.marker.startswith(("run", "output")))]
    return [
        (block, following.text if following and following.marker == "output" else None)
        for block, following in zip(shown, [*shown[1:], None], strict=True)
        if block.language == "python" and not block.marker.startswith("file: ")
    ]


def _name(value: object) -> str:
    return str(value) if isinstance(value, Block) else "output"


def commands() -> list[str]:
    """Every command a page shows, in a block or in running text, once."""
    shown = [line.partition("  # ")[0].strip() for b in ALL if b.language == "sh" for line in b.text.splitlines()]
    shown += [found for page in PAGES for found in INLINE.findall((ROOT / page).read_text(encoding="utf-8"))]
    return list(dict.fromkeys(command for command in shown if command and "..." not in command))


# ---- Python --------------------------------------------------------------------------------------------------------


def _given() -> dict:
    """What the front page's five lines leave to the reader."""
    import torch

    from shardwise.run.reference import build

    return {
        "build_model": lambda: build(dim=32, num_layers=2, ffn=48),
        "dataset": [torch.arange(i, i + 17) % 256 for i in range(192)],
    }


def _run_on_a_rank(path: str, given: bool) -> tuple[str, dict]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        left = runpy.run_path(path, _given() if given else {}, run_name="__main__")
    if given:
        left["world"].close()
    step = left.get("step")
    return printed.getvalue(), {"steps": step.num_steps, "loss": left["out"].loss} if step and "out" in left else {}


def _run_with_ranks(path: str, given: bool) -> tuple[str, dict]:
    """A script that starts ranks itself, in a process that is no rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return _run_on_a_rank(path, given)


@pytest.mark.parametrize(("block", "output"), [e for e in examples() if "ranks" in e[0].marker], ids=_name)
def test_example_on_ranks(ranks, block, output, tmp_path):
    (tmp_path / "example.py").write_text(block.text)
    given = "given" in block.marker
    results = ranks.run(_run_on_a_rank, 2, str(tmp_path / "example.py"), given, timeout_s=100)
    assert block.marker.startswith("run: 2 ranks")
    assert (output is None) == given
    if output is not None:
        assert results[0][0] == output
        assert results[1][0] == ""
    else:
        assert results[0][1] == results[1][1]
        assert results[0][1]["steps"] == 3 and 0 < results[0][1]["loss"] < 10


@pytest.mark.parametrize(("block", "output"), [e for e in examples() if "ranks" not in e[0].marker], ids=_name)
def test_example_alone(ranks, block, output, tmp_path):
    assert block.marker == "run" and output is not None, f"{block} is not run, or shows no output"
    path = tmp_path / "example.py"
    path.write_text(block.text)
    if "launch_local" in block.text:  # as a user starts it; it imports no torch before its ranks do
        done = _shell(f"{shlex.quote(sys.executable)} {path.name}", tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == output
    else:
        run = _run_with_ranks if "__main__" in block.text else _run_on_a_rank
        assert ranks.run(run, 1, str(path), given=False, timeout_s=100)[0][0] == output


# ---- commands ------------------------------------------------------------------------------------------------------


def _shell(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs ``command`` where ``shardwise``, ``python`` and ``torchrun`` are this interpreter's."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, module in (("shardwise", "-m shardwise"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (bin_folder / name).chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"PATH": f"{bin_folder}{os.pathsep}{clean['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=150,
    )


SHORT = "--train.steps=2 --train.eval_every=0 --data.global_batch=4 --data.micro_batch=2"
UNPROVED = "--train.prove=false"  # the demo is proved, and tests/cli/test_train_proof.py has the rest
SMALL_MODEL = "'--model.args={dim: 32, num_layers: 1, ffn: 48}'"
SMALL_DATA = "--data.val_fraction=0.001"  # of the text that the demo brings: a part of a second is validated

# What a page's commands begin with: made once, on warm ranks, and copied for each.
FIRST = {
    "examples/chat.": "python examples/small_chat.py runs/chat --num 40",
    "--model.hf=runs/chat ": "python examples/small_chat.py runs/chat --num 40",
    "examples/lora.": "python examples/small_chat.py runs/chat --num 40",
    "lora.yaml": "python examples/small_chat.py runs/chat-tuned/weights --num 40",
    "runs/chat-lora": "python examples/small_chat.py runs/chat --num 40",
    "s/chat-lora": "python examples/small_chat.py runs/chat-tuned/weights --num 40",
    "/chat-lora": f"shardwise train examples/lora.yaml {SHORT} {UNPROVED}",
    "examples/finetune.": "python examples/small_model.py runs/small --steps 2",
    "shardwise verify --": "python examples/small_chat.py runs/chat --num 40",
    "shardwise convert ": "python examples/example_convert.py",
    "shardwise generate runs/chat-tuned": "python examples/small_chat.py runs/chat-tuned --num 40",
    "shardwise generate runs/latest": f"shardwise train {SHORT} {UNPROVED} {SMALL_MODEL}",
    "shardwise checkpoint ls runs": f"shardwise train --checkpoint.every=2 {SHORT} {UNPROVED} {SMALL_MODEL}",
}


def _warm(command: str) -> tuple[int, list[str]] | None:
    """On how many warm ranks a command is run, and its words; None: in processes of its own."""
    match shlex.split(command):
        case [*_, script] if script.startswith("examples/from/"):  # they import what lies beside them
            return None
        case ["python", script, *words] if script.startswith("examples/"):
            return 1, [script, *words]
        case ["torchrun", "--standalone", "--nproc-per-node", number, script, *words] if script.startswith("examples/"):
            return int(number), [script, *words]
        case ["shardwise", "convert" | "checkpoint" | "generate" | "import-config" as name, *words] if (
            "--help" not in words
        ):
            return 1, [name, *words]
        case ["torchrun", "--standalone", "--nproc-per-node", number, "first.py"]:
            return int(number), ["first.py"]
        case ["python", "first.py"]:  # tests/parallel/test_init_torchrun.py starts a script without a launcher
            return 1, ["first.py"]
        case ["shardwise", "train", first, *words] if "--print-config" in words and first.startswith(
            ("examples/", "--model.hf=")
        ):  # transformers, which reads the directory, is there
            return 1, ["train", first, *words]
        case ["shardwise", "train", *words] if "--print-config" not in words:  # as others would start it
            number = int(words.pop(words.index("--nproc") + 1)) if "--nproc" in words else 2
            return number, ["train", *(word for word in words if word != "--nproc")]
    return None


def _on_ranks(command: str, folder: Path) -> tuple[int, str, list[str]]:
    found = _warm(command)
    assert found is not None
    return found[0], str(folder), found[1]


def _run_words(folder: str, words: list[str]) -> int:
    """On a rank: a script as it is started from ``folder``, or a command of ``shardwise`` that starts no ranks."""
    from shardwise.cli.main import main

    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        if words[0].endswith(".py"):
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            return 0
        return main(words)


def _shortened(command: str, folder: Path) -> str | None:
    """What is run for a command of a page: itself, or the same with less work. None: nothing is known about it."""
    words = shlex.split(command)
    match words:
        case ["python", "examples/small_model.py" | "examples/finetune.py", *_]:
            return f"{command} --steps 2"
        case ["python", "examples/small_chat.py", *_]:
            return f"{command} --num 40"
        case ["torchrun", *rest] if "examples/finetune.py" in rest:
            return f"{command} --steps 2"
        case ["python", "examples/from/plain_before.py"]:
            return command
        case ["torchrun", *_, "-m", "shardwise", "train", _]:
            return f"{command} {SHORT} {UNPROVED} {SMALL_DATA} --log.dir=run"
        case ["shardwise", "train", "--checkpoint.every=100"]:
            return f"shardwise train --checkpoint.every=2 {SHORT} {UNPROVED} {SMALL_MODEL}"
        case ["shardwise", "checkpoint", "ls", _]:
            return command
        case ["shardwise", "import-config", given, *_] if given.startswith("examples/from/"):
            return command
        case ["shardwise", "import-config", "config.yaml", *_]:
            shutil.copy(ROOT / "tests/dialects/fixtures/accelerate/fsdp2-8gpu.yaml", folder / "config.yaml")
            return command
        case ["shardwise", "train", "run.yaml"]:  # what import-config has written
            (folder / "run.yaml").write_text("train: {steps: 2}\n")
            return f"{command} --print-config"
        case ["shardwise", "checkpoint", *_]:
            return f"{command} --help"  # what it shows is there once the command above it has run
        case ["make", "test", torch] if torch.startswith("TORCH="):  # which would install it
            return f"make -C {shlex.quote(str(ROOT))} -n test {torch}"
        case ["shardwise", "train", "--train.epochs=3"]:  # tests/run/test_epochs.py runs them
            return f"{command} --print-config"
        case ["shardwise", "train"]:
            return f"{_make('demo')} -n"  # what the demo runs, and the demo is run
        case [
            "shardwise",
            "train",
            "examples/chat.yaml",
            "--parallel.precision=bf16",
            _,
        ]:  # tests/step, tests/techniques/remat
            return f"{command} --print-config"
        case [
            "shardwise",
            "train",
            "--model.hf=runs/chat",
            "--data.path=runs/chat/chat.jsonl",
        ]:  # as examples/chat.yaml
            return f"{command} --print-config"
        case ["shardwise", "train", "examples/finetune.yaml"]:  # tests/cli/test_train_examples.py runs it to the end
            return f"{command} --print-config"
        case ["shardwise", "train", "--data.path=README.md"]:
            return f"{command} {SHORT} {UNPROVED} {SMALL_MODEL} --log.dir=run"
        case ["shardwise", "train", *_]:
            return f"{command} {SHORT} {UNPROVED} {SMALL_DATA} --log.dir=run"
        case ["shardwise", "convert" | "generate"]:  # named in running text
            return f"{command} --help"
        case ["shardwise", "verify", option, *rest] if option.startswith("--"):  # an option that running text names
            return shlex.join(["shardwise", "verify", "runs/chat", option, *rest])
        case ["shardwise", "verify" | "--help" | "plan" | "convert" | "generate" | "completion", *_] | ["torchrun", *_]:
            return command
        case ["python", "-m", "pip", "install", "-e", "."]:
            for name in ("pyproject.toml", "LICENSE"):
                shutil.copy(ROOT / name, folder)
            shutil.copytree(ROOT / "src" / "shardwise", folder / "src" / "shardwise")
            return f"{command} --dry-run --no-deps --no-build-isolation --no-index"
        case ["python", "examples/in_peft.py", _]:
            return command
        case ["python", "benchmarks/context.py", *_]:  # tests/benchmarks/test_context.py runs its parts
            return "python benchmarks/context.py --help"
        case ["python", "benchmarks/lora.py", *_]:  # tests/benchmarks/test_lora.py runs its parts
            return "python benchmarks/lora.py --help"
        case ["python", script] if script.startswith("examples/"):
            return command
        case ["python", "benchmarks/step.py", *_]:
            return f"{command} --model tiny --rounds 2 --part step".replace("--write docs/", "--write ")
        case ["python", "benchmarks/wrap.py", *_]:
            return f"{command} --ranks 8 --blocks 2 --repeats 1".replace("--write docs/", "--write ")
        case ["python", "benchmarks/checkpoint.py", *_]:
            return f"{command} --megabytes 2 --rounds 1".replace("--write docs/", "--write ")
        case ["python", "benchmarks/weights.py", *_]:
            return f"{command} --megabytes 8 --repeats 1 --part convert".replace("--write docs/", "--write ")
        case ["python", "benchmarks/tensor_parallel.py", *_]:
            return "python benchmarks/tensor_parallel.py --rounds 2"
        case ["python", "benchmarks/linear_loss.py", *_]:  # its one size takes a minute a round
            return "python benchmarks/linear_loss.py --help"
        case ["python", "benchmarks/moving.py", "--trl", *_]:  # the tests do without TRL
            return "python benchmarks/moving.py --help"
        case ["python", "benchmarks/moving.py", *_]:
            return "python benchmarks/moving.py"
        case ["python", "benchmarks/zoo.py", *_]:
            return "python benchmarks/zoo.py --layout tp=2 --only gpt2"
        case ["python", "benchmarks/context_modules.py", *_]:
            return "python benchmarks/context_modules.py --help"
        case ["python", "tools/draw_pages.py"]:
            return f"python {ROOT / 'tools' / 'draw_pages.py'} --draw --to ."
        case ["python", "tools/hostile_table.py"]:
            return f"python {ROOT / 'tools' / 'hostile_table.py'} --num 1 --print"
        case ["python", "tools/units_table.py", *_]:
            return f"python {ROOT / 'tools' / 'units_table.py'} LlamaForCausalLM OPTForCausalLM"
        case ["python", "tools/stamp.py"]:
            return f"python {ROOT / 'tools' / 'stamp.py'} --help"
        case ["python", "tools/loss_table.py"]:
            return f"python {ROOT / 'tools' / 'loss_table.py'} --help"
        case ["make", "demo"]:
            words = f"{SHORT} {SMALL_DATA} --log.dir={folder / 'run'}"
            return f"{_make('demo')} ARGS={shlex.quote(words)}"
        case ["make", "finetune"]:  # tests/cli/test_train_examples.py runs it, shortened
            return f"{_make('finetune')} -n"
        case ["make", "test" | "soak" | "gpu" | "check" | "picture" | "docs" as target]:
            return f"{_make(target)} -n"
        case ["make", "soak", arguments]:
            path = arguments.removeprefix("ARGS=")
            return f"{_make('soak')} -n && test -e {ROOT / path}"
    return None


def _make(target: str) -> str:
    return f"make -C {shlex.quote(str(ROOT))} {target} PYTHON={shlex.quote(sys.executable)}"


INSTALLS = ("python -m pip install build", "python -m pip install dist/")  # tests/pages/test_install.py does these


def _selections() -> dict[str, str]:
    """``make test ARGS=...`` commands of the pages -> their arguments."""
    prefix = "make test ARGS="
    return {c: shlex.split(c)[-1].removeprefix("ARGS=") for c in commands() if c.startswith(prefix)}


@pytest.mark.soak
def test_every_selection_of_tests_selects_some(tmp_path):
    # All in one process, which imports torch once; the target runs `pytest -m "not soak and not gpu"` with them.
    code = """if True:
        import contextlib, io, json, pytest, shlex, sys
        class Count:
            def pytest_collection_finish(self, session):
                self.number = len(session.items)
        found = {}
        for arguments in json.loads(sys.argv[1]):
            count = Count()
            with contextlib.redirect_stdout(io.StringIO()):
                words = ["--collect-only", "-q", *json.loads(sys.argv[2]), "-m", "not soak and not gpu"]
                pytest.main([*words, *shlex.split(arguments)], plugins=[count])
            found[arguments] = count.number
        print(json.dumps(found))
    """
    expanded = _shell(f"{_make('test')} -n", tmp_path).stdout
    assert '-m "not soak and not gpu"' in expanded
    plugin = ["-p", "shardwise.testing.plugin"] if "-p shardwise.testing.plugin" in expanded else []
    words = (sys.executable, "-c", code, json.dumps(list(_selections().values())), json.dumps(plugin))
    done = _shell(f"cd {shlex.quote(str(ROOT))} && {shlex.join(words)}", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(_selections()) >= 4
    assert all(number > 0 for number in found.values()), found


# What they do is seen in tests/benchmarks, tests/pages, tests/verify, tests/state and tests/cli; that they are spelled so, in soak.
SEEN_ELSEWHERE = (
    "python benchmarks/",
    "python examples/from/",
    "torchrun --standalone --nproc-per-node 2 examples/from/",
    "torchrun --standalone --nproc-per-node 2 -m shardwise",
    "shardwise train --checkpoint.every=100",
    "shardwise train --data.path=README.md",
    "python tools/draw_pages.py",
    "python tools/hostile_table.py",
    "python tools/units_table.py",
    "python -m shardwise.verify.torch_check",
    "shardwise verify ",
    # Of tests/cli/test_train_examples.py, which runs these scripts on one rank and on two:
    "python examples/train_step.py",
    "torchrun --standalone --nproc-per-node 2 examples/train_step.py",
    "python examples/example_remat.py",
    "python examples/example_units.py",
    "python examples/example_init.py",
    "python examples/own_loop.py",
    "python examples/small_model.py",
    "python examples/finetune.py",
    "torchrun --standalone --nproc-per-node 2 examples/finetune.py",
    "python examples/in_peft.py",
    # What others begin with:
    "python examples/small_chat.py",
    "python examples/example_convert.py",
    "shardwise train examples/lora.yaml",
    "shardwise train examples/chat.yaml --parallel.precision=bf16 --train.fused=true",
    # Of an adapter beside its base, as tests/cli/test_generate.py has it; what it says of a run is that of runs/chat-tuned:
    "shardwise generate runs/chat-lora",
    # As without a number: warm ranks are two.
    "shardwise train examples/gru.yaml --nproc 2",
)


def _command(command: str):
    return pytest.param(command, marks=pytest.mark.soak if command.startswith(SEEN_ELSEWHERE) else ())


_BEGUN: dict[tuple[str, ...], Path] = {}


@pytest.fixture
def begun(ranks, tmp_path_factory):
    """A function that gives the folder where commands have been run that others begin with."""

    def folder_of(commands: tuple[str, ...]) -> Path:
        if commands not in _BEGUN:
            folder = tmp_path_factory.mktemp("begun")
            if commands:
                shutil.copytree(folder_of(commands[:-1]), folder, symlinks=True, dirs_exist_ok=True)
                ranks.run(_run_words, *_on_ranks(commands[-1], folder), timeout_s=100)
            else:
                for name in ("README.md", "examples", "benchmarks"):
                    (folder / name).symlink_to(ROOT / name)
                shutil.copy(ROOT / "docs" / "benchmarks.md", folder)
            _BEGUN[commands] = folder
        return _BEGUN[commands]

    return folder_of


@pytest.mark.parametrize(
    "command", [_command(c) for c in commands() if c not in _selections() and not c.startswith(INSTALLS)]
)
def test_command_of_a_page(ranks, begun, command, tmp_path):
    beginnings = dict.fromkeys(first for words, first in FIRST.items() if words in command)
    shutil.copytree(begun(tuple(beginnings)), tmp_path, symlinks=True, dirs_exist_ok=True)
    if "first.py" in command:
        (first,) = [block for block in blocks("docs/index.md") if block.language == "python"]
        (tmp_path / "first.py").write_text(first.text)
    short = command if command == "python first.py" else _shortened(command, tmp_path)
    assert short is not None, f"nothing is known about the command {command!r} of a page"
    if _warm(short) is not None:
        assert set(ranks.run(_run_words, *_on_ranks(short, tmp_path), timeout_s=100)) == {0}
        return
    done = _shell(short, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if command == "make demo":
        _has_the_shape_of_the_page(done.stdout, str(tmp_path / "run"))


def _has_the_shape_of_the_page(printed: str, folder: str) -> None:
    """The demo's last lines, but for the figures, are those of the front page."""
    (shown,) = [block.text for block in blocks("README.md") if block.marker == "shape of: make demo"]

    def shape(text: str) -> str:
        text = re.sub(r"(\d+ min )?\d+ s\b", "# s", " ".join(text.split()))
        text = re.sub(r"in [\w.]+\)", "in #)", text)
        text = re.sub(
            r"(\S+ -m )?\S*shardwise train ", "shardwise train ", text
        )  # by its place, where the PATH has none
        return re.sub(r"\d[\d,.]*(e-\d+)?", "#", text)

    assert shape(shown) in shape(printed.replace(folder, "runs/latest").replace(str(Path(folder).parent), "runs"))


def _printing(block):
    command = block.text.removeprefix("$ ")
    return pytest.param(block, id=str(block), marks=pytest.mark.soak if command.startswith(SEEN_ELSEWHERE) else ())


@pytest.mark.parametrize("block", [_printing(block) for block in ALL if block.language == "console"])
def test_what_a_command_prints(block, tmp_path):
    assert block.marker == "prints"
    command, _, expected = block.text.removeprefix("$ ").partition("\n")
    import torch

    done = _shell(command, tmp_path)
    expected = expected.replace(
        "torch 2.13.0+cpu", f"torch {torch.__version__}"
    )  # the page has the version of `make test`
    assert done.stdout + done.stderr == expected


# ---- tests that a page names ------------------------------------------------------------------------------------------


NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "traps.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids=lambda word: word.rpartition("/")[2])
def test_a_test_that_a_page_names_is_there(file, name):
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


# ---- the pages themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # in Python, `layers[i](x)` is no link
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    for target in targets:
        assert (ROOT / page).parent.joinpath(target.partition("#")[0]).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_to_chance(page):
    for block in blocks(page):
        is_shown = block.marker.startswith(("file: ", "diff: "))
        assert is_shown or block.language in ("sh", "python", "console", "text"), f"{block}: {block.language!r}"
        assert block.language == "sh" or block.marker, f"{block} has no marker, so nothing checks it"


def test_every_page_is_reached_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in set(PAGES) - {"docs/index.md"}:
        assert f"({os.path.relpath(page, 'docs')})" in index


def test_the_distances_on_the_page_are_those_of_the_figures():
    spec = importlib.util.spec_from_file_location("make_picture", ROOT / "tools" / "make_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = json.loads((ROOT / "docs/data/curves.json").read_text())
    assert f"<!-- curves -->\n{module.distances(results)}\n<!-- /curves -->" in (ROOT / "docs/parity.md").read_text()
