"""The training run that each rank of ``shardwise train`` executes, up to the exported weights.

Start reading at :func:`train`: data, model, optimizer, step, a completion before training, the steps, a completion
after, the weights. Every rank runs all of it, because every rank takes part in every forward; only rank 0 writes files
and reports. It reports *events*, small dicts passed to ``emit``; the process that started the ranks decides how to show
them.

Events (``kind`` and its fields): ``phase`` text; ``progress`` (of the phase) text; ``data`` name, train_samples, val_samples, tokens_per_step, report; ``kept`` text; ``older`` text; ``vocabulary`` text; ``planned`` steps, text;
``model`` name, num_params, units, why; ``loaded`` text; ``resumed`` text; ``saved`` text; ``sample`` when, prompt, text,
word_share; ``answer`` when, prompt, text, reference; ``step`` step, steps, loss, grad_norm, lr, tokens_per_s, seconds_left, skipped, num_skipped (so far),
memory, and tflops, mfu, comm_bytes as far as they are known; ``ended`` step, callback; ``memory`` per_rank, one_process, rss; ``chosen`` name, text; ``val`` step, loss, num_tokens; ``stop`` reason; ``weights`` path, dtype;
``trace`` path; ``trouble`` text.
"""

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.config.render import dump_config
from shardwise.data.loader import Loader
from shardwise.data.sft.dataset import SFTDataset
from shardwise.data.stream import is_stream
from shardwise.errors import CheckpointError, ConfigError
from shardwise.model.calling import call
from shardwise.parallel import describe, recipe_of, runtime_of
from shardwise.run.build import (
    build_model,
    check_takes_tokens,
    functions_of,
    load_start,
    loaded_text,
    make_step,
    set_tokenizer,
)
from shardwise.run.callback import Callback
from shardwise.run.checkpoints import RunCheckpoints
from shardwise.run.config import RunConfig
from shardwise.run.datasets import RunData, limit_to_model, open_data, prompt_of, vocab_of
from shardwise.run.device_use import DeviceUse
from shardwise.run.diagnostics import Diagnostics, arithmetic
from shardwise.run.disk_space import check_space, spare_folders
from shardwise.run.loggers import Loggers
from shardwise.run.loss_unit import perplexity_of
from shardwise.run.memory import memory_of, state_bytes
from shardwise.run.metrics import MetricsWriter, Pace, cut_metrics
from shardwise.run.older_weights import keep_older_weights
from shardwise.run.optim import put_on_schedule
from shardwise.run.sample import complete_text, generate, vocabulary, word_share
from shardwise.run.steps import check_steps, epochs_text, steps_left
from shardwise.run.stored_dtype import export_dtype
from shardwise.run.vocabulary import vocabulary_of
from shardwise.state import check_dtypes, save_weights, weights_bytes
from shardwise.step.evaluate import evaluate
from shardwise.step.step import TrainStep
from shardwise.world import World
from shardwise.world.signals import EndOfRun

Emit = Callable[..., None]

SAMPLE_BYTES = 160
SAMPLE_TEMPERATURE = 0.6
ANSWER_TOKENS = 48


def train(config: RunConfig, world: World, emit: Emit) -> dict[str, Any]:
    """Runs the training that ``config`` describes; every rank must call it, with the same config.

    Args:
        config: the configuration of the run.
        world: the open world; it stays open.
        emit: called as ``emit(kind, **fields)`` on rank 0 with the events above.

    Raises:
        ConfigError: before the first step; the disk has no room for what the run will write, or the run that it would
            resume is another one.
        CheckpointError: at the end; weights, the last checkpoint or metrics could not be written. It says what is kept,
            and where.
        Stopped: the run was asked to stop, and has saved.

    Returns:
        the last figures, equal on every rank except for memory: ``loss``, ``val_loss`` (None without validation data),
        ``num_params``, ``steps``, ``num_skipped``.
    """
    emit = emit if world.is_main else _silent
    checkpoints = RunCheckpoints(config, world)
    emit("phase", text="reading the data")
    vocabulary = vocabulary_of(config)
    if str(vocabulary):
        emit("vocabulary", text=str(vocabulary))
    corpus = open_data(
        config.data,
        vocab=vocab_of(config),
        tokenizer=vocabulary.tokenizer,
        say=lambda kind, text: emit(kind, text=text),
    )
    over = ", ".join(world.layout.shared_axes)
    emit("phase", text="building the model" + (f", and trying how it is cut over {over}" if over else ""))
    model = build_model(config, world, corpus)
    if config.model.start is not None and not checkpoints.are_there:
        emit("phase", text="loading weights")
        emit("loaded", text=loaded_text(load_start(config, model)))
    limit_to_model(corpus, model)
    if not checkpoints.are_there:  # a run that goes on has been tried, and its model has no values yet
        check_takes_tokens(config, model)
    set_tokenizer(config, model)
    steps = _num_steps(config, corpus)
    step = make_step(config, model, steps)
    run = _Run(config=config, world=world, corpus=corpus, model=model, step=step, steps=steps, emit=emit)
    run.check_space()
    with arithmetic(config.train, world), contextlib.closing(run):
        with checkpoints.opened(step, run.last, emit):
            run.resume(checkpoints)
            if corpus.records is not None and config.data.pack:
                corpus.records.check_attention(model, functions_of(config).get("forward", call))
            run.open_files()
            run.introduce()
            run.complete("before")
            if not run.done and (corpus.records is not None or not steps):
                run.validate(0)  # what a pretrained model knows already
            run.all_steps(checkpoints)
            checkpoints.settle(is_over=True)
        run.complete("after")
        run.export(checkpoints.unsaved)
    return run.last


def _num_steps(config: RunConfig, corpus: RunData) -> int:
    """Optimizer steps of the run, from its beginning; they are counted for a run of epochs.

    Raises:
        ConfigError: epochs of a dataset that has no length, or what depends on the number of steps does not fit into them.
    """
    if config.train.steps is not None:
        return config.train.steps
    epochs, (num_samples, _) = config.train.epochs, corpus.num_samples
    assert epochs is not None, "RunConfig settles steps where there are no epochs"
    if num_samples is None or is_stream(corpus.train):
        raise ConfigError(
            f"train.epochs={epochs:g} for {corpus.name}",
            why="it is a stream: how many samples an epoch has is known only once it has ended, and the schedule depends on it",
            fix="give train.steps, or a dataset with len() and [i]",
        )
    steps = steps_left(epochs, num_samples, config.data.global_batch)
    check_steps(config, steps)
    return steps


@dataclass(kw_only=True)
class _Run:
    """One training run on one rank: its parts, and a method per stage. ``steps``: the optimizer steps of all of it."""

    config: RunConfig
    world: World
    corpus: RunData
    model: nn.Module
    step: TrainStep
    steps: int
    emit: Emit

    def __post_init__(self) -> None:
        data = self.config.data
        self.folder = Path(self.config.log.dir)
        self.loader = Loader(
            self.corpus.train,
            self.world,
            global_batch=data.global_batch,
            micro_batch=data.micro_batch,
            micro_tokens=data.micro_tokens,
            collate=self.corpus.collate,
            num_workers=data.num_workers,
            prefetch=data.prefetch,
        )
        self.last: dict[str, Any] = {
            "num_params": sum(p.numel() for p in self.model.parameters()),
            "steps": self.steps,
            "val_loss": None,
        }
        self.done = 0  # steps, including those before a resume
        self.metrics: MetricsWriter | None = None
        self.loggers: Loggers | None = None
        self.use = DeviceUse(self.config, self.world)
        self.diagnostics = Diagnostics(
            self.config.train,
            self.world,
            self.folder,
            tell=lambda path: self.emit("trace", path=path),
            trouble=lambda text: self.emit("trouble", text=text),
        )
        self.unwritten: CheckpointError | None = None
        self.callback = Callback(self.config.train.callback)
        self.unlogged: dict[str, Any] | None = None  # figures of the last step, if they are not in the metrics
        self.dtype = self.world.broadcast(
            export_dtype(self.config) if self.world.is_main else None
        )  # of the final weights; None: as they are stored
        self.num_validated = 0  # the step of the last validation

    def tell(self, kind: str, **fields: Any) -> None:
        """Writes a line of metrics and emits the event. A full disk ends the metrics but not the training, whose
        weights are still wanted; the error is raised once they are written."""
        if self.metrics is not None and self.unwritten is None:
            try:
                self.metrics.write(kind=kind, **fields)
            except CheckpointError as error:
                self.unwritten = error
                self.emit("trouble", text=f"{error.given}: {error.why}; training continues, its figures are not kept")
        if self.loggers is not None:
            self.loggers.log({"kind": kind, **fields})
        self.emit(kind, **fields)

    def close(self) -> None:
        """Called at the end, also if that is an error: ends what watches the run."""
        self.diagnostics.close()
        if self.loggers is not None:
            self.loggers.close()

    def check_space(self) -> None:
        """Refuses a run for which the disk has no room, or whose weights cannot be written; all ranks must call it."""
        if self.config.checkpoint.export is not None:
            check_dtypes(self.model)
        problem: ConfigError | None = None
        if self.world.is_main:
            try:
                check_space(self.config, weights_bytes(self.model, self.dtype), self.checkpoint_bytes(), self.steps)
            except ConfigError as error:
                problem = error
        problem = self.world.broadcast(problem)
        if problem is not None:
            raise problem

    def checkpoint_bytes(self) -> int:
        """Estimates the size of a checkpoint in bytes."""
        trained = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        optim = self.config.optim
        # Of an optimizer of the user's own it is not known: as of AdamW.
        moments = (
            2 if optim.build else {"adamw": 2, "sgd": int(optim.momentum > 0), "adafactor": 0, "muon": 2}[optim.name]
        )
        return weights_bytes(self.model) + moments * trained

    def resume(self, checkpoints: RunCheckpoints) -> None:
        """Resumes from the newest checkpoint, if there is one; all ranks must call it."""
        if checkpoints.are_there:
            self.emit("phase", text="resuming")
        self.done = checkpoints.resume(self.loader)
        if not checkpoints.are_there:
            return
        self.count_again()
        steps = self.steps
        self.last["steps"] = max(steps, self.done)
        rest = f"{steps - self.done} of {steps} steps are left" if self.done < steps else f"all {steps} steps are done"
        key = "steps" if self.config.train.epochs is None else "epochs"
        more = "" if self.done < steps else f"; --train.{key}=N continues"
        text = f"from step {self.done} of {checkpoints.folder}: {rest}{more} (--fresh starts from the beginning)"
        changes = f"\nfrom here on: {', '.join(checkpoints.changes)}" if checkpoints.changes else ""
        self.emit("resumed", text=text + changes)
        self.diagnostics.tell_missed(self.done)

    def count_again(self) -> None:
        """Counts the steps of a resumed run of epochs from where it is: what is left of the data, in windows of this run's
        size. Sets the learning rate of the next step."""
        epochs, size = self.config.train.epochs, self.config.data.global_batch
        if epochs is None:
            put_on_schedule(self.step)
            return
        place, num_samples = self.loader.state_dict(), len(self.corpus.train)
        left = steps_left(epochs, num_samples, size, epoch=place["epoch"], position=place["position"])
        self.steps = self.done + left
        put_on_schedule(self.step, self.config.schedule, self.steps)

    def open_files(self) -> None:
        """Writes the resolved configuration and the recipe, and opens the metrics file: those of a resumed run are
        continued, those of another older run moved aside, and its weights kept.

        Called only after all checks: a run that is refused leaves the folder as it was.
        """
        if not self.world.is_main:
            return
        file = self.folder / "config.yaml"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(dump_config(self.config), encoding="utf-8")
            file = self.folder / "recipe.txt"
            file.write_text(describe(self.model), encoding="utf-8")
            file = self.folder / "metrics.jsonl"
            if self.done:
                cut_metrics(file, self.done)
            else:
                with contextlib.suppress(FileNotFoundError):
                    file.replace(self.folder / "metrics.previous.jsonl")
                if (name := self.config.checkpoint.export) is not None:
                    file = self.folder / name
                    self.keep_older(file)
            file = self.folder / "metrics.jsonl"
        except OSError as error:
            raise CheckpointError(
                f"the file {file}",
                why=f"writing failed: {error.strerror or error}",
                fix="free space, or name another folder: --log.dir=PATH",
            ) from error
        self.metrics = MetricsWriter(file)
        self.loggers = Loggers(self.config, self.folder, self.done, lambda text: self.emit("trouble", text=text))

    def keep_older(self, weights: Path) -> None:
        """Keeps the weights of an older run, of which this run does not continue the training, and says where."""
        model, data = self.config.model, self.config.data
        used = {"model.hf": model.hf, "model.weights": model.weights, "data.tokenizer": data.tokenizer}
        place = keep_older_weights(weights, used)
        if place is not None:
            self.emit("older", text=f"the weights of the run before stay in {place}")

    def introduce(self) -> None:
        """Emits the events that describe the data and the model."""
        data, (num_train, num_val) = self.config.data, self.corpus.num_samples
        self.emit(
            "data",
            name=self.corpus.name,
            train_samples=num_train,
            val_samples=num_val,
            tokens_per_step=None if data.build is not None else data.global_batch * data.seq_len,
            report=self.corpus.report,
        )
        if self.corpus.kept:
            self.emit("kept", text=self.corpus.kept)
        self.tell_of_idle_ranks()
        epochs = self.config.train.epochs
        text = "" if epochs is None else epochs_text(epochs, num_train or 0, self.steps)
        self.emit("planned", steps=self.steps, text=text)
        name = type(self.model).__name__ if self.config.model.build or self.config.model.hf else "the reference model"
        recipe = recipe_of(self.model)
        why = next(note.why for note in recipe.notes if note.option == "sharding.engine")
        self.emit("model", name=name, num_params=self.last["num_params"], units=len(recipe.units), why=why)

    def tell_of_idle_ranks(self) -> None:
        """Says so where a step has fewer micro-batches than there are ranks that read data: some compute copies, which count as
        nothing."""
        data, size = self.config.data, self.world.axis("dp").size
        if data.micro_batch is None or (count := data.global_batch // data.micro_batch) >= size:
            return
        fits = max(
            (n for n in range(1, data.micro_batch) if data.global_batch % n == 0 and data.global_batch // n >= size),
            default=0,
        )
        text = f"a step has {count} micro-batch{'es' if count > 1 else ''} for {size} ranks: what {size - count} of them computes does not count"
        better = f"; --data.micro_batch={fits} gives each one" if fits else ""
        self.emit("trouble", text=text + better)

    def complete(self, when: str) -> None:
        """Completes a prompt, the same before and after training; on every rank, since every rank takes part in each
        forward."""
        if when == "before" and self.done:
            return
        if (why := runtime_of(self.model).why_not_called) is not None:
            self.emit("phase", text=f"no prompt is continued {when} training: {why}")
            return
        if self.corpus.records is not None:
            self.answer(self.corpus.records, when)
        if self.corpus.text is None:
            return
        self.emit("phase", text=f"completing a prompt {when} training{self._and_compiling()}")
        prompt = prompt_of(self.corpus)
        text = complete_text(
            self.model,
            prompt,
            SAMPLE_BYTES,
            device=self.world.device,
            context=self.config.data.seq_len,
            temperature=SAMPLE_TEMPERATURE,
            seed=self.config.train.seed,
        )
        if self.metrics is not None:  # rank 0: collecting the words of a long text takes a moment
            share = word_share(text, vocabulary(self.corpus.text))
            self.tell("sample", when=when, prompt=prompt, text=text, word_share=share)

    def answer(self, source: SFTDataset, when: str) -> None:
        """Lets the model answer the first record of ``source``; on every rank."""
        self.emit("phase", text=f"answering a prompt {when} training{self._and_compiling()}")
        ids, prompt, reference = source.question()
        tokens = torch.tensor([ids], device=self.world.device)
        made = generate(self.model, tokens, ANSWER_TOKENS, context=self.config.data.seq_len, stop=source.end)
        text = source.decode(made[0, len(ids) :].tolist())
        self.tell("answer", when=when, prompt=prompt, text=text, reference=reference)

    def all_steps(self, checkpoints: RunCheckpoints) -> None:
        """Runs the optimizer steps that are left, with validation and checkpoints in between; fewer if ``train.callback``
        ends the run."""
        try:
            self.planned_steps(checkpoints)
        except EndOfRun:
            self.end_early(checkpoints)

    def planned_steps(self, checkpoints: RunCheckpoints) -> None:
        """Runs the optimizer steps that are left, over one or more epochs."""
        train, steps = self.config.train, self.steps
        pace, first = Pace(steps, done=self.done), self.done + 1
        self.emit("phase", text=f"training{self._and_compiling()}")
        while self.done < steps:
            for window in self.loader:
                self.diagnostics.begin(self.done + 1)
                lr = self.step.optim.param_groups[0]["lr"]  # after the step the scheduler has set that of the next
                with self.use.counted(self.done + 1 - first):
                    out, self.done = self.step(window), self.done + 1
                done = self.done
                self.diagnostics.end(done)
                pace.step(done, int(out.num_tokens))
                if done == first:
                    self.measure()
                    self.tell_chosen()
                self.report(done, out, pace, lr=lr, is_first=done == first)
                if self.callback(out) and done < steps:
                    self.world.stop.ask_for_end()  # all ranks know of it before the next forward
                if done == steps or (train.eval_every and done % train.eval_every == 0):
                    self.validate(done)
                    pace.pause()
                if self.world.stop.agreed:
                    self.emit("stop", reason=self.world.stop.agreed)
                checkpoints.save(done, is_last=done == steps)
                if done == steps:
                    return

    def end_early(self, checkpoints: RunCheckpoints) -> None:
        """Ends the run after the step that was the last, as after the last of the plan; all ranks must call it."""
        self.world.stop.settle()
        self.last["steps"] = self.done
        self.emit("ended", step=self.done, callback=str(self.callback.name))
        if self.unlogged is not None:
            self.tell("step", **self.unlogged, memory=memory_of(self.model, self.step.optim).as_dict())
        if self.num_validated != self.done:
            self.validate(self.done)
        checkpoints.save(self.done, is_over=True)

    def _and_compiling(self) -> str:
        """What is said of a phase until a step was taken: forwards and the first step compile the blocks, which takes long."""
        return ", after compiling the blocks" if self.config.parallel.compile and "loss" not in self.last else ""

    def report(self, done: int, out: Any, pace: Pace, *, lr: float, is_first: bool) -> None:
        """Reports the result of a step: an event for each, a line of metrics every ``log.every`` steps."""
        figures = {
            "step": done,
            "steps": self.steps,
            "loss": float(out.loss),
            "grad_norm": None if out.grad_norm is None else float(out.grad_norm),
            "lr": lr,
            "tokens": int(out.num_tokens),
            "tokens_per_s": pace.tokens_per_s,
            "data_s": out.data_s,
            **self.use.figures(pace.steps_per_s),
            "seconds_left": pace.seconds_left,
            "skipped": bool(out.skipped),
            "num_skipped": self.step.num_skipped,
            "epoch": self.loader.epoch,
            **({} if out.loss_scale is None else {"loss_scale": out.loss_scale}),
            **{name: float(value) for name, value in (out.metrics or {}).items()},
        }
        self.last["loss"], self.last["num_skipped"] = figures["loss"], figures["num_skipped"]
        if done % self.config.log.every == 0 or is_first or done == self.steps:
            self.tell("step", **figures, memory=memory_of(self.model, self.step.optim).as_dict())
            self.unlogged = None
        else:
            self.emit("step", **figures)
            self.unlogged = figures

    def measure(self) -> None:
        """Reports the memory of every rank, and what one process would need; all ranks must call it."""
        here, alone = state_bytes(self.model, self.step.optim)
        use = memory_of(self.model, self.step.optim)
        rows = self.world.gather({"state": here, "rss": use.rss, "cuda_peak": use.cuda_peak})
        self.tell(
            "memory",
            per_rank=[row["state"] for row in rows],
            one_process=alone,
            rss=[row["rss"] for row in rows],
            cuda_peak=[row["cuda_peak"] for row in rows],
        )

    def tell_chosen(self) -> None:
        """Reports what techniques have chosen in the first step, and adds it to the recipe's file."""
        chosen = {name: text for name, value in runtime_of(self.model).chosen.items() if (text := str(value))}
        for name, text in chosen.items():
            self.tell("chosen", name=name, text=text)
        if chosen and self.world.is_main:
            with contextlib.suppress(OSError):  # it is in the metrics too
                (self.folder / "recipe.txt").write_text(describe(self.model), encoding="utf-8")

    def validate(self, done: int) -> None:
        """Computes and reports the mean loss over all validation tokens."""
        if self.corpus.val is None:
            return
        self.emit("phase", text="validating")
        micro = self.config.data.samples_at_least
        ranks = self.world.axis("dp").size
        val = Loader(
            self.corpus.val,
            self.world,
            global_batch=micro * ranks,
            micro_batch=micro,
            collate=self.corpus.collate,
            shuffle=False,
        )
        figures: Mapping[str, Any] = evaluate(
            self.model, val, **functions_of(self.config), fused=self.config.train.fused
        )
        self.last["val_loss"], self.num_validated = float(figures["loss"]), done
        perplexity = perplexity_of(self.config, self.last["val_loss"])
        more = {} if perplexity is None else {"perplexity": perplexity}
        self.tell("val", step=done, **{name: float(value) for name, value in figures.items()}, **more)
        self.emit("phase", text="training")

    def export(self, unsaved: CheckpointError | None) -> None:
        """Writes the final weights; all ranks must call it. Only then it raises the error of the last checkpoint or of
        the metrics."""
        name = self.config.checkpoint.export
        kept = "no weights were asked for"
        if name is not None:
            self.emit("phase", text="writing the weights")
            try:
                kept = f"the weights are whole, in {save_weights(self.model, self.folder / name, dtype=self.dtype)}"
            except CheckpointError as error:
                raise self.rescue(error) from error
            self.tell("weights", path=str(self.folder / name), dtype=self.dtype or stored_dtype(self.model))
        if self.metrics is not None:
            self.metrics.close()
        unwritten = self.world.broadcast(unsaved or self.unwritten)
        if unwritten is not None:
            raise CheckpointError(unwritten.given, why=f"{unwritten.why}; {kept}", fix=unwritten.fix) from unwritten

    def rescue(self, error: CheckpointError) -> CheckpointError:
        """Writes the weights to another folder if they could not be written where they belong, as they are stored: a value
        may be beyond what the dtype of the export can hold. All ranks must call it.

        Returns:
            the error to raise, with what is kept and where; equal on every rank.
        """
        spare = self.world.broadcast(spare_folders(weights_bytes(self.model)) if self.world.is_main else None)
        saved: Path | None = None
        for folder in spare:
            if saved is None:
                with contextlib.suppress(CheckpointError):  # the first error is the one to report
                    saved = save_weights(self.model, folder)
            if self.world.is_main and (saved is None or saved.parent != folder):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        steps = f"{self.last['steps']} steps"
        if saved is None:
            outcome = f"they could not be written in another place either, so the weights of these {steps} are lost"
            fix = "free space or name a folder on another disk (--log.dir=PATH), raise a limit of file sizes (ulimit -f), and run again"
        else:
            outcome = f"the weights of these {steps} were written to {saved} instead"
            self.emit("weights", path=str(saved), dtype=stored_dtype(self.model))
            place = shlex.quote(str(self.folder / str(self.config.checkpoint.export)))
            fix = f"move them from there: mkdir -p {place} && mv {shlex.quote(str(saved.parent))}/* {place}/"
        return CheckpointError(
            error.given,
            why=f"{error.why}; {outcome}; the metrics are in {self.folder / 'metrics.jsonl'}",
            fix=fix,
            name=error.name,
        )


def stored_dtype(model: nn.Module) -> str:
    """The dtypes of a model's parameters, as words."""
    return " and ".join(sorted({param.storage for param in recipe_of(model).params.values()})) or "no parameters"


def _silent(kind: str, **fields: Any) -> None:
    """The ``emit`` of ranks other than 0: does nothing."""
