"""Models whose embeddings and heads are used in the ways that decide whether they can be cut by tokens."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import VOCAB, tokens
from models.linears import WIDTH, Block
from models.record import Model


class Decoder(nn.Module):
    """``tied``: head and embedding have one weight; ``bias``: of the head; ``padding_idx``: of the embedding."""

    def __init__(self, tied: bool = False, bias: bool = False, padding_idx: int | None = None):
        super().__init__()
        self.embed, self.block = self.embedding(padding_idx), Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def embedding(self, padding_idx: int | None) -> nn.Module:
        return nn.Embedding(VOCAB, WIDTH, padding_idx=padding_idx)

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.block(self.embed(input_ids)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids))


class ScaledEmbedding(nn.Embedding):
    """Its own forward, as Gemma has it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * WIDTH**0.5


class Scaled(Decoder):
    def embedding(self, padding_idx: int | None) -> nn.Module:
        return ScaledEmbedding(VOCAB, WIDTH, padding_idx=padding_idx)


class ByFrequency(Decoder):
    """Gradients are divided by how often a token is in the batch."""

    def embedding(self, padding_idx: int | None) -> nn.Module:
        return nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)


class WithoutHead(Decoder):
    """Its code multiplies by the weight of the embedding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.linear(self.hidden(input_ids), self.embed.weight)


class Penalised(Decoder):
    """The size of the rows is in the output."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (1 + self.embed.weight.norm() * 0.01)


class Measured(Decoder):
    """Logits are divided by the number of tokens, as the head's weight has it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) / self.head.weight.shape[0] ** 0.5


class BiasRead(Decoder):
    """The head's bias is in the output once more."""

    def __init__(self) -> None:
        super().__init__(bias=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (1 + self.head.bias.sum() * 0.01)


class TwoHeads(Decoder):
    """Logits of two tokens at once, which are added up."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.second = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.hidden(input_ids)
        return self.head(x) + self.second(x).roll(1, 1)


class Turned(Decoder):
    """A head whose weight lies the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, VOCAB) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Looped(Decoder):
    """The embedding is looked up twice, and the head called twice."""

    def forward(self, input_ids: Tensor) -> Tensor:
        first = super().forward(input_ids)
        return first + super().forward(first.argmax(-1).detach() % VOCAB)


def _model(name: str, build) -> Model:
    return Model(name=f"vocabularies: {name}", build=build, batch=tokens, tags=("own", "vocabularies"))


MODELS = (
    _model("untied", Decoder),
    _model("tied", functools.partial(Decoder, tied=True)),
    _model("tied, with a bias", functools.partial(Decoder, tied=True, bias=True)),
    _model("padding on the first rank", functools.partial(Decoder, padding_idx=2)),
    _model("padding on the last rank", functools.partial(Decoder, tied=True, padding_idx=-1)),
    *(
        _model(cls.__name__, cls)
        for cls in (Scaled, ByFrequency, WithoutHead, Penalised, Measured, BiasRead, TwoHeads, Turned, Looped)
    ),
)
