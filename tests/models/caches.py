"""Language models that keep what they have computed in a buffer, and beside it in Python how much of it is filled."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, VOCAB, ROWS = 8, 20, 32


def angles(num: int) -> Tensor:
    return torch.outer(torch.arange(num).double() + 1, 0.3 ** torch.arange(DIM).double())


class Cache(nn.Module):
    """Angles of positions, computed once for the longest sequence so far. ``how`` says what becomes of the buffer."""

    def __init__(self, how: str, persistent: bool) -> None:
        super().__init__()
        self.how, self.persistent = how, persistent
        self.filled = {"rows": [0]}  # deep, as in an object of a library
        if how != "registered":
            dtype = torch.float32 if how == "of another dtype" else torch.float64
            self.register_buffer("table", torch.zeros(4 if how == "grown" else ROWS, DIM, dtype=dtype), persistent)

    def fill(self, num: int) -> None:
        if self.how == "written":
            self.table[:num] = angles(num)
        elif self.how in ("grown", "registered"):
            self.register_buffer("table", angles(num), self.persistent)
        else:  # replaced
            self.table = angles(ROWS)
        self.filled["rows"][0] = num

    def forward(self, x: Tensor) -> Tensor:
        num = x.shape[1]
        if self.how == "registered" and num < 6 and not self.filled["rows"][0]:
            return x * angles(num).cos()
        if num > self.filled["rows"][0]:
            self.fill(num)
        return x * self.table[:num].cos()


class Block(nn.Module):
    def __init__(self, how: str, persistent: bool) -> None:
        super().__init__()
        self.cache, self.up, self.down = Cache(how, persistent), nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.cache(x))))


class CachedLM(nn.Module):
    def __init__(self, how: str, persistent: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList([Block(how, persistent) for _ in range(3)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_cached(how: str, persistent: bool) -> CachedLM:
    torch.manual_seed(0)
    return CachedLM(how, persistent).double()


def texts(number: int, lengths: Sequence[int], weights: Sequence[float] = ()) -> list[dict[str, Tensor]]:
    """The micro-batches of a window, of two sequences each; a weight multiplies the loss of a micro-batch."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for i, length in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (2, length + 1), generator=generator)
        weight = torch.tensor(weights[i] if weights else 1.0, dtype=torch.float64)
        found.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "weight": weight})
    return found


def summed_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum") * batch["weight"]


def by_ids(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"])
