"""Forwards of a model whose blocks have this rank's positions: what context parallelism and sequence parallelism have in common.

The model's own forward runs on all tokens. At the entry of a block what grows with the length is cut to this rank's rows, which the block
is given as one more argument: the second run of a checkpoint, and a compiled graph, have them like any input.
"""

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch.autograd import runs_again
from shardwise.errors import ShardwiseError, UnsupportedError, UsageError
from shardwise.model import canonical_modules
from shardwise.model.calling import FOR_LOSS, TARGETS, by_name
from shardwise.model.pytrees import keyed_leaves, map_keyed
from shardwise.recipe import Recipe
from shardwise.techniques.row_exchanges import At, Ranks


class Current:
    """The positions that the running block was given; one for all models, as blocks of two do not run at once."""

    def __init__(self) -> None:
        self.at: At | None = None


_CURRENT: dict[str, Current] = {}
_AT = "_at_"  # and what cuts: the argument of a block that has its positions
_WITHIN = "_shardwise_cut_within"  # of a root module


def current_of(what: str) -> Current:
    """The positions that the running block was given by what cuts them."""
    return _CURRENT.setdefault(what, Current())


def with_positions(block: nn.Module, what: str) -> None:
    """Lets the forward of a block take its positions, cut by ``what``, as one more argument, for what runs in it."""
    inner, current, key = block.forward, current_of(what), _AT + what

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, current.at = current.at, kwargs.pop(key, None)
        try:
            return inner(*args, **kwargs)
        finally:
            current.at = before

    block.forward = forward


def cut_within(root: nn.Module, cut: Callable[["CutForward"], object]) -> None:
    """Calls ``cut`` when the sequences of a model have been cut by a technique behind this one: it cuts the rows of that once more, in hooks that
    are behind those at the entry of a block, and around those of modules in it."""
    root.__dict__[_WITHIN] = cut


def were_cut(root: nn.Module, cuts: "CutForward") -> None:
    """The sequences of a model are cut: what :func:`cut_within` was given is called."""
    cut = root.__dict__.pop(_WITHIN, None)
    if cut is not None:
        cut(cuts)


@contextlib.contextmanager
def on_all_positions(what: str) -> Iterator[None]:
    """Within: what runs has all positions that ``what`` cuts."""
    current = current_of(what)
    before, current.at = current.at, None
    try:
        yield
    finally:
        current.at = before


def clear_after(root: nn.Module, clear: Callable[[], None]) -> None:
    """Calls ``clear`` where the root's forward ends by an exception of any kind, for which no hook is called."""
    inner = root.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except BaseException:
            clear()
            raise

    root.forward = forward


def check_blocks(module: nn.Module, recipe: Recipe, cut: Collection[str], what: str) -> None:
    """Refuses what runs blocks that are cut in another way than by calling them. ``what`` cuts them, for messages."""
    for edit in recipe.edits:
        if edit.action == "compile" and any(name.startswith(f"{edit.module}." if edit.module else "") for name in cut):
            raise UnsupportedError(
                f"Compile of a module around blocks whose sequences are cut over {what}",
                why="sequences are cut at the entry of each block, outside of what is compiled",
                fix='compile the blocks: compile="blocks"',
                name=edit.module or None,
            )
    own = next(
        (name for name, child in canonical_modules(module) if getattr(child, "gradient_checkpointing", False)), None
    )
    if own is not None and cut:
        raise UsageError(
            f"a model under {what} that checkpoints its blocks itself",
            why="what it runs again in backward would not know which positions this rank has",
            fix='model.gradient_checkpointing_disable(), and parallelize(..., remat="full")',
            name=own or None,
        )


class CutForward:
    """The forwards of one model.

    Args:
        ranks: which share the positions of a sequence.
        what: cuts them, for messages.
        source, dim: path of the model's argument by which the length is known, and its dim of positions.
        extra: positions that the model adds before its blocks.
        constants: path of each argument of the example that is a number, a text or a flag -> it, as text.

    Attributes:
        at: the positions of this rank in the forward that runs; None: it is whole, or none runs.
        last: those of the last forward that was cut.
        is_running: a forward of the model runs.
        outer, inner: what has cut the sequences before, of which this cuts the rows, and what cuts them once more; None: nothing.
        for_two_lengths: what to do where sequences of two lengths were equal on the example, for messages.
    """

    def __init__(self, ranks: Ranks, what: str, source: str, dim: int, constants: Mapping[str, str], extra: int = 0):
        self.ranks, self.what = ranks, what
        self._source, self._dim, self._constants, self._extra = source, dim, constants, extra
        self.current = current_of(what)
        self.outer: CutForward | None = None
        self.inner: CutForward | None = None
        self.at: At | None = None
        self.last: At | None = None
        self.is_running = False
        self.for_two_lengths = f"leave {what} out for models with sequences of two lengths"
        self._runtime: Any = None
        self._knows_graph = False
        self._num_calls: dict[str, int] = {}  # of blocks, in this forward
        self._seen: dict[int, tuple[Tensor, int, Tensor]] = {}  # what was cut in this forward, and its rows
        self._positions = dict[tuple[int, torch.device], At]()

    def begin(self, runtime: Any) -> None:
        self._runtime = runtime
        runtime.explainers.append(self.explain)

    # ---- what an exchange is

    def part(self, x: Tensor, dim: int, at: At) -> Tensor:
        """This rank's rows of a tensor that is cut at the entry of a block."""
        return x.index_select(dim, at.rows)

    def is_on_rows(self, x: Tensor) -> bool:
        """Whether a tensor of one position has been cut, where sequences have one: to cut it again is to change nothing."""
        return False

    def joined(self, x: Tensor, dim: int, at: At) -> Tensor:
        """All rows, where the stream is joined."""
        raise NotImplementedError

    # ---- a forward

    def is_cut(self) -> bool:
        """Whether the forward that begins is of this rank's positions: those of a step or an evaluation, and those with gradients of a loop of
        the user's own. Others are whole on every rank."""
        runtime = self._runtime
        if runtime is None or runtime.micro_batch is not None:
            return runtime is not None
        return runtime.accumulation is not None and torch.is_grad_enabled()

    def positions(self, length: int, device: torch.device) -> At:
        """Those of this rank in sequences of a length."""
        key = length, device
        if key not in self._positions:
            if len(self._positions) > 64:
                self._positions.clear()
            with torch.inference_mode(False):
                self._positions[key] = self.ranks.at(length, device)
        return self._positions[key]

    def source_of(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The argument by which the length is known, if the forward has the same arguments as the example."""
        given = by_name(module, args, kwargs)
        self._refuse_other_constants(module, given)
        return dict(keyed_leaves(given)).get(self._source)

    def length_of(self, source: Tensor) -> int:
        return source.shape[self._dim] + self._extra

    def clear(self) -> None:
        self.at, self._seen, self.is_running = None, {}, False

    def refuse_own_checkpoint(self, output: Any) -> None:
        """Raises UnsupportedError, once, for an output that is made by a checkpoint of the model's own."""
        if torch.is_grad_enabled() and not self._knows_graph:
            self._knows_graph = True
            if any(runs_again(x) for _, x in keyed_leaves(output) if isinstance(x, Tensor)):
                raise self.own_checkpoint()

    def refuse_again(self, module: nn.Module) -> None:
        """Raises UnsupportedError for a module that runs while the model does not, with gradients that count: in backward."""
        runtime = self._runtime
        if not self.is_running and torch.is_grad_enabled() and runtime is not None and runtime.accumulation is not None:
            raise self.own_checkpoint()

    def own_checkpoint(self) -> UnsupportedError:
        """The error for a checkpoint of the model's own."""
        return UnsupportedError(
            f"a model under {self.what} that checkpoints a part of its forward itself",
            why="what it runs again in backward does not know which positions this rank has",
            fix='take torch.utils.checkpoint out of it (model.gradient_checkpointing_disable()), and use parallelize(..., remat="full")',
        )

    def explain(self, error: BaseException) -> ShardwiseError | None:
        """The ShardwiseError for a difference of two runs of a checkpoint in the user's code, and not of ``remat``; else None."""
        frames = traceback.extract_tb(error.__traceback__)
        is_ours = any("shardwise/techniques/remat" in frame.filename for frame in frames)
        return self.own_checkpoint() if type(error).__name__ == "CheckpointError" and not is_ours else None

    def _refuse_other_constants(self, module: nn.Module, given: Any) -> None:
        """Refuses numbers, texts and flags that the example did not have: the code may take another way."""
        parameters = inspect.signature(module.forward).parameters
        for path, x in keyed_leaves(given):
            name = path.removeprefix("[1]['").removesuffix("']")
            if not isinstance(x, bool | int | float | str) or name in FOR_LOSS or name == "use_cache":
                continue
            default = parameters[name].default if name in parameters else None
            if repr(x) != self._constants.get(path, repr(default)):
                raise UsageError(
                    f"a forward with {path}={x!r}, which the example did not have",
                    why="that its sequences may be cut was proved for the example, and the code may take another way with it",
                    fix="set it where the example has it too: in the model's configuration, or in example=",
                )

    def positions_now(self) -> At | None:
        """Those of this rank in the code that runs, also where a block runs again in backward; None: all."""
        return self.current.at if self.current.at is not None else self.at

    def length_within(self, length: int) -> int:
        """Of what is cut here, in sequences of ``length``: those of the rows that the outer cut has left."""
        outer = None if self.outer is None else self.outer.at
        return length if outer is None else outer.rows.shape[0]

    # ---- hooks of blocks

    def enter_block(
        self,
        name: str,
        calls: Sequence[Sequence[Mapping[str, int]]],
        known: set[str],
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The arguments of a block: this rank's rows of what grows with the length; and its positions."""
        at = self.at
        if at is None:
            self.refuse_again(module)
            return None
        number = self._num_calls.get(name, 0)
        self._num_calls[name] = number + 1
        dims, on_rows = calls[min(number, len(calls) - 1)]
        if not name:  # the model itself: the example's arguments are known by their names
            args, kwargs = by_name(module, args, kwargs)
        positions = {key: kwargs[key] for key in kwargs if key.startswith(_AT)}
        kwargs = {key: x for key, x in kwargs.items() if key not in positions}
        within = None if self.inner is None or self.inner.at is None else self.inner.at.rows.shape[0]

        def cut(path: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if path not in known and path.rpartition("['")[2].removesuffix("']") in {*TARGETS, *FOR_LOSS}:
                return x  # handed on to blocks, which have no loss
            if path not in known:
                raise UnsupportedError(
                    f"a block with an argument {path} that is a tensor, which it did not have on the example",
                    why="whether it grows with the length of the sequences is not known",
                    fix="pass example= with a micro-batch as training gives it",
                    name=name,
                )
            dim = dims.get(path, on_rows.get(path))
            num = at.rows.shape[0]
            if dim is None or (path in on_rows and x.shape[dim] == num and (num != at.length or self.is_on_rows(x))):
                return x  # a block that is on rows may be the first one, where others are left out
            if path in on_rows and x.shape[dim] == within != at.length:
                return x
            if x.shape[dim] != at.length:
                raise UnsupportedError(
                    f"a block with an argument {path} of {x.shape[dim]} positions, for sequences of {at.length}",
                    why="on the example both were equal, and it would be cut at other positions",
                    fix=self.for_two_lengths,
                    name=name,
                )
            version = 0 if x.is_inference() else x._version
            seen = self._seen.get(id(x))
            if seen is None or seen[1] != version:
                seen = self._seen[id(x)] = x, version, self.part(x, dim, at)
            return seen[2]

        args, kwargs = map_keyed(cut, (args, kwargs))
        return args, {**kwargs, **positions, _AT + self.what: at}

    def leave_block(self, name: str, dims: Mapping[str, int], module: nn.Module, args: Any, output: Any) -> Any:
        """The output of a block with all positions."""
        at = self.at
        if at is None:
            return output
        self.was_joined(name)
        return map_keyed(lambda path, x: self.joined(x, dims[path], at) if path in dims else x, output)

    def was_joined(self, name: str) -> None:
        """The stream was joined behind a block."""
