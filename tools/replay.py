"""Checks that a refactoring changed nothing else: compares the behaviour of this tree with an older commit's.

    python tools/replay.py                        # all scenes of both trees, some 30 minutes on 2 cores; exit status 1: something differs
    python tools/replay.py --scene recipes        # one of recipes (no ranks), steps, files, public, errors
    python tools/replay.py --base HEAD~3          # compared with another commit than BASE
    python tools/replay.py --keep DIR             # keeps the records; existing ones of the base are not made again

Each tree is recorded by a process of its own that imports the tree's package and the models of its tests: recipes of every model under
six layouts and five sets of options; collectives and the bits of losses, norms, gradients, parameters and optimizer state over three
windows; the bytes of checkpoints and exports; signatures, help, exit codes and errors. Bits are compared on one machine, in one run.
Places in a record that moved are given by ``MOVED``; what differs for a reason is listed in ``EXPLAINED`` with that reason.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay_words import reworded

__all__ = ["BASE", "EXPLAINED", "MODULES", "MOVED", "differences", "main"]

ROOT = Path(__file__).resolve().parents[1]
BASE = "beaa2d5c7"
"""The commit before files began to move."""

SCENES = {
    "recipes": "replay_scenes.py",
    "steps": "replay_scenes.py",
    "files": "replay_scenes.py",
    "public": "replay_public.py",
    "errors": "replay_public.py",
}
"""Scene -> the program that records it."""

MODULES = {
    "zoo": ("models.zoo", "models.hugging_face"),
    "families": ("models.families", "models.other_families"),
    "handwritten.models": ("models.written",),
    "packages": ("models.packages",),
    "parallel.constructors": ("models.constructors", "models.unreplayable", "models.awkward"),
}
"""Module of the tests of an older commit that has models -> the modules that have them now."""


def _recipe_of_today(fact: Any) -> Any:
    """Recipes in a fact in which what belongs to one technique was a field, and without fields that came later."""
    if isinstance(fact, list):
        return [_recipe_of_today(each) for each in fact]
    if not isinstance(fact, dict):
        return fact
    if {"axis", "dim", "parts"} <= fact.keys():
        return {**fact, "holder": fact.get("holder")}
    if {"cuts", "storage"} <= fact.keys():
        fact = {**fact, "codec": fact.get("codec")}
    if "buffer_policy" not in fact:
        return {key: _recipe_of_today(value) for key, value in fact.items()}
    told, techniques = dict(fact), {}  # type: ignore[var-annotated]
    for field, (technique, key) in _FIELDS.items():
        techniques.setdefault(technique, {})[key] = told.pop(field)
    return told | {"techniques": techniques, "version": 2}


_FIELDS = {
    "compute": ("precision", "compute"),
    "output": ("precision", "output"),
    "cast_inputs": ("precision", "cast_inputs"),
    "buffer_policy": ("data", "buffers"),
    "offload": ("data", "offload"),
    "pin_memory": ("data", "pin_memory"),
    "sync_every_microbatch": ("data", "sync_every_microbatch"),
    "ddp": ("data", "ddp"),
}


_OWN_FORWARD = ("inplace", "nanogpt")
"""Models of which a ``TrainStep`` has a ``forward=`` of the test's own: each micro-batch gathers the root again."""


def _root_gathered_once(name: str, fact: Any) -> Any:
    """What one rank did in three windows, with the gathers of the root for the first micro-batch of each alone. The root's
    is the first gather of a window."""
    what, model, *_ = name.split(" | ")
    if what != "train_step" or model in _OWN_FORWARD or not isinstance(fact, dict):
        return fact
    return {
        window: done | {"collectives": _without_repeats(done["collectives"])} if "collectives" in done else done
        for window, done in fact.items()
    }


def _without_repeats(calls: list[Any]) -> list[Any]:
    root = next((call for call in calls if call[0] == "_allgather_base_"), None)
    first = calls.index(root) if root is not None else 0
    return [call for i, call in enumerate(calls) if i <= first or call != root]


MOVED: dict[str, Callable[[str, Any], Any]] = {
    "recipes": lambda _, fact: _recipe_of_today(fact),
    "steps": _root_gathered_once,
    "files": lambda _, fact: _recipe_of_today(fact),
    "public": lambda _, fact: reworded(fact),
    "errors": lambda _, fact: reworded(fact),
}
"""Scene -> what brings a fact of the older commit, given by its name, into today's shape."""

_FIRST = "transforms stands first among the keys of parallel, as transforms run first: the same lines in another order"
_ROWS = "Parallel is made from the rows of techniques; a recipe keeps what belongs to one below its name"
_ADDED = "added since, see CHANGELOG.md"
_REWORDED = "the same refusal in other words: of streams, sizes, chat data or tensor parallelism too"
_ALONE = "a group of one: nothing is gathered, a TrainStep casts each unit once, and the recipe says so"
_UNITS = "by default a model below 64 MiB is one unit, and units of a larger one hold at least 8 MiB"
_SIZES = "the tests' model has other sizes today, which tp=2 can cut"
_ODD = (
    "two numbers more for each 0-dim parameter: which gradients kept apart came with it, as those are judged together"
)
_COPIES = (
    "copies that ranks hold of a parameter are compared once, before an optimizer first steps: one gather of objects"
)
_SAMPLES = "the tests of misuse have other samples of this error today"
_SELECTIVE = "ranks exchange what the first run of each block keeps and costs, by which selective remat chooses"
EXPLAINED: dict[str, str] = {
    "recipes / qwen3-vl-moe | ": _SIZES,
    "recipes / experts | * / recipe / params": _SIZES,
    **{
        f"recipes / *| {layout} | bf16 and remat / {what}": _ALONE
        for layout in ("dp_replicate=2", "dp_shard=1")
        for what in ("describe", "recipe / notes", "recipe / units*reshard")
    },
    "recipes / *| default / describe": _UNITS,
    "recipes / *| default / recipe / notes*why": _UNITS,
    "steps / * | odd | * / collectives [": _ODD,
    "steps / * | dp_replicate=2 | * / collectives [2] [1]": "which parameters were used travels with the exchange before the step",
    "steps / train_step | odd | dp_replicate=2 | * / grad_norm": "the last bit: gradients of parameters that no rank used are zeros "
    "in the sum until ranks know of each other",
    **dict.fromkeys(
        (
            "steps / train_step | * | dp_replicate=2* / grad_norm",
            "steps / own_loop | * | dp_replicate=2* / norm",
            "steps / own_loop | odd | dp_shard=2 | * / norm",
        ),
        "the last bit: of copies each rank counts some, where the first counted all, so the sum has another order",
    ),
    "steps / train_step | * | selective, kept, ahead | *collectives": _SELECTIVE,
    "steps / * / window 0 / collectives": _COPIES,
    "steps / train_step | experts | dp_shard=1 | bf16 and remat | rank 0 / window 2 / grad_norm": "the last bit: gradients of "
    "one rank are added up without FSDP2's buffers",
    **{
        f"public / commands / {command} / stdout": _FIRST
        for command in (
            "train --help",
            "verify --help",
            "train --print-config",
            "train --parallel.layout=dp_shard=3 --nproc 4 --print-config",
            "train --parallel.sharding.offload=true --parallel.layout=dp_replicate=2 --nproc 2 --print-config",
            "train examples/gru.yaml --print-config",
        )
    },
    "files / *manifest.json / files / training/recipe.json / size": "the same recipe, of version 2",
    "public / signatures / shardwise.Parallel": _ROWS,
    "public / signatures / shardwise.Recipe": _ROWS,
    "public / signatures / shardwise.parallelize": "annotations of options are text, and the order is that of the rows",
    "public / signatures / shardwise.transform": "Module is named in a string, as options are read without torch",
    "public / messages / errors / ConfigError | parallelize({key}": "an option that there is not was a TypeError",
    "public / messages / errors / ConfigError | {key}={value} | that is not a {cls": "one function for every record: other names in it",
    "public / messages / errors / ConfigError | {option.key}={value} | that is not a": "the same",
    "public / messages / errors / PlanError | a recipe with techniques[": "what a recipe says of a technique is checked",
    "public / messages / errors / RankError | rank {rank} did not start": "one fork server: other names in it",
    "public / messages / errors / RankError | the test ranks did not start": "the same",
    "public / messages / errors / RankError | a rank of the test pool did not start": "the same",
    "public / messages / errors / UsageError | a forward that records gradients, outside of a window": "partial gradients are of windows",
    "public / messages / warnings / *contents.notes, *self._re": "the field of the manager has another name",
    "public / messages / warnings / self._re*.take(loader, override)": "the same",
    "public / commands / convert --help / stdout": "reworded, and so wrapped otherwise",
    "public / messages / errors / UnsupportedError | cuts {param.cuts}": "other techniques may cut before the shards do",
    "public / messages / errors / UnsupportedError | torch {": "a newer torch is tried before it is trusted",
    'public / messages / warnings / f"torch {torch.__version__} is newer': "the same",
    "public / messages / errors / ConfigError | notice_s={": "launch_local refuses what it ignored outside the main thread",
    "public / signatures / shardwise.init": "World is not named in a string",
    "public / signatures / names": _ADDED,
    **{
        f"public / signatures / shardwise.{name}": f"{what}: {_ADDED}"
        for name, what in {
            "Loader": "num_workers, prefetch, pin_memory",
            "MicroBatch": "host",
            "Remat": "budget",
            "Sharding": "min_unit_bytes may be None",
            "CheckpointError": "misfit",
            "LoadReport": "grown",
            "load_weights": "cast='lossless'",
            "StepOutput": "data_s",
            "TrainStep": "fused",
            "evaluate": "fused",
            "verify": "fused",
        }.items()
    },
    "public / signatures / shardwise.apply_recipe": "no longer public: parallelize does it, and leaves no memory uninitialised",
    "public / commands / train --parallel.layout=dp_shard=3 --nproc 4 / stderr": "the place that names the layout is said",
    "public / commands / train --parallel.layout=dp_shard=3 --nproc 4 --print-config": "--print-config refuses what train would refuse",
    "public / commands / train --parallel.layout=pp=2 / stderr": "tp is among the axes that work",
    "public / commands / train --parallel.remat=some / stderr": "remat is also given as a size",
    "public / commands / --help / stdout": "two commands more",
    "public / commands / nosuch / stderr": "two commands more",
    "public / commands / train --bf16 / stderr": "options of other libraries are known",
    "public / commands / train --data.path=": "directories of saved datasets are read too",
    "public / commands / train --optim.lr=fast / stderr": "may be null: chosen by what is trained",
    "public / commands / train --train.steps=": "may be null where epochs are given; the dtype of the written weights is said",
    "public / commands / train examples/gru.yaml": "the dtype of the written weights is said",
    "public / messages / warnings / text": _ADDED,
    **{
        f"public / messages / errors / {start}": _REWORDED
        for start in (
            "ConfigError | --max-shard-bytes {text}",
            "CheckpointError | {source.place}: dtype",
            "ConfigError | an empty dataset",
            "ConfigError | launch.nproc={config.launch.nproc}",
            "ConfigError | a batch with the keys {...} and no count=",
            "ConfigError | a loss whose {name} is None",
            "ConfigError | data.micro_batch={self.micro_batch} with data.global_batch",
            "ConfigError | data.path={path}",
            "ConfigError | data.tokenizer={tokenizer}",
            "ConfigError | model.args={model.args} for",
            "ConfigError | model.build={config.model.build} / model.hf=",
            "ConfigError | next_token_loss of a",
            "ConfigError | schedule.min_lr_ratio=",
            "ConfigError | schedule.warmup_steps=",
            "ConfigError | token {...} at position",
            "ConfigError | {key}={value} | that is neither a word for {key} nor a",
            "ConfigError | {type(module).__name__} without --batch",
            "LayoutError | axis {axis}",
            "RankError | rank {self.rank} waited {waited} s",
            "RankError | ranks that came to {place} with micro-batches",
            "RankError | sw.Loader: the ranks have other samples",
            "RankError | {what} differ between ranks",
            "UnsupportedError | a hook on a parameter that is cut",
            "UnsupportedError | deepcopy of a sharded module",
            "UnsupportedError | layout {text}: {axis}={degree}",
            "UsageError | a dataset of type",
            "UsageError | example={{...}} for",
        )
    },
    **{
        f"public / messages / warnings / {start}": "the same warning in other words, or with names that are listed in another way"
        for start in ("f\"units='model': its fully_shard", 'f"{_METHOD}() of {type(model).__name__} leaves out')
    },
    **{
        f"errors / {start}": _SAMPLES
        for start in (
            "CheckpointError: ranks that see different weights",
            "CheckpointError: weights from TMP",
            "UsageError: the module changed after it was sharded",
        )
    },
    "errors / RankError: ranks that came to different exchanges": "the entries of the exchange before a step have changed",
    "errors / RankError: ranks that came to window *micro-batches of different windows": _REWORDED,
    "errors / UnsupportedError: deepcopy of a sharded module": _REWORDED,
    "errors / CheckpointError: TMP dtype float": "how far values would be rounded is said, and cast='lossless' named",
    "errors / ConfigError: a loss whose 'loss' is None": "loss=sw.model_loss is named",
    "errors / ConfigError: next_token_loss of a": "loss=sw.model_loss is named",
}
"""Beginning of a difference's name, with ``*`` for anything -> why it is meant (a line of CHANGELOG.md)."""

Record = dict[str, Any]


def differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and words of each place where two records differ, as deep as they have the same shape."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            where = f"{name} / {key}" if name else key
            if key not in after:
                yield where, f"is gone: it was {_short(before[key])}"
            elif key not in before:
                yield where, f"is new: {_short(after[key])}"
            else:
                yield from differences(before[key], after[key], where)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{name} [{i}]")
    elif before != after:
        yield name, f"{_short(before)} became {_short(after)}"


def _begins(name: str, start: str) -> bool:
    """Whether ``name`` begins with ``start``, in which ``*`` stands for anything."""
    return re.match(".*".join(map(re.escape, start.split("*"))), name) is not None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def num_facts(record: Any) -> int:
    """How many single values there are in a record."""
    if isinstance(record, dict):
        return sum(map(num_facts, record.values()))
    return sum(map(num_facts, record)) if isinstance(record, list) else 1


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of ``commit``."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def recorded(tree: Path, scene: str, out: Path) -> Record:
    """The record of one scene of the source in ``tree``, written to ``out`` too."""
    paths = os.pathsep.join(str(tree / name) for name in ("src", "tests"))
    command = [sys.executable, str(ROOT / "tools" / SCENES[scene]), scene, str(out)]
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        status = subprocess.run(command, env=env, cwd=tree, stdout=file, stderr=file).returncode
    if status:
        sys.exit(f"{scene} of {tree} could not be recorded:\n{log.read_text(errors='replace')[-3000:]}")
    return json.loads(out.read_bytes())


def compare(scene: str, before: Record, after: Record) -> list[str]:
    """Prints what differs in one scene. Returns the names of differences that nothing explains."""
    moved = MOVED.get(scene)
    found = [*differences({key: moved(key, fact) for key, fact in before.items()} if moved else before, after)]
    unexplained = []
    for name, words in found:
        # What is new in these scenes is a feature: of what there was nothing is other.
        is_added = scene in ("public", "errors") and words.startswith("is new")
        reason = (
            _ADDED
            if is_added
            else next((why for start, why in EXPLAINED.items() if _begins(f"{scene} / {name}", start)), None)
        )
        if reason is None:
            unexplained.append(name)
            if len(unexplained) <= 40:
                print(f"  DIFFERS {name}: {words}")
    print(
        f"{scene}: {len(before)} facts of {num_facts(before)} values, {len(found)} differences, "
        f"{len(found) - len(unexplained)} of them explained",
        flush=True,
    )
    return unexplained


def main() -> int:
    """Records both trees and compares. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scene", action="append", choices=[*SCENES], help="only this one; may be repeated")
    parser.add_argument("--base", default=BASE, help=f"the older commit ({BASE})")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the records")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="replay-"))
    folder.mkdir(parents=True, exist_ok=True)
    unexplained: list[str] = []
    with checked_out(given.base) as base:
        for scene in given.scene or SCENES:
            kept = folder / f"{scene}-{given.base}.json"
            before = json.loads(kept.read_bytes()) if kept.exists() else recorded(base, scene, kept)
            unexplained += compare(scene, before, recorded(ROOT, scene, folder / f"{scene}.json"))
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
