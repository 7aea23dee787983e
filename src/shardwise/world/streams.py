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
from torch import Tensor, nn

from shardwise.world.rng import derive_seed


class PartStream:
    """Switches torch's generator of a device to a stream of this rank, and back.

    Args:
        device: on which dropout draws.
        index: of this rank along the axis.
        axis: its name.
        module: in eval mode mostly nothing in it drops: then the generator is put back as it was, and what else draws has the numbers of one
            process.
    """

    def __init__(self, device: torch.device, index: int, axis: str, module: nn.Module):
        self._device, self._index, self._axis = device, index, axis
        self._modules = [*module.modules()]
        self._before: Any = None
        self._unused: tuple[Tensor, Tensor] | None = (
            None  # the states before, and in the stream, where it may be left unused
        )
        self._seed = 0

    @property
    def is_entered(self) -> bool:
        """Whether numbers are drawn from this rank's stream."""
        return self._before is not None

    def enter(self, *, is_used: bool = False) -> None:
        """From now on numbers are drawn from this rank's stream. ``is_used``: some are for sure, if this rank has anything to drop; else, in eval
        mode, it is as if it had not been entered where none was drawn."""
        self.leave()
        generator = self._generator()
        may_be_unused = not is_used and not any(module.training for module in self._modules)
        outside = generator.get_state() if may_be_unused else None
        if self._device.type == "cuda":  # whose position can be read and moved without waiting for the device
            offset = generator.get_offset()
            place = (generator.initial_seed(), offset)
            generator.set_offset(offset + 4)  # so that the next place differs, whatever is drawn between
        else:
            place = (int(torch.randint(2**62, (), generator=generator)),)
        self._before, self._seed = generator.get_state(), derive_seed(place[0], self._axis, *place[1:], self._index)
        generator.manual_seed(self._seed)
        self._unused = None if outside is None else (outside, generator.get_state())

    @contextlib.contextmanager
    def entered(self, *, is_used: bool = False) -> Iterator[None]:
        """Within: numbers are drawn from this rank's stream."""
        self.enter(is_used=is_used)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """From now on numbers are drawn as if this rank's stream had not been used."""
        before, self._before = self._before, None
        unused, self._unused = self._unused, None
        # Not if another stream was set since: by an exception, or the end of a block that is recomputed.
        if before is not None and self._generator().initial_seed() == self._seed:
            is_unused = unused is not None and torch.equal(self._generator().get_state(), unused[1])
            self._generator().set_state(unused[0] if unused is not None and is_unused else before)

    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator
