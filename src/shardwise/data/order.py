"""The order of an epoch's samples, shuffled or drawn by weights, computed for single positions without storing it; and which of
them share a micro-batch where that has a budget of tokens."""

import hashlib
import zlib
from typing import Any

import numpy as np

from shardwise.errors import ConfigError

_ROUNDS = 6


def sample_order(positions: np.ndarray, num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """The samples at ``positions`` of the shuffled order of an epoch; over all positions, a permutation.

    A keyed permutation computed position by position (a Feistel network on the smallest square power of two, walked
    until the value falls inside), so it needs no memory for the rest of the order, and it is defined here rather than
    by a random generator of a library that may change it between versions.

    Args:
        positions: int64 [n], each in ``[0, num_samples)``.
        num_samples: length of the dataset.
        seed: with ``epoch`` the key of the permutation.

    Returns:
        int64 [n], indices into the dataset.
    """
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    out = _permute(positions.astype(np.uint64), half, keys)
    # A value outside is permuted again: each cycle returns inside, and two positions never get the same value.
    while (outside := out >= num_samples).any():
        out[outside] = _permute(out[outside], half, keys)
    return out.astype(np.int64)


class WeightedOrder:
    """Draws with replacement: each position of an epoch is a sample with a chance in proportion to its weight.

    Args:
        weights: float64 [n], not negative, with a sum above 0.
    """

    def __init__(self, weights: np.ndarray):
        self._sums = np.cumsum(weights)
        self.digest = zlib.crc32(weights.tobytes())

    def draws(self, positions: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """The samples at ``positions`` (int64 [k]) of an epoch: int64 [k]; a function of the position and the key alone."""
        key = np.frombuffer(hashlib.blake2b(f"{seed}/{epoch}/weights".encode(), digest_size=8).digest(), "<u8")[0]
        x = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key  # splitmix64 (Steele, Lea, Flood 2014)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        uniform = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        # Right of equal sums: a weight of 0 is never drawn. A product may round up to the whole sum.
        found = np.searchsorted(self._sums, uniform * self._sums[-1], side="right")
        return np.minimum(found, np.searchsorted(self._sums, self._sums[-1])).astype(np.int64)


def _permute(x: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # odd: wraps around modulo 2**64 without collisions
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << bits) | right


# ---- micro-batches by a budget of tokens -----------------------------------------------------------------------------


class TokenBudget:
    """Cuts a window into micro-batches that have at most ``micro_tokens`` positions, padding included.

    The samples of a window are taken from the longest to the shortest, so that those of about one length share a micro-batch and
    little is padded. Which they are follows from the window alone: under every number of ranks the micro-batches are the same.

    Args:
        micro_tokens: positions of a micro-batch, at most: its samples times the longest of them.
        dataset: has ``lengths``, the positions of each sample.

    Raises:
        ConfigError: it has none, or a sample that is longer.
    """

    def __init__(self, micro_tokens: int, dataset: Any):
        if not isinstance(micro_tokens, int) or isinstance(micro_tokens, bool) or micro_tokens < 1:
            raise ConfigError(
                f"micro_tokens={micro_tokens!r}", why="it counts positions", fix="give micro_tokens as an integer >= 1"
            )
        lengths = getattr(dataset, "lengths", None)
        if lengths is None or not hasattr(dataset, "__len__") or len(lengths) != len(dataset):
            raise ConfigError(
                f"micro_tokens={micro_tokens} for a {type(dataset).__name__}",
                why="how many samples fit is found from dataset.lengths, the positions of each sample, which it does not have",
                fix="give the dataset an attribute lengths, with an integer for each sample; or use micro_batch",
            )
        self.micro_tokens, self._lengths = micro_tokens, np.asarray(lengths)
        longest = int(self._lengths.max(initial=0))
        if longest > micro_tokens:
            raise ConfigError(
                f"micro_tokens={micro_tokens} for samples of up to {longest} positions",
                why="a sample would not fit into a micro-batch by itself",
                fix=f"use micro_tokens={longest} or more, or cut the samples off",
            )

    def parts(self, samples: np.ndarray) -> list[np.ndarray]:
        """The samples of a window, by number in the dataset, as places in ``samples``: an array for each micro-batch."""
        lengths = self._lengths[samples]
        order = np.argsort(-lengths, kind="stable")
        found, first = [], 0
        while first < len(order):
            # The first is the longest: of the rest, each takes as many positions.
            stop = first + max(1, self.micro_tokens // max(1, int(lengths[order[first]])))
            found.append(np.sort(order[first:stop]))
            first = stop
        return found
