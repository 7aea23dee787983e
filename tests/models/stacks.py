"""Lists of blocks of which the caller says which run, and in what order: layer drop, early exit, text-only batches, experts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.record import Model

WIDTH, CLASSES, BLOCKS = 6, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def step(self, x: Tensor) -> Tensor:
        """Not its forward: nothing tells when it is called but its layers."""
        return x - torch.tanh(self.down(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """A list of blocks, of which a caller says which run."""

    def __init__(self, num: int = BLOCKS) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(num))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.inp(x)
        for i in order:
            x = self.blocks[i](x)
        return self.head(x)


class Albert(Stack):
    """One block that runs many times."""

    def __init__(self) -> None:
        super().__init__(num=1)

    def forward(self, x: Tensor, times: int) -> Tensor:
        return super().forward(x, [0] * times)


class VisionLanguage(nn.Module):
    """A tower that runs only for batches with pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.see, self.inp, self.head = nn.Linear(3, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, pixels: Tensor | None = None) -> Tensor:
        x = self.inp(x)
        if pixels is not None:
            seen = self.see(pixels)
            for block in self.tower:
                seen = block(seen)
            x = x + seen.sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Experts as the outermost list; which of them run depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = self.inp(x)
        y = torch.stack([self.experts[i](x) for i in chosen]).sum(0)
        return self.head(x + y)


class Frozen(nn.Module):
    """A tower that is not trained before blocks that are."""

    def __init__(self, under_no_grad: bool) -> None:
        super().__init__()
        self.under_no_grad = under_no_grad
        self.inp, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.tower = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, skips: int) -> Tensor:
        x = self.inp(x)
        with torch.set_grad_enabled(not self.under_no_grad):
            for i, block in enumerate(self.tower):
                x = x if i == skips else block(x)
        for i, block in enumerate(self.blocks):
            x = x if i == skips else block(x)
        return self.head(x)


class Stepping(Stack):
    """Its blocks are used by another method than forward."""

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.inp(x)
        for i in order:
            x = self.blocks[i].step(x)
        return self.head(x)


class Dropping(Stack):
    """A block is called, and does not use its parameters."""

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x) * (i in order)
        return self.head(x)


class Checkpointed(Stack):
    """The user's own checkpoints, around blocks that are units."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.inp(x)
        for i in order:
            x = checkpoint(self.blocks[i], x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Spans(Checkpointed):
    """Checkpoints of two blocks each."""

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.inp(x)
        for at in range(0, len(order), 2):
            x = checkpoint(self._run, x, order[at : at + 2], use_reentrant=self.use_reentrant)
        return self.head(x)

    def _run(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


class Extra(nn.Module):
    """A block that takes and returns a record, of which the next uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.side = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.block(state["x"])
        return {"x": x, "side": self.side(x)}


class Records(Stack):
    """What its last block computes on the side is used, of the others' nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Extra() for _ in range(BLOCKS))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.inp(x)
        state = {"x": x, "side": x}
        for i in order:
            state = self.blocks[i](state=state)
        return self.head(state["x"] + state["side"])


MODELS = (Model(name="stack", build=Stack, tags=("own",), hard="the caller says which blocks run"),)
