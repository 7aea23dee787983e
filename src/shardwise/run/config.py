"""The configuration of ``shardwise train``: one record per section, with the defaults of the demo.

The defaults train a byte-level language model of 0.8 million parameters for 500 steps of 2,048 bytes, so that
``shardwise train`` without a file is a whole run. Every section checks itself; checks over two sections are in
:class:`RunConfig`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardwise.config.limits import AboveZero, Positive
from shardwise.config.loader import Loaded
from shardwise.config.loader import load_config as load
from shardwise.config.record import Options, default_of, doc
from shardwise.config.suggest import did_you_mean
from shardwise.config.target import looks_like_target
from shardwise.config.tokenizer import BYTES_MEANT, is_in_4_bits, is_tokens
from shardwise.dialects import words
from shardwise.errors import ConfigError
from shardwise.layout import parse_layout
from shardwise.run.data_config import MICRO_BATCH, Data
from shardwise.run.model_config import Model
from shardwise.run.optim_config import Optim, Scaler, Schedule
from shardwise.run.steps import DEFAULT_STEPS, check_steps
from shardwise.run.train_config import Train
from shardwise.techniques import MESH_AXES, Parallel
from shardwise.techniques.lora.options import LoRA
from shardwise.techniques.precision.options import precision_of

LOGGERS = ("csv", "tensorboard", "wandb")


class Checkpoint(Options, frozen=True, kw_only=True):
    """Section ``checkpoint``: the checkpoints and final weights that the run saves."""

    export: Annotated[
        str | None, doc("folder for the final weights (safetensors), inside log.dir unless absolute; null: none")
    ] = "weights"
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        doc("dtype of the final weights; null: that of the files the run started from, else as they are stored"),
    ] = None
    adapter: Annotated[
        str | None, doc("with parallel.lora: folder for the adapters alone, as PEFT's files, in log.dir; null: none")
    ] = "adapter"
    base: Annotated[
        str | None, doc("with parallel.quantize: folder for the frozen weights in 4 bits, for bitsandbytes; null: none")
    ] = None
    every: Annotated[Positive | None, doc("steps between checkpoints, from which an ended run resumes; null: none")] = (
        None
    )
    keep: Annotated[Positive, doc("how many of the last checkpoints stay")] = 3
    keep_every: Annotated[Positive | None, doc("also keep those whose step is a multiple of it; null: none")] = None
    background: Annotated[bool, doc("checkpoints are written while training continues")] = True
    frozen: Annotated[
        Literal["save", "leave"], doc("save: frozen weights are in checkpoints; leave: not, a resume compares digests")
    ] = "save"
    resume: Annotated[
        bool, doc("resume from the newest checkpoint in log.dir; false: from the beginning, those are moved aside")
    ] = True
    stop_after_s: Annotated[
        AboveZero | None,
        doc("seconds of training after which the run saves, and ends with exit status 75; null: no limit"),
    ] = None

    sigusr1: Annotated[
        Literal["stop", "save"],
        doc("what SIGUSR1 asks for: stop: the run saves, and ends with exit status 75; save: it saves, and continues"),
    ] = "stop"

    @property
    def are_made(self) -> bool:
        """Whether a run saves checkpoints: at an interval, or when it is asked to."""
        return self.every is not None or self.stop_after_s is not None or self.sigusr1 == "save"

    def check(self) -> None:
        if self.export is None and self.dtype is not None:
            raise ConfigError(
                f"checkpoint.dtype={self.dtype!r} with checkpoint.export=null",
                why="no final weights are written, so it would have no effect",
                fix="name a folder for them: checkpoint.export=weights; or remove checkpoint.dtype",
            )
        if self.are_made:
            return
        for key in ("keep", "keep_every", "background", "frozen"):
            if getattr(self, key) != default_of(Checkpoint, key):
                raise ConfigError(
                    f"Checkpoint({key}={getattr(self, key)!r}) without every",
                    why="no checkpoints are made, so it would have no effect",
                    fix=f"say how often they are: checkpoint.every=100; or remove {key}",
                )


class Log(Options, frozen=True, kw_only=True):
    """Section ``log``: where metrics are written, and how often."""

    dir: Annotated[str, doc("folder for metrics, picture and resolved configuration")] = "runs/latest"
    every: Annotated[Positive, doc("steps between lines of metrics")] = 10
    plot: Annotated[bool, doc("draw the loss curve at the end (needs matplotlib)")] = True
    to: Annotated[
        str | tuple[str, ...], doc("besides metrics.jsonl: csv, tensorboard, wandb, pkg.mod:fn; a list, or commas")
    ] = ()
    project: Annotated[str, doc("with wandb: the project")] = "shardwise"
    name: Annotated[str | None, doc("with wandb: the name of the run; null: that of the folder")] = None
    wandb_mode: Annotated[
        Literal["online", "offline"] | None, doc("with wandb: offline keeps it below log.dir; null: as WANDB_MODE says")
    ] = None
    peak_tflops: Annotated[
        AboveZero | None,
        doc("what one device can do, in 10^12 operations/s, for MFU; null: as known for the device, else no MFU"),
    ] = None

    def check(self) -> None:
        named = self.to.split(",") if isinstance(self.to, str) else self.to
        msgspec.structs.force_setattr(self, "to", tuple(word.strip() for word in named if word.strip()))
        for word in self.to:
            if word not in LOGGERS and not looks_like_target(word):
                raise ConfigError(
                    f"log.to={word!r}",
                    why="it is neither a logger nor names a function",
                    fix=did_you_mean(word, LOGGERS, what="loggers") + "; or pkg.mod:fn, a function that returns one",
                )
        if len(set(self.to)) < len(self.to):
            raise ConfigError(f"log.to={list(self.to)}", why="one is named twice", fix="name each once")
        for key in ("project", "name", "wandb_mode"):
            if getattr(self, key) != default_of(Log, key) and "wandb" not in self.to:
                raise ConfigError(
                    f"log.{key}={getattr(self, key)!r} without wandb",
                    why="only Weights & Biases takes it, so it would have no effect",
                    fix=f"add log.to=wandb, or remove {key}",
                )


class Launch(Options, frozen=True, kw_only=True):
    """Section ``launch``: the processes and devices of the run."""

    nproc: Annotated[Positive | None, doc("local processes; null: all accelerators, or 2 on a CPU")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("auto: cuda where there is one, else cpu")] = "auto"
    notice_s: Annotated[
        AboveZero, doc("seconds that ranks have to save after SIGTERM, SIGUSR1 or SIGHUP, before they are ended")
    ] = 300.0


class RunConfig(Options, frozen=True, kw_only=True):
    """The whole configuration of a training run."""

    model: Annotated[Model, doc("what is trained")] = Model()
    data: Annotated[Data, doc("what it is trained on, and how samples are grouped")] = Data()
    parallel: Annotated[Parallel, doc("the layout and the techniques on it")] = Parallel()
    optim: Annotated[Optim, doc("which optimizer, and its settings")] = Optim()
    schedule: Annotated[Schedule, doc("how the learning rate moves")] = Schedule()
    train: Annotated[Train, doc("how long, and by which rules")] = Train()
    checkpoint: Annotated[Checkpoint, doc("what is kept")] = Checkpoint()
    log: Annotated[Log, doc("where figures go, and how often")] = Log()
    launch: Annotated[Launch, doc("on what it runs")] = Launch()

    def computed(self) -> dict[tuple[str, str], Any]:
        computed: dict[tuple[str, str], Any] = {
            ("data", "micro_batch"): None if self.data.micro_tokens is not None else MICRO_BATCH,
            ("optim", "lr"): Optim(build=self.optim.build).settled_lr(
                is_pretrained=self.model.hf is not None, has_adapters=self.parallel.lora is not None
            ),
            ("optim", "weight_decay"): Optim(build=self.optim.build).settled_decay,
        }
        steps = self.train.steps
        if self.train.epochs is None:  # else both are counted from the data, once they are open
            steps = steps or DEFAULT_STEPS
            computed["train", "steps"] = DEFAULT_STEPS
        if self.schedule.warmup_ratio is None and self.schedule.build is None and steps is not None:
            computed["schedule", "warmup_steps"] = Schedule().settled_warmup(steps)
        return computed

    def check(self) -> None:
        if self.train.scaler != Scaler() and not precision_of(self.parallel.precision).has_float16:
            raise ConfigError(
                f"train.scaler with parallel.precision={self.parallel.precision!r}",
                why="the loss is scaled only where float16 is computed in, so it would have no effect",
                fix="remove train.scaler, or use precision=fp16",
            )
        if self.parallel.init == "load" and self.model.start is None:
            raise ConfigError(
                "parallel.init='load' without model.weights",
                why="the model would never get values",
                fix="add model.weights, or remove parallel.init",
            )
        self._check_adapters()
        self._check_folders()
        if self.optim.name in ("adafactor", "muon"):
            self._check_whole_parameters()
        if self.data.tokenizer == "hf" or (self.data.tokenizer is None and self.data.has_records and self.model.hf):
            if self.model.hf is None:
                raise ConfigError(
                    "data.tokenizer='hf' without model.hf",
                    why="it means the tokenizer in the directory of model.hf",
                    fix="name the directory that has it: data.tokenizer=DIRECTORY",
                )
            # Resolved here, like warmup_steps below: code that reads the data need not know the model.
            settled_data = msgspec.structs.replace(self.data, tokenizer=self.model.hf)
            msgspec.structs.force_setattr(self, "data", settled_data)
        self._check_tokenizer()
        # Resolved here, so that all later code sees a number, and --print-config shows it.
        for (section, key), value in self.computed().items():
            record = getattr(self, section)
            if getattr(record, key) is None:
                msgspec.structs.force_setattr(self, section, msgspec.structs.replace(record, **{key: value}))
        if self.log.peak_tflops is not None and self.data.build is not None:
            raise ConfigError(
                f"log.peak_tflops={self.log.peak_tflops:g} with data.build",
                why="it is for MFU, which counts the model's operations on a sample of tokens; what a sample of your own data is is not known",
                fix="remove it",
            )
        if self.train.steps is not None:
            check_steps(self, self.train.steps)

    def _check_adapters(self) -> None:
        """Settles ``parallel.lora`` where the run starts from adapters, and refuses keys that would have no effect."""
        if self.model.adapter is not None and self.parallel.lora is None:
            settled = msgspec.structs.replace(self.parallel, lora=LoRA.of(self.model.adapter))
            msgspec.structs.force_setattr(self, "parallel", settled)
        if self.parallel.lora is None:
            for key in ("adapter", "base"):
                if (value := getattr(self.checkpoint, key)) not in (None, default_of(Checkpoint, key)):
                    raise ConfigError(
                        f"checkpoint.{key}={value!r} without parallel.lora",
                        why="there are no adapters, so it would have no effect",
                        fix="train some: parallel.lora.rank=16; or remove it",
                    )
            return
        start = self.model.start
        if self.parallel.quantize is None and start is not None and is_in_4_bits(start):
            settled = msgspec.structs.replace(self.parallel, quantize="nf4")  # its bytes stay as they are
            msgspec.structs.force_setattr(self, "parallel", settled)
        if self.checkpoint.base is not None and self.parallel.quantize in (None, "none"):
            raise ConfigError(
                f"checkpoint.base={self.checkpoint.base!r} without parallel.quantize",
                why="the adapters are beside the weights of the directory that the run starts from, which is there",
                fix="remove it; or store the frozen weights in 4 bits: parallel.quantize=nf4",
            )
        for key in ("freeze", "train_only"):
            if names := getattr(self.model, key):
                raise ConfigError(
                    f"model.{key}={list(names)} with parallel.lora",
                    why="the adapters are trained, and nothing else but what parallel.lora.train names",
                    fix=f"remove model.{key}; "
                    + (
                        "layers without an adapter: parallel.lora.exclude"
                        if key == "freeze"
                        else "what is trained in full: parallel.lora.train"
                    ),
                )

    def _check_folders(self) -> None:
        """Refuses one folder for two of the things that the run writes at its end."""
        keys = ("export", "adapter", "base") if self.parallel.lora is not None else ("export",)
        found: dict[Path, str] = {}
        start, export = self.model.start if keys[1:] else None, self.checkpoint.export
        if None not in (start, export) and (Path(self.log.dir) / str(export)).resolve() == Path(str(start)).resolve():
            raise ConfigError(
                f"checkpoint.export={export!r} with parallel.lora",
                why="the run starts from the weights there: with the merged ones in their place, its adapters would be applied twice",
                fix=f"name another folder: checkpoint.export={export}-merged; or none: checkpoint.export=null",
            )
        for key in keys:
            if (value := getattr(self.checkpoint, key)) is None:
                continue
            other = found.setdefault((Path(self.log.dir) / value).resolve(), key)
            if other != key:
                raise ConfigError(
                    f"checkpoint.{key}={value!r} with checkpoint.{other}={getattr(self.checkpoint, other)!r}",
                    why="both are one folder, in which the files of one would be taken for those of the other",
                    fix=f"name another folder: checkpoint.{key}={value}-{key}; or write one of them alone: checkpoint.{key}=null",
                )

    def _check_tokenizer(self) -> None:
        """Refuses keys that are about the tokenizer of the data where there is none."""
        model, data = self.model, self.data
        is_read = data.build is None and not is_tokens(data.path) and data.tokenizer not in (None, BYTES_MEANT)
        if not is_read and (model.add_tokens or model.vocab == "tokenizer"):
            given = f"model.add_tokens={list(model.add_tokens)}" if model.add_tokens else f"model.vocab={model.vocab!r}"
            has_text = data.build is None and not is_tokens(data.path)
            raise ConfigError(
                f"{given} with data.{'build' if data.build else 'path' if is_tokens(data.path) else 'tokenizer'}="
                f"{data.build or (data.path if is_tokens(data.path) else data.tokenizer)!r}",
                why="it is about the tokenizer that reads the data, and here none does",
                fix="name it: --data.tokenizer=hf" if has_text else "say how many rows the data need: --model.vocab=N",
            )
        if data.eos_token is not None and "eos_token_id" in model.args:
            raise ConfigError(
                f"data.eos_token={data.eos_token!r} with model.args.eos_token_id={model.args['eos_token_id']!r}",
                why="each of them says which token ends a text",
                fix="remove model.args.eos_token_id: the configuration that is saved has the number of data.eos_token",
            )

    def _check_whole_parameters(self) -> None:
        degrees = parse_layout(self.parallel.layout)
        cut = next((name for name, axis in MESH_AXES.items() if axis.cuts_matrices and degrees.get(name, 1) != 1), None)
        if cut is not None:
            raise ConfigError(
                f"optim.name={self.optim.name!r} with parallel.layout={self.parallel.layout!r}",
                why=f"it mixes elements of a whole matrix, and with {cut} a rank holds a part of it",
                fix="use --parallel.layout=dp_replicate=-1, or optim.name=adamw",
            )


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded[RunConfig]:
    """Loads the configuration of a run; see :func:`shardwise.config.loader.load_config`.

    >>> loaded = load_config(None, ["train.steps=20"])
    >>> loaded.config.train.steps, loaded.origins["train.steps"], loaded.origins["train.seed"]
    (20, 'override --train.steps', 'default')
    """
    return load(path, overrides, RunConfig, foreign=words)
