"""``shardwise checkpoint ls | show | verify | prune``: lists, shows, verifies and removes checkpoints in a directory of
them or in the folder of a run. It starts no run."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.config.folders import is_checkpoint
from shardwise.errors import CheckpointError, ConfigError
from shardwise.launch.imports import import_frozen
from shardwise.launch.lock import try_lock

if TYPE_CHECKING:
    from shardwise.state.checkpoint.saved_run import SavedRun

# Imported when they are used: they need torch, which the help of a command does not.
MANIFEST = "shardwise.state.integrity.manifest"
OPENED = "shardwise.state.checkpoint.saved_run"
KEEPING = "shardwise.state.checkpoint.retention"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "action",
        choices=list(_ACTIONS),
        help="ls: what is there; show: one of them in detail; verify: compare every byte with its checksum; prune: remove old ones",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="the folder of a run, a directory of checkpoints, or one checkpoint (step-00000100)",
    )
    parser.add_argument("--keep", metavar="N", type=int, help="prune: how many of the last ones stay")
    parser.add_argument("--keep-every", metavar="N", type=int, help="prune: also keep steps that are multiples of it")
    parser.add_argument("--dry-run", action="store_true", help="prune: say what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="ls, show, verify: print JSON, for programs")
    parser.usage = "shardwise checkpoint ls|show|verify|prune PATH [--json] [--keep N] [--keep-every N] [--dry-run]"


def run(args: argparse.Namespace) -> int:
    _check_effects(args)
    path = Path(args.path)
    if not path.is_dir():
        raise ConfigError(
            f"shardwise checkpoint {args.action} {args.path}",
            why="there is no such directory",
            fix="check the path: it is the folder of a run (log.dir), or the directory that CheckpointManager was given",
        )
    return _ACTIONS[args.action](_place(path), args)


def _check_effects(args: argparse.Namespace) -> None:
    """Refuses an option that has no effect on this action."""
    prunes = args.action == "prune"
    given = {"--keep": args.keep, "--keep-every": args.keep_every, "--dry-run": args.dry_run or None}
    idle = next((option for option, value in given.items() if value is not None and not prunes), None)
    if idle is not None:
        raise ConfigError(
            f"shardwise checkpoint {args.action} {idle}",
            why="it says what prune removes",
            fix=f"leave {idle} out, or use shardwise checkpoint prune",
        )
    if prunes and args.json:
        raise ConfigError("shardwise checkpoint prune --json", why="prune prints paths only", fix="leave --json out")
    if prunes and args.keep is None:
        raise ConfigError(
            "shardwise checkpoint prune without --keep",
            why="how many stay has to be said",
            fix="add --keep 3 (and --dry-run, to see first what would go)",
        )


def _place(path: Path) -> Path:
    """The directory of checkpoints, or the checkpoint, that ``path`` names; for the folder of a run, the directory in
    it."""
    manifest = import_frozen(MANIFEST)
    path = path.resolve()
    below = path / "checkpoints"  # where shardwise train saves them
    goes_deeper = not is_checkpoint(path, by_name=True) and not manifest.steps_in(path) and below.is_dir()
    return below if goes_deeper and manifest.steps_in(below) else path


def _folders(path: Path) -> list[Path]:
    """The checkpoint that ``path`` is, or those in it, oldest first."""
    manifest = import_frozen(MANIFEST)
    if is_checkpoint(path, by_name=True):
        return [path]
    found = [path / manifest.folder_name(step) for step in manifest.steps_in(path)]
    if not found:
        raise CheckpointError(
            f"the directory {path}",
            why="there is no checkpoint in it",
            fix="name the folder of a run (log.dir), the directory that CheckpointManager was given, or a checkpoint itself",
        )
    return found


def _facts(saved: "SavedRun") -> dict[str, Any]:
    """The properties of a checkpoint that are shown: step, size, layout, versions and so on."""
    manifest, state, left = saved.manifest, saved.brief(), saved.left_base()
    return {
        "step": manifest.step,
        "saved": state.get("time"),
        "bytes": manifest.num_bytes,
        "layout": manifest.layout if saved.has_run else "weights only",
        "ranks": manifest.num_ranks,
        "fingerprint": manifest.fingerprint,
        "versions": dict(manifest.versions),
        "optimizer": state.get("optimizer"),
        "data": state.get("loader"),
        "extra": state.get("extra", []),
        "figure": state.get("figure"),
        "best": state.get("best"),
        "base": None if left is None else left.folder or "without a directory",
        "files": {name: fact.size for name, fact in sorted(manifest.files.items())},
    }


def _asked(folder: Path, ask: Callable[["SavedRun"], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``ask`` for a checkpoint, with its path and ``problem``: what is wrong with it, or None."""
    opened = import_frozen(OPENED)
    try:
        with opened.SavedRun(folder) as saved:
            return {"path": str(folder), "problem": None, **ask(saved)}
    except CheckpointError as error:
        return {"path": str(folder), "problem": f"{error.given}: {error.why}"}


def _ls(path: Path, args: argparse.Namespace) -> int:
    rows = [_asked(folder, _facts) for folder in _folders(path)]
    rows = [row for row in rows if Path(row["path"]).exists()]  # a run at the same time may have pruned one
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    lines = [("step", "saved (UTC)", "size", "layout", "")]
    for row in rows:
        if row["problem"] is not None:
            lines.append((Path(row["path"]).name, "", "", "", f"cannot be read: {row['problem']}"))
        else:
            lines.append((str(row["step"]), row["saved"] or "-", _size(row["bytes"]), row["layout"], ""))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip())
    return 0


def _show(path: Path, args: argparse.Namespace) -> int:
    rows = [_asked(_folders(path)[-1], _facts)]
    if args.json:
        print(json.dumps(rows[0], indent=1))
        return int(rows[0]["problem"] is not None)
    row = rows[0]
    if row["problem"] is not None:
        raise CheckpointError(row["path"], why=row["problem"], fix="use another checkpoint")
    print(row["path"])
    facts = {
        "step": row["step"],
        "saved": row["saved"] or "by shardwise convert",
        "size": _size(row["bytes"]),
        "layout": f"{row['layout']} ({row['ranks']} ranks); any other can load it"
        if row["layout"] != "weights only"
        else "none: it holds weights only, and no run can resume from it",
        "optimizer": row["optimizer"] or "none",
        "data": _position(row["data"]),
        "extra": ", ".join(row["extra"]) or "none",
        **({} if row["base"] is None else {"base": f"frozen weights are not in it: {row['base']}"}),
        "versions": ", ".join(f"{name} {version}" for name, version in row["versions"].items()),
    }
    for name, value in facts.items():
        print(f"  {name:<10} {value}")
    for name, size in row["files"].items():
        print(f"  {_size(size):>10}  {name}")
    return 0


def _verify(path: Path, args: argparse.Namespace) -> int:
    rows = [_asked(folder, lambda saved: {"bytes": saved.verify(), **_facts(saved)}) for folder in _folders(path)]
    rows = [row for row in rows if Path(row["path"]).exists()]
    bad = [row for row in rows if row["problem"] is not None]
    if args.json:
        print(json.dumps(rows, indent=1))
        return int(bool(bad))
    for row in rows:
        told = row["problem"] or f"whole: {_size(row['bytes'])} compared with their checksums"
        print(f"{Path(row['path']).name}  {'DAMAGED: ' if row['problem'] else ''}{told}")
    return int(bool(bad))


def _prune(path: Path, args: argparse.Namespace) -> int:
    manifest, retention = import_frozen(MANIFEST), import_frozen(KEEPING)
    folders = _folders(path)
    rule = retention.RetentionPolicy(last=args.keep, every=args.keep_every, best=_best_of(folders))
    if folders == [path]:
        raise ConfigError(
            f"shardwise checkpoint prune {args.path}",
            why="that is one checkpoint",
            fix=f"name the directory it is in: {path.parent}",
        )
    try:
        tried = try_lock(path / ".lock")
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    if tried.held is None:
        raise CheckpointError(
            f"the checkpoints in {path}",
            why=f"a run is using them (process {tried.owner})",
            fix="let the run prune: CheckpointManager(keep=...), or wait for its end",
        )
    if tried.note is not None:
        print(f"warning: {tried.note}", file=sys.stderr)
    with tried.held:
        if not args.dry_run:
            retention.remove_removed(path)
        gone = rule.steps_to_remove(path, max(manifest.steps_in(path)), None)
        for step in gone:
            folder = path / manifest.folder_name(step)
            if not args.dry_run:
                retention.remove(folder)
                if folder.exists():
                    raise _unwritable(path, f"{folder.name} is still there")
            print(f"{'would remove' if args.dry_run else 'removed'} {folder}")
    print(f"{len(folders) - len(gone)} of {len(folders)} stay")
    return 0


def _unwritable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoints in {path}",
        why=f"nothing can be removed there: {why}",
        fix="run it as the user whose they are, or make the directory writable",
    )


def _best_of(folders: list[Path]) -> str | None:
    """The metric by which the run keeps its best checkpoint, from the newest readable checkpoint."""
    for folder in reversed(folders):
        row = _asked(folder, _facts)
        if row["problem"] is None:
            return row["best"]
    return None


def _position(data: Mapping[str, Any] | None) -> str:
    if not data:
        return "none"
    of_all = "" if data.get("num_samples") is None else f" of {data['num_samples']}"
    return f"epoch {data['epoch']}, sample {data['position']}{of_all}"


def _size(num_bytes: int) -> str:
    from shardwise.recipe import human_bytes

    return human_bytes(num_bytes)


_ACTIONS: dict[str, Callable[[Path, argparse.Namespace], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "prune": _prune,
}
