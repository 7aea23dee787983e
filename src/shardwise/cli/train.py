"""``shardwise train [CONFIG] [--a.b=c ...]``: trains a model on one or more ranks. Without CONFIG, ``shardwise.yaml`` of the
working directory is read if it is there.

Everything that can be checked without a process is checked first: the configuration, the layout, the model's function,
the data file. Then the ranks are started (or this process is one, if torchrun or SLURM has started it), and their
events are shown until the final report. Only the ranks import torch.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.cli.resume_command import Command
    from shardwise.cli.train_display import Display
    from shardwise.cli.train_folder import RunFolder
    from shardwise.config.loader import Loaded
    from shardwise.run.config import RunConfig

OVERRIDES = True
OTHER_TOOLS = True

NEXT = (
    (
        "{program} train {config} --nproc 1 --parallel.layout=dp_shard=1 --log.dir={one}",
        "the same curve from one process",
    ),
    (
        "{program} train {config} --parallel.layout=dp_replicate=-1 --log.dir={ddp}",
        "a whole copy of the model on every rank",
    ),
    ("{program} train {config} --train.{key}={twice} --log.dir={long}", "this run, twice as long"),
    ("{program} train {config} --print-config", "every setting, and where it came from"),
)
"""Commands to try after a run, and what each shows; ``{program}`` is how to call this program, ``{config}`` the
resolved configuration of the run, and the folders are next to its own."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a .yaml, .toml or .json file, or pkg.mod:fn; without it shardwise.yaml of this directory, else the defaults",
    )
    parser.add_argument(
        "--no-config", action="store_true", help="the defaults, also where this directory has a shardwise.yaml"
    )
    parser.add_argument("--nproc", metavar="N", help="local processes; the same as --launch.nproc=N")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start from the beginning where log.dir holds checkpoints, which are moved aside; the same as --checkpoint.resume=false",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show the configuration, and where each value came from; do not run"
    )
    parser.usage = (
        "shardwise train [CONFIG] [--no-config] [--nproc N] [--fresh] [--print-config] [--section.key=value ...]"
    )


def keys() -> list[str]:
    from shardwise.config.loader import dotted_keys
    from shardwise.run.config import RunConfig

    return dotted_keys(RunConfig)


def more_help() -> str:
    """Help text: every key of the configuration."""
    from shardwise.config.render import config_help
    from shardwise.run.config import RunConfig

    return f"keys of the configuration, with their defaults:\n{config_help(RunConfig)}"


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.resume_command import FOUND, Command, configuration_of
    from shardwise.config.render import print_config
    from shardwise.launch.environment import is_rank
    from shardwise.run.config import load_config
    from shardwise.run.preflight import check_early, check_ranks

    overrides = args.overrides + ([f"--launch.nproc={args.nproc}"] if args.nproc is not None else [])
    overrides += ["--checkpoint.resume=false"] if args.fresh else []
    with _shown_once_a_node():
        loaded = load_config(configuration_of(args), overrides)
        check_early(loaded)
        check_ranks(loaded)
    command = Command.of(args, loaded, is_of_launcher=is_rank())
    if args.print_config:
        print(f"# {FOUND} of {Path.cwd()}\n" if command.has_found else "", print_config(loaded), sep="", end="")
        return 0
    return (_be_a_rank if command.is_of_launcher else _launch)(loaded, command)


def _show_found(command: "Command", display: "Display") -> None:
    from shardwise.cli.resume_command import FOUND

    if command.has_found:
        display.row("config", f"{FOUND}, found in this directory (--no-config: without it)")


# ---- started here: this process launches the ranks and shows their events --------------------------------------------


def _launch(loaded: "Loaded[RunConfig]", command: "Command") -> int:
    import msgspec

    from shardwise.cli.train_display import Display
    from shardwise.cli.train_folder import RankLogs, RunFolder
    from shardwise.launch import STOP_SIGNALS, is_cpu, launch_local, passed_over, terminable
    from shardwise.layout import layout_of
    from shardwise.run.metrics import unit_of
    from shardwise.run.preflight import at_origin
    from shardwise.techniques import AXES_IN_USE

    config = loaded.config
    nproc, why = _ranks(loaded)
    with at_origin(loaded.origins["parallel.layout"]):
        layout_of(config.parallel.layout, nproc, nproc, AXES_IN_USE)
    saves = _signals_that_save(config)
    logs = RankLogs(Path(config.log.dir))

    def on_event(rank: int, event: dict[str, Any]) -> None:
        display.on_event(rank, event)
        if display.began:
            logs.begin()

    def on_line(rank: int, stream: str, line: str) -> None:
        logs.write(rank, stream, line)
        display.on_line(rank, stream, line)

    with (
        passed_over(saves),
        terminable(STOP_SIGNALS),  # also before the ranks are started: RunFolder says what resumes
        contextlib.closing(logs),
        Display(unit=unit_of(config)) as display,
        RunFolder(config, display, command) as folder,
    ):
        _show_found(command, display)
        display.row("ranks", f"{nproc} local process{'es' if nproc > 1 else ''}: {why}")
        display.on_phase("starting the ranks (loading torch, a few seconds)")
        results = launch_local(
            "shardwise.cli.train_rank:main",
            nproc=nproc,
            args=(msgspec.json.encode(config),),
            on_event=on_event,
            on_line=on_line,
            notice_s=config.launch.notice_s,
            passes_on=saves,
            preload=("shardwise.verify.preload",) if is_cpu(config.launch.device) else (),
        )
        no_picture = folder.draw(unit_of(config))
    _report(folder, results[0], no_picture)
    return 0


def _signals_that_save(config: "RunConfig") -> tuple[int, ...]:
    """Signals that ask for a checkpoint: before the first step and after the last there is nothing to save, and they
    end nothing."""
    return (signal.SIGUSR1,) if config.checkpoint.sigusr1 == "save" else ()


def _ranks(loaded: "Loaded[RunConfig]") -> tuple[int, str]:
    """The number of ranks to start, and the reason for it."""
    from shardwise.launch import default_nproc

    launch = loaded.config.launch
    if launch.nproc is not None:
        return launch.nproc, f"launch.nproc={launch.nproc} ({loaded.origins['launch.nproc']})"
    count = default_nproc(launch.device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if launch.device != "cpu" and "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        return count, "one for each visible accelerator"
    return count, f"no accelerator in use, so at most 2 of the {cores} cores; --nproc N changes it"


# ---- started by torchrun or SLURM: this process is a rank ------------------------------------------------------------


@contextlib.contextmanager
def _shown_once_a_node() -> Iterator[None]:
    """For errors that every rank of a node has: within, only the first rank of the node shows them."""
    try:
        yield
    except ShardwiseError as error:
        from shardwise.launch.environment import is_rank, local_rank

        if is_rank() and local_rank():
            error.shown_by = "local rank 0"
        raise


def _be_a_rank(loaded: "Loaded[RunConfig]", command: "Command") -> int:
    from shardwise.cli.train_display import Display
    from shardwise.cli.train_folder import RunFolder
    from shardwise.cli.train_rank import run_rank
    from shardwise.launch import passed_over, terminable
    from shardwise.launch.environment import rank_and_size
    from shardwise.run.metrics import unit_of

    config = loaded.config
    rank, size = rank_and_size()
    if rank:
        with passed_over(_signals_that_save(config)):
            run_rank(config, lambda event: None)
        return 0
    # A preempted run also prints what is kept.
    with (
        passed_over(_signals_that_save(config)),
        terminable(),
        Display(unit=unit_of(config)) as display,
        RunFolder(config, display, command) as folder,
    ):
        _show_found(command, display)
        display.row("ranks", f"{size}, as the launcher of this environment started them")
        display.on_phase("loading torch")
        result = run_rank(config, lambda event: display.on_event(0, event))
        no_picture = folder.draw(unit_of(config))
    _report(folder, result, no_picture)
    return 0


# ---- the report ------------------------------------------------------------------------------------------------------


def _report(folder: "RunFolder", result: dict[str, Any], no_picture: str | None) -> None:
    from shardwise.cli.resume_command import program
    from shardwise.cli.train_display import seconds_text
    from shardwise.run.metrics import perplexity_of, unit_of

    display, unit = folder.display, unit_of(folder.config)
    display.say()
    val = result["val_loss"]
    loss = result.get("loss", math.nan)  # of a run of no steps
    final = f"validation loss {val:.4f} {unit}" if val is not None else f"training loss {loss:.4f} {unit}"
    if (perplexity := perplexity_of(folder.config, loss if val is None else val)) is not None:
        final += f" (perplexity {perplexity:.4g})"
    display.row("result", f"{final} after {result['steps']} steps in {seconds_text(result['seconds'])}")
    if result.get("num_skipped"):
        display.row("skipped", _skipped_text(folder.config, result["num_skipped"], result["steps"]))
    display.row("proof", result["proof"]["text"])
    display.row("files", "\n".join(folder.files(picture=no_picture is None)) or "none")
    if no_picture is not None:
        display.row("picture", no_picture)
    train = folder.config.train
    commands = next_commands(folder.path, train.steps, program(), epochs=train.epochs)
    display.commands("try", commands)


def _skipped_text(config: "RunConfig", count: int, steps: int) -> str:
    """A text that says how many steps were skipped, and what may help."""
    from shardwise.techniques.precision.options import precision_of

    text = f"{count} of {steps} steps, not finite or without a valid label: {'nothing was trained' if count == steps else 'they changed nothing'}"
    if precision_of(config.parallel.precision).has_float16 and count > steps // 10:
        text += f"; a smaller --train.scaler.init_scale than {config.train.scaler.init_scale:g} overflows less often"
    return text


def next_commands(
    folder: Path, steps: int | None, program: str = "shardwise", epochs: float | None = None
) -> list[tuple[str, str]]:
    """The commands of :data:`NEXT` for a run of ``steps``, or of ``epochs``, in ``folder``: (command, what it shows)."""
    places = {
        "program": program,
        "config": shlex.quote(str(folder / "config.yaml")),
        "one": shlex.quote(str(folder.parent / "one")),
        "ddp": shlex.quote(str(folder.parent / "ddp")),
        "long": shlex.quote(str(folder.parent / "long")),
        "key": "steps" if epochs is None else "epochs",
        "twice": f"{2 * (steps or 0)}" if epochs is None else f"{2 * epochs:g}",
    }
    return [(command.format(**places), shows) for command, shows in NEXT]
