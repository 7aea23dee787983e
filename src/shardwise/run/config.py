"""The configuration of ``shardwise train``: one record per section, with the defaults of the demo.

The defaults train a byte-level language model of 0.8 million parameters for 500 steps of 2,048 bytes, so that
``shardwise train`` without a file is a whole run. Every section checks itself; checks over two sections are in
:class:`RunConfig`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardwise.config.loader import Loaded
from shardwise.config.loader import load_config as load
from shardwise.config.record import Options, default_of, doc
from shardwise.config.suggest import did_you_mean
from shardwise.config.target import looks_like_target
from shardwise.config.tokenizer import BYTES_MEANT, is_tokens
from shardwise.data.sft.records import is_records
from shardwise.errors import ConfigError
from shardwise.layout import parse_layout
from shardwise.run.optim_config import Optim, Scaler, Schedule
from shardwise.run.steps import DEFAULT_STEPS, check_steps
from shardwise.techniques import Parallel
from shardwise.techniques.precision.options import precision_of

__all__ = [
    "MODEL_LOSS",
    "Checkpoint",
    "Data",
    "Launch",
    "Log",
    "Model",
    "Optim",
    "RunConfig",
    "Scaler",
    "Schedule",
    "Train",
    "load_config",
]

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


MICRO_BATCH = 8  # of a run that says neither data.micro_batch nor data.micro_tokens
LOGGERS = ("csv", "tensorboard", "wandb")
MODEL_LOSS = "model"  # train.loss: the loss that the model returns


class Model(Options, frozen=True, kw_only=True):
    """Section ``model``: the model and its initial weights."""

    build: Annotated[
        str | None,
        doc("function that returns the nn.Module: pkg.mod:fn or path/to/file.py:fn; null: the reference model"),
    ] = None
    hf: Annotated[
        str | None,
        doc(
            "Hugging Face model directory: the class that its config.json names, and its weights; nothing is downloaded"
        ),
    ] = None
    args: Annotated[
        dict[str, Any], doc("keyword arguments of build; with hf: fields of the configuration that are to be others")
    ] = msgspec.field(default_factory=dict)
    weights: Annotated[
        str | None,
        doc(
            "start from these: a Hugging Face directory, a safetensors or torch file, a DCP directory; null: those of hf"
        ),
    ] = None
    rename: Annotated[
        dict[str, str | None],
        doc("regex -> replacement, for the names in weights, in order; null: leave the tensor out"),
    ] = msgspec.field(default_factory=dict)
    cast: Annotated[
        bool | None,
        doc(
            "weights of another floating dtype than the model stores. null: converted where nothing is rounded, such as bfloat16 to float32; true: "
            "converted; false: refused"
        ),
    ] = None
    strict: Annotated[
        bool,
        doc("false: missing weights are initialised (a new head), extra ones are left out; both are reported"),
    ] = True

    freeze: Annotated[
        tuple[str, ...], doc("parameters that are not trained: names with * and ?, such as model.embed_tokens.*")
    ] = ()
    train_only: Annotated[tuple[str, ...], doc("the only parameters that are trained, named in the same way")] = ()

    def check(self) -> None:
        if self.hf is not None and self.build is not None:
            raise ConfigError(
                f"model.hf={self.hf!r} with model.build={self.build!r}",
                why="each of them says which model is built",
                fix="remove one; a function of your own can start from the weights: model.weights",
            )
        if self.freeze and self.train_only:
            raise ConfigError(
                f"model.freeze={list(self.freeze)} with model.train_only={list(self.train_only)}",
                why="each of them says which parameters are trained",
                fix="remove one",
            )
        for key, default in (("rename", {}), ("cast", None), ("strict", True)):
            if self.start is None and getattr(self, key) != default:
                raise ConfigError(
                    f"model.{key}={getattr(self, key)!r} without model.weights or model.hf",
                    why="it says how weights are read, so it would have no effect",
                    fix=f"add model.weights, or remove model.{key}",
                )
        if self.build is not None and not looks_like_target(self.build):
            raise ConfigError(
                f"model.build={self.build!r}",
                why="it does not name a function",
                fix="write pkg.mod:fn, or path/to/file.py:fn",
            )

    @property
    def start(self) -> str | None:
        """Path of the weights that the run starts from; None for new ones."""
        return self.weights or self.hf


class Data(Options, frozen=True, kw_only=True):
    """Section ``data``: the training data, sequence length and batch sizes."""

    path: Annotated[
        str | None,
        doc(
            "a text file, .npy or .bin of tokens, or .jsonl of records for fine-tuning (text; prompt and completion; messages); null: Python's "
            "help topics"
        ),
    ] = None
    build: Annotated[
        str | None,
        doc(
            "function that returns a dataset, or one to train on and one to validate: pkg.mod:fn or path/to/file.py:fn; null: path is read"
        ),
    ] = None
    args: Annotated[dict[str, Any], doc("keyword arguments of build")] = msgspec.field(default_factory=dict)
    val_path: Annotated[str | None, doc("validation data of the same kind; null: val_fraction of path")] = None
    tokenizer: Annotated[
        str | None,
        doc(
            "how a text becomes tokens. bytes: each byte is one; hf: by the tokenizer.json in the directory model.hf; the path of another "
            "directory: by the tokenizer.json in it; null: bytes, refused for a model that has a tokenizer; for .jsonl hf"
        ),
    ] = None
    dtype: Annotated[Literal["uint8", "uint16", "uint32", "int32", "int64"], doc("dtype of the tokens in a .bin")] = (
        "uint16"
    )
    val_fraction: Annotated[BelowOne, doc("part of the tokens kept for validation, taken from the end")] = 0.1
    seq_len: Annotated[Positive, doc("tokens a sample predicts")] = 128
    global_batch: Annotated[Positive, doc("samples of one optimizer step, over all ranks")] = 16
    micro_batch: Annotated[
        Positive | None, doc("samples of one forward on one rank; null: 8, or as micro_tokens says")
    ] = None
    micro_tokens: Annotated[
        Positive | None,
        doc(
            "of padded .jsonl, in place of micro_batch: a forward has as many samples as fit into so many positions, padding included"
        ),
    ] = None
    pack: Annotated[
        bool, doc("of .jsonl: several records share a sample of seq_len tokens, and none attends to another")
    ] = False
    unusable: Annotated[
        Literal["refuse", "drop"], doc("of .jsonl: a record without an answer within seq_len is an error, or left out")
    ] = "refuse"
    cache: Annotated[
        str | None,
        doc(
            "folder that keeps the tokens that a tokenizer makes of path, so that it reads a file once; none: keep nothing; null: "
            "$SHARDWISE_CACHE, else ~/.cache/shardwise, for files of 1 MB and more"
        ),
    ] = None
    num_workers: Annotated[Count, doc("processes of each rank that read samples ahead of training; 0: none")] = 0
    prefetch: Annotated[Positive | None, doc("micro-batches that each of them is ahead; null: 2")] = None

    def check(self) -> None:
        if self.micro_tokens is not None:
            self._check_micro_tokens(self.micro_tokens)
        elif self.micro_batch is None:
            msgspec.structs.force_setattr(self, "micro_batch", MICRO_BATCH)
        micro = self.micro_batch
        if micro is not None and self.global_batch % micro:
            near = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            best = min(near, key=lambda n: (abs(n - micro), n))
            raise ConfigError(
                f"data.micro_batch={micro} with data.global_batch={self.global_batch}",
                why="a step is a whole number of micro-batches, so micro_batch divides global_batch",
                fix=f"use micro_batch={best}, or global_batch={-(-self.global_batch // micro) * micro}",
            )
        if self.prefetch is not None and not self.num_workers:
            raise ConfigError(
                f"data.prefetch={self.prefetch} with data.num_workers=0",
                why="nothing is read ahead without workers, so it would have no effect",
                fix="give data.num_workers=2 too, or remove data.prefetch",
            )
        self._check_build()
        for key in ("pack", "unusable"):
            if getattr(self, key) != default_of(Data, key) and not self.has_records:
                raise ConfigError(
                    f"data.{key}={getattr(self, key)} with data.path={self.path!r}",
                    why="it is for records in a .jsonl, which a tokenizer reads, so it would have no effect",
                    fix=f"name such a file, or remove data.{key}",
                )
        if self.val_path is not None:
            self._check_val_path(self.val_path)
        if self.cache is not None and self.build is None:
            self._check_cache(self.cache)
        if self.tokenizer is not None and is_tokens(self.path):
            raise ConfigError(
                f"data.tokenizer={self.tokenizer!r} with data.path={self.path!r}",
                why="the file holds tokens already, so it would have no effect",
                fix="remove data.tokenizer, or name a text file",
            )
        if self.dtype != "uint16" and not (self.path or "").endswith(".bin"):
            raise ConfigError(
                f"data.dtype={self.dtype!r} with data.path={self.path!r}",
                why="only a .bin file needs a dtype, so this would have no effect",
                fix="remove data.dtype, or name a .bin file",
            )

    def _check_micro_tokens(self, most: int) -> None:
        if self.micro_batch is not None:
            raise ConfigError(
                f"data.micro_tokens={most} with data.micro_batch={self.micro_batch}",
                why="each of them says how much one forward of a rank has",
                fix="remove one; on the command line, over a file that has it: --data.micro_batch=null or --data.micro_tokens=null",
            )
        if self.build is None and (self.pack or not self.has_records):
            raise ConfigError(
                f"data.micro_tokens={most} with data.path={self.path!r} and data.pack={self.pack}",
                why="all samples have seq_len positions, so that it would have no effect beyond that of micro_batch",
                fix=f"use data.micro_batch={max(1, most // self.seq_len)}; micro_tokens is for padded records in a .jsonl",
            )
        if self.build is None and most < self.seq_len:
            raise ConfigError(
                f"data.micro_tokens={most} with data.seq_len={self.seq_len}",
                why="a record of seq_len positions would not fit into a micro-batch by itself",
                fix=f"use micro_tokens={self.seq_len} or more, or a smaller seq_len",
            )

    @property
    def samples_at_least(self) -> int:
        """Samples of a micro-batch, at least: in an evaluation, whose micro-batches have equally many."""
        return self.micro_batch or max(1, (self.micro_tokens or 1) // self.seq_len)

    def _check_cache(self, cache: str) -> None:
        if not cache:
            raise ConfigError("data.cache=''", why="it names no folder", fix="give the path of a folder, or none")
        # The words of a text are its bytes where no tokenizer is named.
        is_read = not is_tokens(self.path) and (self.tokenizer not in (None, BYTES_MEANT) or self.has_records)
        if not is_read or self.path is None:
            raise ConfigError(
                f"data.cache={cache!r} with data.path={self.path!r} and data.tokenizer={self.tokenizer!r}",
                why="only tokens that a tokenizer makes of a file are kept, so it would have no effect",
                fix="remove data.cache, or name a tokenizer: data.tokenizer=DIRECTORY",
            )

    def _check_build(self) -> None:
        if self.build is None:
            if self.args:
                raise ConfigError(
                    f"data.args={self.args} without data.build",
                    why="they are the arguments of that function, so they would have no effect",
                    fix="add data.build, or remove data.args",
                )
            return
        if not looks_like_target(self.build):
            raise ConfigError(
                f"data.build={self.build!r}",
                why="it does not name a function",
                fix="write pkg.mod:fn, or path/to/file.py:fn",
            )
        for key in ("path", "val_path", "tokenizer", "dtype", "seq_len", "pack", "unusable", "cache"):
            if getattr(self, key) != default_of(Data, key):
                raise ConfigError(
                    f"data.{key}={getattr(self, key)!r} with data.build={self.build!r}",
                    why="the function gives the samples as they are, so it would have no effect",
                    fix=f"remove data.{key}, or pass it to the function: data.args={{{key}: ...}}",
                )

    @property
    def has_records(self) -> bool:
        """Whether ``path`` holds records for fine-tuning, read by a tokenizer."""
        return is_records(self.path) and self.tokenizer != BYTES_MEANT

    def _check_val_path(self, path: str) -> None:
        if self.val_fraction != default_of(Data, "val_fraction"):
            raise ConfigError(
                f"data.val_fraction={self.val_fraction} with data.val_path={path!r}",
                why="nothing of data.path is kept for validation, so it would have no effect",
                fix="remove one of them",
            )
        kinds = [
            Path(each).suffix if is_tokens(each) or is_records(each) else "text" for each in (self.path or "", path)
        ]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"data.val_path={path!r} with data.path={self.path!r}",
                why="one is read otherwise than the other",
                fix="give both as a text, .npy, .bin or .jsonl",
            )


class Train(Options, frozen=True, kw_only=True):
    """Section ``train``: number of steps, gradient clipping, validation, seed."""

    steps: Annotated[Positive | None, doc("optimizer steps; null: those of epochs, else 500")] = None
    epochs: Annotated[
        NotNegative | None,
        doc("times that all samples are trained on, in place of steps; 0.5: half of them; null: steps says how long"),
    ] = None
    max_grad_norm: Annotated[AboveZero | None, doc("gradients are scaled down to this norm; null: never")] = 1.0
    norm_type: Annotated[AboveZero | Literal["inf"], doc("p of that norm: 2, 1, ...; inf: the largest element")] = 2.0
    clip_grad_value: Annotated[
        AboveZero | None, doc("each element of a gradient is clamped to [-value, value], after the norm; null: never")
    ] = None
    fused: Annotated[
        bool | str,
        doc("the loss is computed where the head is called, and logits are never held; or the name of the head"),
    ] = False
    loss: Annotated[
        str | None,
        doc(
            "pkg.mod:fn, (output, batch) -> sum over the micro-batch, or a mapping of sums; model: the mean that the model returns, as (logits, "
            "loss) or .loss; null: cross entropy of labels"
        ),
    ] = None
    count: Annotated[
        str | None,
        doc(
            "pkg.mod:fn, batch -> what the loss is divided by; null: the loss's own count, else labels that are not -100"
        ),
    ] = None
    forward: Annotated[
        str | None, doc("pkg.mod:fn, (model, batch) -> output; null: the batch's keys that the model's forward names")
    ] = None
    callback: Annotated[
        str | None,
        doc("pkg.mod:fn, called as fn(out) on every rank after every step; True of any rank ends the run; null: none"),
    ] = None
    seed: Annotated[Count, doc("seed of the weights, the order of samples and dropout")] = 0
    eval_every: Annotated[Count, doc("steps between validations; 0: only at the end")] = 100
    on_nonfinite: Annotated[
        Literal["raise", "skip"], doc("a NaN or infinite gradient: raise ends the run, skip leaves out the step")
    ] = "raise"
    scaler: Annotated[Scaler, doc("how the loss is scaled where precision is fp16")] = Scaler()
    tf32: Annotated[
        bool | None, doc("on cuda, products of float32 in TF32; false: in float32; null: as PyTorch is set")
    ] = None
    deterministic: Annotated[
        bool, doc("only kernels that give the same bits each time; an operator without one is an error")
    ] = False
    anomaly: Annotated[bool, doc("autograd's anomaly detection: names the forward of a NaN in backward; slow")] = False
    profile: Annotated[
        int | str | None,
        doc("a step, or FIRST:LAST, the last not included: a trace by torch.profiler, for Perfetto; null: none"),
    ] = None
    profile_ranks: Annotated[Literal["main", "all"], doc("with profile: rank 0 only, or a trace of each rank")] = "main"
    memory_snapshot: Annotated[
        Positive | None, doc("on cuda, the step whose allocations are written, for pytorch.org/memory_viz; null: none")
    ] = None
    timeout_s: Annotated[
        AboveZero, doc("seconds a rank waits for the others before it gives up; after 10 it says whom for")
    ] = 600.0

    @property
    def profiled_steps(self) -> range | None:
        """The steps of ``profile``."""
        if self.profile is None:
            return None
        first, _, last = str(self.profile).partition(":")
        return range(int(first), int(last or int(first) + 1))

    def check(self) -> None:
        if self.epochs is not None:
            self._check_epochs(self.epochs)
        for key in ("loss", "count", "forward", "callback"):
            target = getattr(self, key)
            if target is not None and not looks_like_target(target) and (key, target) != ("loss", MODEL_LOSS):
                raise ConfigError(
                    f"train.{key}={target!r}",
                    why="it does not name a function",
                    fix="write pkg.mod:fn, or path/to/file.py:fn"
                    + ("; or model, for the loss that the model returns" if key == "loss" else ""),
                )
        if self.fused and self.loss is not None:
            raise ConfigError(
                f"train.fused={self.fused!r} with train.loss={self.loss!r}",
                why="the next-token loss is computed in place of the logits, which a loss of your own would be given",
                fix="remove one of them",
            )
        if self.profile is None:
            if self.profile_ranks != "main":
                raise ConfigError(
                    f"train.profile_ranks={self.profile_ranks!r} without train.profile",
                    why="nothing is profiled, so it would have no effect",
                    fix="say which steps: train.profile=10:13; or remove profile_ranks",
                )
        elif not re.fullmatch(r"[1-9]\d{0,9}(:\d{1,10})?", str(self.profile)) or not self.profiled_steps:
            raise ConfigError(
                f"train.profile={self.profile!r}",
                why="it is neither a step, from 1, nor FIRST:LAST, a first one and a later one, which is not included",
                fix="write 10:13 for steps 10, 11 and 12",
            )

    def _check_epochs(self, epochs: float) -> None:
        if self.steps is not None:
            raise ConfigError(
                f"train.epochs={epochs:g} with train.steps={self.steps}",
                why="each of them says how long the run is",
                fix="remove one; on the command line, over a file that has it: --train.steps=null or --train.epochs=null",
            )


class Checkpoint(Options, frozen=True, kw_only=True):
    """Section ``checkpoint``: the checkpoints and final weights that the run saves."""

    export: Annotated[
        str | None, doc("folder for the final weights (safetensors), inside log.dir unless absolute; null: none")
    ] = "weights"
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        doc("dtype of the final weights; null: that of the files the run started from, else as they are stored"),
    ] = None
    every: Annotated[Positive | None, doc("steps between checkpoints, from which an ended run resumes; null: none")] = (
        None
    )
    keep: Annotated[Positive, doc("how many of the last checkpoints stay")] = 3
    keep_every: Annotated[Positive | None, doc("also keep those whose step is a multiple of it; null: none")] = None
    background: Annotated[bool, doc("checkpoints are written while training continues")] = True
    resume: Annotated[
        bool,
        doc(
            "resume from the newest checkpoint in log.dir; false: start from the beginning, and move those there aside"
        ),
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
        for key in ("keep", "keep_every", "background"):
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
        str | tuple[str, ...],
        doc(
            "loggers besides metrics.jsonl, as a list or with commas: csv, tensorboard, wandb, or pkg.mod:fn that returns one"
        ),
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
        words = self.to.split(",") if isinstance(self.to, str) else self.to
        msgspec.structs.force_setattr(self, "to", tuple(word.strip() for word in words if word.strip()))
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
            ("optim", "lr"): Optim(build=self.optim.build).settled_lr(is_pretrained=self.model.hf is not None),
            ("optim", "weight_decay"): Optim(build=self.optim.build).settled_decay,
        }
        steps = self.train.steps
        if self.train.epochs is None:  # else both are counted from the data, once they are open
            steps = steps or DEFAULT_STEPS
            computed["train", "steps"] = DEFAULT_STEPS
        if self.schedule.warmup_ratio is None and steps is not None:
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
        # Resolved here, so that all later code sees a number, and --print-config shows it.
        for (section, key), value in self.computed().items():
            record = getattr(self, section)
            if getattr(record, key) is None:
                msgspec.structs.force_setattr(self, section, msgspec.structs.replace(record, **{key: value}))
        if self.train.steps is not None:
            check_steps(self, self.train.steps)

    def _check_whole_parameters(self) -> None:
        degrees = parse_layout(self.parallel.layout)
        cut = next((axis for axis in ("dp_shard", "tp") if degrees.get(axis, 1) != 1), None)
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
    return load(path, overrides, RunConfig)
