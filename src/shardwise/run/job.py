"""The training run that each rank of ``shardwise train`` executes, up to the exported weights.

Start reading at :func:`train`: data, model, optimizer, step, a completion before training, the steps, a completion
after, the weights. Every rank runs all of it, because every rank takes part in every forward; only rank 0 writes files
and reports (:mod:`shardwise.run.output`).
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.data.loader import Loader
from shardwise.data.stream import is_stream
from shardwise.errors import ConfigError, UsageError
from shardwise.model.calling import call
from shardwise.parallel import recipe_of, runtime_of
from shardwise.run.build import (
    build_model,
    check_takes_tokens,
    functions_of,
    load_start,
    loaded_text,
    make_callback,
    make_step,
    set_tokenizer,
)
from shardwise.run.checkpoints import RunCheckpoints
from shardwise.run.config import RunConfig
from shardwise.run.datasets import RunData, limit_to_model, open_data, prompt_of, vocab_of
from shardwise.run.device_use import DeviceUse
from shardwise.run.diagnostics import Diagnostics, arithmetic
from shardwise.run.memory import memory_of
from shardwise.run.metrics import Pace, perplexity_of, refuse_taken_names
from shardwise.run.optim import base_rate, put_on_schedule
from shardwise.run.output import RunOutput
from shardwise.run.sample import answer, complete
from shardwise.run.steps import check_steps, steps_left
from shardwise.run.vocabulary import vocabulary_of
from shardwise.step.evaluate import evaluate
from shardwise.step.step import TrainStep
from shardwise.world import World
from shardwise.world.signals import EndOfRun

Emit = Callable[..., None]
_NUM_EMPTY = 10
"""Windows without a valid label, from the start or resume on, after which a run ends with an error: one alone may be by chance."""


def train(config: RunConfig, world: World, emit: Emit) -> dict[str, Any]:
    """Runs the training that ``config`` describes; every rank must call it, with the same config.

    Args:
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
    emit = emit if world.is_main else lambda kind, **fields: None
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
    model = _built(config, world, corpus, checkpoints, emit)
    steps = _num_steps(config, corpus)
    step = make_step(config, model, steps)
    run = _Run(config=config, world=world, corpus=corpus, model=model, step=step, steps=steps, emit=emit)
    run.output.check_space(steps, resumes=checkpoints.are_there)
    with arithmetic(config.train, world), contextlib.closing(run):
        with checkpoints.opened(step, run.last, emit):
            run.resume(checkpoints)
            if corpus.records is not None and config.data.pack:
                num = min(config.data.samples_at_least, 2)  # more cross where two do
                corpus.records.check_attention(model, functions_of(config).get("forward", call), micro_batch=num)
            run.output.open(run.done)
            run.output.introduce(corpus, run.steps)
            run.complete("before")
            if not run.done and (corpus.records is not None or not steps):
                run.validate(0)  # what a pretrained model knows already
            try:
                run.planned_steps(checkpoints)
            except EndOfRun:  # train.callback has ended it
                run.end_early(checkpoints)
            checkpoints.settle(is_over=True)
        run.complete("after")
        run.output.export(checkpoints.unsaved, run.last["steps"])
    return run.last


def _built(config: RunConfig, world: World, corpus: RunData, checkpoints: RunCheckpoints, emit: Emit) -> nn.Module:
    """The model, with its pretrained weights where a checkpoint does not have them."""
    shared = ", ".join(world.layout.shared_axes)
    emit("phase", text="building the model" + (f", and trying how it is cut over {shared}" if shared else ""))
    model = build_model(config, world, corpus)
    if config.model.start is not None and (not checkpoints.are_there or checkpoints.lack_base):
        emit("phase", text="loading weights")
        emit("loaded", text=loaded_text(load_start(config, model)))
    limit_to_model(corpus, model)
    if not checkpoints.are_there:  # a run that goes on has been tried, and its model has no values yet
        check_takes_tokens(config, model)
    set_tokenizer(config, model)
    return model


def _num_steps(config: RunConfig, corpus: RunData) -> int:
    """Optimizer steps of the run, from its beginning; they are counted for a run of epochs."""
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
        self.output = RunOutput(self.config, self.world, self.model, self.emit)
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
            "num_params": sum(param.numbers for param in recipe_of(self.model).params.values()),
            "steps": self.steps,
            "val_loss": None,
        }
        self.done = 0  # steps, including those before a resume
        lengths = None if self.corpus.records is None else self.corpus.train.lengths
        self.use = DeviceUse(self.config, self.world, lengths)
        self.diagnostics = Diagnostics(
            self.config.train,
            self.world,
            self.output.folder,
            tell=lambda path: self.emit("trace", path=path),
            trouble=lambda text: self.emit("trouble", text=text),
        )
        self.callback = make_callback(self.config.train.callback)
        self.unlogged: dict[str, Any] | None = None  # figures of the last step, if they are not in the metrics
        self.num_validated = 0  # the step of the last validation
        self.num_trained_on: float = 0  # valid labels since the start or resume

    def close(self) -> None:
        """Called at the end, also if that is an error: ends what watches the run."""
        self.diagnostics.close()
        self.output.close()

    def resume(self, checkpoints: RunCheckpoints) -> None:
        """Resumes from the newest checkpoint, if there is one; all ranks must call it."""
        if checkpoints.are_there:
            self.emit("phase", text="resuming")
        self.done = checkpoints.resume(self.loader)
        if not checkpoints.are_there:
            return
        self.count_again()
        self.last["steps"] = max(steps := self.steps, self.done)
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

    def complete(self, when: str) -> None:
        """Shows what the model writes, before and after training; on every rank, since every rank takes part in each forward."""
        if when == "before" and self.done:
            return
        if (why := runtime_of(self.model).why_not_called) is not None:
            self.emit("phase", text=f"no prompt is continued {when} training: {why}")
            return
        if self.corpus.records is not None:
            self.emit("phase", text=f"answering a prompt {when} training{self._and_compiling()}")
            self.output.tell("answer", when=when, **answer(self.model, self.corpus.records, self.config.data.seq_len))
        if self.corpus.text is not None:
            self.emit("phase", text=f"completing a prompt {when} training{self._and_compiling()}")
            sample = complete(self.model, self.corpus.text, prompt_of(self.corpus), self.config)
            self.output.tell("sample", when=when, **sample)

    def _and_compiling(self) -> str:
        """What is said of a phase until a step was taken: forwards and the first step compile the blocks, which takes long."""
        return ", after compiling the blocks" if self.config.parallel.compile and "loss" not in self.last else ""

    def planned_steps(self, checkpoints: RunCheckpoints) -> None:
        """Runs the optimizer steps that are left, over one or more epochs, with validation and checkpoints in between."""
        train, steps = self.config.train, self.steps
        pace, first = Pace(steps, done=self.done), self.done + 1
        self.emit("phase", text=f"training{self._and_compiling()}")
        while self.done < steps:
            for window in self.loader:
                self.diagnostics.begin(self.done + 1)
                lr = base_rate(self.config.optim, self.step.optim)  # after the step: that of the next
                with self.use.counted(self.done + 1 - first):
                    out, self.done = self.step(window), self.done + 1
                done = self.done
                self.diagnostics.end(done)
                pace.step(done, int(out.num_tokens))
                if done == first:
                    self.output.tell_memory(self.step.optim)
                    self.output.tell_chosen()
                self.report(done, out, pace, lr=lr, is_first=done == first)
                self.num_trained_on += out.num_tokens
                self.refuse_nothing(done, first)
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
        self.emit("ended", step=self.done, callback=str(self.config.train.callback))
        if self.unlogged is not None:
            self.output.tell("step", **self.unlogged, memory=memory_of(self.model, self.step.optim).as_dict())
        if self.num_validated != self.done:
            self.validate(self.done)
        checkpoints.save(self.done, is_over=True)

    def report(self, done: int, out: Any, pace: Pace, *, lr: float, is_first: bool) -> None:
        """Reports the result of a step: an event for each, a line of metrics every ``log.every`` steps."""
        refuse_taken_names(out.metrics or ())
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
        self.last["num_skipped"] = figures["num_skipped"]
        if out.num_tokens:  # of a window without a valid label there is none
            self.last["loss"] = figures["loss"]
        if done % self.config.log.every == 0 or is_first or done == self.steps:
            self.output.tell("step", **figures, memory=memory_of(self.model, self.step.optim).as_dict())
            self.unlogged = None
        else:
            self.emit("step", **figures)
            self.unlogged = figures

    def refuse_nothing(self, done: int, first: int) -> None:
        """Raises UsageError, on all ranks, if no window had a valid label: of the first ones, or of the whole run."""
        num = done - first + 1
        if not self.num_trained_on and (num == _NUM_EMPTY or done == self.steps == num):
            raise UsageError(
                f"{num} windows of {self.config.data.global_batch} samples without a valid label",
                why="every label is ignored (-100), or every count is 0: nothing was trained",
                fix="look at the labels of the samples, or at what train.loss or train.count counts",
            )

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
        refuse_taken_names(figures.keys() - {"loss", "num_tokens"})
        self.last["val_loss"], self.num_validated = float(figures["loss"]), done
        perplexity = perplexity_of(self.config, self.last["val_loss"])
        more = {} if perplexity is None else {"perplexity": perplexity}
        self.output.tell("val", step=done, **{name: float(value) for name, value in figures.items()}, **more)
        self.emit("phase", text="training")
