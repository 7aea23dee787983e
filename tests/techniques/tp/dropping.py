"""Where a model drops out numbers while its layers are cut, and with which masks."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw

WIDTH, HEADS, HIDDEN, VOCAB = 16, 4, 48, 19


class Block(nn.Module):
    """Dropout before the layers, of the scores, of the MLP's hidden values, and after the layers."""

    def __init__(self, fused: bool, last: float):
        super().__init__()
        self.last = last
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.fused = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), fused

    def forward(self, x):
        h = F.dropout(self.norm(x), 0.25, self.training)
        q, k, v = self.qkv(h).view(*x.shape[:2], 3, -1, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if self.fused:
            h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        else:
            h = F.dropout((q @ k.mT).softmax(-1), 0.3, self.training) @ v
        x = x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.25, self.training)
        y = self.down(F.dropout(F.relu(self.up(x)), 0.5, self.training))
        return x + (F.dropout(y, self.last, self.training) if self.last else y)


class Words(nn.Module):
    def __init__(self, fused: bool = False, last: float = 0.25):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(fused, last) for _ in range(3))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def window(step: int):
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, VOCAB, (2, 8), generator=generator) for _ in range(2)]
    return [{"input_ids": x, "labels": x.roll(-1, 1)} for x in ids]


@contextlib.contextmanager
def masks_noted():
    """Within: notes what each call of dropout keeps, as the shape and the mask."""
    found, plain = [], F.dropout

    def dropout(x, p=0.5, training=True, inplace=False):
        y = plain(torch.ones_like(x), p, training)
        if training:
            found.append((tuple(x.shape), (y != 0).flatten().tolist()))
        return x * y

    F.dropout = dropout
    try:
        yield found
    finally:
        F.dropout = plain


def _frozen():
    """What a block keeps for its backward ends between its layers."""
    model = Words(last=0.0)
    for block in model.blocks:
        block.down.requires_grad_(False)
    return model


def train(layout: str, fused: bool, steps: int = 2, frozen: bool = False, device: str = "cpu", backend=None, **options):
    """Masks of a run, its losses, and its gradients of the last step."""
    with sw.init(layout, device=device, backend=backend, seed=3) as world:
        model = sw.parallelize(_frozen if frozen else lambda: Words(fused), world, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step, grads = sw.TrainStep(model, optim), {}

        def keep(*_):
            whole = {name: param.grad for name, param in model.named_parameters() if "norm" in name}
            grads.update({name: grad.tolist() for name, grad in whole.items()})

        optim.register_step_pre_hook(keep)
        with masks_noted() as masks:
            losses = [step([{k: x.to(device) for k, x in b.items()} for b in window(i)]).loss for i in range(steps)]
        return masks, losses, grads, model.training
