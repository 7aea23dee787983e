"""Blocks a model from being used while its weights are loaded, and after a load that failed half way, until a complete
load."""

from collections.abc import Collection, Mapping
from types import TracebackType

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


class LoadTransaction:
    """A context manager for writing a model's tensors; after an exception the model refuses to be used, since some of
    its tensors are old and others new.

    Within, the caller writes the tensors of ``names``. If the model was built for loading (without values), its other
    tensors get their constructor's values.

    Args:
        runtime: of the model.
        local: its ``local_tensors()``.
        names: the ones that the caller writes.
    """

    def __init__(self, runtime: Runtime, local: Mapping[str, Tensor], names: Collection[str]):
        self.runtime, self.names = runtime, set(names)
        self.rest = {name: tensor for name, tensor in local.items() if name not in self.names}

    def __enter__(self) -> None:
        runtime = self.runtime
        memory = runtime.memory(LoadState)
        if runtime.in_window or memory.num_gathered:
            raise UsageError(
                "values loaded in the middle of a window" if runtime.in_window else "values loaded within sw.gathered",
                why="forward has computed with the old ones, and backward would meet the new",
                fix="load before or after it",
            )
        runtime.engine.drop_gathered()
        memory.half_loaded |= self.names
        runtime.withhold(
            UsageError(
                "a model whose weights were not loaded whole",
                why="loading failed after it had begun to write: some tensors are new, others are not",
                fix="load it again; until then it cannot be used",
            )
        )
        if runtime.pending is not None and self.rest:
            runtime.pending.write_rest(runtime, self.rest)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.runtime.memory(LoadState).half_loaded.clear()
            for name in self.names:
                self.runtime.frozen_draws.pop(name, None)
            self.runtime.pending = None
            self.runtime.release()


def refuse_left_half(runtime: Runtime, place: str, names: Collection[str]) -> None:
    """Refuses a load that does not contain all tensors that an earlier load, which failed, had begun to write.

    Args:
        runtime: of the model.
        place: where the weights come from, for messages.
        names: canonical names of the tensors that will be written.

    Raises:
        CheckpointError: some of those tensors are missing.
    """
    left = sorted(runtime.memory(LoadState).half_loaded - set(names))
    if left:
        raise CheckpointError(
            f"weights from {place} without {len(left)} tensors that an earlier load left half written",
            why=f"their values are neither old nor new: {shortened(left)}",
            fix="load weights that hold them",
            name=left[0],
        )
