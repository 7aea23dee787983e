"""Models and data of one's own, for `shardwise train`: each run names functions of this file.

shardwise train --model.build=examples/own_data.py:images_model --data.build=examples/own_data.py:images --train.steps=60
shardwise train examples/diffusion.yaml

A dataset is anything with len() and [i], or an iterable; a loss returns the sum over a micro-batch, and count what it runs over.
"""

import torch
from torch import Tensor, nn

__all__ = ["Denoiser", "denoise", "denoising_loss", "images", "images_model", "num_pixels", "points"]


class Images:
    """Small images of five kinds: a bright row in each, with noise."""

    def __init__(self, num: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(5, (num,), generator=draw)
        self.pixels = torch.randn(num, 1, 10, 10, generator=draw) * 0.5
        for i, label in enumerate(self.labels):
            self.pixels[i, 0, 2 * int(label)] += 1.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.pixels[i], self.labels[i]


def images(num: int = 512) -> tuple[Images, Images]:
    """A dataset to train on, and one to validate: pairs of an image and its class."""
    return Images(num, seed=0), Images(num // 4, seed=1)


class VisionTransformer(nn.Module):
    """Patches of two rows, as a sequence."""

    def __init__(self, dim: int = 32, num_blocks: int = 2):
        super().__init__()
        self.patches, self.places = nn.Linear(20, dim), nn.Parameter(torch.randn(5, dim) * 0.5)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True) for _ in range(num_blocks)
        )
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x.flatten(1).unflatten(1, (5, 20))) + self.places
        for block in self.blocks:
            y = block(y)
        return self.head(y.mean(1))


images_model = VisionTransformer


# ---- a diffusion model: forward adds noise, the loss compares what was predicted with it ------------------------------


class Points:
    """Points on a circle."""

    def __init__(self, num: int):
        angles = torch.linspace(0, 6.2, num)
        self.points = torch.stack([angles.cos(), angles.sin()], 1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.points[i]}


def points(num: int = 512) -> Points:
    return Points(num)


class Denoiser(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.layers(torch.cat([x, time], -1))


def denoise(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The noise that the model finds in noisy points, and that which was added: how a step calls the model."""
    x = batch["x"]
    time, noise = torch.rand(len(x), 1, device=x.device, dtype=x.dtype), torch.randn_like(x)
    return model((1 - time) * x + time * noise, time), noise


def denoising_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    found, noise = output
    return (found - noise).square().sum()


def num_pixels(batch: dict[str, Tensor]) -> int:
    return batch["x"].numel()
