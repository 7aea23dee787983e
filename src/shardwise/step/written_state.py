"""What the first windows' forwards write besides gradients, for ``describe``: buffers with their policies, and plain numbers, which count
a rank's own forwards only."""

import warnings

from shardwise.config.suggest import first_few
from shardwise.model.module_state import plain_numbers
from shardwise.model.tensors import change_marks
from shardwise.parallel import Runtime

__all__ = ["WrittenState", "written_state"]

_NUM_WINDOWS = 2  # what a hook after the step writes shows in the second
_MEANING = {
    "equal": "equal on all ranks",
    "sum": "the sum of what the data ranks add",
    "mean": "the mean of the ranks",
    "min": "the least of all ranks",
    "max": "the largest of all ranks",
    "rank0": "those of rank 0",
    "own": "each rank's own; a checkpoint has rank 0's",
    None: "each rank's own, in no checkpoint",
}


def written_state(runtime: Runtime) -> "WrittenState | None":
    """Takes what the first windows of a process begin with, once; None: they are over."""
    if "buffers" not in runtime.chosen:
        runtime.chosen["buffers"] = WrittenState(runtime)
    state = runtime.chosen["buffers"]
    return state if isinstance(state, WrittenState) and state.num_windows < _NUM_WINDOWS else None


class WrittenState:
    """The buffers and numbers of a model before its first window, and after it. As text: the buffers that have changed."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.num_windows = 0
        self._before = self._after = _Buffers(runtime)
        self._numbers = {prefix: plain_numbers(module) for prefix, module in runtime.modules}

    def end(self) -> None:
        """Called when a window has ended. Names the numbers that the first has changed."""
        self._after = _Buffers(self._runtime)
        self.num_windows += 1
        if self.num_windows == 1:
            self._name_numbers()
            self._numbers = {}

    def __str__(self) -> str:
        runtime, groups = self._runtime, dict[str | None, list[str]]()
        persistent = {n for name, b in runtime.recipe.buffers.items() if b.persistent for n in (name, *b.aliases)}
        for name in self._after.changed_since(self._before):
            word = runtime.buffer_policies.get(name, "own")
            groups.setdefault(None if word == "own" and name not in persistent else word, []).append(name)
        told = [f"{first_few(names)} ({_MEANING[word]})" for word, names in groups.items()]
        return f"written in the first windows: {'; '.join(told)}" if told else ""

    def _name_numbers(self) -> None:
        runtime = self._runtime
        caches = self._after.homes_of_new(self._before, runtime)
        found = [
            f"{prefix}.{path}" if prefix else path
            for prefix, module in runtime.modules
            if prefix not in caches  # how much of a cache is filled belongs to the cache
            for path, value in plain_numbers(module).items()
            if path in self._numbers[prefix] and self._numbers[prefix][path] != value
        ]
        if not found:
            return
        text = f"{first_few(found)} changed in the first window: plain numbers that count the forwards of this rank only, in no checkpoint"
        runtime.chosen["numbers"] = text
        num = runtime.world.axis("loss").size
        if num > 1 and runtime.world.is_main:
            warnings.warn(
                f"{text}. {num} data ranks share the micro-batches of a window, so they count more slowly than one process. Count optimizer steps "
                "instead: TrainStep passes its forward a `state` with state.step, and calls the model's post_optimizer_step()",
                stacklevel=2,
            )


class _Buffers:
    """The buffers of a model at one time: objects, versions, and marks of their values, which are read when they are compared."""

    def __init__(self, runtime: Runtime):
        buffers = runtime.buffers()
        self._objects = {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}
        self._marks = change_marks(list(buffers.values()))

    def changed_since(self, before: "_Buffers") -> list[str]:
        marks = dict(zip(before._objects, before._marks.tolist(), strict=True))
        return [n for n, mark in zip(self._objects, self._marks.tolist(), strict=True) if marks.get(n) != mark]

    def homes_of_new(self, before: "_Buffers", runtime: Runtime) -> set[str]:
        """The modules of which a buffer that is each rank's own was written, as far as objects and versions show it."""
        return {
            name.rpartition(".")[0]
            for name, seen in self._objects.items()
            if seen != before._objects.get(name) and runtime.buffer_policies.get(name, "own") == "own"
        }
