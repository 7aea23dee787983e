"""What a run writes into its folder and reports: the resolved configuration, metrics, events, and the weights at its end.

A disk that fills up ends what it can end without losing the training: metrics first, and the weights go where there is space.

A run reports *events*, small dicts passed to ``emit``; the process that started the ranks decides how to show them. Events
(``kind`` and its fields): ``phase`` text; ``progress`` (of the phase) text; ``data`` name, train_samples, val_samples,
tokens_per_step, report; ``kept`` text; ``older`` text; ``vocabulary`` text; ``planned`` steps, text; ``model`` name,
num_params, num_trained, units, why; ``adapters`` text; ``adapter`` path; ``loaded`` text; ``resumed`` text; ``saved`` text; ``sample`` when, prompt, text, word_share; ``answer``
when, prompt, text, reference; ``step`` step, steps, loss, grad_norm, lr, tokens_per_s, seconds_left, skipped, num_skipped (so
far), memory, and tflops, mfu, comm_bytes as far as they are known; ``ended`` step, callback; ``memory`` per_rank, one_process,
rss; ``chosen`` name, text; ``val`` step, loss, num_tokens; ``stop`` reason; ``weights`` path, dtype; ``trace`` path;
``trouble`` text.
"""

import contextlib
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.config.folders import free_place
from shardwise.config.render import dump_config
from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.parallel import describe, recipe_of, runtime_of
from shardwise.run.config import RunConfig
from shardwise.run.datasets import RunData
from shardwise.run.disk_space import check_folders, check_space, spare_folders, written_folders
from shardwise.run.loggers import Loggers
from shardwise.run.memory import memory_of, state_bytes
from shardwise.run.metrics import MetricsWriter, cut_metrics
from shardwise.run.older_weights import check_older, keep_older
from shardwise.run.steps import epochs_text
from shardwise.run.stored_dtype import export_dtype
from shardwise.state import check_adapter, check_dtypes, check_packed, save_adapter, save_weights, weights_bytes
from shardwise.state.files import writing
from shardwise.state.left_base import frozen_names
from shardwise.techniques import fold
from shardwise.techniques.lora.rule import lines as adapter_lines
from shardwise.world import World
from shardwise.world.collectively import collectively


class RunOutput:
    """Writes the files of a run and emits its events; all ranks make one, and rank 0 writes.

    Args:
        model: whose weights are written at the end.

    Attributes:
        dtype: of the final weights; None: as they are stored.
    """

    def __init__(self, config: RunConfig, world: World, model: nn.Module, emit: Any):
        self.config, self.world, self.model, self.emit = config, world, model, emit
        self.folder = Path(config.log.dir)
        self.dtype = world.broadcast(export_dtype(config) if world.is_main else None)
        self._metrics: MetricsWriter | None = None
        self._loggers: Loggers | None = None
        self._unwritten: CheckpointError | None = None

    def check_space(self, steps: int, *, resumes: bool) -> None:
        """Refuses a run for which the disk has no room, or whose weights cannot be written; all ranks must call it."""
        sizes = self._check_export()

        def check() -> None:
            check_space(self.config, sizes, self._checkpoint_bytes(), steps)
            check_folders(self.config, self._has_adapters)
            for folder, kind in () if resumes else written_folders(self.config, self._has_adapters).values():
                check_older(folder, kind, self._used)

        collectively(self.world, "looking at the folders of the run", check, on_main=True)

    def _check_export(self) -> dict[str, int]:
        """Refuses what could not be written at the end, before the first step. Returns the bytes of each, by its key in ``checkpoint``."""
        kept, has_adapters, sizes = self.config.checkpoint, self._has_adapters, dict[str, int]()
        for key, path, check in (
            ("export", kept.export, self._export_bytes),
            ("adapter", kept.adapter if has_adapters else None, check_adapter),
            ("base", kept.base, check_packed),
        ):
            try:
                if path is not None:
                    sizes[key] = check(self.model)
            except UnsupportedError as error:
                if has_adapters and self.config.parallel.lora is None:
                    error.fix = f"in this run: --checkpoint.{key}=null; or {error.fix}"
                elif has_adapters:
                    other = "adapters" if key == "export" else "merged weights"
                    error.fix = f"in this run: --checkpoint.{key}=null, and the {other} are written alone"
                raise
        return sizes

    def _export_bytes(self, model: nn.Module) -> int:
        check_dtypes(model)
        return weights_bytes(model, self.dtype)

    @property
    def _has_adapters(self) -> bool:
        """Also those that the model's own code has put there by PEFT."""
        return "lora" in recipe_of(self.model).techniques

    def _checkpoint_bytes(self) -> int:
        trained = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        optim = self.config.optim
        # Of an optimizer of the user's own it is not known: as of AdamW.
        moments = (
            2 if optim.build else {"adamw": 2, "sgd": int(optim.momentum > 0), "adafactor": 0, "muon": 2}[optim.name]
        )
        left = frozen_names(runtime_of(self.model)) if self.config.checkpoint.frozen == "leave" else ()
        return weights_bytes(self.model, form="stored", without=left) + moments * trained

    def open(self, done: int) -> None:
        """Writes the resolved configuration and the recipe, and opens the metrics file: those of a resumed run are
        continued, those of another older run moved aside, and its weights kept.

        Called only after all checks: a run that is refused leaves the folder as it was. ``done``: steps before a resume.
        """
        if not self.world.is_main:
            return
        file = self.folder / "metrics.jsonl"
        with writing(f"the files of the run in {self.folder}", "free space, or name another folder: --log.dir=PATH"):
            self.folder.mkdir(parents=True, exist_ok=True)
            text, config = dump_config(self.config), self.folder / "config.yaml"
            if config.exists() and config.read_bytes() != text.encode():  # it may be what the user wrote
                config.replace(self.folder / "config.previous.yaml")
            config.write_text(text, encoding="utf-8")
            (self.folder / "recipe.txt").write_text(describe(self.model), encoding="utf-8")
            if done:
                cut_metrics(file, done)
            else:
                with contextlib.suppress(FileNotFoundError):
                    file.replace(self.folder / "metrics.previous.jsonl")
                for folder, kind in written_folders(self.config, self._has_adapters).values():
                    if (place := keep_older(folder, kind, self._used)) is not None:
                        what = "adapters" if kind == "adapter" else "weights"
                        self.emit("older", text=f"the {what} of the run before stay in {place}")
        self._metrics = MetricsWriter(file)
        self._loggers = Loggers(self.config, self.folder, done, lambda text: self.emit("trouble", text=text))

    @property
    def _used(self) -> dict[str, str | None]:
        model, data = self.config.model, self.config.data
        found = {f"model.{key}": getattr(model, key) for key in ("hf", "weights", "adapter")}
        return {**found, "data.tokenizer": data.tokenizer}

    def tell(self, kind: str, **fields: Any) -> None:
        """Writes a line of metrics and emits the event. A full disk ends the metrics but not the training, whose
        weights are still wanted; the error is raised once they are written."""
        if self._metrics is not None and self._unwritten is None:
            try:
                self._metrics.write(kind=kind, **fields)
            except CheckpointError as error:
                self._unwritten = error
                self.emit("trouble", text=f"{error.given}: {error.why}; training continues, its figures are not kept")
        if self._loggers is not None:
            self._loggers.log({"kind": kind, **fields})
        self.emit(kind, **fields)

    def introduce(self, corpus: RunData, steps: int) -> None:
        data, (num_train, num_val) = self.config.data, corpus.num_samples
        self.emit(
            "data",
            name=corpus.name,
            train_samples=num_train,
            val_samples=num_val,
            tokens_per_step=None if data.build is not None else data.global_batch * data.seq_len,
            report=corpus.report,
        )
        if corpus.kept:
            self.emit("kept", text=corpus.kept)
        self._tell_of_idle_ranks()
        epochs = self.config.train.epochs
        text = "" if epochs is None else epochs_text(epochs, num_train or 0, steps)
        self.emit("planned", steps=steps, text=text)
        name = type(self.model).__name__ if self.config.model.build or self.config.model.hf else "the reference model"
        recipe = recipe_of(self.model)
        why = next(note.why for note in recipe.notes if note.option == "sharding.engine")
        self.emit(
            "model",
            name=name,
            num_params=sum(param.numbers for param in recipe.params.values()),
            num_trained=sum(param.numbers for param in recipe.params.values() if param.trainable),
            units=len(recipe.units),
            why=why,
        )
        for text in adapter_lines(recipe):
            self.emit("adapters", text=text)

    def _tell_of_idle_ranks(self) -> None:
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

    def tell_memory(self, optim: torch.optim.Optimizer) -> None:
        """Reports the memory of every rank, and what one process would need; all ranks must call it."""
        here, alone = state_bytes(self.model, optim)
        use = memory_of(self.model, optim)
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

    def close(self) -> None:
        """Called at the end, also if that is an error."""
        if self._loggers is not None:
            self._loggers.close()

    def export(self, unsaved: CheckpointError | None, steps: int) -> None:
        """Writes the final weights; all ranks must call it. Only then it raises the error of the last checkpoint or of
        the metrics. ``steps``: those that were done, for errors."""
        name, adapter = self.config.checkpoint.export, self.config.checkpoint.adapter if self._has_adapters else None
        failed, kept = self._export_adapter(steps), "no weights were asked for"
        if adapter is not None and failed is None:
            kept = f"the adapters are whole, in {self.folder / adapter}"
        unsaved = failed or unsaved  # which says where the adapters are
        if name is not None:
            self.emit("phase", text="writing the weights")
            try:
                kept = f"the weights are whole, in {save_weights(self.model, self.folder / name, dtype=self.dtype)}"
            except CheckpointError as error:
                save = functools.partial(save_weights, self.model)
                size = weights_bytes(self.model)
                raise self._rescue(error, steps, self.folder / name, save, size, "weights") from error
            self.tell("weights", path=str(self.folder / name), dtype=self.dtype or stored_dtype(self.model))
        if self._metrics is not None:
            self._metrics.close()
        unwritten = self.world.broadcast(unsaved or self._unwritten)
        if unwritten is not None:
            raise CheckpointError(unwritten.given, why=f"{unwritten.why}; {kept}", fix=unwritten.fix) from unwritten

    def _export_adapter(self, steps: int) -> CheckpointError | None:
        """Writes the adapters of a model that has some, and the base in 4 bits; all ranks must call it. A failure is returned: the merged weights follow,
        if they were asked for."""
        name, base = (self.config.checkpoint.adapter if self._has_adapters else None), self.config.checkpoint.base
        try:
            if name is not None:
                self.emit("phase", text="writing the adapters")
                try:
                    save_adapter(self.model, self.folder / name)
                except CheckpointError as error:
                    if self.config.checkpoint.export is not None:
                        raise
                    save = functools.partial(save_adapter, self.model)
                    return self._rescue(error, steps, self.folder / name, save, check_adapter(self.model), "adapter")
                self.tell("adapter", path=str(self.folder / name))
            if base is not None:
                self.emit("phase", text="writing the base")
                save_weights(self.model, self.folder / base, merge=False, packed=True)
                self.tell("base", path=str(self.folder / base))
        except CheckpointError as error:
            return error
        return None

    def _rescue(
        self, error: CheckpointError, steps: int, dest: Path, save: Callable[[Path], Path], num_bytes: int, kind: str
    ) -> CheckpointError:
        """Writes the weights or adapters to another folder if they could not be written where they belong, as they are stored: a value
        may be beyond what the dtype of the export can hold. All ranks must call it.

        Returns:
            the error to raise, with what is kept and where; equal on every rank.
        """
        what = "adapters" if kind == "adapter" else kind
        spare = self.world.broadcast(spare_folders(num_bytes) if self.world.is_main else None)
        saved: Path | None = None
        for folder in spare:
            if saved is None:
                with contextlib.suppress(CheckpointError):  # the first error is the one to report
                    saved = save(folder)
            if self.world.is_main and (saved is None or saved.parent != folder):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if saved is None:
            outcome = (
                f"they could not be written in another place either, so the {what} of these {steps} steps are lost"
            )
            fix = "free space or name a folder on another disk (--log.dir=PATH), raise a limit of file sizes (ulimit -f), and run again"
        else:
            outcome = f"the {what} of these {steps} steps were written to {saved} instead"
            self.emit(kind, path=str(saved), **({"dtype": stored_dtype(self.model)} if kind == "weights" else {}))
            place = shlex.quote(str(free_place(dest, kind)))
            fix = f"move them from there: mkdir -p {place} && mv {shlex.quote(str(saved.parent))}/* {place}/"
        return CheckpointError(
            error.given,
            why=f"{error.why}; {outcome}; the metrics are in {self.folder / 'metrics.jsonl'}",
            fix=fix,
            name=error.name,
        )


def stored_dtype(model: nn.Module) -> str:
    """The dtypes of a model's parameters without adapters, as words; of packed ones that of their values."""
    recipe = recipe_of(model)
    own = {*fold.own_names(recipe)}
    found = {p.storage if p.codec is None else p.codec.dtype for name, p in recipe.params.items() if name not in own}
    return " and ".join(sorted(found)) or "no parameters"
