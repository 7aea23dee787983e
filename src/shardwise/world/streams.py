"""Random numbers for what a rank has a part of: other ones on each rank along an axis (``tp``, ``cp``), and the same again when a block
is recomputed or a run is resumed.

Ranks with the same samples draw equal numbers, as what they compute is equal. For dropout of a rank's part of activations they
must differ (equal masks would be repeated along the features, or the positions). So for its time the generator is seeded by where it
stands and the rank. Numbers of one process cannot be repeated: there one mask covers all parts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.world.rng import derive_seed


class PartStream:
    """Switches torch's generator of a device to a stream of this rank, and back.

    Args:
        device: on which dropout draws.
        index: of this rank along the axis.
        axis: its name.
        module: nothing in it drops in eval mode, where the generator stays as it is: what else draws has the numbers of one process.
    """

    def __init__(self, device: torch.device, index: int, axis: str, module: nn.Module):
        self._device, self._index, self._axis = device, index, axis
        self._modules = [*module.modules()]
        self._before: Any = None
        self._seed = 0

    @property
    def is_entered(self) -> bool:
        """Whether numbers are drawn from this rank's stream."""
        return self._before is not None

    def enter(self) -> None:
        """From now on numbers are drawn from this rank's stream, if a module is in training mode."""
        self.leave()
        if not any(module.training for module in self._modules):
            return
        generator = self._generator()
        if self._device.type == "cuda":  # whose position can be read and moved without waiting for the device
            offset = generator.get_offset()
            place = (generator.initial_seed(), offset)
            generator.set_offset(offset + 4)  # so that the next place differs, whatever is drawn between
        else:
            place = (int(torch.randint(2**62, (), generator=generator)),)
        self._before, self._seed = generator.get_state(), derive_seed(place[0], self._axis, *place[1:], self._index)
        generator.manual_seed(self._seed)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within: numbers are drawn from this rank's stream."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """From now on numbers are drawn as if this rank's stream had not been used."""
        before, self._before = self._before, None
        # Not if another stream was set since: by an exception, or the end of a block that is recomputed.
        if before is not None and self._generator().initial_seed() == self._seed:
            self._generator().set_state(before)

    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator
