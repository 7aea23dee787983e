"""``shardwise verify MODEL --layout L``: trains a model sharded and in one process, and compares them.

The model's function and the layout's text are checked before torch is imported.
"""

import argparse
from pathlib import Path
from typing import Any

from shardwise.cli.arguments import Parser
from shardwise.launch.imports import import_frozen

OVERRIDES = True

_NUM_RANKS = "the layout says how many ranks: --layout dp_shard=4 compares 4"
_ELSEWHERE = {"launch.nproc": _NUM_RANKS, "parallel.layout": "give it as --layout"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the function that returns the nn.Module: pkg.mod:fn or path/to/file.py:fn; or a Hugging Face model directory",
    )
    parser.add_argument(
        "--layout", metavar="L", default="dp_shard=2", help="the layout to compare with one process (dp_shard=2)"
    )
    parser.add_argument(
        "--batch", metavar="FN", help="pkg.mod:fn, index -> micro-batch (a mapping of tensors); default: random tokens"
    )
    parser.add_argument(
        "--loss",
        metavar="FN",
        help="pkg.mod:fn, (output, batch) -> sum; model: the mean that the model returns; default: next-token loss",
    )
    parser.add_argument(
        "--count",
        metavar="FN",
        help="pkg.mod:fn, batch -> what the loss is divided by; default: labels that are not -100",
    )
    parser.add_argument(
        "--forward",
        metavar="FN",
        help="pkg.mod:fn, (model, batch) -> output; default: the batch's keys that the model's forward names",
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps to compare (3)")
    parser.add_argument(
        "--fused",
        action="store_true",
        help="the ranks compute the next-token loss without logits, as TrainStep(fused=True)",
    )
    parser.add_argument("--accumulate", type=int, default=2, metavar="N", help="micro-batches per rank and step (2)")
    parser.instead = {"--nproc": _NUM_RANKS}
    parser.usage = "shardwise verify MODEL [--layout L] [--batch FN] [--loss FN] [--count FN] [--forward FN] [--fused] [--parallel.key=value ...]"


def keys() -> list[str]:
    from shardwise.config.loader import dotted_keys
    from shardwise.run.config import RunConfig

    elsewhere = _elsewhere()
    return [key for key in dotted_keys(RunConfig) if key.startswith("parallel.") and _section(key) not in elsewhere]


def more_help() -> str:
    """Help text: the configuration keys that verify takes."""
    return (
        "keys, as `shardwise train` takes them; without one of parallel.sharding the units are those of training, and then every block "
        f"is one:\n  {', '.join(keys())}"
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.config.target import check_target
    from shardwise.errors import ConfigError
    from shardwise.layout import layout_of, num_ranks_of
    from shardwise.run.train_config import MODEL_LOSS
    from shardwise.techniques import AXES_IN_USE

    _check_model(args.model)
    for option in ("batch", "loss", "count", "forward"):
        target = getattr(args, option)
        if target and (option, target) != ("loss", MODEL_LOSS):
            check_target(target, what=f"--{option}")
    for option in ("steps", "accumulate"):
        if getattr(args, option) < 1:
            given = f"--{option} {getattr(args, option)}"
            raise ConfigError(given, why="there would be nothing to compare", fix=f"use --{option} 1 or more")
    if args.fused and args.loss:
        raise ConfigError(
            f"--fused with --loss {args.loss}",
            why="the next-token loss is computed in place of the logits, which a loss of your own would be given",
            fix="leave one of them out",
        )
    num_ranks = num_ranks_of(args.layout)
    if num_ranks is None:
        raise ConfigError(
            f"--layout {args.layout}",
            why="-1 and node need to know how many ranks there are",
            fix='give numbers: "dp_shard=2"',
        )
    layout_of(args.layout, num_ranks, axes=AXES_IN_USE)
    parallel, is_default = _parallel(args.overrides)
    return import_frozen("shardwise.verify.job").main(
        args.model,
        args.layout,
        batch=args.batch,
        loss=args.loss,
        count=args.count,
        forward=args.forward,
        steps=args.steps,
        accumulate=args.accumulate,
        fused=args.fused,
        parallel=parallel,
        small_units=is_default,
    )


def _check_model(given: str) -> None:
    from shardwise.config.target import check_target, looks_like_target
    from shardwise.errors import ConfigError

    folder = Path(given)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"MODEL={given!r}",
            why="there is no config.json in this directory",
            fix="give a directory that save_pretrained has written, or name a function: path/to/file.py:fn",
        )
    if not folder.is_dir() and not looks_like_target(given):
        raise ConfigError(
            f"MODEL={given!r}",
            why="it names neither a function nor a directory that is there; nothing is downloaded",
            fix="write pkg.mod:fn, or path/to/file.py:fn, or give a directory that save_pretrained has written",
        )
    if not folder.is_dir():
        check_target(given, what="MODEL", bare=True)


def _parallel(overrides: list[str]) -> tuple[Any, bool]:
    """The ``Parallel`` that the overrides ask for, and whether they leave sharding at its default."""
    from shardwise.errors import ConfigError
    from shardwise.run.config import load_config
    from shardwise.techniques import fold

    keys, elsewhere = [word.removeprefix("--").partition("=")[0] for word in overrides], _elsewhere()
    for word, key in zip(overrides, keys, strict=True):
        if (section := _section(key)) in elsewhere:
            raise ConfigError(f"verify {word}", why="verify does not read that key", fix=elsewhere[section])
        if not key.startswith("parallel."):
            raise ConfigError(
                f"verify {word}",
                why="verify runs a few steps of its own, and reads keys of parallel only",
                fix="options and keys: shardwise verify --help",
            )
    loaded = load_config(None, overrides)
    fold.check_early(loaded.config.parallel, loaded.origins)
    return loaded.config.parallel, not any(key.startswith("parallel.sharding") for key in keys)


def _elsewhere() -> dict[str, str]:
    """Keys that verify does not read, and what to use instead."""
    from shardwise.techniques import TECHNIQUES

    return _ELSEWHERE | {f"parallel.{option.key}": t.without for t in TECHNIQUES if t.without for option in t.options}


def _section(key: str) -> str:
    return ".".join(key.split(".")[:2])
