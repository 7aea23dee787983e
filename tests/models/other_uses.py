"""Models that use what lies between two linear layers in one more way, which no single block or input shows: a rank's part
of it would be taken for the whole."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import VOCAB, tokens
from models.linears import WIDTH, Attention, Decoder, weight_norm
from models.record import Model
from shardwise.step.loss import next_token_loss

HIDDEN = 2 * WIDTH


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.relu(self.up(x))))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


class RunningMean(Mlp):
    """Keeps the mean of its features in a buffer, in training alone, and uses it in the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def between(self, hidden: Tensor) -> Tensor:
        out = hidden - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(hidden.mean(), alpha=0.5)
        return out


class BiasElsewhere(Mlp):
    """The bias of its first layer is added up for its output too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.bias.sum().sigmoid()


class ComputedElsewhere(Mlp):
    """Uses a computed weight in another module than the one that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(WIDTH, HIDDEN)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(F.linear(x, self.up.weight, self.up.bias)))


class ComputedAndRead(Mlp):
    """Multiplies by the norm of a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(WIDTH, HIDDEN)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.norm()


class ComputedOfAnother(Mlp):
    """What a weight is computed from is the weight of another layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(WIDTH, HIDDEN)  # type: ignore[assignment]
        self.other = nn.Linear(WIDTH, HIDDEN)
        self.other.weight = self.up.parametrizations.weight.original1  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x) + self.other(x)))


class _ByAnother(nn.Module):
    """Multiplies a weight by the mean of another layer's."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.other[0].weight.mean()  # type: ignore[operator]


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Computed(Mlp):
    """A first layer whose weight is computed, in ways that leave it whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.other = kind, nn.LayerNorm(WIDTH)
        if kind == "layer":
            self.up = weight_norm(WIDTH, HIDDEN, _Doubled)  # type: ignore[assignment]
        elif kind == "by another":
            nn.utils.parametrize.register_parametrization(self.up, "weight", _ByAnother(self.other))
        elif kind == "bias":
            nn.utils.parametrize.register_parametrization(self.up, "bias", Scaled())
        else:
            self.up = weight_norm(WIDTH, HIDDEN)  # type: ignore[assignment]
        if kind == "bias":
            nn.utils.parametrize.register_parametrization(self.up, "weight", Scaled())
        if kind == "forward":
            self.up.forward = functools.partial(_halved, self.up)
        if kind == "two names":
            self.first = self.up
        if kind == "shared":
            self.scale = Scaled()
            nn.utils.parametrize.register_parametrization(self.up, "weight", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.other(x))
        if self.kind == "looked at":
            y = y * self.up.parametrizations.weight.original0.mean()  # type: ignore[union-attr]
        return y


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.by


def _halved(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x * 0.5, layer.weight) + layer.bias


class HookedBackward(Mlp):
    """The gradient of its last layer's input is divided by its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_hook(lambda module, given, got: (given[0] / (given[0].norm() + 1),))


class HookedAround(Mlp):
    """The same of the outputs of a module around its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(self.up)  # type: ignore[assignment]
        self.up.register_full_backward_pre_hook(lambda module, got: (got[0] / (got[0].norm() + 1),))


class OneBias(Mlp):
    """Its last layer's bias is that of another layer, which gives it a part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.bias = self.down.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(self.other(x))


class Reversed(Mlp):
    """Puts its features into an order that a buffer of integers holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(HIDDEN).flip(0), persistent=False)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.order] * torch.linspace(0.5, 1.5, HIDDEN, dtype=hidden.dtype)


class Rotated(Mlp):
    """Puts its features into an order that a tensor holds which is no buffer; within the parts of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.cat([torch.arange(HIDDEN // 2).roll(1), torch.arange(HIDDEN // 2, HIDDEN).roll(3)])

    def between(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.order]


class Swapped(Mlp):
    """Takes every other feature from the other end, as a buffer of booleans says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_swapped", torch.arange(HIDDEN) % 2 == 0, persistent=False)

    def between(self, hidden: Tensor) -> Tensor:
        return torch.where(self.is_swapped[: hidden.shape[-1]], hidden.flip(-1), hidden)


class OneByOne(Mlp):
    """Calls its first layer, and uses its weight in the same forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)) + F.linear(x * 0.5, self.up.weight))


class TurnedProduct(Mlp):
    """Divides its weight by its largest singular value, which it finds by products with a vector of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        u = torch.ones(weight.shape[0], dtype=weight.dtype)
        for _ in range(2):
            v = F.normalize(weight.T @ u, dim=0)
            u = F.normalize(weight @ v, dim=0)
        return self.down(F.relu(F.linear(x, weight / (u @ weight @ v), self.up.bias)))


class Measured(Mlp):
    """Divides by the number of its features, as its weight has it."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden / self.up.weight.shape[0] ** 0.5


class Counted(Mlp):
    """Divides by the number of its features, as its bias has it."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden / len(self.up.bias)


class MixedBackward(Mlp):
    """Its gradients are divided by their norm over all features."""

    def between(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad / (grad.norm(dim=-1, keepdim=True) + 1e-3))
        return hidden * 1.0


class TrainsElse(Mlp):
    """Normalises over its features in training alone."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden / (1 + hidden.mean(-1, keepdim=True)) if self.training else hidden


class Gated(Mlp):
    """A layer whose outputs every rank needs whole is used in the MLP, and elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)) * gate.sum(-1, keepdim=True).sigmoid())


class GateInSecondHalf(Gated):
    """In the second half of the inputs of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.mix(torch.cat([self.gated(x, gate), gate], -1))


class GateInLoss(Gated):
    """In a factor of the output, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.gated(x, gate)
        return y * (1 + gate.square().mean()) if self.training else y


class PaddedColumns(nn.Module):
    """Features are scaled by a table of one row for each token; the token of padding trains no row."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mlp, self.table = Mlp(), nn.Embedding(VOCAB, HIDDEN, **options)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        hidden = F.relu(self.mlp.up(F.layer_norm(x, (WIDTH,)))) * self.table(input_ids)
        return self.head(F.layer_norm(x + self.mlp.down(hidden), (WIDTH,)))


class Returns(nn.Module):
    """Returns a statistic of its features beside the logits: as an integer, a number, or in an object of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.kind, self.mlp = kind, Mlp()

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        hidden = F.relu(self.mlp.up(F.layer_norm(x, (WIDTH,))))
        logits = self.head(F.layer_norm(x + self.mlp.down(hidden), (WIDTH,)))
        number = {"integer": (hidden > 0.5).sum(), "number": float(hidden.detach().sum()), "object": hidden.mean()}
        return logits, (SimpleNamespace(number=number["object"]) if self.kind == "object" else number[self.kind])


def _with_number(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, number = output
    number = getattr(number, "number", number)
    return next_token_loss(logits, batch) * (1 + 0.01 * number)


class NormElsewhere(nn.Module):
    """The weight of a norm over the queries of all heads scales its output too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Attention(norm="width") for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (WIDTH,))) * block.norm.weight
        return self.head(x)


class LateHalf(nn.Module):
    """In its third block the features of the last rank are treated in another way than those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Numbered(number) for number in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (WIDTH,)))
        return self.head(x)


class Numbered(Mlp):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def between(self, hidden: Tensor) -> Tensor:
        return (
            hidden if self.number < 2 else torch.cat([hidden[..., : HIDDEN // 2], hidden[..., HIDDEN // 2 :] ** 2], -1)
        )


class Scales(Mlp):
    """A number by which a rank's part is multiplied: its gradients on the ranks are parts of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(0.7))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.number


class LastIsElse(nn.Module):
    """Uses what is within its third block once more: the first two show nothing of it. This one adds what lies between the
    block's layers to its output."""

    block: type[Mlp] = Mlp

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x, kept = self.embed(input_ids), []
        for i, block in enumerate(self.blocks):
            y = F.layer_norm(x, (WIDTH,))
            kept.append(block.between(F.relu(block.up(y))))
            x = x + block.down(kept[-1])
            x = self.after_third(x, block) if i == 2 else x
        return self.result(x, kept[2]) if len(kept) > 2 else self.head(x)

    def after_third(self, x: Tensor, block: Mlp) -> Tensor:
        return x

    def result(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.head(x + hidden.mean(-1, keepdim=True))


class LastIsShown(LastIsElse):
    """Scales its logits by what lies between the layers, of which a rank would have a part."""

    def result(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.head(x) * hidden.mean(-1, keepdim=True)


class LastIsRead(LastIsElse):
    """Adds a number that the block uses itself."""

    block = Scales

    def after_third(self, x: Tensor, block: Mlp) -> Tensor:
        return torch.tanh(x + block.number)

    def result(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.head(x)


class LastIsNormed(LastIsRead):
    """Multiplies by the norm of a weight, which has no values while what two blocks show is looked for."""

    block = Mlp

    def after_third(self, x: Tensor, block: Mlp) -> Tensor:
        return x * block.up.weight.norm()


_DECODERS = (
    RunningMean,
    BiasElsewhere,
    ComputedElsewhere,
    ComputedAndRead,
    ComputedOfAnother,
    HookedBackward,
    HookedAround,
    OneBias,
    Reversed,
    Rotated,
    Swapped,
    OneByOne,
    TurnedProduct,
    Measured,
    Counted,
    MixedBackward,
    TrainsElse,
    GateInSecondHalf,
    GateInLoss,
)


def _model(name: str, build: Any, loss: Any = next_token_loss) -> Model:
    return Model(name=f"other uses: {name}", build=build, batch=tokens, loss=loss, tags=("own", "other uses"))


COMPUTED = ("layer", "by another", "bias", "forward", "two names", "shared", "looked at")

MODELS = (
    *(
        _model(f"computed, {kind}", functools.partial(Decoder, mlp=functools.partial(Computed, kind)))
        for kind in COMPUTED
    ),
    *(_model(cls.__name__, functools.partial(Decoder, mlp=cls)) for cls in _DECODERS),
    *(
        _model(cls.__name__, cls)
        for cls in (NormElsewhere, LastIsElse, LastIsShown, LastIsRead, LastIsNormed, LateHalf)
    ),
    _model("padding index", functools.partial(PaddedColumns, padding_idx=3)),
    _model("scaled by frequency", functools.partial(PaddedColumns, scale_grad_by_freq=True)),
    *(
        _model(f"returns {kind}", functools.partial(Returns, kind=kind), _with_number)
        for kind in ("integer", "number", "object")
    ),
)
