"""Options of LoRA: which layers get an adapter, and of which kind. Torch-free.

>>> LoRA(rank=16, targets="q_proj,v_proj").targets
('q_proj', 'v_proj')
>>> LoRA(rank=16, alpha=32).scale, LoRA(rank=16, alpha=32, rslora=True).scale
(2.0, 8.0)
>>> few = LoRA(rank=16, ranks={"v_proj": 4})
>>> few.rank_of("layers.0.v_proj"), few.rank_of("layers.0.q_proj"), few.scale_of("layers.0.v_proj")
(4, 16, 2.0)
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from shardwise.config.record import Options, doc
from shardwise.config.torch_options import Replacement
from shardwise.errors import ConfigError, PlanError
from shardwise.recipe.patterns import by_name, closeness, names_meant

ALL_LINEAR = "all-linear"


class LoRA(Options, frozen=True, kw_only=True):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): beside each chosen linear layer ``W`` the factors ``A [rank, in]`` and ``B [out,
    rank]`` are trained, ``y = W x + alpha / rank * B A x``, and ``W`` is frozen. Names and numbers are those of PEFT."""

    patterns: ClassVar[frozenset[str]] = frozenset({"targets", "exclude", "train", "experts", "ranks", "alphas"})
    foreign: ClassVar[Mapping[str, str | Replacement]] = {
        "r": Replacement("it is called rank here: {}", "rank=16", "parallel.lora.rank", "16"),
        "lora_alpha": Replacement("it is called alpha here: {}", "alpha=32", "parallel.lora.alpha", "32"),
        "rank_pattern": Replacement(
            "it is called ranks here: {}", 'ranks={"v_proj": 4}', "parallel.lora.ranks", "{v_proj: 4}"
        ),
        "alpha_pattern": Replacement(
            "it is called alphas here: {}", 'alphas={"v_proj": 8}', "parallel.lora.alphas", "{v_proj: 8}"
        ),
        "lora_dropout": Replacement("it is called dropout here: {}", "dropout=0.05", "parallel.lora.dropout", "0.05"),
        "target_modules": Replacement(
            "it is called targets here: {}", 'targets=("q_proj", "v_proj")', "parallel.lora.targets", "[q_proj, v_proj]"
        ),
        "target_parameters": Replacement(
            "it is called experts here: {}",
            'experts=("gate_up_proj", "down_proj")',
            "parallel.lora.experts",
            "[gate_up_proj, down_proj]",
        ),
        "exclude_modules": Replacement(
            "it is called exclude here: {}", 'exclude=("lm_head",)', "parallel.lora.exclude", "[lm_head]"
        ),
        "modules_to_save": Replacement(
            "what is trained in full beside the adapters is called train here: {}",
            'train=("*norm*",)',
            "parallel.lora.train",
            '["*norm*"]',
        ),
        "use_rslora": Replacement("it is called rslora here: {}", "rslora=True", "parallel.lora.rslora", "true"),
        "use_dora": Replacement("it is called dora here: {}", "dora=True", "parallel.lora.dora", "true"),
        "init_lora_weights": Replacement(
            "it is called init here: {}", 'init="default"', "parallel.lora.init", "default"
        ),
        "bias": 'biases are trained by their names: train=("*.bias",)',
        "task_type": "leave it out: the model says what it computes",
        "fan_in_fan_out": "leave it out: the layer's class says it",
    }

    rank: Annotated[Annotated[int, msgspec.Meta(ge=1)], doc("r: rows of A, columns of B")] = 8
    alpha: Annotated[
        float | None, doc("the product is scaled by alpha / rank, or alpha / sqrt(rank) with rslora; null: 2 x rank")
    ] = None
    targets: Annotated[
        str | tuple[str, ...],
        doc(
            "layers with an adapter: all-linear: all linear layers but the head, and the routers of experts; else names, last parts of names, or "
            "patterns of them (*.q_proj), or classes, as a list or with commas"
        ),
    ] = ALL_LINEAR
    exclude: Annotated[
        str | tuple[str, ...], doc("of these targets, those without one: names as in targets, as a list or with commas")
    ] = ()
    dropout: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)], doc("probability with which inputs of A are dropped in training")
    ] = 0.0
    rslora: Annotated[bool, doc("scale by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732)")] = False
    dora: Annotated[
        bool, doc("train the norm of each output's weights too (DoRA, https://arxiv.org/abs/2402.09353)")
    ] = False
    train: Annotated[
        str | tuple[str, ...],
        doc(
            "what is trained in full beside the adapters: names of modules or parameters as in targets, such as *norm* or *.bias"
        ),
    ] = ()
    experts: Annotated[
        str | tuple[str, ...],
        doc(
            "parameters with an adapter that the code of their module multiplies by: experts stacked in one tensor, such as "
            "gate_up_proj,down_proj of Mixtral, or a matrix in no layer; names as in targets"
        ),
    ] = ()
    init: Annotated[
        Literal["default", "gaussian"],
        doc("of A: default: uniform, as nn.Linear; gaussian: normal with a deviation of 1 / rank. B begins at 0"),
    ] = "default"
    ranks: Annotated[
        dict[str, Annotated[int, msgspec.Meta(ge=1)]],
        doc(
            "layers of another rank: {v_proj: 4}; names as in targets, of which the closest counts: a whole name, then the last parts of one, "
            "then a pattern, then a class"
        ),
    ] = msgspec.field(default_factory=dict)
    alphas: Annotated[
        dict[str, float], doc("layers of another alpha: {v_proj: 8}; others: alpha, or 2 x their rank")
    ] = msgspec.field(default_factory=dict)
    name: Annotated[str, doc("the adapter's name in the names of its tensors: LAYER.lora_A.NAME.weight")] = "default"

    def check(self) -> None:
        for key in ("targets", "exclude", "train", "experts"):
            value = getattr(self, key)
            if isinstance(value, str) and (key, value) != ("targets", ALL_LINEAR):
                value = tuple(part.strip() for part in value.split(","))
                msgspec.structs.force_setattr(self, key, value)
            if isinstance(value, tuple) and not (all(value) and (value or key != "targets" or self.experts)):
                raise ConfigError(
                    f"LoRA({key}={list(value)})",
                    why="no name, or an empty one, means no layer",
                    fix='name layers, as targets=("q_proj", "v_proj"), or use targets="all-linear"',
                )
        for alpha in (self.alpha, *self.alphas.values()):
            if alpha is None or (alpha > 0 and math.isfinite(alpha)):
                continue
            raise ConfigError(
                f"LoRA(alpha={alpha})" if alpha == self.alpha else f"LoRA(alphas={self.alphas})",
                why="the adapters' product is scaled by it: with 0 nothing is trained",
                fix="use a positive number: 2 x rank is common",
            )
        if self.experts and (self.dora or self.dropout):
            raise ConfigError(
                f"LoRA(experts={list(self.experts)}, {'dora=True' if self.dora else f'dropout={self.dropout}'})",
                why="W + s B A is made before the inputs are known, of which dropout would take some away"
                if self.dropout
                else "the norms of DoRA are those of the outputs of a layer; PEFT has none for parameters either",
                fix="leave it out, or leave experts= out",
            )
        if not self.name or "." in self.name:
            raise ConfigError(
                f"LoRA(name={self.name!r})",
                why="it is one part of a tensor's name",
                fix='use a name without dots: "default"',
            )

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> "LoRA":
        """The option for the adapters in a directory that :func:`~shardwise.save_adapter` or PEFT has written: make the model with it, then
        :func:`~shardwise.load_adapter`. Its targets are the layers that the file has tensors of.

        Args:
            folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises:
            CheckpointError: it cannot be read.
            UnsupportedError: it has what is not supported here, such as biases of its own.
        """
        from shardwise.techniques.lora.peft_folder import option_in

        return cls(**option_in(Path(folder)))

    @property
    def scale(self) -> float:
        """The factor of the product B A x, of layers that ``ranks`` and ``alphas`` do not mean."""
        return self.alpha_used / self._divisor(self.rank)

    @property
    def alpha_used(self) -> float:
        """``alpha``, or its default."""
        return float(2 * self.rank) if self.alpha is None else self.alpha

    def rank_of(self, name: str) -> int:
        """The rank of a layer's adapter, or of that of a parameter."""
        return self.ranks.get(name) or self._numbers("ranks", {name: ""}).get(name, self.rank)

    def alpha_of(self, name: str) -> float:
        """Its alpha."""
        found = self.alphas.get(name) or self._numbers("alphas", {name: ""}).get(name)
        return float(found or (2 * self.rank_of(name) if self.alpha is None else self.alpha))

    def scale_of(self, name: str) -> float:
        """The factor of its product."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / self._divisor(rank)

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.rslora else rank

    def settled(self, classes: Mapping[str, str]) -> "LoRA":
        """The option with ``ranks`` and ``alphas`` that say the same without the classes, and without the names beside a name.

        Args:
            classes: of what has an adapter, name -> its class with the package; "" of a parameter.

        Raises:
            PlanError: two patterns give a layer different numbers, and neither is closer.
        """
        if not self.ranks and not self.alphas:
            return self
        ranks = {**dict.fromkeys(classes, self.rank), **self._numbers("ranks", classes)}
        alphas = {name: float(2 * rank) if self.alpha is None else self.alpha for name, rank in ranks.items()}
        alphas |= {name: float(alpha) for name, alpha in self._numbers("alphas", classes).items()}
        numbers = {"ranks": by_name(ranks, self.rank), "alphas": by_name(alphas, self.alpha_used)}
        return msgspec.structs.replace(self, alpha=self.alpha_used, **numbers)

    def _numbers(self, key: str, classes: Mapping[str, str]) -> dict[str, Any]:
        """Name -> its number in ``ranks`` or ``alphas``, of those that a pattern there means."""
        values, hits = getattr(self, key), dict[str, list[str]]()
        for pattern in values:
            for name in names_meant(classes, pattern):
                hits.setdefault(name, []).append(pattern)
        return {name: values[_closest(key, values, name, patterns)] for name, patterns in hits.items()}


def _closest(key: str, values: Mapping[str, float], name: str, patterns: Sequence[str]) -> str:
    best = max(closeness(name, pattern) for pattern in patterns)
    first, *others = sorted(pattern for pattern in patterns if closeness(name, pattern) == best)
    if other := next((pattern for pattern in others if values[pattern] != values[first]), None):
        raise PlanError(
            f"LoRA({key}={{{first!r}: {values[first]:g}, {other!r}: {values[other]:g}}})",
            why="both mean this layer, and neither is closer to its name",
            fix=f"add the name itself: {key}={{{name!r}: {values[first]:g}}}",
            name=name,
        )
    return first


def lora_of(value: Any) -> LoRA | None:
    if value is None or isinstance(value, LoRA):
        return value
    raise ConfigError(
        f"lora={value!r}",
        why=f"that is a {type(value).__name__}, and no LoRA record",
        fix=f"write lora=sw.LoRA(rank={value if isinstance(value, int) and not isinstance(value, bool) else 16}), or leave it out",
    )
