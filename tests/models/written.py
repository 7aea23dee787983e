"""Scripts as their users write them (the folder ``handwritten``), and what each eats."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from models.batches import class_loss, grids, masks, tokens
from models.handwritten.mixture import MoELanguageModel
from models.handwritten.nanogpt import GPT, GPTConfig
from models.handwritten.resnet import ResNet
from models.handwritten.rnn import RNNModel
from models.handwritten.unet import UNet
from models.record import Model


def gpt(width: int = 12) -> nn.Module:
    return GPT(GPTConfig(n_embd=width))


def logits_of_gpt(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """All of them come only with targets, in which -1 marks what is ignored."""
    return model(batch["input_ids"], batch["labels"].clamp(min=-1))[0]


def logits_of_rnn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"])[0]


def _written(
    name: str,
    kind: str,
    build: Callable[[], nn.Module],
    hard: str,
    batch: Any,
    *,
    model: str | None = None,
    **contract: Any,
) -> Model:
    return Model(
        name=name,
        build=build,
        batch=batch,
        kind=kind,
        model=model or build.__name__,
        hard=hard,
        tags=("handwritten", "foreign"),
        **contract,
    )


MODELS = (
    _written(
        "nanogpt",
        "language",
        gpt,
        "tied embeddings, self.apply(self._init_weights), a smaller spread for c_proj, a mask as a buffer",
        tokens,
        model="GPT",
        forward=logits_of_gpt,
    ),
    _written(
        "basic-resnet",
        "image",
        ResNet,
        "batch norm, work in place on what a block returns, the last norm of a block at 0",
        functools.partial(grids, channels=3),
        loss=class_loss,
    ),
    _written(
        "lstm",
        "language",
        RNNModel,
        "flat LSTM weights, a hidden state, a tied decoder",
        tokens,
        forward=logits_of_rnn,
    ),
    _written(
        "plain-unet",
        "image",
        UNet,
        "no list: a name for every level, skips between them",
        masks,
        units=("Down", "Up"),
        loss=class_loss,
    ),
    _written(
        "sparse-moe",
        "language",
        MoELanguageModel,
        "the data decide which experts of a ModuleList run",
        tokens,
    ),
)
