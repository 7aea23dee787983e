"""Micro-batches by a budget of tokens: as many samples as fit into so many padded positions."""

from typing import Any

import numpy as np

from shardwise.errors import ConfigError


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
