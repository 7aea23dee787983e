"""Eval mode of layers that draw random numbers, for a while; and a warning for training steps of a model in eval mode: dropout and batch norm act differently
there, and torch does not warn."""

import contextlib
import warnings
from collections.abc import Iterator

from torch import nn

from shardwise._torch.modules import BatchNormBase
from shardwise.config.caller import level_of_caller
from shardwise.model import canonical_modules
from shardwise.model.mode import eval_mode


@contextlib.contextmanager
def without_draws(model: nn.Module) -> Iterator[None]:
    """Within: modules of torch that draw random numbers or keep running statistics are in eval mode, and the others in train
    mode, in which they may compute another loss."""
    with eval_mode(model, on=False):
        for module in model.modules():
            module.training = not acts_by_mode(module)
        yield


class EvalMode:
    """Warns once, on the first rank, of training steps in eval mode of a model with modules that depend on the mode.

    Modules that are kept in eval mode on purpose (frozen batch norm) leave the whole model in train mode: no warning.

    Attributes:
        is_meant: True for no warning: the model is in eval mode on purpose, as in a comparison whose two sides must
            draw no random numbers.
    """

    def __init__(self, *, is_main: bool):
        self.is_main, self.is_meant, self._has_warned = is_main, False, False

    def warn_once(self, model: nn.Module) -> None:
        """A ``UserWarning`` at the line that calls the step, the first time that ``model`` is in eval mode."""
        if model.training or self.is_meant or self._has_warned:
            return
        self._has_warned = True
        found = [
            repr(name) if name else "the model itself"
            for name, child in canonical_modules(model)
            if acts_by_mode(child)
        ]
        if found and self.is_main:
            warnings.warn(
                f"a training step of a model in eval mode: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} (dropout, batch "
                "norm) act as in evaluation. Call model.train() first (from_pretrained gives models in eval mode; after model.eval() it stays "
                "so); where it is meant, leave the model in train mode, and call eval() on those modules.",
                stacklevel=level_of_caller(),
            )


_DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def acts_by_mode(module: nn.Module) -> bool:
    """Whether a module of torch computes something else in train mode: active dropout (a dropout layer, of attention
    weights, between the layers of an LSTM), RReLU's random slope, a norm with running statistics."""
    if isinstance(module, _DROPS):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RReLU):
        return module.lower != module.upper
    return isinstance(module, BatchNormBase) and module.track_running_stats
