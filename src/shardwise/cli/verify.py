"""``shardwise verify MODEL --layout L``: run a model sharded and in one process, and compare.

The model's function and the layout's text are checked before torch is imported.
"""

import argparse
import importlib

from shardwise.cli.arguments import Parser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="the function that returns the nn.Module: pkg.mod:fn or path/to/file.py:fn"
    )
    parser.add_argument(
        "--layout", metavar="L", default="dp_shard=2", help="the layout to compare with one process (dp_shard=2)"
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.config.target import check_target
    from shardwise.layout import parse_layout

    check_target(args.model, what="MODEL")
    parse_layout(args.layout)
    return importlib.import_module("shardwise.verify.job").main(args.model, args.layout)
