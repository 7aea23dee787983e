"""``shardwise train [CONFIG] [--a.b=c ...]``: the main job.

Everything that can be told without a process is told first: the configuration, the layout's text, the model's
function. Only then is the job imported, and with it torch.
"""

import argparse
import importlib
from typing import TYPE_CHECKING

from shardwise.cli.arguments import Parser
from shardwise.errors import LayoutError

if TYPE_CHECKING:
    from shardwise.config.loader import Loaded
    from shardwise.config.schema import RunConfig

__all__ = ["OVERRIDES", "add_arguments", "check_early", "more_help", "run"]

OVERRIDES = True


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a .yaml, .toml or .json file, or pkg.mod:fn; without it, every key has its default",
    )
    parser.add_argument("--nproc", metavar="N", help="local processes; the same as --launch.nproc=N")
    parser.add_argument(
        "--print-config", action="store_true", help="show the configuration, and where each value came from; do not run"
    )
    parser.usage = "shardwise train [CONFIG] [--nproc N] [--print-config] [--section.key=value ...]"


def more_help() -> str:
    """Every key of the configuration."""
    from shardwise.config.render import config_help
    from shardwise.config.schema import RunConfig

    return f"keys of the configuration, with their defaults:\n{config_help(RunConfig)}"


def check_early(loaded: "Loaded[RunConfig]") -> None:
    """Refuse what can be refused before a process starts: a layout that is no layout, a missing model function."""
    from shardwise.config.target import check_target
    from shardwise.layout import parse_layout

    config, origins = loaded.config, loaded.origins
    try:
        parse_layout(config.parallel.layout)
    except LayoutError as error:
        error.given = f"{error.given} ({origins['parallel.layout']})"
        raise
    if config.model.build is not None:
        check_target(config.model.build, what="model.build", origin=origins["model.build"])


def run(args: argparse.Namespace) -> int:
    from shardwise.config.loader import load_config
    from shardwise.config.render import print_config

    overrides = args.overrides + ([f"--launch.nproc={args.nproc}"] if args.nproc is not None else [])
    loaded = load_config(args.config, overrides)
    check_early(loaded)
    if args.print_config:
        print(print_config(loaded), end="")
        return 0
    return importlib.import_module("shardwise.train.job").main(loaded)
