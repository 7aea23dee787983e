"""The first exchange of a window: the token count over all ranks and micro-batches, whether every rank can begin, and
whether the run was asked to stop after this window, or to end before it."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.data.batch import MicroBatch, is_padding
from shardwise.data.labels import Batch, compare_labels, judge_labels, valid_labels
from shardwise.errors import ConfigError, RankError, ShardwiseError, UsageError
from shardwise.parallel import Runtime
from shardwise.step.no_gradient import refuse_gradless
from shardwise.step.same_data import (
    compare_shared,
    digest_of_data,
    digest_of_dataset,
    judge_data,
    other_datasets,
    refuse_others,
)
from shardwise.world.agreement import digest_of_text, minority
from shardwise.world.signals import EndOfRun

_FIX_LENGTH = "give every rank the same number of micro-batches per window: sw.Loader pads with flagged copies"


class SeenLabels:
    """How labels of a model's windows compare with its inputs so far; None: enough was seen."""

    def __init__(self) -> None:
        self.counts: Tensor | None = torch.zeros(3)


class Counted(NamedTuple):
    """What the first exchange of a window tells.

    Attributes:
        tokens: valid ones over all ranks.
        waited_s: seconds that ranks waited for the window's data, on average; 0 where it is of no Loader.
        num_ignored: labels over all ranks that are -100; None: labels are not what is counted.
    """

    tokens: int | float
    waited_s: float
    num_ignored: int | None


def agree_on_count(
    runtime: Runtime,
    batches: list[Batch],
    counter: Callable[[Batch], Any],
    *,
    trains: bool,
    meanwhile: Callable[[], object] = lambda: None,
) -> Counted:
    """Counts the valid tokens of this window over all ranks. All ranks must call it; with ``trains``, it also refuses
    what can have no gradient. ``meanwhile`` is called while ranks exchange their counts.

    Raises:
        RankError: ranks have different numbers of micro-batches, or one of them could not begin.
        UsageError: an empty window, a model or mode without a gradient.
        EndOfRun: the window before was to be the last one.
        ConfigError: nothing says how many tokens a batch has, or the count is not a number; labels that are the inputs
            at their own places.
    """
    seen = runtime.memory(SeenLabels)
    on_host = [_on_host(batch, counter) for batch in batches]
    counted = [h for b, h in zip(batches, on_host, strict=True) if not is_padding(b)]
    tokens, labels, problem = _counts_of(runtime, counted, counter, seen, trains=trains, is_empty=not batches)
    place, agreement = f"window {runtime.step + 1}, before forward", runtime.world.agreement
    data = getattr(batches[0], "window", None) if batches else None
    samples = digest_of_data(runtime, batches) if problem is None else 0
    shared = compare_shared(runtime, batches if problem is None else [])
    sums = agreement.sum(
        {
            "samples": agreement.same(samples),
            **shared,
            "data": agreement.same(digest_of_text(repr(data))),
            "dataset": agreement.same(digest_of_dataset(data)),
            "tokens": tokens if runtime.world.counts_data else 0,
            "labels": labels,
            "positions": _num_labels(counted) if runtime.world.counts_data and counter is valid_labels else 0,
            "waited": getattr(data, "waited_s", 0.0) / runtime.world.size,
            "length": float(len(batches)),
            "length2": float(len(batches) ** 2),
            "problem": float(problem is not None),
            "stop": runtime.world.stop.entry(),
        },
        place,
        meanwhile=meanwhile,
    )
    _agree_on_stop(runtime, sums["stop"])
    _refuse_problem(runtime, sums, problem, place)
    if not agreement.all_same(sums["dataset"]):
        raise other_datasets(runtime, data, place)
    if runtime.world.size * sums["length2"] != sums["length"] ** 2:
        raise _lengths_differ(runtime, len(batches), place)
    if not agreement.all_same(sums["data"]):
        raise _data_differ(runtime, data, place)
    seen.counts = judge_labels(seen.counts, sums["labels"], f"window {runtime.step + 1}")
    if shared:
        refuse_others(runtime, batches, sums["shared data"], place)
    judge_data(runtime, samples, agreement.all_same(sums["samples"]))
    total = _total_of(sums["tokens"])
    num_ignored = int(float(sums["positions"]) - total) if counter is valid_labels else None
    return Counted(int(total) if total.is_integer() else total, float(sums["waited"]), num_ignored)


def _counts_of(
    runtime: Runtime,
    counted: list[Batch],
    counter: Callable[[Batch], Any],
    seen: SeenLabels,
    *,
    trains: bool,
    is_empty: bool,
) -> tuple[Any, Tensor, ShardwiseError | None]:
    """This rank's tokens, and how labels compare with inputs; or the error that keeps it from beginning."""
    try:
        if trains:
            refuse_gradless(runtime)
        if is_empty:
            raise UsageError("an empty window", why="a step needs at least one micro-batch", fix=_FIX_LENGTH)
        # Summed as tensors: one device synchronization instead of one per micro-batch. In float64: a count may be a sum
        # of weights, which must not depend on the layout, and a number of Python.
        tokens = sum(torch.as_tensor(counter(batch), dtype=torch.float64) for batch in counted)
        return tokens, compare_labels(seen.counts, counted, counter), None
    except ShardwiseError as error:
        return 0, torch.zeros(3), error


def _total_of(tokens: Tensor) -> float:
    total = float(tokens)
    if not math.isfinite(total) or total < 0:
        raise ConfigError(
            f"a window of {total:g} tokens",
            why="count(batch) is what a sum of the loss runs over: a number, 0 or more",
            fix="look at what count= returns",
        )
    return total


def _agree_on_stop(runtime: Runtime, summed: Tensor) -> None:
    """Takes over whether ranks were asked to stop, and says on rank 0, once, that a loop begins another window although they were.

    Raises:
        EndOfRun: the window before was to be the last one.
    """
    stop = runtime.world.stop
    stop.agree(summed)
    if stop.ends:
        raise EndOfRun
    if stop.num_ignored == 1 and runtime.world.is_main:
        print(
            f"shardwise: {stop.agreed}: this loop goes on until its next manager.save(), or its end. Call manager.save_every(None, out) after each "
            "step: it saves, and ends the run, when it was asked to",
            file=sys.stderr,
            flush=True,
        )


def _num_labels(batches: list[Batch]) -> float:
    found = [batch.get("labels") for batch in batches]
    return float(sum(labels.numel() for labels in found if isinstance(labels, Tensor)))


def count_again(runtime: Runtime, batches: list[Batch], counter: Callable[[Batch], Any]) -> dict[str, Tensor]:
    """An entry for the exchange before the step: the labels as the device has them, where :func:`agree_on_count` may have
    counted copies of them on the host. Empty elsewhere."""
    if not _counts_copies(runtime, counter):
        return {}
    found = sum(torch.as_tensor(counter(b), dtype=torch.float64) for b in batches if not is_padding(b))
    return {"tokens again": torch.as_tensor(found if runtime.world.counts_data else 0.0)}


def refuse_other_count(summed: Mapping[str, Tensor], tokens: float, place: str) -> None:
    """Raises UsageError on all ranks if what came of :func:`count_again` is another number than ``tokens``."""
    if "tokens again" in summed and float(summed["tokens again"]) != tokens:
        raise UsageError(
            f"{place}: {float(summed['tokens again']):g} valid labels on the device, and {tokens:g} on the host",
            why="labels of a micro-batch of a Loader were written through .data after it was made, which no copy follows",
            fix='replace them, batch["labels"] = ..., or write them in place without .data; or do it in Loader(prepare=...)',
        )


def _counts_copies(runtime: Runtime, counter: Callable[[Batch], Any]) -> bool:
    return runtime.world.device.type != "cpu" and counter is valid_labels


def _on_host(batch: Batch, counter: Callable[[Batch], Any]) -> Batch:
    """What is counted for a micro-batch: its copy on the host, where there is one, and labels are counted. A count of the
    user's may use tensors on the device."""
    found = batch.on_host() if isinstance(batch, MicroBatch) and counter is valid_labels else None
    return batch if found is None else found


def _lengths_differ(runtime: Runtime, length: int, place: str) -> RankError:
    lengths = runtime.world.agreement.gather(length, place)
    _, ranks = minority(lengths)
    return RankError(
        f"micro-batches per rank: {lengths}",
        why="every rank must run as many forwards as the others, or they wait for each other in vain",
        fix=_FIX_LENGTH,
        ranks=ranks,
    )


def _data_differ(runtime: Runtime, data: tuple[int, int] | None, place: str) -> RankError:
    told = runtime.world.agreement.gather(data, place)
    usual, ranks = minority(told)
    texts = ["data of no Loader" if each is None else f"epoch {each[0]} from sample {each[1]} on" for each in told]
    return RankError(
        f"ranks that came to {place} with micro-batches of different windows of a Loader",
        why=f"rank {ranks[0]} has {texts[ranks[0]]}, rank {told.index(usual)} {texts[told.index(usual)]}: one of them has left a window out, "
        "or caught an exception; from here on samples would be grouped otherwise than in one process",
        fix="take as many windows from the Loader on every rank; to leave one out, do so on all ranks",
        ranks=ranks,
    )


def _refuse_problem(runtime: Runtime, sums: Mapping[str, Tensor], problem: ShardwiseError | None, place: str) -> None:
    """Raises on all ranks if one cannot continue: that rank its own error, the others a RankError that names it."""
    if not float(sums["problem"]):
        return
    texts = runtime.world.agreement.gather(str(problem) if problem else None, place)
    if problem is not None:
        raise problem
    ranks = tuple(rank for rank, text in enumerate(texts) if text)
    raise RankError(
        f"rank {', '.join(map(str, ranks))} could not start {place}",
        why=str(texts[ranks[0]]).splitlines()[0],
        fix="see the error of that rank",
        ranks=ranks,
    )
