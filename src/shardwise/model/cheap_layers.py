"""Layers without weights: what takes the place of one, where only which rows its outputs come from counts."""

import functools
import zlib

import torch
from torch import Tensor

from shardwise.model.layers import Layer


def cheap(layer: Layer, x: Tensor, num_outputs: int) -> Tensor:
    """A fixed function of each row with as many outputs as a layer has: the sum of two inputs, with factors, for each; of an embedding, a
    sine of the index."""
    if layer.is_embedding:
        generator = torch.Generator().manual_seed(zlib.crc32(layer.weight.encode()))
        drawn = torch.rand(num_outputs, generator=generator, dtype=torch.float64) * 3
        result = torch.sin((x[..., None] + 1) * drawn)
    else:
        at, factors = _of_layer(layer.weight, x.shape[-1], num_outputs)
        if factors.dim() == 3:  # as often as needed, in one new tensor: new memory is what takes time
            sums = (x[..., None, :] * factors[0]).addcmul_(x[..., None, at[0]], factors[1])
            result = sums.flatten(-2)[..., :num_outputs]
        else:
            result = x[..., at[0]] * factors[0] + x[..., at[1]] * factors[1]
    if result.requires_grad or not torch.is_grad_enabled():
        return result
    return result.requires_grad_().clone()  # as of a weight that is trained


@functools.lru_cache(maxsize=64)
def _of_layer(weight: str, num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor]:
    """Two inputs, and their factors, for each output of a layer; of one with more outputs than inputs all inputs, beside another one each,
    as often as it takes."""
    generator = torch.Generator().manual_seed(zlib.crc32(weight.encode()))
    if num_outputs <= num_inputs:
        at = torch.randint(0, num_inputs, (2, num_outputs), generator=generator)
        return at, torch.randn(2, num_outputs, generator=generator, dtype=torch.float64).sign() * 0.7
    at = torch.randperm(num_inputs, generator=generator)[None]
    sizes = 2, -(-num_outputs // num_inputs), num_inputs
    signs = torch.randn(sizes, generator=generator, dtype=torch.float64).sign()
    return at, signs * (torch.rand(sizes, generator=generator, dtype=torch.float64) * 0.4 + 0.5)
