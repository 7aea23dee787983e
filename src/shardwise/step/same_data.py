"""Whether ranks train on the right samples: data-parallel ranks each on their own, ranks that share a model's layers (along
``tp``) on the same ones; and whether their Loaders read one dataset.

Micro-batches are compared by digests, in an exchange that is made anyway. Where data-parallel ranks have the same
samples, as with a DataLoader without a DistributedSampler and equal seeds, the user is warned after a few windows that
do not come from a Loader; data that does not change (a benchmark's, one batch to overfit on) is accepted. Where ranks
along ``tp`` have other samples than each other, gradients would be of no data at all: an error, in every window.
"""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shardwise.config.caller import level_of_caller
from shardwise.data.batch import Place, is_padding
from shardwise.errors import RankError
from shardwise.model.digest import digest_of_values
from shardwise.parallel import Runtime
from shardwise.step.loss import Batch
from shardwise.world.agreement import minority

_WINDOWS = 3  # equal ones in a row; two ranks may draw the same few samples once


class SeenData:
    """Digests of a model's windows that were equal on all ranks; None: one was not, or the warning was given."""

    def __init__(self) -> None:
        self.digests: list[int] | None = []


def digest_of_data(runtime: Runtime, batches: list[Batch]) -> int:
    """A digest of this rank's first and last micro-batch; 0 where there is nothing to compare."""
    if runtime.memory(SeenData).digests is None or runtime.world.axis("dp").size == 1 or not batches:
        return 0
    # Of a Loader: each rank has others, or a copy that counts as nothing.
    if any(getattr(batch, "window", None) is not None or is_padding(batch) for batch in batches):
        return runtime.world.rank
    return _digest(batches[:: max(1, len(batches) - 1)], unread=str(runtime.world.rank))  # assumed to differ


def compare_shared(runtime: Runtime, batches: list[Batch]) -> dict[str, float]:
    """An entry of an exchange whose sum is 0 if ranks that share the layers of one model have equal micro-batches: none if
    there are no such ranks."""
    world, data = runtime.world, runtime.world.axis("dp")
    if world.size == data.size:
        return {}
    # Exact in float64: 24 bits of a digest times 15 bits that differ between the groups, so that no two make up for
    # each other.
    number = (_digest(batches, unread="") >> 8) * (1 + data.rank * 40503 % (1 << 15))
    return {"shared data": float(number * (world.size // data.size - 1 if world.counts_data else -1))}


def refuse_others(runtime: Runtime, batches: list[Batch], summed: Tensor, place: str) -> None:
    """Raises RankError if ``summed``, from :func:`compare_shared`, is not 0; on all ranks."""
    if not float(summed):
        return
    found = runtime.world.agreement.gather((runtime.world.axis("dp").rank, _digest(batches, unread="")), place)
    first: dict[int, int] = {}
    for rank, (index, _) in enumerate(found):
        first.setdefault(index, rank)
    ranks = tuple(rank for rank, (index, digest) in enumerate(found) if digest != found[first[index]][1])
    if not ranks:  # of fake peers
        return
    other = first[found[ranks[0]][0]]
    raise RankError(
        f"ranks {other} and {ranks[0]} with other micro-batches at {place}",
        why="they are the same index along dp: each has a part of the same layers, or of the positions of the same samples, so both must work "
        "on the same data",
        fix='take data by the index along dp, as sw.Loader does: DistributedSampler(dataset, num_replicas=world.axis("dp").size, '
        'rank=world.axis("dp").rank)',
        ranks=ranks,
    )


def _digest(batches: Iterable[Batch], unread: str) -> int:
    found = 1
    for batch in batches:
        found = digest_of_values(batch, unread=unread, before=found)
    return found


def judge_data(runtime: Runtime, digest: int, is_same: bool) -> None:
    """Warns on rank 0 if the windows so far were equal on all ranks, and not all the same. All ranks decide the
    same."""
    memory = runtime.memory(SeenData)
    if (seen := memory.digests) is None:
        return
    if not is_same or runtime.world.axis("dp").size == 1 or len(seen) > 2 * _WINDOWS:
        memory.digests = None
        return
    seen.append(digest)
    if len(set(seen)) < _WINDOWS:
        return
    memory.digests = None
    if runtime.world.is_main:
        size = runtime.world.axis("dp").size
        warnings.warn(
            f"all {size} ranks were given the same samples in {_WINDOWS} windows: each counts {size} times, and a step learns from 1/{size} "
            "of the data it seems to. Pass the dataset to sw.Loader(dataset, world, ...), which gives each rank its own; or give a DataLoader "
            "sampler=DistributedSampler(dataset), and call its set_epoch(epoch) in every epoch.",
            stacklevel=level_of_caller(),
        )


def digest_of_dataset(window: Any) -> int:
    """Of the dataset that a micro-batch with this ``window`` is from; 0: of no Loader."""
    return window.digest if isinstance(window, Place) else 0


def other_datasets(runtime: Runtime, window: Any, place: str) -> RankError:
    """The error for ranks whose Loaders read other samples; all ranks must call it, each with the ``window`` of a micro-batch."""
    own = (window.digest, window.num_samples) if isinstance(window, Place) else None
    told = runtime.world.agreement.gather(own, place)
    usual, ranks = minority(told)
    if all(each is not None and each[1] is None for each in told):
        return RankError(
            f"sw.Loader: rank {ranks[0]} has read other samples of its stream than rank {told.index(usual)}",
            why=f"{place}: each rank reads the whole stream and keeps its part of it, so that samples would be seen twice, and others never",
            fix="let the stream give the same samples in the same order on every rank: no part for each rank (split_by_node), no random numbers but "
            "from a generator of its own with one seed, and no shorter file on one of them",
            ranks=ranks,
        )
    return RankError(
        "sw.Loader: the ranks have other samples in their datasets",
        why=f"rank {ranks[0]} has {_samples(told[ranks[0]])}, rank {told.index(usual)} {_samples(usual)}, which are others. A Loader gives each rank its part of one "
        "order of one dataset: some samples would be seen twice, and others never",
        fix="give every rank the whole dataset in the same order, not a part for each rank. Loader shuffles it, by the seed of sw.init; to shuffle or split it before, use one "
        "seed on all ranks: random.Random(0).shuffle(data), random_split(data, sizes, torch.Generator().manual_seed(0))",
        ranks=ranks,
    )


def _samples(told: tuple[int, int | None] | None) -> str:
    if told is not None and told[1] is None:
        return "a stream"
    return "no Loader" if told is None else f"{told[1]} sample{'s' if told[1] != 1 else ''}"
