"""``gathered``: all-gathers a model's parameters temporarily, to read them, to generate text, or to compute
log-probabilities outside of a training step."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from shardwise._torch.fully_shard import gathered_parameters
from shardwise.config.keywords import public_call
from shardwise.errors import UsageError
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.plain_parts import refuse_gathering
from shardwise.state.load_transaction import LoadState


@public_call({"writeback": "leave it out: values are for reading; load_full_state_dict(model, state) writes them"})
@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Within, every parameter of ``model`` is unsharded on every rank, in its compute dtype, and read only. All ranks
    must enter it, and leave it.

    Args:
        model: from ``parallelize``; ``with ... as`` returns it.

    Raises:
        UnsupportedError: a model that is cut over ``tp``.
        UsageError: at the end, if a parameter was written: the shards do not get what is written to the full tensor.
        RankError: a rank does not take part.

    Example:
        >>> with gathered(model):  # doctest: +SKIP
        ...     print(model.head.weight.shape)
    """
    runtime = runtime_of(model)
    runtime.check_values()
    refuse_gathering(runtime)
    runtime.world.agreement.sum({}, "gathered, before it is gathered")
    memory = runtime.memory(LoadState)
    memory.num_gathered += 1
    written: list[str] = []
    try:
        with runtime.engine.whole():
            versions = {name: tensor._version for name, tensor in _whole(runtime).items()}
            yield model
            written = [name for name, tensor in _whole(runtime).items() if tensor._version != versions.get(name)]
    finally:
        memory.num_gathered -= 1
    if written:
        is_cut = bool(runtime.recipe.params[written[0]].cuts)
        raise UsageError(
            "a parameter that was written within sw.gathered(model)",
            why="what is gathered is a copy: the shards of the ranks do not change with it"
            if is_cut
            else "it is for reading; this rank's own parameter was written, and the other ranks' only if they did the same",
            fix="change parameters outside of it, on every rank, or load values with sw.load_full_state_dict(model, state)",
            name=written[0],
        )


def _whole(runtime: Runtime) -> dict[str, Tensor]:
    """Name -> the tensor that forward computes with now."""
    found: dict[str, Tensor] = dict(runtime.parameters)
    names = {id(param): name for name, param in runtime.parameters.items()}
    for module in runtime.module.modules():
        found |= {names[id(shard)]: tensor for tensor, shard in gathered_parameters(module)}
    return found
