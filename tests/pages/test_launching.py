"""docs/launching.md: exit codes and variables are those of the code, and what it says to type runs."""

import ast
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import _BY_SIGNAL, COMMANDS
from shardwise.errors import Stopped
from shardwise.run.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
SRC = ROOT / "src" / "shardwise"
SMALL = (
    "--launch.device=cpu --train.eval_every=0 --data.global_batch=4 --data.micro_batch=2 --data.seq_len=16 "
    "--log.plot=false '--model.args={dim: 16, num_layers: 1, ffn: 16}'"
)


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def returned(function: ast.FunctionDef) -> set[int]:
    """The numbers that a function returns, as they are written in it."""
    found: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            text = ast.unparse(node.value)
            if text == "128 + signal.SIGPIPE":
                found.add(128 + signal.SIGPIPE)
            elif text == "stop.CODE":
                found.add(Stopped.CODE)
            elif text.startswith("int("):  # of a comparison
                found |= {0, 1}
            elif not isinstance(node.value, ast.Call):
                found |= {
                    leaf.value
                    for leaf in ast.walk(node.value)
                    if isinstance(leaf, ast.Constant) and type(leaf.value) is int
                }
    return found


def test_exit_codes_are_those_of_the_code():
    from shardwise.world import EXIT_PEER_LOST

    files = [SRC / "cli" / "main.py"]
    files += [ROOT / "src" / f"{module.replace('.', '/')}.py" for module, _ in COMMANDS.values()]
    codes = {EXIT_PEER_LOST, *_BY_SIGNAL}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (
                node.name in ("main", "run", "_run") or node.name.startswith("_be_a")
            ):
                codes |= returned(node)
    shown = [int(code) for code in re.findall(r"^\| (-?\d+) \|", section("Exit codes"), re.MULTILINE)]
    assert shown == sorted(codes)


def test_variables_are_those_that_the_code_reads():
    inner = {  # of our own processes to each other, of tests, and names that are no variables
        "SHARDWISE_TORCH_CHECK_RUNS", "SHARDWISE_SET_OMP_NUM_THREADS", "SHARDWISE_SIGNALS_BLOCKED_AT_START",
        "BLOCKED_AT_START", "DUMP_SIGNAL", "STOP_SIGNALS", "OPENBLAS_NUM_THREADS", "RES_OPTIONS", "CUDA_VISIBLE_DEVICES",
        "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "SHARD_GRAD_OP",  # values of another system's variables
    }  # fmt: skip
    read: set[str] = set()
    for path in SRC.rglob("*.py"):
        if re.search(r"\benviron\b", text := path.read_text(encoding="utf-8")):
            own = set(re.findall(r"^([A-Z_]+)\b.*=", text, re.MULTILINE))  # constants of the file, named in its __all__
            read |= set(re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK|TERM)"', text)) - own
    rows = re.findall(r"^\| (`.*?) \|", section("Environment variables"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == read - inner


def test_command_of_the_batch_script_is_read():
    text = (ROOT / "examples" / "slurm.sbatch").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = shlex.split(line.removeprefix("srun shardwise train "))
    assert words.pop() == "$@"
    limit = load_config(None, words).config.checkpoint
    hours, minutes, seconds = map(int, re.search(r"--time=(\d+):(\d+):(\d+)", text).groups())
    notice = int(re.search(r"--signal=USR1@(\d+)", text)[1])
    assert limit.every and limit.stop_after_s + notice < hours * 3600 + minutes * 60 + seconds
    for flag in re.findall(r"^\| `(--[^`]+)`", section("SLURM"), re.MULTILINE):
        assert flag in text, f"{flag} is explained and not in the file"


def test_batch_script_stops_in_time_and_goes_back_into_the_queue(tmp_path):
    """With an ``srun`` that starts two local tasks, and a ``scontrol`` that writes down what it is asked."""
    programs = {
        "shardwise": f'exec {shlex.quote(sys.executable)} -m shardwise "$@"',
        "srun": "export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost\n"
        'SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!\n'
        'SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; first=$?\n'
        "wait $other; second=$?\n"
        'exit "$(( first > second ? first : second ))"',
        "scontrol": 'echo "$@" >> asked.txt',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = sbatch(tmp_path, limit_s=1)
    assert done.returncode == 75, done.stdout + done.stderr
    assert (tmp_path / "asked.txt").read_text() == "requeue 4711\n"
    assert list((tmp_path / "run").rglob("step-*"))


def sbatch(folder: Path, limit_s: int) -> subprocess.CompletedProcess:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PATH": f"{folder}{os.pathsep}{env['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env |= {"SLURM_JOB_ID": "4711", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    text = (ROOT / "examples" / "slurm.sbatch").read_text(encoding="utf-8")
    (folder / "job.sbatch").write_text(text.replace("stop_after_s=13800", f"stop_after_s={limit_s}"))
    command = ["bash", "job.sbatch", *shlex.split(SMALL), "--train.steps=100000", "--log.dir=run"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.soak
def test_command_for_two_nodes_runs_on_two_launchers(tmp_path):
    (line,) = re.findall(r"<!-- two nodes -->\n```text\n(.*)\n```", PAGE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = line.replace("node0:29500", f"127.0.0.1:{port}").replace("--nproc-per-node 8", "--nproc-per-node 1")
    line = line.replace(" run.yaml ", f" {SMALL} --train.steps=2 --log.dir=run ").removeprefix("torchrun ")
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    printed = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    assert "dp_replicate=2" in "".join(printed)
