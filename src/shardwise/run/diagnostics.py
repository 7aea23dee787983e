"""What can be switched on to look into a run: a profiler's trace of some steps, a snapshot of the device's memory,
autograd's anomaly detection; and how its arithmetic is done (TF32, deterministic kernels)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise._torch.cuda_memory import dump_history, record_history
from shardwise.errors import ConfigError
from shardwise.run.config import Train
from shardwise.world import World


@contextlib.contextmanager
def arithmetic(train: Train, world: World) -> Iterator[None]:
    """Within: the run's arithmetic is as ``train.tf32``, ``train.deterministic`` and ``train.anomaly`` say."""
    if train.tf32 is not None and world.device.type != "cuda":
        raise ConfigError(
            f"train.tf32={str(train.tf32).lower()} on {world.device.type}",
            why="TF32 is a way in which NVIDIA GPUs multiply float32, so it would have no effect",
            fix="remove it, or run on cuda",
        )
    with contextlib.ExitStack() as stack:
        if train.tf32 is not None:
            # Not by the newer fp32_precision of each backend: with it set, reading allow_tf32 is an error of PyTorch's.
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high" if train.tf32 else "highest")
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.backends.cudnn.allow_tf32 = train.tf32
        if train.deterministic:
            # Read when cuBLAS makes its first handle; without it some of its kernels refuse to run.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = False
        if train.anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield


class Diagnostics:
    """The profiler and the memory snapshot of one rank.

    Args:
        tell: called with the path of each file, on the rank that wrote it.
        trouble: called with a sentence where one cannot be written, as on a full disk; the run goes on.
    """

    def __init__(
        self, train: Train, world: World, folder: Path, tell: Callable[[str], None], trouble: Callable[[str], None]
    ):
        self._world, self._folder, self._tell, self._trouble = world, folder, tell, trouble
        self._window = train.profiled_steps if train.profile_ranks == "all" or world.is_main else None
        self._snapshot = train.memory_snapshot
        self._profiler: Any = None
        self._first = self._last = 0  # steps that the profiler has seen
        if self._snapshot is not None and world.device.type != "cuda":
            raise ConfigError(
                f"train.memory_snapshot={self._snapshot} on {world.device.type}",
                why="it is the history of the CUDA allocator",
                fix="remove it, or run on cuda",
            )

    def tell_missed(self, done: int) -> None:
        """Says of a run that resumes after ``done`` steps what it will not record."""
        window = self._window
        missed = {
            "train.profile": window is not None and window.stop <= done + 1,
            "train.memory_snapshot": self._snapshot is not None and self._snapshot <= done,
        }
        for key, is_missed in missed.items():
            if is_missed:
                self._trouble(
                    f"{key} records nothing: its steps are before step {done + 1}, with which this run goes on"
                )

    def begin(self, step: int) -> None:
        """Called before step ``step``, counted from 1."""
        # A resumed run may begin within the window.
        if self._window is not None and step in self._window and self._profiler is None:
            self._first = step
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, *([kinds.CUDA] if self._world.device.type == "cuda" else [])]
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
        if self._profiler is not None:
            self._last = step
        if self._snapshot == step:
            record_history(True)

    def end(self, step: int) -> None:
        if self._profiler is not None and self._window is not None and step == self._window.stop - 1:
            self._end_profile()
        if self._snapshot == step:
            self._write(f"memory-step-{step}-rank-{self._world.rank}.pickle", dump_history)
            record_history(False)

    def close(self) -> None:
        """Writes what was recorded when the run ended within the window."""
        if self._profiler is not None:
            self._end_profile()

    def _end_profile(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._write(f"steps-{self._first}-{self._last}-rank-{self._world.rank}.json.gz", profiler.export_chrome_trace)

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        path = self._folder / "profile" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._trouble(f"{path} could not be written: {error}; training goes on without it")
        else:
            self._tell(str(path))
