"""What the loss of a run counts: nats per token, byte or label; and the perplexity. Torch-free."""

import math

from shardwise.config.tokenizer import BYTES_MEANT, is_tokens
from shardwise.run.config import RunConfig


def unit_of(config: RunConfig) -> str:
    """The unit of the loss."""
    data = config.data
    if config.train.loss is not None:
        return "per item counted"
    if data.build is not None:
        return "nats/label"
    return "nats/token" if is_tokens(data.path) or data.tokenizer not in (None, BYTES_MEANT) else "nats/byte"


def perplexity_of(config: RunConfig, loss: float) -> float | None:
    """The perplexity for a loss per token, ``exp(loss)``; None for another loss."""
    if unit_of(config) != "nats/token":
        return None
    return math.exp(loss) if loss < 700 else math.inf
