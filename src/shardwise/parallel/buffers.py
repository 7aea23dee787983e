"""What ranks agree on about the buffers of a model at the end of a window, at both ends of an evaluation, and before a save.

One digest compares names, shapes and dtypes, others the values, in the exchange that is made anyway; nothing moves before that.
Persistent buffers must be equal on all ranks. Where they are not, their policy in the recipe says what is made of them (running
statistics: that of rank 0, or the mean); where none does, differences within rounding are made equal, and any other is an error.
Buffers that are not persistent are each rank's own, unless a policy names them.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.config.caller import level_of_caller
from shardwise.config.suggest import first_few
from shardwise.errors import RankError, UsageError
from shardwise.model.read import dtype_name
from shardwise.model.tensors import change_marks, checksums, combined, same_bytes, write_values
from shardwise.parallel.added_only import AddedOnly, HostReads, ReadWhereWritten
from shardwise.parallel.buffer_errors import (
    BEGIN,
    Fact,
    described,
    not_only_added_to,
    other_begin,
    other_buffers,
    other_values,
    when,
)
from shardwise.parallel.copies import refuse_diverged
from shardwise.parallel.runtime import Runtime
from shardwise.recipe.records import STATISTICS, SUM_AXES, SUMMED_OVER
from shardwise.world.agreement import Entry, digest_of_text

_ROUNDING = 16  # times the spacing of a dtype's numbers: ranks that compute one thing differ by no more
_ROUNDING_OF_HALF = 2
_CANCELLED = 1e-3  # of the largest number of a buffer: below it, differences are relative to this
_SLOT = (1 << 50) - 1  # the bits of a digest that a float64 holds
_SYNCED = frozenset({"rank0", "mean", "min", "max"})  # policies by which values are reduced where they differ
_RANGES = frozenset({"mean", "min", "max"})
_UNKNOWN = "unknown"  # of a persistent buffer that the recipe does not have


class _Watchable:
    """The windows of a model so far whose operators may be watched."""

    num = 0

    def is_due(self) -> bool:
        """Called once in each: whether this one is, the first, second, fourth, ..."""
        self.num += 1
        return self.num.bit_count() == 1


class BufferExchange:
    """The entries about buffers in the exchange before an optimizer step, and what follows from their sums over the ranks.

    Made when the window begins; :meth:`apply` is not called for a window that is skipped. ``is_save``: of buffers that are saved alone.
    """

    def __init__(self, runtime: Runtime, *, is_save: bool = False):
        self._runtime, self._is_save = runtime, is_save
        self._held: dict[str, dict[str, Tensor]] = {}  # policy -> name -> buffer, as at the exchange
        words = set(runtime.buffer_policies.values())  # equal on all ranks, as are the names of entries
        self._has_equal, self._has_sums = "equal" in words, "sum" in words
        self._has_synced = bool(words & _SYNCED)
        self._has_ranges = bool(words & _RANGES)
        self._axes = {n: b.axis for name, b in runtime.recipe.buffers.items() for n in (name, *b.aliases)}
        sums = _by_policy(runtime, is_save).get("sum", {}) if self._has_sums else {}
        self._begin = {name: tensor.clone() for name, tensor in sums.items()}
        self._is_watched: bool | None = None
        self._added_only: AddedOnly | None = None
        self._reads: ReadWhereWritten | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager around a micro-batch. In windows 1, 2, 4, 8, ... of a process its operators are watched: :meth:`apply` then refuses
        buffers of the policy "sum" that a forward does not only add to, and names ranges that its results depend on."""
        if self._is_watched is None:
            self._is_watched = self._runtime.memory(_Watchable).is_due()
        if not self._is_watched or not (self._has_sums or self._has_ranges):
            yield
            return
        held = _by_policy(self._runtime)
        if sums := held.get("sum", {}):
            self._added_only = self._added_only or AddedOnly(sums)
        if ranges := _ranges(held):
            self._reads = self._reads or ReadWhereWritten(ranges)
        watches = [watch for watch in (self._added_only, self._reads) if watch is not None]
        with contextlib.ExitStack() as stack:
            for watch in (*watches, *([HostReads(watches)] if watches else ())):
                stack.enter_context(watch)
            yield

    def entries(self, *, is_idle: bool) -> dict[str, Entry]:
        """``is_idle``: this rank ran paddings only, so that its buffers are what they were."""
        self._held = held = _by_policy(self._runtime, self._is_save)
        same = self._runtime.world.agreement.same_mark
        found: dict[str, Entry] = {
            "buffers": self._runtime.world.agreement.same(digest_of_text("\n".join(map(str, _facts(held)))))
        }
        if self._has_equal:
            values = same(_mark(held.get("equal", {})))
            found["values of buffers"] = values
            found["values of buffers of busy ranks"] = values * float(not is_idle)
            found["busy ranks"] = (float(not is_idle), float(not is_idle and self._runtime.world.is_main))
        if self._has_synced:
            found["values of buffers with a policy"] = same(
                _mark({name: b for word in sorted(_SYNCED) for name, b in held.get(word, {}).items()})
            )
        if self._has_sums:
            now, begin = _mark(held.get("sum", {})), _mark(self._begin)
            found["buffers to add to"] = same(begin)
            found["buffers not only added to"] = float(self._wrong_use() is not None)
            found["buffers added to"] = now.ne(begin).double()
            for axis in self._shared_axes:
                mark = _mark({name: x for name, x in held.get("sum", {}).items() if self._axis_of(name) == axis})
                found[f"buffers added to over {axis}"] = self._runtime.world.agreement.slots((mark & _SLOT).double())
        return found

    def apply(self, summed: Mapping[str, Tensor], place: str) -> None:
        """Compares, and makes equal what a policy says. ``summed``: :meth:`entries`, summed over the ranks. ``place``: what has ended,
        for messages; behind :data:`~shardwise.parallel.buffer_errors.BEGIN` what will begin.

        Raises:
            RankError: ranks hold other buffers, or values that no policy brings together.
            UsageError: a buffer that a checkpoint would not hold.
        """
        all_same = self._runtime.world.agreement.all_same
        if not all_same(summed["buffers"]):
            raise other_buffers(self._runtime, _facts(self._held), place)
        self._refuse_unsaved()
        if self._has_sums:
            if not all_same(summed["buffers to add to"]):
                raise other_begin(self._runtime, self._begin, place)
            if bool(summed["buffers not only added to"]):
                raise not_only_added_to(self._runtime, self._wrong_use(), place)
            if bool(summed["buffers added to"]):
                self._add_up(summed, place)
        if self._reads is not None:
            self._name_ranges(self._reads.found(_ranges(self._held)))
        if self._has_synced and not all_same(summed["values of buffers with a policy"]):
            if place.startswith(BEGIN) and not self._runtime.in_window:
                self._name_lost(place)
            make_equal(self._runtime, {w: list(self._held.get(w, {}).values()) for w in sorted(_SYNCED)}, place)
        if self._has_equal and not all_same(summed["values of buffers"]):
            num_busy, main_is_busy = map(int, summed["busy ranks"].tolist())
            if main_is_busy and all_same(summed["values of buffers of busy ranks"], num_busy):
                make_equal(self._runtime, {"rank0": list(self._held["equal"].values())}, place)
            else:
                self._settle(place)

    @property
    def is_needed(self) -> bool:
        """Whether there are buffers that ranks agree on; equal on all ranks."""
        return self._has_equal or self._has_sums or self._has_synced

    def _wrong_use(self) -> tuple[str, str] | None:
        return None if self._added_only is None else self._added_only.wrong_use(self._held.get("sum", {}))

    def _name_ranges(self, names: Sequence[str]) -> None:
        runtime, num = self._runtime, self._runtime.world.axis("loss").size
        if names and num > 1 and "ranges" not in runtime.chosen:
            runtime.chosen["ranges"] = (
                f"{first_few(names)}: a forward reads what it writes there, of this rank only until the window ends"
            )
            if runtime.world.is_main:
                warnings.warn(
                    f"{first_few(names)}: a forward writes this buffer and computes with it. Until the end of a window, when {num} data ranks "
                    "bring its values together, each has its own, so results differ from those of one process. For the same results write it "
                    "in post_optimizer_step(), from values that forwards keep in another buffer",
                    stacklevel=level_of_caller(),
                )

    def _name_lost(self, place: str) -> None:
        """Warns of buffers that differ outside of windows, and of which rank 0's value is taken."""
        runtime, held = self._runtime, self._held.get("rank0", {})
        marks = runtime.world.agreement.gather(checksums(list(held.values())).tolist(), f"{place}, naming buffers")
        names = [name for i, name in enumerate(held) if len({of_rank[i] for of_rank in marks}) > 1]
        if names and runtime.world.is_main:
            warnings.warn(
                f"{first_few(names)}: ranks have other values at {place}, which were written outside of windows, and rank 0's are taken, as "
                'Sharding(buffers=) says. For the mean over the ranks use "mean" there, and equally many batches on each; or let every rank run '
                "all batches",
                stacklevel=level_of_caller(),
            )

    @property
    def _shared_axes(self) -> list[str]:
        """The axes over which buffers are summed, of those that ranks with the same data share; equal on all ranks."""
        world, buffers = self._runtime.world, self._runtime.recipe.buffers.values()
        return [
            a
            for a in SUM_AXES
            if world.axis(a).size < world.size and any((b.policy, b.axis) == ("sum", a) for b in buffers)
        ]

    def _axis_of(self, name: str) -> str:
        """The axis whose ranks each add to a buffer, by any of its names."""
        return self._axes.get(name, SUMMED_OVER)

    def _refuse_unsaved(self) -> None:
        """Refuses persistent buffers that the recipe does not know, or does and that are gone; all ranks have the same here."""
        for name in self._held.get(_UNKNOWN, {}):
            raise UsageError(
                "a persistent buffer that was registered after parallelize",
                why="checkpoints hold the buffers that the module had when it was sharded: this one would be lost",
                fix="register it in the constructor, or with persistent=False where a forward computes it",
                name=name,
            )
        there = {name for held in self._held.values() for name in held}
        for name, buffer in self._runtime.recipe.buffers.items():
            if buffer.persistent and not there.intersection((name, *buffer.aliases)):
                raise UsageError(
                    "a persistent buffer that was removed after parallelize",
                    why="the module had it when it was sharded, and a checkpoint would lack it",
                    fix="keep the buffer, or register it with persistent=False",
                    name=name,
                )

    def _add_up(self, summed: Mapping[str, Tensor], place: str) -> None:
        """Makes each buffer of the policy "sum" its value at the window's begin plus what the data ranks have added."""
        runtime, now = self._runtime, self._held["sum"]
        for name, tensor in now.items():
            before = self._begin.get(name)
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                was = "there was none" if before is None else described(before)
                raise UsageError(
                    f'a buffer of the policy "sum" that is {described(tensor)} {when(place)}',
                    why=f"at its begin {was if before is None else f'it was {was}'}, so that there is nothing to add to",
                    fix="keep its shape and dtype, and write it in place",
                    name=name,
                )
        for axis in self._shared_axes:
            self._refuse_other_counts(summed[f"buffers added to over {axis}"].tolist(), axis, place)
        counts = {
            SUMMED_OVER: runtime.world.counts,
            "dp": runtime.world.counts_data,
        }  # of ranks that add the same one counts
        added = [
            _wide(x) - _wide(self._begin[name]) if counts[self._axis_of(name)] else torch.zeros_like(_wide(x))
            for name, x in now.items()
        ]
        totals = runtime.world.agreement.reduce_tensors(added, "sum", f"{place}, adding up buffers")
        for (name, tensor), total in zip(now.items(), totals, strict=True):
            write_values(tensor, (_wide(self._begin[name]) + total).to(tensor.dtype))

    def _refuse_other_counts(self, marks: Sequence[float], axis: str, place: str) -> None:
        """Refuses ranks that differ in nothing of ``axis`` and have added other values to the buffers that are summed over it."""
        grid = self._runtime.recipe.grid
        name = next((name for name in self._held["sum"] if self._axis_of(name) == axis), None)
        first: dict[int, int] = {}
        for rank, mark in enumerate(marks):
            one = first.setdefault(grid.coord(rank).index(axis), rank)
            if marks[one] != mark:
                raise RankError(
                    f'buffers of the policy "sum", such as this one, {when(place)}',
                    why=f"ranks {one} and {rank} run the same data ({', '.join(grid.shared_axes)}), and have added other values",
                    fix="add the same on both: nothing that depends on the rank",
                    name=name,
                    ranks=(rank,),
                )

    def _settle(self, place: str) -> None:
        """Takes rank 0's values of buffers that differ within rounding; raises for the others."""
        runtime, held = self._runtime, self._held["equal"]
        agreement = runtime.world.agreement
        marks = agreement.gather(checksums(list(held.values())).tolist(), f"{place}, naming buffers that differ")
        differ = [name for i, name in enumerate(held) if len({of_rank[i] for of_rank in marks}) > 1]
        if not differ:
            return
        own = [held[name] for name in differ]
        main = agreement.reduce_tensors(own, "rank0", f"{place}, comparing buffers")
        off = torch.tensor([float(not _is_rounding(a, b)) for a, b in zip(own, main, strict=True)], dtype=torch.float64)
        summed = agreement.sum({"off": off}, f"{place}, comparing buffers")["off"].tolist()
        wrong = [name for name, num in zip(differ, summed, strict=True) if num]
        if wrong:
            beside = _by_policy(runtime).get("own", {})
            raise other_values(runtime, wrong, held[wrong[0]], main[differ.index(wrong[0])], beside, place)
        _take(own, main)


def agree_on_saved(runtime: Runtime, what: str) -> None:
    """Compares the persistent buffers before ``what`` saves rank 0's, and makes equal what a policy says; then the copies of parameters.
    All ranks must call it. Within a window the buffers stay as they are: each rank's have its own micro-batches, until the end.

    Raises:
        as :meth:`BufferExchange.apply` and :func:`~shardwise.parallel.copies.refuse_diverged`.
    """
    exchange, place = BufferExchange(runtime, is_save=True), f"{BEGIN} {what}"
    told = runtime.world.agreement.sum({} if runtime.in_window else exchange.entries(is_idle=False), place)
    if not runtime.in_window:
        exchange.apply(told, place)
    refuse_diverged(runtime, what)


def make_equal(runtime: Runtime, by_word: Mapping[str, Sequence[Tensor]], place: str) -> None:
    """Makes buffers equal on all ranks by the policy they are listed under. All ranks must call it, with buffers of the same shapes
    and dtypes."""
    wholes = [b for b in by_word.get("mean", ()) if not (b.is_floating_point() or b.is_complex())]
    for word, buffers in by_word.items():
        own = [b for b in buffers if word != "mean" or not any(b is whole for whole in wholes)]
        own += wholes if word == "rank0" else []
        if own:
            _take(own, runtime.world.agreement.reduce_tensors(own, word, f"{place}, making buffers equal"))


def _take(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        write_values(buffer, value)


def _by_policy(runtime: Runtime, is_save: bool = False) -> dict[str, dict[str, Tensor]]:
    """Policy -> name -> buffer, each under its first name. ``is_save``: without those that are not persistent."""
    persistent = {n for name, b in runtime.recipe.buffers.items() if b.persistent for n in (name, *b.aliases)}
    found: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    for prefix, module in runtime.modules:
        for attr, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{attr}" if prefix else attr
            if is_save and name not in persistent and attr in module._non_persistent_buffers_set:
                continue
            is_known = name in persistent or attr in module._non_persistent_buffers_set
            word = runtime.buffer_policies.get(name, "own") if is_known else _UNKNOWN
            found.setdefault(word, {})[name] = buffer
    return found


def _ranges(held: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Those that a forward should not read before ranks have brought their values together; layers of torch that do are known."""
    return {
        name: buffer
        for word in _RANGES
        for name, buffer in held.get(word, {}).items()
        if name.rpartition(".")[2] not in STATISTICS
    }


def _facts(held: Mapping[str, Mapping[str, Tensor]]) -> list[Fact]:
    """Name, shape and dtype of each buffer that must be there on all ranks alike."""
    return [
        (name, tuple(b.shape), dtype_name(b.dtype))
        for word in sorted(held.keys() - {"own"})
        for name, b in held[word].items()
    ]


def _mark(buffers: Mapping[str, Tensor]) -> Tensor:
    """A digest of their values, 0-dim int64, not read."""
    return combined(change_marks(list(buffers.values())))


def _wide(tensor: Tensor) -> Tensor:
    """A buffer in numbers whose sums are exact where those of the buffer are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _is_rounding(a: Tensor, b: Tensor) -> bool:
    """Whether two values of a buffer differ by rounding at most: no counts, and each number relative to itself. Numbers far below the
    largest may come of larger ones that cancel."""
    if not (a.is_floating_point() or a.is_complex()):
        return same_bytes(a, b)
    finfo = torch.finfo(a.dtype)
    a, b = _wide(a), _wide(b)
    if not bool((a.isfinite() & b.isfinite()).all()) or (_is_whole(a) and _is_whole(b)):
        return torch.equal(a, b)
    size = torch.maximum(a.abs(), b.abs())
    limit = (_ROUNDING if finfo.bits >= 32 else _ROUNDING_OF_HALF) * finfo.eps
    return bool(((a - b).abs() <= limit * size.clamp(min=_CANCELLED * float(size.max()))).all())


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_complex() and torch.equal(tensor, tensor.round())
