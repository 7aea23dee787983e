"""The errors for buffers that ranks hold or have written differently. All ranks must make them: they exchange what each has."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwise.errors import RankError, UsageError
from shardwise.model.read import dtype_name
from shardwise.model.tensors import checksum, checksums
from shardwise.parallel.runtime import Runtime
from shardwise.world.agreement import minority

BEGIN = "the begin of"
"""How a place begins that is no end."""
Fact = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a buffer."""

_SUM = '"sum" for counts and running sums that are used after the step, '
_WORDS = (
    '"mean" for averages, "min" and "max" for the ranges of observers, '
    '"rank0" where those of one rank will do, "own" for what each rank keeps for itself, of any shape'
)


def when(place: str) -> str:
    return f"at {place}" if place.startswith(BEGIN) else f"at the end of {place}"


def not_only_added_to(runtime: Runtime, use: tuple[str, str] | None, place: str) -> UsageError:
    """The error for a sum that is set anew or read; ``use``: of this rank, the buffer and what was done. All ranks must call it."""
    found = runtime.world.agreement.gather(use, f"{place}, naming a buffer")
    name, what = next(use for use in found if use is not None)
    return UsageError(
        'a buffer of the policy "sum" that is not only added to',
        why=f"a forward {what}: it has what this rank's micro-batches make of it, and its sum over the ranks is not what one process has. "
        "Operators are watched in windows 1, 2, 4, 8, ... of a process: those since the last of them may have done it too",
        fix="add to it in place (self.tokens += counts), and read and clear it after the step (post_optimizer_step); or give it another policy: "
        '"rank0", "mean", "own"',
        name=name,
    )


def other_begin(runtime: Runtime, begin: Mapping[str, Tensor], place: str) -> RankError:
    """The error for a sum that ranks began with other values of. All ranks must call it."""
    marks = checksums(list(begin.values())).tolist()
    by_rank = runtime.world.agreement.gather(marks, f"{place}, naming a buffer")
    at = next((i for i in range(len(marks)) if len({of_rank[i] for of_rank in by_rank}) > 1), 0)
    _, ranks = minority([of_rank[at] for of_rank in by_rank])
    return RankError(
        f'a buffer of the policy "sum" that ranks began {place.removeprefix(BEGIN).strip()} with other values of',
        why="what all ranks add in a window is added to one value: code between windows, or after the step, has written another on some",
        fix="write it on all ranks alike there, such as self.tokens.zero_() in post_optimizer_step",
        name=list(begin)[at],
        ranks=ranks,
    )


def other_buffers(runtime: Runtime, own: list[Fact], place: str) -> RankError:
    """The error for buffers that only some ranks have, or of other shapes or dtypes. All ranks must call it."""
    told = runtime.world.agreement.gather(own, f"{place}, naming a buffer")
    by_rank = [{name: f"{dtype} of shape {list(shape)}" for name, shape, dtype in facts} for facts in told]
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    name = next(n for n in names if any(of_rank.get(n) != by_rank[0].get(n) for of_rank in by_rank))
    held = [of_rank.get(name, "none") for of_rank in by_rank]
    usual, ranks = minority(held)
    other = next(rank for rank in range(len(held)) if rank not in ranks)
    can_be_own = name in runtime.buffer_policies
    return RankError(
        f"a persistent buffer that is not the same on all ranks {when(place)}",
        why=f"rank {ranks[0]} has {held[ranks[0]]}, rank {other} has {usual}",
        fix="give it one shape and dtype in the constructor; or, where a forward computes it from its input, "
        "register_buffer(..., persistent=False)"
        + (f'; or, where each rank is to keep its own, Sharding(buffers={{{name!r}: "own"}})' if can_be_own else ""),
        name=name,
        ranks=ranks,
    )


def other_values(
    runtime: Runtime, names: Sequence[str], buffer: Tensor, main: Tensor, own: Mapping[str, Tensor], place: str
) -> RankError:
    """The error for buffers that ranks have written differently; ``buffer``, ``main``: the first of them, and rank 0's value of it;
    ``own``: the buffers that are each rank's own. All ranks must call it."""
    name, agreement, grid = names[0], runtime.world.agreement, runtime.recipe.grid
    beside = {n: b for n, b in own.items() if n.rpartition(".")[0] == name.rpartition(".")[0]}
    marks = zip(beside.items(), checksums(list(beside.values())).tolist(), strict=True)
    at = min(agreement.gather(_first_difference(buffer, main), f"{place}, naming a buffer"))
    told = agreement.gather(
        (int(checksum(buffer)), _shown(buffer, at), {n: (tuple(b.shape), mark) for (n, b), mark in marks}),
        f"{place}, naming a buffer",
    )
    sums, shown, others = ([each[i] for each in told] for i in range(3))
    usual, ranks = minority(sums)
    rank, other = ranks[0], sums.index(usual)
    written = [n for n in dict.fromkeys(n for own in others for n in own) if len({own.get(n) for own in others}) > 1]
    more = f"; so do {', '.join(names[1:4])}{' and others' if len(names) > 4 else ''}" if len(names) > 1 else ""
    same_data = grid.coord(rank).index("loss") == grid.coord(other).index("loss")
    because = (
        f"they run the same data ({', '.join(grid.shared_axes)}), and a layer that is cut shows each another part"
        if same_data
        else "each runs other data"
        if not place.startswith(BEGIN)
        else "code between windows has written it, or a forward in training mode outside of them, and each rank has other data"
    )
    beside_it = (
        f". Its module has also written {', '.join(map(repr, written))}, not persistent and therefore each rank's own: where this buffer "
        "follows from it, name that one"
        if written
        else ""
    )
    return RankError(
        f"a persistent buffer whose values differ between ranks {when(place)}",
        why=f"rank {rank} has {shown[rank]}, rank {other} has {shown[other]}{more}: {because}, and nothing says what their values make together{beside_it}",
        fix=("write it on all ranks alike there: run the same batches on each; or " if place.startswith(BEGIN) else "")
        + f"say it: Sharding(buffers={{{(written or [name])[0]!r}: WORD}}), where WORD is {'' if place.startswith(BEGIN) else _SUM}{_WORDS}; or, where a forward computes it from its "
        "input, register_buffer(..., persistent=False)",
        name=name,
        ranks=ranks,
    )


def _first_difference(a: Tensor, b: Tensor) -> int:
    """The index of the first number in which two tensors differ; their number where they are equal."""
    places = a.detach().flatten().ne(b.flatten()).nonzero()
    return int(places[0]) if len(places) else a.numel()


def _shown(tensor: Tensor, start: int) -> str:
    values = tensor.detach().flatten()[start : start + 4].tolist()
    before, after = "..., " if start else "", ", ..." if tensor.numel() > start + 4 else ""
    return f"[{before}{', '.join(f'{x:.12g}' if isinstance(x, float) else str(x) for x in values)}{after}]"


def described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} of shape {list(tensor.shape)}"
