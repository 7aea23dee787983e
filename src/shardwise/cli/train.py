"""``shardwise train [CONFIG] [--a.b=c ...]``: the main job.

Everything that can be told without a process is told first: the configuration, the layout, the model's function, the
data file. Then the ranks are started (or, where torchrun or SLURM has started them, this process becomes one), and
their events are shown until the report. Only the ranks import torch.
"""

import argparse
import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.cli.arguments import Parser
from shardwise.errors import CheckpointError, ConfigError, LayoutError

if TYPE_CHECKING:
    from shardwise.cli.train_display import Display
    from shardwise.config.loader import Loaded
    from shardwise.config.schema import RunConfig

__all__ = ["NEXT", "OVERRIDES", "add_arguments", "check_early", "more_help", "run"]

OVERRIDES = True

NEXT = (
    ("shardwise train --nproc 1 --log.dir=runs/one", "the same curve from one process"),
    ("shardwise train --parallel.layout=dp_replicate=2 --nproc 2 --log.dir=runs/ddp", "whole copies instead of shards"),
    ("shardwise train {config} --train.steps=1000 --log.dir=runs/long", "this run, twice as long"),
    ("shardwise train --print-config", "every setting, and where it came from"),
)
"""Commands to try after a run, and what each shows; ``{config}`` is the resolved configuration of the run."""


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


def run(args: argparse.Namespace) -> int:
    from shardwise.config.loader import load_config
    from shardwise.config.render import print_config

    overrides = args.overrides + ([f"--launch.nproc={args.nproc}"] if args.nproc is not None else [])
    loaded = load_config(args.config, overrides)
    check_early(loaded)
    if args.print_config:
        print(print_config(loaded), end="")
        return 0
    return _be_a_rank(loaded) if _started_by_others() else _launch(loaded)


def check_early(loaded: "Loaded[RunConfig]") -> None:
    """Refuse what can be refused before a process starts: no layout, a missing model function, a missing data file."""
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
    path = config.data.path
    if path is not None and not Path(path).is_file():
        raise ConfigError(
            f"data.path={path!r} ({origins['data.path']})",
            why="it is a directory" if Path(path).is_dir() else f"there is no such file (looked from {Path.cwd()})",
            fix="give the path of a text file, or of tokens as .npy or .bin",
        )
    # A token is a byte or more, and training and validation each need one window.
    if path is not None and (size := Path(path).stat().st_size) < 2 * (config.data.seq_len + 1):
        raise ConfigError(
            f"data.path={path!r} ({origins['data.path']}): {size} bytes",
            why=f"training and validation each need a window of seq_len={config.data.seq_len} + 1 tokens",
            fix="use more data, or a smaller --data.seq_len",
        )


# ---- started here: this process launches the ranks and shows what they say -------------------------------------------


def _launch(loaded: "Loaded[RunConfig]") -> int:
    import msgspec

    from shardwise.cli.train_display import Display
    from shardwise.launch import launch_local
    from shardwise.layout import layout_of

    config = loaded.config
    nproc, why = _ranks(loaded)
    layout_of(config.parallel.layout, nproc)
    held = _prepare(config)
    with held, Display(unit=_unit(config)) as display:
        display.row("ranks", f"{nproc} local process{'es' if nproc > 1 else ''}: {why}")
        display.on_phase("starting the ranks (each loads torch, a few seconds)")
        try:
            results = launch_local(
                "shardwise.cli.train_rank:main",
                nproc=nproc,
                args=(msgspec.json.encode(config),),
                # torch's own C++ warnings speak to whoever writes the training loop, which here is not the user.
                env={"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")},
                on_event=display.on_event,
                on_line=display.on_line,
            )
            no_picture = _draw(config, display)
        except BaseException:
            _keep(config, display)
            raise
    _report(config, results[0], no_picture, display)
    return 0


def _ranks(loaded: "Loaded[RunConfig]") -> tuple[int, str]:
    """How many ranks, and why."""
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


def _started_by_others() -> bool:
    given = os.environ
    return given.get("RANK", "-1") not in ("", "-1") or int(given.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def _be_a_rank(loaded: "Loaded[RunConfig]") -> int:
    from shardwise.cli.train_display import Display
    from shardwise.cli.train_rank import run_rank

    config = loaded.config
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    size = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if config.launch.nproc not in (None, size):
        raise ConfigError(
            f"launch.nproc={config.launch.nproc} ({loaded.origins['launch.nproc']}) on {size} ranks",
            why="the ranks were started by the launcher of this environment, so it would have no effect",
            fix="remove it, or start that many ranks",
        )
    if rank:
        run_rank(config, lambda event: None)
        return 0
    held = _prepare(config)
    with held, Display(unit=_unit(config)) as display:
        display.row("ranks", f"{size}, as the launcher of this environment started them")
        display.on_phase("loading torch")
        try:
            result = run_rank(config, lambda event: display.on_event(0, event))
            no_picture = _draw(config, display)
        except BaseException:
            _keep(config, display)
            raise
    _report(config, result, no_picture, display)
    return 0


# ---- files and the report --------------------------------------------------------------------------------------------


def _unit(config: "RunConfig") -> str:
    tokens = config.data.path is not None and config.data.path.endswith((".npy", ".bin"))
    return "nats/token" if tokens else "nats/byte"


def _prepare(config: "RunConfig") -> TextIO:
    """Makes the folder of the run, takes it for this process, writes the resolved configuration, and moves an older run's
    metrics aside. The folder is held as long as the returned file is open; a process that is killed lets go of it."""
    from shardwise.config.render import dump_config
    from shardwise.train.space import check_space

    folder = Path(config.log.dir)
    check_space(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _hold(folder)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        if (folder / "metrics.jsonl").exists():
            (folder / "metrics.jsonl").replace(folder / "metrics.previous.jsonl")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"log.dir={config.log.dir!r}",
            why=f"it cannot be written: {error}",
            fix="name another folder: --log.dir=PATH",
        ) from error
    return held


def _hold(folder: Path) -> TextIO:
    held = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.seek(0)
        owner = held.read().strip() or "unknown"
        held.close()
        raise CheckpointError(
            f"log.dir={str(folder)!r}",
            why=f"another run is writing there (process {owner}), and their metrics and weights would mix",
            fix="wait for it, or name another folder: --log.dir=PATH",
        ) from None
    held.truncate(0)
    held.write(f"{os.getpid()}\n")
    held.flush()
    return held


def _draw(config: "RunConfig", display: "Display") -> str | None:
    """Draws the loss curve; the reason why there is none, as a line."""
    if not config.log.plot:
        return "no picture: log.plot=false"
    from shardwise.train.metrics import read_metrics
    from shardwise.train.plot import plot_losses

    display.on_phase("drawing the loss curve")
    rows = read_metrics(Path(config.log.dir) / "metrics.jsonl")
    kinds = {"training": "step", "validation": "val"}
    curves = {name: [(r["step"], float(r["loss"])) for r in rows if r["kind"] == kind] for name, kind in kinds.items()}
    curves = {name: points for name, points in curves.items() if points}
    return plot_losses(curves, Path(config.log.dir) / "loss.png", title="shardwise train", unit=_unit(config))


def _keep(config: "RunConfig", display: "Display") -> None:
    """After a failure or an interruption: says how far the run came, and what is left of it, and where."""
    from shardwise.train.metrics import read_metrics

    folder, export = Path(config.log.dir), config.checkpoint.export
    if not (folder / "metrics.jsonl").exists():
        return  # it ended before it had anything to keep
    written = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "step"]
    done = max([display.latest.get("step", 0), *written])
    lines = [f"{done} of {config.train.steps} steps were done"]
    last = f"up to step {max(written)}" if written else "without a step"
    lines.append(f"{folder / 'metrics.jsonl'} (metrics {last})")
    if display.weights is not None:
        lines.append(f"{display.weights} (weights, safetensors)")
    elif export is not None:
        older = (folder / export).exists()
        lines.append(f"no weights{f' (those in {folder / export} are older)' if older else ''}")
    display.row("kept", "\n".join(lines))


def _report(config: "RunConfig", result: dict[str, Any], no_picture: str | None, display: "Display") -> None:
    from shardwise.cli.train_display import seconds_text

    folder, unit = Path(config.log.dir), _unit(config)
    display.say()
    val = result["val_loss"]
    final = f"validation loss {val:.4f} {unit}" if val is not None else f"training loss {result['loss']:.4f} {unit}"
    display.row("result", f"{final} after {result['steps']} steps in {seconds_text(result['seconds'])}")
    display.row("proof", result["proof"]["text"])
    files = [f"{folder / 'metrics.jsonl'}", f"{folder / 'config.yaml'} (everything resolved)"]
    if no_picture is None:
        files.append(f"{folder / 'loss.png'} (loss curve)")
    if config.checkpoint.export is not None:
        files.append(f"{folder / config.checkpoint.export} (weights, safetensors)")
    display.row("files", "\n".join(files))
    if no_picture is not None:
        display.row("picture", no_picture)
    width = max(len(command) for command, _ in NEXT)
    for n, (command, shows) in enumerate(NEXT):
        text = command.format(config=folder / "config.yaml")
        display.say(f"{'try' if n == 0 else '':<9}  {text:<{width}}  # {shows}")
