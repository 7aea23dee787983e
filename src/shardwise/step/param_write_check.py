"""Detects a forward that writes to the model's parameters in place. Under FSDP2, which computes with gathered copies,
such a write is lost; under replicas it is correct only where every rank writes the same."""

from operator import attrgetter

from torch import Tensor

from shardwise.errors import UnsupportedError
from shardwise.model.tensors import checksum
from shardwise.parallel import Runtime
from shardwise.world.agreement import digest_of_text

_VERSION = attrgetter("_version")


class ParamWriteCheck:
    """Compares parameters at the end of a window with those at its beginning, when it is made: by their version
    counters, which cost nothing to read, and by value where one has changed. Gathered parameters are compared by value in windows 0,
    1, 2, 4, 8, ...: a write through ``.data`` changes no version."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._is_cut = runtime.recipe.is_cut
        self._watches = self._is_cut or runtime.world.size > 1
        self._found: dict[str, Tensor] = {}
        runtime.engine.watch_writes(not runtime.num_windows & (runtime.num_windows - 1))
        self._ids, self._versions = self._versions_of(self._computed_with())

    def entry(self) -> tuple[float, ...]:
        """For the window's second exchange: which parameters this rank wrote, with a digest of values that must be
        equal."""
        self._found = self._written()
        told = [(name, None if self._is_lost(name) else int(checksum(t))) for name, t in self._found.items()]
        return self.runtime.world.agreement.same(digest_of_text(repr(told)))

    def check(self, summed: Tensor) -> None:
        """Raises UnsupportedError on every rank if a write is lost or ranks wrote different values."""
        runtime = self.runtime
        written = list(self._found)
        if runtime.world.agreement.all_same(summed) and not any(map(self._is_lost, written)):
            return
        place = f"window {runtime.step + 1}, naming parameters that were written"
        everywhere = {name for names in runtime.world.agreement.gather(written, place) for name in names}
        name = next((name for name in runtime.recipe.params if name in everywhere), None)
        if name is None or not self._is_lost(name):
            raise UnsupportedError(
                "a parameter that the model's own forward writes in place, differently on each rank",
                why="what it writes depends on the rank's own batch, so the replicas are no longer equal",
                fix="write parameters after optim.step(), the same on every rank",
                name=name,
            )
        raise UnsupportedError(
            "a parameter that the model's own forward writes in place, or replaces",
            why="FSDP2 computes with a gathered copy of it, so what is written there is lost",
            fix='write parameters after optim.step(), or keep them whole: sw.init("dp_replicate=-1")',
            name=name,
        )

    def _is_lost(self, name: str) -> bool:
        return bool(self.runtime.recipe.params[name].cuts)

    def _written(self) -> dict[str, Tensor]:
        if not self._watches:
            return {}
        lost = {id(shard) for shard in self.runtime.engine.lost_writes()}
        found: dict[str, Tensor] = {name: param for name, param in self.runtime.parameters.items() if id(param) in lost}
        now = self._computed_with()
        if self._versions_of(now) == (self._ids, self._versions):
            return found
        before = dict(zip(self._ids, self._versions, strict=True))
        return found | {name: tensor for name, tensor in now if tensor._version != before.get(id(tensor), 0)}

    def _computed_with(self) -> list[tuple[str, Tensor]]:
        """The tensors that forward computes with; under FSDP2 those that are gathered now. New ones have version 0."""
        runtime = self.runtime
        if not self._watches:
            return []
        found: list[tuple[str, Tensor]] = list(runtime.parameters.items())
        if not self._is_cut:
            return found
        names = {id(param): name for name, param in found}
        whole = [(name, param) for name, param in found if not runtime.recipe.params[name].cuts]
        return whole + [(names[id(shard)], tensor) for tensor, shard in runtime.engine.gathered()]

    def _versions_of(self, named: list[tuple[str, Tensor]]) -> tuple[list[int], list[int]]:
        """The ids of tensors, which are not kept alive, and their versions."""
        tensors = [tensor for _, tensor in named]
        with self.runtime.torchs_classes():
            return list(map(id, tensors)), list(map(_VERSION, tensors))
