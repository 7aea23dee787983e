"""A window: the micro-batches of one optimizer step, counted, run and reduced so that the sum is the one process's.

    with sw.window(model, batches) as w:
        for b in w:
            (loss(model(b["input_ids"]), b) / w.num_tokens).backward()

Entering exchanges the token count and the number of micro-batches (the first of two exchanges per window). Iterating
reduces gradients at the last micro-batch only and gives each micro-batch its own random stream. Leaving exchanges what
must be agreed before the step (the second): which parameters were used, the units entered, gradients of 0-dim
parameters, and whatever the caller adds. An exception on the way restores the module: synchronising again, no
gradients left over.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._compat import BatchNormBase, local_tensor
from shardwise.errors import RankError, ShardwiseError, UsageError
from shardwise.launch.failure import is_lost_peer
from shardwise.parallel import Runtime, runtime_of
from shardwise.parallel.tensors import tensors_of
from shardwise.train.batch import MicroBatch
from shardwise.train.loss import Batch, count_of
from shardwise.world.rng import derive_seed

__all__ = ["Window", "accumulate", "count_tokens", "window"]

_FIX_LENGTH = "give every rank the same number of micro-batches per window: sw.Loader pads with flagged copies"


class Window:
    """See the module's text. Made by :func:`window`; all ranks enter, iterate to the end and leave it.

    Attributes:
        num_tokens: valid tokens of all ranks and micro-batches, at least 1, what a sum is divided by. While a padding
            micro-batch runs it is infinite, so that its sums count as 0.
        num_valid: the same count as it is, 0 included.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], *, loss: Any = None, count: Any = None):
        self.model, self.batches = model, list(batches)
        self.runtime: Runtime = runtime_of(model)
        self.num_valid = 0
        self.agreed: dict[str, Tensor] | None = None  # sums of the second exchange
        self._count = count_of(loss, count)
        self._padding = False
        self._iterated = False
        self._rng_before: Tensor | None = None
        self._cuda_before: Tensor | None = None

    @property
    def num_tokens(self) -> float:
        return float("inf") if self._padding else float(max(self.num_valid, 1))

    @property
    def place(self) -> str:
        """Where this window is, for messages."""
        return f"window {self.runtime.step + 1}"

    # ---- entering --------------------------------------------------------------------------------------------

    def __enter__(self) -> "Window":
        runtime = self.runtime
        if runtime.in_window:
            raise UsageError(
                "a window inside a window", why="they would share one model's gradients", fix="leave the first"
            )
        runtime.check_unchanged()
        self.num_valid = count_tokens(self.model, self.batches, count=self._count)
        runtime.engine.begin()
        runtime.in_window = True
        self._versions = _buffer_versions(runtime)
        return self

    # ---- running ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[MicroBatch]:
        if not self.runtime.in_window:
            raise UsageError(
                "a window used outside its with block",
                why="tokens are counted when it is entered",
                fix="write `with sw.window(model, batches) as w:` and iterate over w inside",
            )
        self._iterated = True
        axis = self.runtime.world.axis("dp")
        for i, given in enumerate(self.batches):
            batch = given if isinstance(given, MicroBatch) else MicroBatch(given, index=i * axis.size + axis.rank)
            self.runtime.engine.set_sync(i == len(self.batches) - 1)
            kept = _clone_buffers(self.runtime) if batch.padding else None
            self._padding = batch.padding
            self._fork_rng(batch.index)
            yield batch
            self._restore_rng()
            self._padding = False
            if kept is not None:
                _restore_buffers(self.runtime, kept)
        self.runtime.engine.set_sync(True)

    def _fork_rng(self, index: int) -> None:
        """A stream of this micro-batch's own: (seed, step, global index), the same whichever rank runs it."""
        world = self.runtime.world
        self._rng_before = torch.get_rng_state()
        seed = derive_seed(world.seed, "forward", self.runtime.step, index)
        if world.device.type == "cuda":
            self._cuda_before = torch.cuda.get_rng_state(world.device)
        torch.manual_seed(seed)

    def _restore_rng(self) -> None:
        if self._rng_before is not None:
            torch.set_rng_state(self._rng_before)
            self._rng_before = None
        if self._cuda_before is not None:
            torch.cuda.set_rng_state(self._cuda_before, self.runtime.world.device)
            self._cuda_before = None

    # ---- leaving ---------------------------------------------------------------------------------------------

    def finish(self, entries: Mapping[str, Tensor | float] | None = None) -> dict[str, Tensor]:
        """The second exchange, with the caller's ``entries`` (name -> number or tensor) summed along; gradients are
        final afterwards. Called once, after the last micro-batch; leaving the window calls it if nobody did."""
        runtime = self.runtime
        if not self._iterated and self.batches:
            raise UsageError(
                "a window that was entered but not iterated",
                why="its micro-batches would be skipped on this rank while others wait for them",
                fix="write `for batch in w:` inside the with block",
            )
        own = _Exchange(runtime, self._versions)
        self.agreed = runtime.world.agreement.sum(
            {**own.entries(), **(entries or {})}, f"{self.place}, before the step"
        )
        own.apply(self.agreed)
        runtime.step += 1
        runtime.in_window = False
        return self.agreed

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            if self.agreed is None:
                self.finish()
            return
        self.runtime.in_window = False
        self._restore_rng()
        self.runtime.engine.abandon()
        for param in self.runtime.parameters.values():
            param.grad = None
        world = self.runtime.world
        if world.size > 1 and isinstance(error, RuntimeError) and is_lost_peer(error):
            raise world.agreement.explain(error, f"{self.place}, forward or backward") from error


def window(model: nn.Module, batches: Iterable[Batch], *, loss: Any = None, count: Any = None) -> Window:
    """A context manager and iterator over one step's micro-batches; see :class:`Window`. All ranks must use it.

    Args:
        model: from ``parallelize``.
        batches: this rank's micro-batches (``str -> Tensor``); equally many on every rank.
        loss: only for its ``.count``; optional.
        count: ``count(batch)`` -> number of valid tokens; default: labels that are not -100.

    Raises:
        RankError: ranks came with different numbers of micro-batches.
        UsageError: an empty window, a window inside a window.
        ConfigError: nothing says how many tokens a batch has.
    """
    return Window(model, batches, loss=loss, count=count)


def count_tokens(model: nn.Module, batches: Iterable[Batch], *, loss: Any = None, count: Any = None) -> int:
    """Valid tokens of this window over all ranks; paddings count 0. All ranks must call it (one exchange).

    Raises:
        RankError, UsageError, ConfigError: as :func:`window` says.
    """
    runtime, batches = runtime_of(model), list(batches)
    counter = count if count is not None else count_of(loss, None)
    tokens, problem = 0, None
    try:
        if not batches:
            raise UsageError("an empty window", why="a step needs at least one micro-batch", fix=_FIX_LENGTH)
        # Summed as tensors: one wait for the device instead of one per micro-batch.
        tokens = sum(torch.as_tensor(counter(b)) for b in batches if not getattr(b, "padding", False))
    except ShardwiseError as error:
        problem = error
    place = f"window {runtime.step + 1}, before forward"
    sums = runtime.world.agreement.sum(
        {
            "tokens": tokens,
            "length": float(len(batches)),
            "length2": float(len(batches) ** 2),
            "problem": float(problem is not None),
        },
        place,
    )
    _refuse_problem(runtime, sums, problem, place)
    size = runtime.world.size
    if size * sums["length2"] != sums["length"] ** 2:
        lengths = runtime.world.agreement.gather(len(batches), place)
        usual = max(set(lengths), key=lengths.count)
        raise RankError(
            f"micro-batches per rank: {lengths}",
            why="every rank must run as many forwards as the others, or they wait for each other in vain",
            fix=_FIX_LENGTH,
            ranks=tuple(rank for rank, length in enumerate(lengths) if length != usual),
        )
    return int(sums["tokens"])


@contextlib.contextmanager
def accumulate(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Within: backward reduces gradients over the ranks only if ``is_last``. After, also after an exception: it does
    again. All ranks must use it alike."""
    engine = runtime_of(model).engine
    engine.set_sync(is_last)
    try:
        yield
    finally:
        engine.set_sync(True)


def _refuse_problem(runtime: Runtime, sums: Mapping[str, Tensor], problem: ShardwiseError | None, place: str) -> None:
    """A rank that cannot go on raises its own error; the others name it, instead of waiting for it."""
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


class _Exchange:
    """What the module itself must agree on before a step, packed into the second exchange and carried out after it."""

    def __init__(self, runtime: Runtime, versions: dict[str, int]):
        self.runtime, self.versions = runtime, versions
        self.buffers = tensors_of(runtime.module, "_buffers")

    def entries(self) -> dict[str, Tensor]:
        runtime = self.runtime
        units = runtime.engine.entered()
        found = {"units": runtime.world.agreement.same(hash_names(units))}
        used = runtime.engine.used()
        if used is not None:
            found["used"] = used
        if runtime.replicated:
            found["whole"] = torch.stack([_gradient_or_zero(runtime.parameters[n]) for n in runtime.replicated])
        if self.buffers:
            changed = _changed_buffers(runtime, self.buffers, self.versions)
            found["buffers"] = torch.tensor([float(name in changed) for name in self.buffers])
        return found

    def apply(self, summed: Mapping[str, Tensor]) -> None:
        runtime = self.runtime
        if not runtime.world.agreement.all_same(summed["units"]):
            raise self._units_differ()
        if "used" in summed:
            for name, count in zip(runtime.trainable, summed["used"].tolist(), strict=True):
                if not count:  # no rank used it: None, as in one process, so that no optimizer decays it
                    runtime.parameters[name].grad = None
        if "whole" in summed:
            self._set_replicated(summed["used"], summed["whole"])
        if "buffers" in summed and runtime.world.size > 1:
            flags = summed["buffers"].tolist()
            changed = [buffer for buffer, flag in zip(self.buffers.values(), flags, strict=True) if flag]
            _same_buffers(runtime, changed)

    def _set_replicated(self, used: Tensor, whole: Tensor) -> None:
        runtime = self.runtime
        for name, value in zip(runtime.replicated, whole, strict=True):
            param = runtime.parameters[name]
            if used[runtime.trainable.index(name)] > 0:
                param.grad = value.to(param.device, param.dtype)

    def _units_differ(self) -> RankError:
        lists = self.runtime.world.agreement.gather(self.runtime.engine.entered(), "naming the units that differ")
        usual = max(lists, key=lists.count)
        ranks = tuple(rank for rank, units in enumerate(lists) if units != usual)
        other = lists[ranks[0]]
        at = next(
            (i for i, (a, b) in enumerate(zip(usual, other, strict=False)) if a != b), min(len(usual), len(other))
        )
        name = (usual[at : at + 1] or other[at : at + 1] or [None])[0]
        return RankError(
            f"rank {ranks[0]} entered other units than rank {next(r for r in range(len(lists)) if r not in ranks)}",
            why=f"entry {at + 1} differs: {usual[at : at + 1] or 'nothing'} against {other[at : at + 1] or 'nothing'}; "
            "their collectives crossed, so gradients are wrong",
            fix='keep modules that may be skipped in their parent\'s unit: Sharding(units="auto"), or name units that '
            "every forward enters",
            name=name,
            ranks=ranks,
        )


def hash_names(names: list[str]) -> int:
    """A 60-bit digest of an ordered list of names, the same in every process."""
    return derive_seed(0, *names) & (1 << 60) - 1


def _gradient_or_zero(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        return torch.zeros((), dtype=torch.float64)
    return local_tensor(param.grad).detach().double().cpu()


def _buffer_versions(runtime: Runtime) -> dict[str, int]:
    return {name: buffer._version for name, buffer in tensors_of(runtime.module, "_buffers").items()}


def _changed_buffers(runtime: Runtime, buffers: Mapping[str, Tensor], versions: Mapping[str, int]) -> set[str]:
    """Buffers written since the window began. Batch norm's kernels write running statistics without counting a version,
    so those of a layer in training count as written."""
    changed = {name for name, buffer in buffers.items() if buffer._version != versions.get(name)}
    statistics = {
        id(buffer)
        for module in runtime.module.modules()
        if isinstance(module, BatchNormBase) and module.training
        for buffer in module.buffers(recurse=False)
    }
    return changed | {name for name, buffer in buffers.items() if id(buffer) in statistics}


def _clone_buffers(runtime: Runtime) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in tensors_of(runtime.module, "_buffers").items()}


def _restore_buffers(runtime: Runtime, kept: Mapping[str, Tensor]) -> None:
    for name, buffer in tensors_of(runtime.module, "_buffers").items():
        if name in kept:
            buffer.copy_(kept[name])


def _same_buffers(runtime: Runtime, changed: list[Tensor]) -> None:
    """Buffers that changed on any rank become equal again: rank 0's, or the mean over ranks (integers: rank 0's)."""
    mean = runtime.recipe.buffer_policy == "mean"
    for buffer in changed:
        if mean and buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= runtime.world.size
        else:
            dist.broadcast(buffer, src=0)
