"""Records for ``tools/replay.py`` what a user sees of one source tree: signatures, commands, and texts of errors.

    PYTHONPATH=TREE/src python tools/replay_public.py public OUT.json     # in TREE: signatures, commands and messages
    PYTHONPATH=TREE/src python tools/replay_public.py errors OUT.json     # in TREE: errors that its tests of misuse construct

A record is a mapping from the name of a fact to JSON. What two runs of one tree do not share is written in a common form: places of
temporary folders, and, where errors of ranks are recorded, every number.
"""

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

import error_index  # noqa: E402

__all__ = ["SCENES", "record"]

Record = dict[str, Any]

# ---- signatures -----------------------------------------------------------------------------------------------------


def signatures() -> Record:
    """Signature of every public name, and of the public methods and fields of each public class."""
    import shardwise
    import shardwise.testing

    found: Record = {"names": dir(shardwise)}
    for module, names in ((shardwise, dir(shardwise)), (shardwise.testing, shardwise.testing.__all__)):
        for name in names:
            for place, text in _signatures(f"{module.__name__}.{name}", getattr(module, name)):
                found[place] = text
    return found


def _signatures(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if not callable(value):
        yield place, type(value).__name__
        return
    yield place, _signature(value)
    if not inspect.isclass(value):
        return
    yield f"{place} bases", " ".join(base.__name__ for base in value.__mro__ if base.__module__ != "builtins")
    if dataclasses.is_dataclass(value):
        yield f"{place} fields", " ".join(field.name for field in dataclasses.fields(value))
    if fields := getattr(value, "__struct_fields__", None):
        yield f"{place} fields", " ".join(fields)
    for name, member in sorted(inspect.getmembers_static(value)):
        if name[0] != "_" and isinstance(member, staticmethod | classmethod | property) | inspect.isfunction(member):
            function = member.fget if isinstance(member, property) else getattr(value, name)
            yield f"{place}.{name}", f"{type(member).__name__} {_signature(function)}"


def _signature(function: Any) -> str:
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
    text = re.sub(r"shardwise(?:\.\w+)*\.(\w+)", r"\1", text)  # files move, names do not
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# ---- commands -------------------------------------------------------------------------------------------------------

COMMANDS = """
--help
--version
nosuch
--hepl
train --help
convert --help
checkpoint --help
verify --help
train --print-config
train examples/gru.yaml --print-config
train examples/finetune.yaml --print-config
train --parallel.layout=dp_shard=3 --nproc 4
train --parallel.layout=dp_shard=3 --nproc 4 --print-config
train --parallel.layout=dp_shard=x
train --parallel.layout=pp=2
train --train.stepz=5
train --train.steps=five
train --train.steps=-1
train --train.steps 5
train --optim.lr=fast
train --parallel.precision=fp8
train --parallel.remat=some
train --parallel.compile=all
train --parallel.sharding.engine=zero
train --parallel.sharding.units=nosuch
train --parallel.sharding.offload=true --parallel.layout=dp_replicate=2 --nproc 2 --print-config
train --checkpoint.keep=5
train --checkpoint.every=5 --checkpoint.keep=0
train --data.path=nosuch.txt
train --data.path=tests
train --model.hf=tests
train --model.build=nosuch
train --model.build=examples/train_step.py:Nosuch
train --model.args.dimm=4
train nosuch.yaml
train examples/gru.yaml --nproc 0
train --launch.device=tpu
train --bf16
verify
verify examples/train_step.py
verify examples/train_step.py:Nosuch --layout dp_shard=2
verify examples/train_step.py:Model --layout dp_shard=0
verify examples/train_step.py:Model --layout dp_shard=-1
verify examples/train_step.py:Model --layout dp_shard=2 --steps 0
verify examples/train_step.py:Model --layout dp_shard=2 --train.steps=2
verify examples/train_step.py:Model --layout dp_shard=2 --nproc 2
verify examples/train_step.py:Model --layout dp_shard=2
verify examples/train_step.py:Model --layout dp_replicate=2 --parallel.precision=bf16
convert
convert nosuch out.safetensors
convert README.md out.safetensors
checkpoint
checkpoint list nosuch
checkpoint list tests
checkpoint show tests
checkpoint prune tests
checkpoint prune --json
train examples/gru.yaml --train.steps=3 --nproc 1 --log.dir=OUT
train examples/gru.yaml --train.steps=3 --nproc 2 --log.dir=OUT
train --train.steps=4 --checkpoint.every=2 --nproc 2 --log.dir=OUT
train --train.steps=3 --parallel.layout=dp_replicate=2 --parallel.precision=bf16 --parallel.remat=full --nproc 2 --log.dir=OUT
"""


def commands() -> Record:
    """Exit status and words of commands: help, mistakes, and a few that run to their end."""
    found: Record = {}
    for line in COMMANDS.strip().splitlines():
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/run"
            words = [word.replace("OUT", out) for word in line.split()]
            done = subprocess.run(
                [sys.executable, "-m", "shardwise", *words],
                capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
            )  # fmt: skip
            runs = any(words in done.stdout for words in ("starting the ranks", "starting 2 ranks", "proof"))
            found[line] = {
                "exit status": done.returncode,
                "stdout": _timeless(done.stdout) if runs else _common(done.stdout),
                "stderr": _timeless(done.stderr) if runs else _common(done.stderr),
                "files": sorted(path.relative_to(out).as_posix() for path in Path(out).rglob("*") if path.is_file()),
                "losses": _losses(Path(out) / "metrics.jsonl"),
            }
    return found


def _common(text: str) -> str:
    # The program is shown by the shortest path from where it is called.
    text = re.sub(r"[^\s'\"]*/bin/shardwise\b", "shardwise", text)
    text = text.replace(str(Path.cwd()), "TREE")
    return re.sub(r"(/tmp|/var/folders)/[^\s'\"),:;]+", "TMP", text)


_TIMED = re.compile(
    r"\bin \d+ s\b|\d[\d.,]*k? (?:tok|samples)\w*/s|\d+(?:\.\d+)? (?:s|ms|GiB|MiB|MB|GB|kB)\b|#+|\d+e-\d+"
)


def _timeless(text: str) -> list[str]:
    """The lines of a run, without numbers, and without those that only show how far it is."""
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _common(text)))
    common = {" ".join(_TIMED.sub("#", re.sub(r"\d+(\.\d+)?", "#", line)).split()) for line in lines}
    return sorted(line for line in common if not line.endswith("(# s)") and not line.startswith(("...", "step ")))


def _losses(path: Path) -> list[Any]:
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if "loss" in k or "norm" in k or k in ("step", "num_tokens")} for row in rows]


# ---- messages -------------------------------------------------------------------------------------------------------


def messages() -> Record:
    """How often each message stands in the code, as its parts are written; and every text that the code warns with."""
    package = Path.cwd() / "src" / "shardwise"
    _, found, problems = error_index.collect(package)
    counted = Counter(f"{one.kind} | {one.given} | {one.why} | {one.fix}" for one in found)
    warned = Counter(text for path in package.rglob("*.py") for text in _warned(ast.parse(path.read_bytes())))
    return {"errors": dict(counted), "warnings": dict(warned), "problems": len(problems)}


def _warned(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn") and node.args:
            yield ast.unparse(node.args[0])


# ---- errors of the tests of misuse ----------------------------------------------------------------------------------

MISUSE = (
    "test_bad_input.py", "test_misuse.py", "test_ways_out.py", "test_checkpoint_misuse.py", "test_train_refusals.py",
    "test_unfit.py", "test_unregistered.py", "test_traps_sharding.py", "test_traps_dtype.py", "test_call.py",
    "test_sums.py", "test_labels.py", "test_loop_forgets.py", "test_silent.py", "test_changed_settings.py",
    "test_loader.py", "test_foreign.py", "test_target.py", "test_techniques.py", "test_layout.py", "test_fsdp1.py",
    "test_transforms.py", "test_load.py", "test_zero_grad.py", "test_precision_parts.py", "test_existing_group.py",
)  # fmt: skip
"""Files of tests that construct errors; looked for by name, wherever they lie."""


def errors() -> Record:
    """The texts of errors that the tree's tests of misuse construct, in every process, with ``#`` for numbers.

    How often one is constructed depends on which rank was first, so that only which texts there are is recorded.
    """
    files = [str(path) for name in MISUSE for path in sorted((Path.cwd() / "tests").rglob(name))]
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(TOOLS / "replay_hook"), *os.environ["PYTHONPATH"].split(os.pathsep)]
        env = os.environ | {"SHARDWISE_REPLAY_ERRORS": folder, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak and not gpu", *files]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        found: dict[str, set[str]] = {}
        for file in Path(folder).glob("*.jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines():
                kind, given, text = json.loads(line)
                if _LOST.match(given):  # which ranks are left to say so, and what they were at, is a matter of time
                    continue
                found.setdefault(f"{kind}: {_numberless(given)}", set()).add(_numberless(text))
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    if done.returncode:
        raise RuntimeError(f"the tests of misuse are not green, so that their errors say nothing: {summary}")
    return {given: sorted(texts) for given, texts in found.items()}


_LOST = re.compile(r"rank \d+ was (lost|given up|reported lost)|ranks [\d, ]+ (were|wait)")


def _numberless(text: str) -> str:
    text = re.sub(r"\b(?:0x)?[0-9a-f]{8,}\b|\d+(?:\.\d+)?(?:e-?\d+)?", "#", _common(text))
    text = re.sub(r"\bTMP\S*", "TMP", text)
    return re.sub(r"#(?:, #)+", "#", text)


def public() -> Record:
    """Signatures, commands and messages."""
    return {"signatures": signatures(), "commands": commands(), "messages": messages()}


SCENES = {"public": public, "errors": errors}


def record(scene: str, out: Path) -> None:
    """Records one scene of the tree that is the working directory."""
    import shardwise

    if not Path(str(shardwise.__file__)).is_relative_to(Path.cwd()):
        raise RuntimeError(f"this is the code of {shardwise.__file__}, not of {Path.cwd()}: set PYTHONPATH to its src")
    out.write_text(json.dumps(SCENES[scene](), indent=0, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
