"""Communication parallel to the training: the same ranks in another process group, for use by a second thread."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise.world.agreement import Agreement
from shardwise.world.group import new_group
from shardwise.world.init import World


class SideGroup:
    """The ranks of a world in a second process group, for one thread that works next to the training. All ranks must
    make it; only that thread may use it.

    It has no watch: the training's own exchanges name a lost rank, and a wait here ends with the group's connection, or
    after the world's timeout.
    """

    def __init__(self, world: World):
        self.rank, self.size = world.rank, world.size
        group: Any = dist.group.WORLD
        if not world.agreement.is_alone:
            group = new_group(None, world.timeout_s, backend="gloo")
        self._group = group if not world.agreement.is_alone else None
        self.agreement = Agreement(
            world.size,
            world.rank,
            group=group,
            device=torch.device("cpu"),
            timeout_s=world.timeout_s,
            watch=None,
            is_fake=world.agreement.is_alone,
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Destroys the group. All ranks must call it, while the world is open."""
        self.agreement.is_open = False
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
