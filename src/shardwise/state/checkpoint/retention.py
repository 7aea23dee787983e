"""Decides which checkpoints are kept, and removes the others."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.folders import found_in
from shardwise.errors import CheckpointError, ConfigError
from shardwise.state.checkpoint.saved_run import SavedRun
from shardwise.state.integrity.manifest import Manifest, folder_name, steps_in
from shardwise.world import World
from shardwise.world.collectively import collectively

_REMOVING = ".removing-"


@dataclass(frozen=True)
class RetentionPolicy:
    """The rule for which checkpoints are kept.

    Attributes:
        last: how many of the newest; None: all.
        every: also those whose step is a multiple of it.
        best: also the one with the smallest value of this metric; ``"-NAME"``: with the largest.
    """

    last: int | None
    every: int | None
    best: str | None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.last), ("keep_every", self.every)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value!r}", why="it is a number, 1 or more, or None", fix=f"use {name}=3")
        if self.best is not None and (not isinstance(self.best, str) or not self.best.removeprefix("-")):
            raise ConfigError(f"best={self.best!r}", why="it is the name of a figure", fix='use best="val_loss"')

    def figure(self, metrics: Mapping[str, float], *, is_asked: bool = False) -> float | None:
        """The value by which a checkpoint with ``metrics`` is ranked, the smallest being the best; None: no ranking. ``is_asked``: by a
        signal or by the end of the run, which have none; without one it is kept as the newest."""
        if self.best is None:
            return None
        name = self.best.removeprefix("-")
        if name not in metrics and is_asked:
            return None
        if name not in metrics:
            raise ConfigError(
                f"best={self.best!r} and a save without {name}",
                why=f"it was given {', '.join(metrics) or 'no figures'}",
                fix=f"save(metrics={{{name!r}: value}}), or save_every(n, out, metrics={{{name!r}: value}}) where n divides the step; or let the loss return it",
            )
        try:
            value = float(metrics[name])
        except (TypeError, ValueError):
            raise ConfigError(
                f"best={self.best!r} and a save with {name}={metrics[name]!r:.60}",
                why="checkpoints are ranked by it: it is a number",
                fix=f"save(metrics={{{name!r}: 0.25}})",
            ) from None
        return -value if self.best.startswith("-") else value

    def agreed_figure(self, world: World, metrics: Mapping[str, float], *, is_asked: bool) -> float | None:
        """As :meth:`figure`, the same on all ranks, or an error on all of them. All ranks must call it."""
        if self.best is None:
            return None
        place, name = "a checkpoint, comparing figures", self.best.removeprefix("-")
        figure = collectively(world, place, lambda: self.figure(metrics, is_asked=is_asked))
        everyone = world.agreement.gather(repr(figure), place)
        if len(set(everyone)) > 1:
            raise ConfigError(
                f"best={self.best!r} and a save whose {name} differs between ranks",
                why=f"by rank it is {', '.join(everyone)}: ranks would keep other checkpoints as the best",
                fix=f'give what all ranks share, such as a mean over them: save(metrics={{{name!r}: sw.evaluate(model, loader)["loss"]}})',
            )
        return figure

    def steps_to_remove(self, root: Path, newest: int, figure: float | None) -> list[int]:
        """Steps of the checkpoints below ``root`` to remove, now that the one of ``newest`` is on disk. Only complete
        ones count as kept; incomplete ones are removed once enough newer ones are complete."""
        if self.last is None:
            return []
        kept: set[int] = set()
        num_last = 0
        for step in reversed(steps_in(root)):
            if step <= newest and num_last < self.last:
                kept.add(step)
                with contextlib.suppress(CheckpointError):
                    Manifest.read(root / folder_name(step))
                    num_last += 1
        others = [step for step in steps_in(root) if step < newest and step not in kept]
        best = self._best(root, {} if figure is None else {newest: figure}).values() if others else ()
        others = [step for step in others if step not in best and not (self.every and step % self.every == 0)]
        return [step for step in others if found_in(root / folder_name(step)).keys() <= {"checkpoint"}]

    def former_best(self, root: Path) -> dict[str, int]:
        """Rule -> step of the best checkpoint by it, for each other figure by which checkpoints below ``root`` were ranked: they stay."""
        return {rule: step for rule, step in self._best(root, {}).items() if rule != self.best}

    def _best(self, root: Path, now: Mapping[int, float]) -> dict[str, int]:
        """Rule -> step of the best checkpoint by it; ``now``: the figure of one that is being saved. Figures of the same name are ranked by
        the rule of now; those of another name say nothing of it, and have a best of their own."""
        found = {} if self.best is None else {self.best: dict(now)}
        for step in steps_in(root):
            with contextlib.suppress(CheckpointError), SavedRun(root / folder_name(step)) as saved:
                state = saved.brief()
                value, rule = state.get("figure"), state.get("best", self.best)
                if value is None or rule is None:
                    continue
                if (
                    self.best is not None
                    and rule != self.best
                    and rule.removeprefix("-") == self.best.removeprefix("-")
                ):
                    value, rule = -value, self.best
                found.setdefault(rule, {})[step] = value
        ranked = {
            rule: {s: v for s, v in values.items() if v == v} for rule, values in found.items()
        }  # NaN is never the best
        return {rule: min(values, key=lambda s: (values[s], -s)) for rule, values in ranked.items() if values}


def remove(folder: Path) -> None:
    """Removes a checkpoint: renames it out of the way in one step, then deletes it."""
    away = folder.with_name(f".{folder.name}{_REMOVING}{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # then the next save deletes it
        os.replace(folder, away)
        _clear(away)


def remove_removed(root: Path) -> None:
    """Deletes what a killed removal left."""
    for path in root.glob(f".*{_REMOVING}*"):
        _clear(path)


def _clear(path: Path) -> None:
    if path.is_symlink():  # its target was put elsewhere by the user, and is kept
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def figures_of(out: Any) -> dict[str, float]:
    if out is None:
        return {}
    if not hasattr(out, "loss") or not isinstance(getattr(out, "metrics", None), Mapping):
        raise ConfigError(
            f"save_every(n, {out!r:.60})",
            why="the second argument is what the step returned, of which loss and metrics are taken",
            fix="out = step(window); manager.save_every(100, out); a figure of your own: save_every(100, metrics={'loss': value})",
        )
    return {"loss": out.loss, **out.metrics}


def checked_metrics(metrics: Any) -> Mapping[str, float]:
    """The metrics that a save was given; refused where they are no mapping."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={metrics!r:.60} of a checkpoint",
            why="it maps names of figures to numbers",
            fix="metrics={'val_loss': 0.25}",
        )
    return metrics or {}
