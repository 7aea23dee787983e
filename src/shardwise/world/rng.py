"""Random numbers that depend on what they are for, not on who draws them.

A stream is named by the run's seed and a place ("init", "blocks.0.weight", 3): the same place gives the same
numbers under every layout and after a resume. Derivation is SHA-256, so places never collide by arithmetic.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive_seed", "forked_rng", "seed_all"]


def derive_seed(seed: int, *place: str | int) -> int:
    """A 63-bit seed for ``place`` in the run of ``seed``."""
    text = "\x1f".join([str(seed), *map(str, place)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def forked_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Within: torch draws from a stream of its own on CPU and ``device``. After: as if nothing had been drawn."""
    cuda = device if device is not None and device.type == "cuda" else None
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state(cuda) if cuda is not None else None
    torch.default_generator.manual_seed(seed)
    if cuda is not None:
        torch.cuda.default_generators[cuda.index or 0].manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if cuda is not None and before_cuda is not None:
            torch.cuda.set_rng_state(before_cuda, cuda)


def seed_all(seed: int, rank: int) -> None:
    """Seeds Python, numpy and torch: rank 0 with ``seed`` itself, so that it draws what one process would; others
    apart from it."""
    own = seed if rank == 0 else derive_seed(seed, "rank", rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
