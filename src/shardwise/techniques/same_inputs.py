"""Ranks along ``tp`` have parts of the same layers, ranks along ``cp`` parts of the same samples, so they must come to a forward with the
same inputs. A window compares its micro-batches; what is called outside of one, as ``generate`` and evaluations are, is compared here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RankError
from shardwise.model.digest import digest_of_values
from shardwise.world.axis import Axis


def input_check(runtime: Any, axis_name: str) -> Callable[[Any, Mapping[str, Any]], None]:
    """A function of the arguments of a forward that raises RankError, on all ranks along an axis, where tensors differ between them outside
    of a window, or where one of them calls it alone."""
    axis, agreement = runtime.world.axis(axis_name), runtime.world.agreement
    has_host = agreement.host_group is agreement.group  # else groups of an axis have no backend for the CPU
    device = agreement.device if has_host else runtime.world.device
    if runtime.world.watch is not None:
        runtime.world.watch.gathers_with(axis.ranks, axis.group)

    def check(args: Any, kwargs: Mapping[str, Any]) -> None:
        if not runtime.in_window:
            named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
            _compare(axis, {name: value for name, value in named.items() if isinstance(value, Tensor)}, device)

    return check


def _compare(axis: Axis, inputs: Mapping[str, Tensor], device: torch.device) -> None:
    digest = torch.tensor([digest_of_values(inputs, unread="")], dtype=torch.float64, device=device)
    smallest, largest = axis.reduce(torch.cat([-digest, digest]), "max")
    if float(smallest) == -float(largest):
        return
    found = axis.gather(digest).tolist()
    others = tuple(rank for rank, its in zip(axis.ranks, found, strict=True) if its != found[0])
    raise RankError(
        f"ranks {axis.ranks[0]} and {others[0]} with other inputs in a forward ({', '.join(inputs)})",
        why=f"they are ranks along {axis.name}, which must work on the same data",
        fix='take data by the index along dp: DistributedSampler(dataset, num_replicas=world.axis("dp").size, '
        'rank=world.axis("dp").rank); before generate with do_sample=True call torch.manual_seed with one seed on all of them',
        ranks=others,
    )
