"""``shardwise import-config FILE...``: a configuration of another system as a run file, with an answer for each of its keys. Imports no
torch.

The run file is printed, the answers go to the error stream, so that ``> run.yaml`` keeps the one and shows the others.
"""

import argparse
import errno
import json
import math
import os
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.dialects.answers import Imported

OVERRIDES = True
_FOLLOWED = ("train.steps", "train.epochs", "data.global_batch", "data.micro_batch", "parallel.layout", "launch.nproc")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="a .yaml, .toml or .json file; several are one configuration"
    )
    parser.add_argument("--from", dest="dialect", metavar="NAME", help="whose the first file is (by its keys)")
    parser.add_argument("--ranks", metavar="N", type=int, help="ranks of all machines, where the files do not say it")
    parser.add_argument("--ranks-per-node", metavar="M", type=int, help="ranks of one machine")
    parser.add_argument(
        "--env", action="store_true", help="variables of this environment count too, as accelerate sets them"
    )
    parser.add_argument(
        "--allow",
        metavar="KEY",
        action="append",
        default=[],
        help="leave a key out that would be refused; may be repeated",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="keep the learning rate curve of the files where ours follows it within two steps",
    )
    parser.add_argument("--json", action="store_true", help="print the run file and all answers, or the error, as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no answers")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the run file is written; an old one is replaced (it is printed)"
    )
    parser.usage = "shardwise import-config FILE... [--from NAME] [--ranks N] [--env] [--allow KEY] [-o run.yaml] [--log.every=1 ...]"


def more_help() -> str:
    """Help text: the systems whose configurations are read, and what an answer is."""
    from shardwise.dialects.table import systems

    return (
        f"systems: {', '.join(systems())}\n"
        "answers: changed (it means something else here), kept, dropped (it is not needed, and why); a key that would train\n"
        "something else without a word, or that is not known, ends the import: every such key is named, and nothing is written"
    )


def keys() -> list[str]:
    """Keys that can be overridden in the run file."""
    from shardwise.config.loader import dotted_keys
    from shardwise.run.config import RunConfig

    return dotted_keys(RunConfig)


def run(args: argparse.Namespace) -> int:
    try:
        _check_output(args)
        _import(args)
    except ConfigError as error:
        if args.json and args.output != "-":
            print(json.dumps({"error": {"given": error.given, "why": error.why, "fix": error.fix}}))
        raise
    return 0


def _import(args: argparse.Namespace) -> None:
    from shardwise.config.loader import with_overrides
    from shardwise.dialects import words
    from shardwise.dialects.answers import imported
    from shardwise.run.config import RunConfig
    from shardwise.run.imported import checked

    made = imported(
        *args.files,
        dialect=args.dialect,
        ranks=args.ranks,
        ranks_per_node=args.ranks_per_node,
        allow=tuple(args.allow),
        exact=args.exact,
        environ=os.environ if args.env else None,
    )
    if args.overrides:
        _refuse_overrides(args.overrides, made.followed)
        values = with_overrides(made.run, args.overrides, RunConfig, foreign=words)
        left = made.run.items()
        needless = {
            f"{name}.{key}" for name, keys in left if isinstance(keys, dict) for key in {*keys} - {*values[name]}
        }
        missing = tuple(text for text in made.missing if text.partition(": ")[0] not in needless)
        made = _with_answers(replace(made, run=values, missing=missing), args.overrides)
    made = checked(made)  # with the overrides: what one of them mends is not refused
    was_there = False
    if args.output not in (None, "-"):
        was_there = _write(args.output, made.yaml())
    elif not args.json:
        print(made.yaml(), end="")
    if args.json:
        everything = {
            "dialect": made.dialect,
            "run": made.run,
            "findings": [asdict(finding) for finding in made.findings],
            "missing": made.missing,
            "samples": made.samples,
        }
        print(json.dumps(_plain(everything), default=str, allow_nan=False))
    elif not args.quiet and sys.stderr is not None:
        print(made, file=sys.stderr)
        if was_there:
            print(f"replaced {args.output}, which was there", file=sys.stderr)


def _plain(value: Any) -> Any:
    """With numbers that JSON does not have, infinity, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write(output: str, text: str) -> bool:
    """Writes the run file beside its place and moves it there, so that a full disk loses no old one; whether there was one."""
    place = Path(os.path.realpath(output))  # a link stays one
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    was_there = place.exists()
    try:
        if Path(output).exists() and not Path(output).is_file():  # a device or a pipe
            Path(output).write_text(text, encoding="utf-8")
            return False
        try:
            beside.write_text(text, encoding="utf-8")
            if was_there:
                shutil.copymode(place, beside)
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output {output}",
            why=f"it cannot be written: {error.strerror or error}",
            fix="name another: -o run.yaml",
        ) from None
    return was_there


def _refuse_overrides(overrides: list[str], own: tuple[str, ...]) -> None:
    """Refuses keys that other numbers of the run file, and the answers, follow from: of all files, and of these (``own``)."""
    for word in overrides:
        key = word.removeprefix("--").partition("=")[0]
        if any(_is_in(one, key) or _is_in(key, one) for one in (*_FOLLOWED, *own)):
            later = f"; or give it to the run itself: shardwise train run.yaml {shlex.quote(word)}"
            raise ConfigError(
                f"--{key} of import-config",
                why="other numbers of the run file, and its answers, follow from what the files say of it",
                fix=f"change it there{later if key not in own else ''}",
            )


def _with_answers(made: "Imported", overrides: list[str]) -> "Imported":
    """With overrides in the answers of the keys whose place they take."""
    findings, missing = list(made.findings), list(made.missing)
    for word in overrides:
        key = word.removeprefix("--").partition("=")[0]
        missing = [text for text in missing if text.partition(": ")[0] != key]
        for place, one in enumerate(findings):
            ours = tuple(said for said in one.ours if not _is_in(said.partition("=")[0], key))
            is_part = any(_is_in(key, said.partition("=")[0]) for said in one.ours)
            if ours != one.ours or is_part:
                say = "; ".join(text for text in (one.say, f"replaced by {word}") if text)
                findings[place] = replace(one, verdict="changed", ours=ours, say=say)
    return replace(made, findings=tuple(findings), missing=tuple(missing))


def _is_in(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _check_output(args: argparse.Namespace) -> None:
    is_printed = args.output in (None, "-")
    if args.json and args.output == "-":
        raise ConfigError(
            "--json --output -", why="both would be printed", fix="remove one, or name a file: -o run.yaml"
        )
    if sys.stdout is None and (is_printed or args.json):
        raise ConfigError("a closed standard output", why="nothing can be printed", fix="write a file: -o run.yaml")
    if is_printed:
        return
    if not args.output or Path(args.output).is_dir() or (Path(args.output).is_symlink() and _is_loop(args.output)):
        raise ConfigError(f"--output {args.output!r}", why="it is no file's name", fix="name a file: -o run.yaml")
    for file in args.files:
        if os.path.realpath(file) == os.path.realpath(args.output):
            raise ConfigError(
                f"--output {args.output}", why="it is the file that is imported", fix="name another: -o run.yaml"
            )
    if not Path(os.path.realpath(args.output)).parent.is_dir():
        raise ConfigError(
            f"--output {args.output}",
            why="the folder is not there",
            fix=f"make it: mkdir -p {Path(args.output).parent}",
        )


def _is_loop(link: str) -> bool:
    try:
        os.stat(link)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
