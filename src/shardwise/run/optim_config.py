"""The sections ``optim``, ``schedule`` and ``train.scaler`` of the configuration of ``shardwise train``: which optimizer changes
which parameters, and with which learning rates. Torch-free."""

from typing import Annotated, Any, Literal

import msgspec

from shardwise.config.limits import AboveOne, AboveZero, BelowOne, Count, Fraction, NotNegative, Positive, Shrink
from shardwise.config.record import Options, default_of, doc
from shardwise.config.target import check_build
from shardwise.errors import ConfigError

_FROM_SCRATCH, _FINE_TUNING, _ADAPTERS, _DECAY = 3e-3, 2e-5, 2e-4, 0.1
_OF_OPTIMIZERS = {"betas": ("adamw", "muon"), "momentum": ("sgd",), "fused": ("adamw", "sgd", "muon")}
"""Settings that not every optimizer has."""


class Group(Options, frozen=True, kw_only=True):
    """What the optimizer does otherwise with some parameters: a value of ``optim.groups``."""

    lr: Annotated[AboveZero | None, doc("their learning rate at its highest; null: optim.lr")] = None
    lr_scale: Annotated[AboveZero | None, doc("their learning rate, as a multiple of optim.lr")] = None
    weight_decay: Annotated[NotNegative | None, doc("their weight decay; null: optim.weight_decay")] = None

    def check(self) -> None:
        if self.lr is not None and self.lr_scale is not None:
            raise ConfigError(
                f"optim.groups: lr={self.lr} with lr_scale={self.lr_scale}",
                why="each of them says what the learning rate is",
                fix="remove one",
            )
        if (self.lr, self.lr_scale, self.weight_decay) == (None, None, None):
            raise ConfigError(
                "optim.groups: a pattern without settings",
                why="it says nothing of these parameters, so it would have no effect",
                fix="give it lr, lr_scale or weight_decay; to keep parameters as they are: model.freeze",
            )


class Optim(Options, frozen=True, kw_only=True):
    """Section ``optim``: the optimizer and its settings."""

    name: Annotated[
        Literal["adamw", "sgd", "adafactor", "muon"],
        doc("adafactor: no state as large as the parameters; muon: matrices between layers, adamw for the rest"),
    ] = "adamw"
    build: Annotated[
        str | None, doc("pkg.mod:fn, a class or function of parameter groups, as torch.optim:NAdam; null: name")
    ] = None
    args: Annotated[dict[str, Any], doc("keyword arguments of build")] = msgspec.field(default_factory=dict)
    lr: Annotated[
        AboveZero | None,
        doc("the highest; null: 3e-3, 2e-5 with model.hf, 2e-4 with parallel.lora; with build: its own"),
    ] = None
    betas: Annotated[tuple[BelowOne, BelowOne], doc("decay of the two running means (adamw)")] = (0.9, 0.95)
    weight_decay: Annotated[NotNegative | None, doc("weight decay; null: 0.1; with build: that of its own")] = None
    decay_on: Annotated[
        Literal["all", "matrices", "names"],
        doc(
            "what weight decay is for; matrices: parameters of two dims and more, so neither biases nor norms; names: as "
            "transformers' Trainer, all but those of nn.LayerNorm and those with bias or a norm in their name"
        ),
    ] = "all"
    groups: Annotated[
        dict[str, dict[str, Any]],
        doc("pattern of names (lm_head.*, *.bias) -> {lr or lr_scale, weight_decay}; the first that matches holds"),
    ] = msgspec.field(default_factory=dict)
    momentum: Annotated[BelowOne, doc("momentum (sgd)")] = 0.9
    fused: Annotated[bool | None, doc("torch's fused kernel; null: where the device has it")] = None

    def check(self) -> None:
        self._check_build()
        for key, names in _OF_OPTIMIZERS.items():
            if self.build is None and self.name not in names and getattr(self, key) != default_of(Optim, key):
                raise ConfigError(
                    f"optim.{key}={getattr(self, key)} with optim.name={self.name!r}",
                    why=f"{self.name} has no {key}, so it would have no effect",
                    fix=f"remove {key}, or use name={names[0]}",
                )

        for pattern, given in self.groups.items():
            try:
                Group(**given)
            except ConfigError as error:
                error.given = f"optim.groups[{pattern!r}]: {error.given}"
                raise

    def _check_build(self) -> None:
        if not check_build("optim", self.build, self.args, "; such as torch.optim:NAdam"):
            return
        for key in ("name", *_OF_OPTIMIZERS):
            if getattr(self, key) != default_of(Optim, key):
                raise ConfigError(
                    f"optim.{key}={getattr(self, key)} with optim.build={self.build!r}",
                    why="it is of the optimizers that optim.name names, so it would have no effect",
                    fix=f"remove optim.{key}" + ("" if key == "name" else f", or pass it: optim.args={{{key}: ...}}"),
                )
        for key in ("lr", "weight_decay"):
            if key in self.args:
                raise ConfigError(
                    f"optim.args={self.args}: {key}",
                    why=f"the {'schedule' if key == 'lr' else 'group'} of each parameter is made from optim.{key}",
                    fix=f"give it as optim.{key}",
                )
        scaled = next((pattern for pattern, given in self.groups.items() if "lr_scale" in given), None)
        if self.lr is None and scaled is not None:
            raise ConfigError(
                f"optim.groups[{scaled!r}]: lr_scale, without optim.lr",
                why="with optim.build the learning rate is that of its own, which is not known",
                fix="give optim.lr",
            )

    def settled_lr(self, *, is_pretrained: bool, has_adapters: bool = False) -> float | None:
        """The learning rate, also where it is not given; None: that of the optimizer ``build``."""
        if self.lr is not None or self.build is not None:
            return self.lr
        return _ADAPTERS if has_adapters else _FINE_TUNING if is_pretrained else _FROM_SCRATCH

    @property
    def settled_decay(self) -> float | None:
        """The weight decay, also where it is not given; None: that of the optimizer ``build``."""
        return _DECAY if self.weight_decay is None and self.build is None else self.weight_decay


class Schedule(Options, frozen=True, kw_only=True):
    """Section ``schedule``: the learning rate schedule."""

    name: Annotated[
        Literal["cosine", "linear", "constant", "wsd"],
        doc("after warm-up: a cosine or a line down to the floor, constant, or wsd: constant, then a line at the end"),
    ] = "cosine"
    warmup_steps: Annotated[Count | None, doc("steps of linear rise from 0; null: a tenth of the run, at most 50")] = (
        None
    )
    warmup_ratio: Annotated[Fraction | None, doc("the same as a part of the run")] = None
    min_lr_ratio: Annotated[Fraction, doc("floor, as a part of optim.lr")] = 0.1
    decay_ratio: Annotated[Fraction, doc("with wsd: the part of the run, at its end, in which the rate goes down")] = (
        0.2
    )
    build: Annotated[
        str | None, doc("pkg.mod:fn, (done, steps, **args) -> part of optim.lr after done of steps; null: name")
    ] = None
    args: Annotated[dict[str, Any], doc("keyword arguments of build; steps: length of the curve, if not the run's")] = (
        msgspec.field(default_factory=dict)
    )

    def check(self) -> None:
        self._check_build()
        for key, names in (("min_lr_ratio", ("cosine", "linear", "wsd")), ("decay_ratio", ("wsd",))):
            if self.name not in names and getattr(self, key) != default_of(Schedule, key):
                raise ConfigError(
                    f"schedule.{key}={getattr(self, key)} with schedule.name={self.name!r}",
                    why=f"{'a constant rate has no floor' if self.name == 'constant' else 'it goes down until the end'}, so it would have no effect"
                    if key == "decay_ratio" or self.name == "constant"
                    else "it would have no effect",
                    fix=f"remove {key}, or use name={names[0]}",
                )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps} with schedule.warmup_ratio={self.warmup_ratio}",
                why="each of them says how long the learning rate rises",
                fix="remove one",
            )

    def _check_build(self) -> None:
        if not check_build("schedule", self.build, self.args, "; a function of your own"):
            return
        for key in ("name", "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio"):
            if getattr(self, key) != default_of(Schedule, key):
                raise ConfigError(
                    f"schedule.{key}={getattr(self, key)} with schedule.build={self.build!r}",
                    why="the function says the whole curve, so it would have no effect",
                    fix=f"remove schedule.{key}, or pass what it says: schedule.args={{...}}",
                )
        if "done" in self.args:
            raise ConfigError(
                f"schedule.args={self.args}: done",
                why="it is the number of steps done before, which the run gives",
                fix="leave done out; steps may be given, where the curve is of another length than the run",
            )

    def settled_warmup(self, num_steps: int) -> int:
        """Steps of warm-up in a run of ``num_steps``, also where they are not given; 0 where a function of the user says the curve."""
        if self.build is not None:
            return 0
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * num_steps)
        return min(50, num_steps // 10) if self.warmup_steps is None else self.warmup_steps


class Scaler(Options, frozen=True, kw_only=True):
    """Section ``train.scaler``: loss scaling for float16, with the argument names of ``torch.amp.GradScaler``."""

    init_scale: Annotated[AboveZero, doc("what the loss is multiplied by at first")] = 65536.0
    growth_factor: Annotated[
        AboveOne, doc("the scale grows by this after growth_interval steps that overflow nowhere")
    ] = 2.0
    backoff_factor: Annotated[
        Shrink, doc("the scale is multiplied by this after a step that overflowed, which is skipped")
    ] = 0.5
    growth_interval: Annotated[Positive, doc("steps without overflow before the scale grows")] = 2000
