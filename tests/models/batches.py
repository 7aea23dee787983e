"""Micro-batches of unequal size for the models of the tests, and losses that are sums.

Each batch function takes a generator and the number of the micro-batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VOCAB = 19


def tokens(generator: torch.Generator, index: int, batch: int = 2, length: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (batch, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : index % length] = -100  # micro-batch 0 has all its tokens, the next ones fewer and fewer
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def features(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    size = 2 + index % 3
    x = torch.randn(size, 6, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (size,), generator=generator)}


def images(generator: torch.Generator, index: int, side: int = 8) -> dict[str, Tensor]:
    size = 2 + index % 3
    x = torch.randn(size, 3, side, side, generator=generator, dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.randint(0, 5, (size,), generator=generator)}


def pairs(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Source and target sequences for an encoder-decoder."""
    target = tokens(generator, index)
    source = torch.randint(0, VOCAB, (2, 5), generator=generator)
    return {"input_ids": source, "decoder_input_ids": target["input_ids"], "labels": target["labels"]}


def longer(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Sequences longer than a window of 4."""
    return tokens(generator, index, length=9)


def sound(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Waves, and a label for some of their frames."""
    waves = torch.randn(2, 90, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, 21), generator=generator)
    labels[0, : index % 6] = -100
    return {"input_values": waves, "labels": labels}


def speech(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Spectrograms, and what was said."""
    said = tokens(generator, index)
    frames = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    return {"input_features": frames, "decoder_input_ids": said["input_ids"], "labels": said["labels"]}


def captions(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Pictures and texts; the label of a picture is the number of its text."""
    size = 2 + index % 3
    ids = torch.randint(3, VOCAB - 1, (size, 6), generator=generator)
    ids[:, -1] = VOCAB - 1
    pixels = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "labels": torch.arange(size)}


def seen_text(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Texts in which four places stand for the patches of a picture."""
    batch = tokens(generator, index, length=9)
    ids = batch["input_ids"].clamp(max=VOCAB - 2)
    ids[:, :4] = VOCAB - 1
    pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "labels": batch["labels"]}


def seen_turns(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Texts with a picture in each, given as patches and their numbers per side: four of them are one token."""
    batch = tokens(generator, index, length=9)
    ids = batch["input_ids"].clamp(max=VOCAB - 5)
    ids[:, 0], ids[:, 1] = VOCAB - 4, VOCAB - 1
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == VOCAB - 1).long(),
        "pixel_values": torch.randn(8, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "labels": batch["labels"],
    }


def spectrograms(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Frames of 8 mel bands, and a label for some of them."""
    labels = torch.randint(0, VOCAB, (2, 9), generator=generator)
    labels[0, : index % 9] = -100
    return {"x": torch.randn(2, 9, 8, generator=generator, dtype=torch.float64), "labels": labels}


def grids(generator: torch.Generator, index: int, channels: int = 1, side: int = 16) -> dict[str, Tensor]:
    """Pictures under the name ``x``, of any number of channels."""
    size = 2 + index % 3
    x = torch.randn(size, channels, side, side, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (size,), generator=generator)}


def masks(generator: torch.Generator, index: int, side: int = 16) -> dict[str, Tensor]:
    """Pictures with a class for most of their pixels."""
    batch = grids(generator, index, side=side)
    labels = torch.randint(0, 3, (len(batch["x"]), side, side), generator=generator)
    labels[0, : index % 5] = -100
    return {"x": batch["x"], "labels": labels}


def noisy(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Pictures, how far along they are, and the noise in them."""
    x = grids(generator, index, side=8)["x"]
    timesteps = torch.randint(0, 100, (len(x),), generator=generator)
    return {"x": x, "timesteps": timesteps, "labels": torch.randn(x.shape, generator=generator, dtype=torch.float64)}


def graphs(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """One graph of as many nodes and edges as it likes; some nodes have a label."""
    nodes, edges = 10 + index % 4, 24 + 3 * (index % 5)
    labels = torch.randint(0, 5, (nodes,), generator=generator)
    labels[: index % 6] = -100
    return {
        "x": torch.randn(nodes, 8, generator=generator, dtype=torch.float64),
        "edge_index": torch.randint(0, nodes, (2, edges), generator=generator),
        "labels": labels,
    }


def series(generator: torch.Generator, index: int, past: int = 12, future: int = 12) -> dict[str, Tensor]:
    """Four variables over time, and what comes next."""
    size = 2 + index % 3
    wave = torch.randn(size, past + future, 4, generator=generator, dtype=torch.float64).cumsum(1)
    return {"x": wave[:, :past], "labels": wave[:, past:]}


# ---- losses, and what is counted ------------------------------------------------------------------------------------


def class_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


def contrastive_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    rows = F.cross_entropy(output.logits_per_image, batch["labels"], reduction="sum")
    return (rows + F.cross_entropy(output.logits_per_text, batch["labels"], reduction="sum")) / 2


def squared_error(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["labels"], reduction="sum")


def all_values(batch: dict[str, Tensor]) -> int:
    return batch["labels"].numel()
