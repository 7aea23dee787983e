"""What the first windows' forwards write besides gradients, for ``describe``: buffers with their policies, and what lies in attributes,
which follows a rank's own forwards only."""

import warnings
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
from torch import Tensor

from shardwise.config.caller import level_of_caller
from shardwise.config.suggest import first_few
from shardwise.model.module_state import plain_values, values_of_class
from shardwise.model.tensors import change_marks, has_no_memory, version_of
from shardwise.parallel import Runtime

_LARGEST = 1 << 24  # bytes of a tensor or an array in an attribute that are compared
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
    """Called when a window, or a micro-batch of ``accumulate``, begins: takes what the first windows of a process begin with. None: they
    are over."""
    if "buffers" not in runtime.chosen:
        runtime.chosen["buffers"] = WrittenState(runtime)
    state = runtime.chosen["buffers"]
    if not isinstance(state, WrittenState) or state.num_windows >= _NUM_WINDOWS:
        return None
    state.begin()
    return state


class WrittenState:
    """The buffers and numbers of a model before its first window, and after it. As text: the buffers that have changed."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.num_windows = 0
        self._before = self._after = _Buffers(runtime)
        self._begin: _Buffers | None = None  # of the running window
        # Buffers that are to be equal, and the forwards of each window so far have changed.
        self._counted: set[str] = set()
        self._plain = _PlainState(runtime)
        self._made: set[tuple[str, str]] = set()  # attributes that the first window's forwards have made

    def begin(self) -> None:
        if self._begin is None:
            self._begin = _Buffers(self._runtime) if self.num_windows else self._before

    def end(self) -> None:
        """Called when a window has ended, before the optimizer's step. Names the numbers that the first has changed, and the equal
        buffers that each has."""
        assert self._begin is not None
        self._after = _Buffers(self._runtime)
        changed = {n for n in self._after.changed_since(self._begin) if self._runtime.buffer_policies.get(n) == "equal"}
        self._counted = changed & self._counted if self.num_windows else changed
        self.num_windows, self._begin = self.num_windows + 1, None
        self._name_attributes()
        if self.num_windows > 1 and self._counted:
            names = sorted(self._counted)
            self._warn(
                "in the first windows: buffers, equal on all ranks, that count",
                names,
                f'For the count of all ranks: Sharding(buffers={{{names[0]!r}: "sum"}}). ',
            )

    def __str__(self) -> str:
        runtime, groups = self._runtime, dict[str | None, list[str]]()
        persistent = {n for name, b in runtime.recipe.buffers.items() if b.persistent for n in (name, *b.aliases)}
        for name in self._after.changed_since(self._before):
            word = runtime.buffer_policies.get(name, "own")
            groups.setdefault(None if word == "own" and name not in persistent else word, []).append(name)
        told = [f"{first_few(names)} ({_MEANING[word]})" for word, names in groups.items()]
        return f"written in the first windows: {'; '.join(told)}" if told else ""

    def _name_attributes(self) -> None:
        # How much of a cache is filled belongs to the cache. What the first window makes may be a table, which the second leaves as it is.
        now, before = _PlainState(self._runtime), self._plain
        found = now.changed_since(
            before,
            self._after.homes_of_new(self._before, self._runtime),
            self._made if self.num_windows > 1 else before.keys,
        )
        self._made, self._plain = now.keys - before.keys, now
        numbers = [name for name, is_number in found.items() if is_number]
        others = [name for name, is_number in found.items() if not is_number]
        if numbers:
            self._note(
                "numbers", self._warn("in the first windows: plain numbers, in no checkpoint, that count", numbers)
            )
        if others:
            what = "in the first windows: lists, arrays or tensors in attributes, that follow"
            policy = (
                'A tensor that is registered as a buffer is combined over the ranks: Sharding(buffers={name: "mean"}). '
            )
            self._note("attributes", self._warn(what, others, policy))

    def _note(self, key: str, text: str) -> None:
        before = self._runtime.chosen.get(key)
        self._runtime.chosen[key] = f"{before}; {text}" if before else text

    def _warn(self, what: str, names: Collection[str], policy: str = "") -> str:
        runtime, num = self._runtime, self._runtime.world.axis("loss").size
        text = f"{first_few(names)} changed {what} the forwards of this rank only"
        if num > 1 and runtime.world.is_main:
            warnings.warn(
                f"{text}. {num} data ranks share the micro-batches of a window, so they count more slowly than one process. "
                f"{policy}Where optimizer steps are meant, count those: TrainStep passes its forward a `state` with state.step, and calls the model's post_optimizer_step()",
                stacklevel=level_of_caller(),
            )
        return text


class _PlainState:
    """What the modules of a model, their classes and parameters keep in attributes at one time: numbers, tensors and arrays by their
    values, lists by their lengths."""

    def __init__(self, runtime: Runtime):
        self._seen: dict[tuple[str, str], Any] = {}
        self._numbers: set[tuple[str, str]] = set()
        tensors: dict[tuple[str, str], Tensor] = {}
        classes = {type(module): ("", values_of_class(type(module))) for _, module in runtime.modules}
        for prefix, values in (
            *((prefix, plain_values(module)) for prefix, module in runtime.modules),
            *classes.values(),
        ):
            for path, value in values:
                if type(value) is Tensor and not value.requires_grad and not value.is_meta and value.nbytes <= _LARGEST:
                    if not has_no_memory(value):
                        tensors[prefix, path] = value
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    self._seen[prefix, path] = value
                    self._numbers.add((prefix, path))
                elif isinstance(value, list | deque):
                    self._seen[prefix, path] = len(value)
                elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.nbytes <= _LARGEST:
                    self._seen[prefix, path] = value.shape, value.tobytes()
        marks = change_marks([*tensors.values()]).tolist() if tensors else []
        for (key, tensor), mark in zip(tensors.items(), marks, strict=True):
            self._seen[key] = tuple(tensor.shape), mark

    @property
    def keys(self) -> set[tuple[str, str]]:
        """The module and the path of each value."""
        return set(self._seen)

    def changed_since(
        self, before: "_PlainState", without: Collection[str], among: Collection[tuple[str, str]]
    ) -> dict[str, bool]:
        """Name of what has changed, ``among`` these keys -> whether it is a number; but for the modules ``without``."""
        return {
            f"{key[0]}.{key[1]}" if key[0] else key[1]: key in self._numbers
            for key, value in self._seen.items()
            if key[0] not in without and key in among and before._seen.get(key) != value
        }


class _Buffers:
    """The buffers of a model at one time: objects, versions, and marks of their values, which are read when they are compared."""

    def __init__(self, runtime: Runtime):
        buffers = runtime.buffers()
        self._objects = {name: (id(buffer), version_of(buffer)) for name, buffer in buffers.items()}
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
