"""What the ranks exchange about a sharded module before an optimizer step: units entered, parameters used, 0-dim
gradients; early in a run, whether ranks that hold the same parameters have the same gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import RankError
from shardwise.parallel import Runtime
from shardwise.parallel.named_gradients import OwnGradients
from shardwise.parallel.outside_parameters import entries_of_outside, refuse_drifted
from shardwise.parallel.partial_sums import add_late
from shardwise.parallel.replicas import Replicas
from shardwise.world.agreement import Entry, digest_of_text, minority


class Exchange:
    """The module's own entries of the exchange before an optimizer step, and what is done with their sums over the
    ranks."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        # 0-dim, which FSDP2 does not shard.
        self._whole = {name: runtime.parameters[name] for name in runtime.replicated}
        self._outside = entries_of_outside(runtime)
        self._replicas = Replicas(runtime)  # which counts the window

    def entries(self) -> dict[str, Entry]:
        runtime = self.runtime
        units = digest_of_text("\n".join(runtime.engine.entered()))
        found: dict[str, Entry] = {"units": runtime.world.agreement.same_among(units, runtime.same_units)}
        flags = {"used": runtime.engine.used(), "late": runtime.engine.late()}
        found |= {name: values for name, values in flags.items() if values is not None}
        if self._whole:
            found["whole"] = runtime.world.counts * torch.stack([_as_pair(param) for param in self._whole.values()])
        return found | self._outside | self._replicas.entries()

    def apply(self, summed: Mapping[str, Tensor], place: str) -> bool:
        """Completes the gradients. Returns whether some came late, so that what was computed from them is to be computed
        again."""
        runtime = self.runtime
        if not runtime.world.agreement.all_same_among(summed["units"], runtime.same_units):
            raise self._units_differ()
        refuse_drifted(runtime, summed, place)
        if "used" in summed:
            if summed["used"].any():
                runtime.forget(OwnGradients)
            for name, count in zip(runtime.trainable, summed["used"].tolist(), strict=True):
                if not count:  # no rank used it: None, as in one process, so that weight decay skips it
                    runtime.parameters[name].grad = None
        for (name, param), pair in zip(self._whole.items(), summed.get("whole", ()), strict=True):
            param.grad = _of_pair(pair, param) if summed["used"][runtime.trainable.index(name)] else None
        if is_late := "late" in summed and bool(summed["late"].any()):
            add_late(runtime, summed["used"].tolist(), place)
        else:
            self._replicas.apply(summed)
        return is_late

    def _units_differ(self) -> RankError:
        scope, agreement = self.runtime.same_units, self.runtime.world.agreement
        told = agreement.gather((scope.index, self.runtime.engine.entered()), "naming the units that differ")
        groups = {at: [(rank, units) for rank, (index, units) in enumerate(told) if index == at] for at, _ in told}
        group = next(group for group in groups.values() if any(units != group[0][1] for _, units in group))
        usual, odd = minority([units for _, units in group])
        ranks = tuple(group[i][0] for i in odd)
        lists = [units for _, units in told]
        other = lists[ranks[0]]
        at = next(
            (i for i, (a, b) in enumerate(zip(usual, other, strict=False)) if a != b), min(len(usual), len(other))
        )
        name = (usual[at : at + 1] or other[at : at + 1] or [None])[0]
        return RankError(
            f"rank {ranks[0]} entered other units than rank {next(rank for rank, _ in group if rank not in ranks)}",
            why=f"entry {at + 1} differs: {usual[at : at + 1] or 'nothing'} against {other[at : at + 1] or 'nothing'}; "
            "their collectives crossed, so gradients are wrong",
            fix="give every rank the same forwards and backwards, in one order; a loss over two models of which ranks skip blocks needs "
            'them in one unit each: Sharding(units="none"), or in one module: sw.TaskModel',
            name=name,
            ranks=ranks,
        )


def _as_pair(param: nn.Parameter) -> Tensor:
    """A 0-dim gradient as float64 [2], real and imaginary part."""
    if param.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=param.device)
    return torch.view_as_real(local_tensor(param.grad).detach().to(torch.complex128))


def _of_pair(pair: Tensor, param: nn.Parameter) -> Tensor:
    both = torch.complex(pair[0], pair[1])
    return (both if param.is_complex() else both.real).to(param.device, param.dtype)
