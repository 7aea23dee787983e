"""Blocks a model from being used while its weights are loaded, and after a load that failed half way, until a complete
load."""

import contextlib
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from shardwise.errors import CheckpointError, UsageError
from shardwise.parallel import Runtime
from shardwise.state.report import shortened


class LoadState:
    """What loads keep of a model.

    Attributes:
        half_loaded: names of tensors that a failed load had begun to write.
        num_gathered: number of open ``sw.gathered`` contexts, within which nothing is loaded.
    """

    def __init__(self) -> None:
        self.half_loaded: set[str] = set()
        self.num_gathered = 0


@contextlib.contextmanager
def load_transaction(runtime: Runtime, local: Mapping[str, Tensor], names: Collection[str]) -> Iterator[None]:
    """Within, the caller writes the tensors of ``names``; after an exception the model refuses to be used, since some of its tensors are
    old and others new. If it was built for loading (without values), its other tensors get their constructor's values. ``local``: its
    ``local_tensors()``."""
    memory = runtime.memory(LoadState)
    if runtime.in_window or memory.num_gathered:
        raise UsageError(
            "values loaded in the middle of a window" if runtime.in_window else "values loaded within sw.gathered",
            why="forward has computed with the old ones, and backward would meet the new",
            fix="load before or after it",
        )
    runtime.engine.drop_gathered()
    memory.half_loaded |= set(names)
    runtime.withhold(
        UsageError(
            "a model whose weights were not loaded whole",
            why="loading failed after it had begun to write: some tensors are new, others are not",
            fix="load it again; until then it cannot be used",
        )
    )
    rest = {name: tensor for name, tensor in local.items() if name not in set(names)}
    if runtime.pending is not None and rest:
        runtime.pending.write_rest(runtime, rest)
    yield
    memory.half_loaded.clear()
    for name in names:
        runtime.frozen_draws.pop(name, None)
    runtime.pending = None
    runtime.release()


def refuse_left_half(runtime: Runtime, place: str, names: Collection[str]) -> None:
    """Refuses a load that does not contain all tensors that an earlier load, which failed, had begun to write.

    Args:
        names: canonical names of the tensors that will be written.
    """
    left = sorted(runtime.memory(LoadState).half_loaded - set(names))
    if left:
        raise CheckpointError(
            f"weights from {place} without {len(left)} tensors that an earlier load left half written",
            why=f"their values are neither old nor new: {shortened(left)}",
            fix="load weights that hold them",
            name=left[0],
        )
