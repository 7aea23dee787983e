"""What the ranks exchange about a sharded module before an optimizer step: units entered, parameters used, 0-dim
gradients, buffers written."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import RankError
from shardwise.model.tensors import change_marks
from shardwise.parallel import Runtime
from shardwise.techniques.data.rule import DataEntry
from shardwise.techniques.data.scalar_gradients import ScalarGradients
from shardwise.world.agreement import Entry, digest_of_text, minority

__all__ = ["BufferMarks", "Exchange", "buffer_versions", "buffers_written", "sync_buffers"]


class Exchange:
    """The module's own entries of the exchange before an optimizer step, and what is done with their sums over the
    ranks."""

    def __init__(self, runtime: Runtime, versions: "BufferMarks"):
        self.runtime, self.versions = runtime, versions
        whole = [runtime.parameters[name] for name in runtime.replicated]
        self._whole = ScalarGradients(
            whole, runtime.engine.penalties, runtime.world.axis("loss").size, counts=runtime.world.counts
        )

    def entries(self) -> dict[str, Entry]:
        runtime = self.runtime
        units = runtime.engine.entered()
        found: dict[str, Entry] = {"units": runtime.world.agreement.same(digest_of_text("\n".join(units)))}
        told = {"used": runtime.engine.used(), "late": runtime.engine.late()}
        found |= {name: flags for name, flags in told.items() if flags is not None}
        found |= self._whole.entries()
        if len(written := buffers_written(runtime, self.versions)):
            found["buffers"] = written
        return found

    def apply(self, summed: Mapping[str, Tensor]) -> bool:
        """Completes the gradients. Returns whether some came late, so that what was computed from them is to be computed
        again."""
        runtime = self.runtime
        if not runtime.world.agreement.all_same(summed["units"]):
            raise self._units_differ()
        if "used" in summed:
            for name, count in zip(runtime.trainable, summed["used"].tolist(), strict=True):
                if not count:  # no rank used it: None, as in one process, so that weight decay skips it
                    runtime.parameters[name].grad = None
        if runtime.replicated:
            self._whole.set(summed, [bool(summed["used"][runtime.trainable.index(n)]) for n in runtime.replicated])
        if is_late := "late" in summed and bool(summed["late"].any()):
            runtime.add_late(summed["late"].tolist(), summed["used"].tolist(), f"window {runtime.step + 1}")
        if "buffers" in summed and bool(summed["buffers"].any()):
            sync_buffers(runtime, summed["buffers"], f"window {runtime.step + 1}")
        return is_late

    def _units_differ(self) -> RankError:
        lists = self.runtime.world.agreement.gather(self.runtime.engine.entered(), "naming the units that differ")
        usual, ranks = minority(lists)
        other = lists[ranks[0]]
        at = next(
            (i for i, (a, b) in enumerate(zip(usual, other, strict=False)) if a != b), min(len(usual), len(other))
        )
        name = (usual[at : at + 1] or other[at : at + 1] or [None])[0]
        return RankError(
            f"rank {ranks[0]} entered other units than rank {next(r for r in range(len(lists)) if r not in ranks)}",
            why=f"entry {at + 1} differs: {usual[at : at + 1] or 'nothing'} against {other[at : at + 1] or 'nothing'}; "
            "their collectives crossed, so gradients are wrong",
            fix="give every rank the same forwards and backwards, in one order; a loss over two models of which ranks skip blocks needs "
            'them in one unit each: Sharding(units="none"), or in one module: sw.TaskModel',
            name=name,
            ranks=ranks,
        )


@dataclass(frozen=True)
class BufferMarks:
    """What shows later whether buffers were written.

    Attributes:
        objects: name -> the buffer's identity (``self.ema = ...``) and version (in-place operations).
        digests: marks of their values in that order, int64, on the device of the first; writes to ``.data`` do not
            change the version.
    """

    objects: Mapping[str, tuple[int, int]]
    digests: Tensor


def buffer_versions(runtime: Runtime) -> BufferMarks:
    """What :func:`buffers_written` compares with."""
    return _marks(runtime.buffers())


def buffers_written(runtime: Runtime, before: BufferMarks) -> Tensor:
    """A flag per buffer, to be summed over the ranks: whether this rank wrote it since :func:`buffer_versions` returned
    ``before``. On the device of the first buffer."""
    buffers = runtime.buffers()
    now = _marks(buffers)
    known = {name: i for i, name in enumerate(before.objects)}
    digests = before.digests if buffers else now.digests
    if buffers and [*now.objects] != [*before.objects]:  # a buffer was registered, or removed
        digests = torch.stack([before.digests[known[name]] if name in known else now.digests[0] for name in buffers])
    replaced = [now.objects[name] != before.objects.get(name) for name in buffers]
    always = _always_written(runtime)
    told = torch.tensor(
        [flag or id(b) in always for flag, b in zip(replaced, buffers.values(), strict=True)], dtype=torch.bool
    )
    return (now.digests.ne(digests) | told.to(now.digests.device, non_blocking=True)).double()


def sync_buffers(runtime: Runtime, summed: Tensor, place: str) -> None:
    """Makes the buffers equal that any rank wrote: ``summed`` is :func:`buffers_written` summed over the ranks. All
    ranks must call it."""
    written = summed.tolist()
    if not any(written):
        return
    flags = zip(runtime.buffers().values(), written, strict=True)
    _same_buffers(runtime, [buffer for buffer, flag in flags if flag], place)


def _marks(buffers: Mapping[str, Tensor]) -> BufferMarks:
    return BufferMarks(
        {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}, change_marks(list(buffers.values()))
    )


def _always_written(runtime: Runtime) -> set[int]:
    """Ids of the buffers that count as written by any forward. Batch norm's kernels write running statistics without
    changing their version."""
    return {id(buffer) for module in runtime.batch_norms if module.training for buffer in module.buffers(recurse=False)}


def _same_buffers(runtime: Runtime, changed: list[Tensor], place: str) -> None:
    """Makes buffers that changed on any rank equal: those of rank 0, or the mean over ranks, as the recipe's option
    ``buffers`` says."""
    mean = runtime.recipe.entry("data", DataEntry).buffers == "mean"
    runtime.world.agreement.sync_tensors(changed, f"{place}, making buffers equal", mean=mean)
