"""What the ranks exchange about a sharded module before an optimizer step: units entered, parameters used, 0-dim
gradients; early in a run, whether ranks that hold the same parameters have the same gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise._torch.dtensor import local_tensor
from shardwise.errors import RankError
from shardwise.parallel import Runtime
from shardwise.techniques.data.scalar_gradients import ScalarGradients
from shardwise.world.agreement import Entry, digest_of_text, minority

__all__ = ["Exchange"]


class Exchange:
    """The module's own entries of the exchange before an optimizer step, and what is done with their sums over the
    ranks."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        whole = [runtime.parameters[name] for name in runtime.replicated]
        self._whole = ScalarGradients(
            whole, runtime.engine.penalties, runtime.world.axis("loss").size, counts=runtime.world.counts
        )
        self._replicas = _Replicas(runtime)

    def entries(self) -> dict[str, Entry]:
        runtime = self.runtime
        units = runtime.engine.entered()
        found: dict[str, Entry] = {"units": runtime.world.agreement.same(digest_of_text("\n".join(units)))}
        told = {"used": runtime.engine.used(), "late": runtime.engine.late()}
        found |= {name: flags for name, flags in told.items() if flags is not None}
        return found | self._whole.entries() | self._replicas.entries()

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
        else:
            self._replicas.apply(summed)
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


class _Replicas:
    """Compares the gradients of parameters that all ranks along ``tp`` hold whole: they have the same data, so that a difference
    is a part of a gradient for the whole. In the first window of a run and then ever more rarely, in the exchange that is made
    anyway."""

    def __init__(self, runtime: Runtime):
        self._runtime, self._axis = runtime, runtime.world.axis("tp")
        runtime.num_windows += 1
        is_due = self._axis.size > 1 and not runtime.num_windows & (runtime.num_windows - 1)
        params = runtime.recipe.params if is_due else {}
        self._names = [
            name for name in runtime.trainable if name in params and all(c.axis != "tp" for c in params[name].cuts)
        ]

    def entries(self) -> dict[str, Tensor]:
        """``replicas``, float64 [n, 2]: of each gradient a sum with other signs on the ranks, 0 where they are equal; and its size."""
        if not self._names:
            return {}
        weights = [(i + 1) * 0.7548776662 % 1 for i in range(self._axis.size)]
        weight = weights[self._axis.rank] - sum(weights) / len(weights)
        return {"replicas": torch.stack([_mark(self._runtime.parameters[name].grad, weight) for name in self._names])}

    def apply(self, summed: Mapping[str, Tensor]) -> None:
        """Makes equal what differs by rounding.

        Raises:
            RankError: gradients differ by more, on all ranks.
        """
        found = summed["replicas"].tolist() if self._names else []
        least = _NOISE * max((size for _, size in found), default=0.0)
        for name, (off, size) in zip(self._names, found, strict=True):
            param = self._runtime.parameters[name]
            if abs(off) > max(size, least) * torch.finfo(param.dtype).eps ** 0.5:
                raise self._differ(name)
            if abs(off) > size * _EXACT and param.grad is not None:
                local = local_tensor(param.grad)
                local.copy_(self._axis.reduce(local, "sum") / self._axis.size)

    def _differ(self, name: str) -> RankError:
        return RankError(
            f"ranks {', '.join(map(str, self._axis.ranks))} with other gradients of a parameter that each holds whole",
            why="they have the same data, along tp: code between layers that are cut uses it in a way that the example did not show",
            fix="parallelize(..., example=batch), with one micro-batch as training gives it; or keep the layers around it whole: "
            "tensor_parallel=sw.TensorParallel(plan={...})",
            name=name,
            ranks=self._axis.ranks,
        )


_EXACT = 1e-12  # of float64 sums
_NOISE = 1e-2  # of the largest gradient: a smaller one, as that of a key's bias, may be rounding alone


def _mark(grad: Tensor | None, weight: float) -> Tensor:
    """A sum of a gradient with a weight for each place, times ``weight``; and how large such a sum is by chance."""
    if grad is None:
        return torch.zeros(2, dtype=torch.float64)
    flat = local_tensor(grad).detach().flatten()
    flat = (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).double()
    terms = flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).mul_(0.7548776662).frac_()
    return torch.stack([terms.sum() * weight, terms.norm()])
