"""``shardwise train [CONFIG] [--a.b=c ...]``: trains a model on one or more ranks. Without CONFIG, ``shardwise.yaml`` of the
working directory is read if it is there.

Everything that can be checked without a process is checked first: the configuration, the layout, the model's function,
the data file. Then the ranks are started (or this process is one, if torchrun or SLURM has started it), and their
events are shown until the final report. Only the ranks import torch.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.errors import ConfigError, LayoutError, ShardwiseError, UnsupportedError

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
    """Every key of the configuration."""
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

    overrides = args.overrides + ([f"--launch.nproc={args.nproc}"] if args.nproc is not None else [])
    overrides += ["--checkpoint.resume=false"] if args.fresh else []
    with _shown_once_a_node():
        loaded = load_config(configuration_of(args), overrides)
        check_early(loaded)
        _check_ranks(loaded)
    command = Command.of(args, loaded, is_of_launcher=is_rank())
    if args.print_config:
        print(f"# {FOUND} of {Path.cwd()}\n" if command.has_found else "", print_config(loaded), sep="", end="")
        return 0
    return (_be_a_rank if command.is_of_launcher else _launch)(loaded, command)


def _show_found(command: "Command", display: "Display") -> None:
    """Says which configuration was found, where none was named."""
    from shardwise.cli.resume_command import FOUND

    if command.has_found:
        display.row("config", f"{FOUND}, found in this directory (--no-config: without it)")


def check_early(loaded: "Loaded[RunConfig]") -> None:
    """Raises the errors that can be found before a process starts: an invalid layout, a missing model function, sizes
    that do not fit, a missing data file."""
    from shardwise.config.target import check_target
    from shardwise.layout import parse_layout
    from shardwise.run.attention import check_attention_args
    from shardwise.run.loggers import check_loggers
    from shardwise.run.positions_check import check_positions
    from shardwise.run.reference_config import check_reference_args
    from shardwise.run.stored_dtype import check_stored_dtype
    from shardwise.run.token_check import check_tokens
    from shardwise.techniques import AXES_IN_USE, fold

    config, origins = loaded.config, loaded.origins
    with _at(origins["parallel.layout"]):
        parse_layout(config.parallel.layout, AXES_IN_USE)
    if config.model.hf is not None:
        _check_hf(config.model.hf, origins["model.hf"])
        check_attention_args(config, origins)
    elif config.model.build is None:
        check_reference_args(config.model.args, seq_len=config.data.seq_len, origins=origins)
    else:
        check_target(config.model.build, what="model.build", origin=origins["model.build"])
    _check_functions(config, origins)
    fold.check_early(config.parallel, origins)
    check_loggers(config.log.to, config.log.wandb_mode, origins["log.to"])
    _check_files(config, origins)
    check_tokens(config, origins)
    check_positions(config, origins)
    check_stored_dtype(config, origins)
    _check_size(config, origins)


def _check_ranks(loaded: "Loaded[RunConfig]") -> None:
    """Raises the errors of a layout that does not fit its ranks, where their number is known: the launcher of this environment
    has started them, or ``launch.nproc`` names it. The default is counted on the machine that runs."""
    from shardwise.launch.environment import is_rank, rank_and_size
    from shardwise.layout import layout_of
    from shardwise.techniques import AXES_IN_USE

    config, origins = loaded.config, loaded.origins
    nproc, size = config.launch.nproc, rank_and_size()[1] if is_rank() else None
    if size is not None and nproc not in (None, size):
        raise ConfigError(
            f"launch.nproc={nproc} ({origins['launch.nproc']}) on {size} ranks",
            why="the ranks were started by the launcher of this environment, so it would have no effect",
            fix="remove it, or start that many ranks",
        )
    if (ranks := size or nproc) is not None:
        with _at(origins["parallel.layout"]):
            layout_of(config.parallel.layout, ranks, nproc if size is None else _ranks_per_node, AXES_IN_USE)


@contextlib.contextmanager
def _at(origin: str) -> Iterator[None]:
    """Errors within say where the layout was written."""
    try:
        yield
    except (LayoutError, UnsupportedError) as error:
        error.given = f"{error.given} ({origin})"
        raise


def _check_functions(config: "RunConfig", origins: Mapping[str, str]) -> None:
    from shardwise.config.target import check_target
    from shardwise.run.train_config import MODEL_LOSS

    targets = [(section, "build") for section in ("data", "optim")]
    targets += [("train", key) for key in ("loss", "count", "forward", "callback")]
    for section, key in targets:
        target = getattr(getattr(config, section), key)
        if target is not None and (key, target) != ("loss", MODEL_LOSS):
            check_target(target, what=f"{section}.{key}", origin=origins[f"{section}.{key}"])


def _check_files(config: "RunConfig", origins: Mapping[str, str]) -> None:
    from shardwise.run.data_files_check import check_data_files

    weights = config.model.weights
    if weights is not None and not Path(weights).exists():
        raise ConfigError(
            f"model.weights={weights!r} ({origins['model.weights']})",
            why=f"there is no such file or directory (relative to {Path.cwd()})",
            fix="give the path of a model directory, or of a file of weights",
        )
    check_data_files(config.data, origins)


def _check_size(config: "RunConfig", origins: Mapping[str, str]) -> None:
    path = config.data.path
    # A token is a byte or more, and training and validation each need one window.
    if (
        path is not None
        and not config.data.has_records
        and (size := Path(path).stat().st_size) < 2 * (config.data.seq_len + 1)
    ):
        raise ConfigError(
            f"data.path={path!r} ({origins['data.path']}): {size} bytes",
            why=f"training and validation each need a window of seq_len={config.data.seq_len} + 1 tokens",
            fix="use more data, or a smaller --data.seq_len",
        )


def _check_hf(folder: str, origin: str) -> None:
    """Refuses a path that is not a model directory, and a model whose library is not installed."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"model.hf={folder!r} ({origin})",
            why=f"there is no config.json in it (relative to {Path.cwd()})",
            fix="give a directory that save_pretrained has written; nothing is downloaded",
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"model.hf={folder!r} ({origin})", why="transformers is not installed", fix="pip install 'shardwise[hf]'"
        )


# ---- started here: this process launches the ranks and shows their events --------------------------------------------


def _launch(loaded: "Loaded[RunConfig]", command: "Command") -> int:
    import msgspec

    from shardwise.cli.rank_logs import RankLogs
    from shardwise.cli.train_display import Display
    from shardwise.cli.train_folder import RunFolder
    from shardwise.launch import STOP_SIGNALS, is_cpu, launch_local, passed_over, terminable
    from shardwise.layout import layout_of
    from shardwise.run.loss_unit import unit_of
    from shardwise.techniques import AXES_IN_USE

    config = loaded.config
    nproc, why = _ranks(loaded)
    with _at(loaded.origins["parallel.layout"]):
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
    from shardwise.run.loss_unit import unit_of

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


def _ranks_per_node() -> int:
    from shardwise.world.env import ranks_per_node, read_env  # imports torch, which this rank needs anyway

    return ranks_per_node(read_env())


# ---- the report ------------------------------------------------------------------------------------------------------


def _report(folder: "RunFolder", result: dict[str, Any], no_picture: str | None) -> None:
    from shardwise.cli.program import program
    from shardwise.cli.train_display import seconds_text
    from shardwise.run.loss_unit import perplexity_of, unit_of

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

    text = (
        f"{count} of {steps} steps, not finite: {'nothing was trained' if count == steps else 'they changed nothing'}"
    )
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
