"""``shardwise convert SRC DST``: converts weights from one file format to another. Options and key maps are checked
before torch is imported."""

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.config.sizes import num_bytes
from shardwise.launch.imports import import_frozen

if TYPE_CHECKING:
    from shardwise.state.block_copy import Progress
    from shardwise.state.convert import Converted


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face directory, a .safetensors file, a file by torch.save, a DCP directory, a checkpoint, or a run's directory of them",
    )
    parser.add_argument("dest", metavar="DST", help="what to write; it appears when all of it is on disk")
    parser.add_argument(
        "--to",
        metavar="KIND",
        help="what DST will be: hf, safetensors, torch, dcp or shardwise; default: by its ending (.safetensors, .pt), else hf",
    )
    parser.add_argument(
        "--dtype", metavar="D", help="write floating-point tensors in it: bfloat16, float32, ... (as they are)"
    )
    parser.add_argument(
        "--keep",
        metavar="REGEX",
        action="append",
        default=[],
        help="names that --dtype does not change; may be repeated",
    )
    parser.add_argument("--max-shard-bytes", metavar="N", help="size of one file of a directory at most (5GiB)")
    parser.add_argument("--map", metavar="M", help="rename tensors: a map by its name (below), or a YAML file of rules")
    parser.add_argument("--config", metavar="FILE", help="the model's config.json for --map, if it is not next to SRC")
    parser.add_argument(
        "--adapter", metavar="DIR", help="merge the LoRA adapters in it (PEFT's files) into the weights of SRC"
    )
    parser.add_argument("--verify", action="store_true", help="compare every tensor with the source before DST appears")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    parser.usage = "shardwise convert SRC DST [--to KIND] [--dtype D] [--map M] [--verify] ..."


def more_help() -> str:
    """Help text: the key maps that exist, and how to write one."""
    from shardwise.config.keymap import map_names

    return (
        f"maps: {', '.join(map_names())}\n"
        "a map of one's own, in YAML; the first rule that matches a whole name renames it:\n"
        "  - {from: 'model\\.layers\\.(\\d+)\\.(.*)', to: 'blocks.\\1.\\2'}\n"
        "  - {from: '.*\\.inv_freq', drop: true}"
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.config.conversion import Conversion
    from shardwise.config.keymap import load_map

    job = Conversion(
        source=Path(args.source),
        dest=Path(args.dest),
        to=args.to or "",
        dtype=args.dtype,
        keep=tuple(args.keep),
        max_shard_bytes=num_bytes(args.max_shard_bytes, "--max-shard-bytes") if args.max_shard_bytes else None,
        rules=load_map(args.map) if args.map else (),
        config=Path(args.config) if args.config else None,
        adapter=Path(args.adapter) if args.adapter else None,
        verify=args.verify,
        overwrite=args.overwrite,
    )
    engine = import_frozen("shardwise.state.convert")
    with _Bar() as bar:
        done = engine.convert(job, bar.show, functools.partial(_model_in, job.source))
    print(_report(done, args))
    return 0


def _model_in(folder: Path) -> Any:
    """The model, without values, of a directory of transformers; None: it is none."""
    if not (folder / "config.json").is_file():
        return None
    import torch

    from shardwise.run.pretrained import build_pretrained

    with torch.device("meta"):
        return build_pretrained(str(folder), {})


def _report(done: "Converted", args: argparse.Namespace) -> str:
    from shardwise.recipe import human_bytes

    speed = (
        f", {human_bytes(int(done.num_bytes / done.seconds))}/s" if done.num_bytes > 1 << 20 and done.seconds else ""
    )
    lines = [
        f"{done.kind} {args.source} -> {args.dest}: {done.num_tensors} tensors, {human_bytes(done.num_bytes)} in "
        f"{done.num_files} file{'s' if done.num_files > 1 else ''}, {done.seconds:.1f} s{speed}"
    ]
    if args.verify:
        lines.append("  every tensor compared with the source: equal")
    return "\n".join([*lines, *(f"  {note}" for note in done.notes)])


class _Bar:
    """A progress bar on a terminal; does nothing elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    @property
    def show(self) -> "Progress":
        def show(what: str, done: int, total: int) -> None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=total)
            self._bar.update(self._tasks[what], completed=done)

        return show
