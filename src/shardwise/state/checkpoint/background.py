"""Asynchronous saves: copies the run's state and writes it in a thread while training continues."""

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.state.checkpoint.contents import Contents
from shardwise.state.checkpoint.writer import memory_in_line
from shardwise.world import World
from shardwise.world.collectively import Peers
from shardwise.world.side_group import SideGroup


class Background:
    """Writes one save at a time in a thread. All ranks must make it, and call :meth:`begin`, :meth:`wait` and
    :meth:`close` in the same way."""

    def __init__(self, world: World):
        self._device = world.device
        self._side_group = SideGroup(world)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-save")
        self._buffers: dict[str, Tensor] = {}
        self._under_way: Future[Path] | None = None

    def begin(self, contents: Contents, write: Callable[[Peers, Contents], Path]) -> None:
        """Copies what is to be saved, starts the thread, which calls ``write`` with the copies, and returns."""
        staged = contents.staged(self._stage)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._under_way = self._thread.submit(write, self._side_group, staged)

    def wait(self) -> None:
        """Waits for the save that is being written, and raises its error."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        error = under_way.exception()
        if isinstance(error, ShardwiseError):  # it says what happened: without the lines of the thread
            error.add_note(
                "The save that was written beside training has failed, and the run stops here unless this error is caught: checkpoints from "
                "before are as they were, and the same command goes on from the newest."
            )
            raise error.with_traceback(None) from None
        under_way.result()

    def outcome(self, timeout_s: float) -> BaseException | None:
        """Waits for the save that is being written, and returns its error or None. No communication."""
        under_way, self._under_way = self._under_way, None
        try:
            return under_way.exception(timeout=timeout_s) if under_way is not None else None
        except TimeoutError as late:
            return late

    def close(self) -> None:
        """Destroys the process group of the saves, once no rank is in an exchange of it."""
        self._side_group.close()

    def let_go(self) -> None:
        """Frees this rank's thread and buffers; no new save can begin."""
        self._thread.shutdown(wait=False)
        self._buffers.clear()

    def tell(self) -> None:
        """Prints the error of the last save, if any. For a manager that is not closed, so that the error is not
        lost."""
        if self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None:
            print(f"shardwise: the last checkpoint was not written: {self._under_way.exception()}", file=sys.stderr)

    def _stage(self, name: str, tensor: Tensor, offset: Callable[[], int]) -> Tensor:
        """Copies ``tensor`` into a buffer that the next save uses again."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            if tensor.device.type == "cuda":  # pinned memory is page-aligned
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            else:
                buffer = memory_in_line(tensor, offset())
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)
