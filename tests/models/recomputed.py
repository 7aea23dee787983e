"""Models whose blocks run twice: with dropout, attention, keyword arguments, tuples."""

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.record import Model

_RUNS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class Block(nn.Module):
    """Attention, dropout, keyword arguments, a tuple in and a tuple out; counts its runs."""

    def __init__(self, dim: int):
        super().__init__()
        self.qkv, self.out, self.up = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, dim))

    @property
    def runs(self) -> int:
        """All of them: an attribute of its own would be put back after those that do not count."""
        return _RUNS.get(self, 0)

    @runs.setter
    def runs(self, number: int) -> None:
        _RUNS[self] = number

    def forward(self, x: Tensor, *, mask: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            self.runs += 1
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        q, k = q * rope[0] + rope[1], k * rope[0] + rope[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        x = x + F.dropout(self.out(y), 0.3, self.training)
        y = F.dropout(torch.tanh(self.up(x)) * self.gain.to(x.dtype), 0.2, self.training)
        return x + y, y.square().sum()


class Attentive(nn.Module):
    """Blocks called with keywords; the second list is of experts that some tokens skip, so it is no unit."""

    def __init__(self, dim: int = 8, num_blocks: int = 3):
        super().__init__()
        self.embed = nn.Embedding(13, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, 13)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        rope = (torch.linspace(0.5, 1, length)[:, None].to(x), torch.linspace(-1, 1, length)[:, None].to(x))
        extra = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x, mask=mask, rope=rope)
            extra = extra + more
        x = self.experts[int(input_ids[0, 0]) % 2](x)
        return self.head(x), extra


def build() -> Attentive:
    torch.manual_seed(5)
    return Attentive().double()


class Wide(nn.Module):
    """A block of two linears with tanh between them, as in docs/remat.md."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + F.dropout(self.down(torch.tanh(self.up(x))), 0.2)


class Feed(nn.Module):
    """A block of a norm and two linears with GELU between them: most of what it keeps is cheap to compute again."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2)


class Stack(nn.Module):
    def __init__(self, block=Wide):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODELS = (
    Model(
        name="attentive",
        build=build,
        tags=("own",),
        hard="dropout, keyword arguments and tuples, experts that some batches skip",
    ),
)
