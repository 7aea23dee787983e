"""``shardwise verify MODEL --layout L``: run a model sharded and in one process, and compare.

The model's function and the layout's text are checked before torch is imported.
"""

import argparse
import importlib
import math

from shardwise.cli.arguments import Parser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="the function that returns the nn.Module: pkg.mod:fn or path/to/file.py:fn"
    )
    parser.add_argument(
        "--layout", metavar="L", default="dp_shard=2", help="the layout to compare with one process (dp_shard=2)"
    )
    parser.add_argument(
        "--batch", metavar="FN", help="pkg.mod:fn, index -> micro-batch (a mapping of tensors); default: random tokens"
    )
    parser.add_argument("--loss", metavar="FN", help="pkg.mod:fn, (output, batch) -> sum; default: next-token loss")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps to compare (3)")
    parser.add_argument("--accumulate", type=int, default=2, metavar="N", help="micro-batches per rank and step (2)")


def run(args: argparse.Namespace) -> int:
    from shardwise.config.target import check_target
    from shardwise.errors import ConfigError
    from shardwise.layout import layout_of, parse_layout

    check_target(args.model, what="MODEL")
    for option in ("batch", "loss"):
        if getattr(args, option):
            check_target(getattr(args, option), what=f"--{option}")
    for option in ("steps", "accumulate"):
        if getattr(args, option) < 1:
            given = f"--{option} {getattr(args, option)}"
            raise ConfigError(given, why="there would be nothing to compare", fix=f"use --{option} 1 or more")
    degrees = parse_layout(args.layout)
    if -1 in degrees.values():
        raise ConfigError(
            f"--layout {args.layout}", why="-1 needs to know how many ranks there are", fix='give numbers: "dp_shard=2"'
        )
    layout_of(degrees, math.prod(degrees.values()))
    return importlib.import_module("shardwise.verify.job").main(
        args.model, args.layout, batch=args.batch, loss=args.loss, steps=args.steps, accumulate=args.accumulate
    )
