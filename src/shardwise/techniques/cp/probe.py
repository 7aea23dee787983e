"""How a module's sequences may be cut: proved by running a copy of it on an example, without weights."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.layout import Layout
from shardwise.model.attend import refuse_uncaught
from shardwise.model.blocks import find_block_lists
from shardwise.model.calling import line_of
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.row_facts import AroundBlocks, Differs
from shardwise.model.row_gradients import BackwardDiffers
from shardwise.model.rows import imbalance, most_rows
from shardwise.recipe import Draft
from shardwise.techniques.cp.options import ContextParallel
from shardwise.techniques.one_rank import found_by_one_rank
from shardwise.techniques.row_search import Search, is_of_a_run
from shardwise.techniques.sequences import Arguments, Sequences, arguments_of, constants_of, sequences_in
from shardwise.techniques.technique import Example
from shardwise.world import World

_WITHOUT = "or leave cp out: tensor_parallel=sw.TensorParallel(sequence_parallel=True) cuts positions within blocks alone, over tp"
_FIX = (
    'context_parallel=sw.ContextParallel(fallback="gather") runs it on the whole sequence on every rank, with the same numbers; or let it mix '
    "positions by torch.nn.functional.scaled_dot_product_attention, or sw.attend, alone"
)


class _NothingCut(Differs):
    """Nothing of positions is given to what was taken for the blocks."""


def _lists(module: nn.Module) -> str:
    return ", ".join(found.name or "the model itself" for found in find_block_lists(module))


def probe(
    module: nn.Module, example: Example, draft: Draft, world: World, *, context_parallel: ContextParallel
) -> dict[str, Any]:
    """What context parallelism does with ``module``, as JSON. Nothing if ``cp`` is 1.

    Rank 0 finds it for all ranks.

    Raises:
        UnsupportedError: a module mixes positions in another way than by attention, and ``fallback`` is ``"refuse"``.
        UsageError: there is no example, and none can be guessed.
    """
    if draft.layout.cp == 1:
        return {}
    kept = draft.kept
    find = lambda: proof(module, example, draft.layout, context_parallel, kept.pop("rows", None))  # noqa: E731
    return found_by_one_rank(world, example, "the proof that positions may be cut over cp", find)


def proof(
    module: nn.Module, example: Example, layout: Layout, option: ContextParallel, inner: Search | None = None
) -> dict[str, Any]:
    """What :func:`probe` finds, on one process. ``inner``: has found how the rows of each rank are cut once more."""
    degree = layout.cp
    what = f"cp={degree}"
    refuse_uncaught(module, what)
    if not find_block_lists(module):
        raise UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why="it has no list of blocks: sequences are cut where the first of them is entered",
            fix="keep the repeated layers in an nn.ModuleList or nn.Sequential; or leave cp out of the layout",
        )
    arguments = example.shows(functools.partial(arguments_of, module))
    try:
        with torch.inference_mode(False):
            return _found(module, arguments, layout, option, inner)
    except ShardwiseError:
        raise
    except Differs as wrong:
        raise _refusal(module, what, wrong, option) from None
    except Exception as error:
        raise UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"it was to be run on some rows of a sequence: {type(error).__name__}: {first_line(error)}{line_of(error)}",
            fix="pass example= with a micro-batch as training gives it; it must run on the CPU, and in float64",
        ) from error


def _found(
    module: nn.Module, arguments: Arguments, layout: Layout, option: ContextParallel, inner: Search | None
) -> dict[str, Any]:
    degree, wrong, unfit = layout.cp, list[tuple[str, Differs]](), None
    for sequences in sequences_in(arguments):
        for method in _methods(option):
            order = option.order if option.order != "auto" else "zigzag" if method == "gather" else "contiguous"
            search = Search(
                module,
                sequences,
                degree,
                order,  # type: ignore[arg-type]
                heads_over=degree if method == "ulysses" else 1,
                tp=layout.tp,
                fallback=option.fallback == "gather" and method in ("gather", option.method),
            )
            try:
                facts = search.run()
                if method == "ulysses" and option.method == "auto" and not search.sends_less_over_heads():
                    continue
            except Differs as each:
                wrong.append((method, each))
                continue
            except UnsupportedError as each:
                if not is_of_a_run(each):  # at other lengths
                    raise
                unfit = unfit or each
                continue
            is_first = sequences.dims[sequences.path][0] == 0  # where samples often are, which no module mixes
            if not facts.has_cuts or (is_first and not any(facts.attention.values()) and not facts.products):
                wrong.append((method, _NothingCut("", f"the list that was taken for its blocks is {_lists(module)}")))
                continue
            if inner is not None:
                _refuse_cut_again(module, layout, search, inner)
            return {
                "facts": dataclasses.asdict(facts),
                "method": method,
                "order": order,
                "source": sequences.path,
                "dim": sequences.dims[sequences.path][0],
                "extra": search.extra,
                "given": [path for path, x in keyed_leaves(arguments) if isinstance(x, Tensor)],
                "known": search.known,
                "sent": search.sent(),
                "constants": constants_of(arguments),
                "lengths": sorted(sequences.dims),
                **_of_example(arguments, sequences, degree, order, search.extra, is_by_heads=method == "ulysses"),
            }
    if not wrong:
        why = (
            "none of its arguments has two dims or more"
            if unfit is None
            else f"run on sequences of other lengths: {unfit.why}"
        )
        raise UnsupportedError(
            f"cp={degree} of a {type(module).__name__}",
            why=f"no dim of its arguments was found that is of positions: {why}",
            fix="leave cp out of the layout, for models whose inputs have one size; or pass example= with sequences as long as in training",
        )
    raise next((each for method, each in wrong if method == "gather"), wrong[0][1])  # of the likeliest dim


def _of_example(
    arguments: Arguments, sequences: Sequences, degree: int, order: Any, extra: int, *, is_by_heads: bool
) -> dict[str, Any]:
    """The size of the example, and how even the ranks' work in attention is on it. ``is_by_heads``: each rank has all positions there."""
    given, dim = dict(keyed_leaves(arguments)), sequences.dims[sequences.path][0]
    x = given[sequences.path]
    positions = next((each for path, each in given.items() if path == "[1]['position_ids']"), None)
    if not isinstance(positions, Tensor) or positions.shape[-1:] != (sequences.length,) or positions.dim() != 2:
        positions = torch.arange(sequences.length)[None]
    of_positions = positions.cpu().long()
    return {
        "example": [x.shape[1 - dim], sequences.length],
        "rows": most_rows(sequences.length + extra, degree, order),
        "work": 1.0 if is_by_heads else imbalance(of_positions, degree, order),
        "is_packed": bool((of_positions[:, 1:] == 0).any()),
    }


def _refuse_cut_again(module: nn.Module, layout: Layout, search: Search, inner: Search) -> None:
    """Refuses a model of which a rank's positions cannot be cut over ``tp`` too."""
    try:
        search.refuse_cut_again(inner)
    except Differs as wrong:
        raise UnsupportedError(
            f"cp={layout.cp} of a {type(module).__name__} with TensorParallel(sequence_parallel=True)",
            why=f"either alone is right, and on a rank's positions, cut over tp={layout.tp} too, {wrong.why}",
            fix="leave sequence_parallel out: under cp activations fall by cp already; or leave cp out of the layout",
            name=wrong.name or None,
        ) from None


def _methods(option: ContextParallel) -> Sequence[str]:
    """In the order in which they are tried."""
    return ("ulysses", "gather") if option.method == "auto" else (option.method,)


def _masks_outside(owner: str) -> str:
    """What to do with masks that ``owner``, the module that runs the blocks, makes; the root has nothing outside of it."""
    if owner:
        return f"make masks and biases of all positions outside of {owner}"
    return "run the blocks in a module of its own, called once, and make masks and biases of all positions before it"


def _refusal(module: nn.Module, what: str, wrong: Differs, option: ContextParallel) -> UnsupportedError:
    if wrong.is_kept:
        return UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"{wrong.why}: a loss that reads it would have this rank's positions alone",
            fix="return what the loss reads, and let nothing of it stay in the model after its forward",
            name=wrong.name or None,
        )
    if wrong.is_drawn:
        return UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"{wrong.why}: all ranks would draw the same ones, each for positions of its own",
            fix='context_parallel=sw.ContextParallel(fallback="gather") draws them for the whole sequence on every rank, as one process; or leave that '
            "noise out, where the model's configuration has a number for it; dropout is drawn for each rank's positions",
            name=wrong.name or None,
        )
    if wrong.is_of_gradients:
        return UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"it runs on the whole sequence on every rank: {wrong.why}",
            fix="return what such a loss is made of, and add it in loss=; let a backward or a hook treat each position by itself; or leave cp out",
            name=wrong.name or None,
        )
    if wrong.is_of_heads:
        return UnsupportedError(
            f'{what} with method="ulysses"',
            why=f"each rank gets some of the heads: {wrong.why}",
            fix='use method="gather", which any number of heads allows; or a degree that divides both',
            name=wrong.name or None,
        )
    if isinstance(wrong, _NothingCut):
        return UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"sequences are cut where the first block is entered, {wrong.why}, and no argument of these is as long as the sequences of the model: "
            "they are parts of a block (experts), or get positions that were added before them (registers, a padding)",
            fix="keep the layers that the stream passes in an nn.ModuleList, and let them get as many positions as the model; "
            + _WITHOUT,
        )
    if isinstance(wrong, AroundBlocks):
        return UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"its code around the blocks works with what they return, so it is to run on some positions too, and there {wrong.why}",
            fix=f"let that code treat each position by itself: {_masks_outside(wrong.name)}, where the model has all of its tokens, and pass them to "
            f"it as arguments; or let the blocks add to the stream themselves; {_WITHOUT}",
            name=wrong.name or None,
        )
    if option.fallback == "gather":
        return UnsupportedError(
            f"{what} of a {type(module).__name__}",
            why=f"what it computes for a position depends on other positions, also where modules that mix them run on the whole sequence: {wrong.why}",
            fix="return what is of positions, and add up over them in loss=; " + _WITHOUT,
            name=wrong.name or None,
        )
    return UnsupportedError(
        f"{what} of a {type(module).__name__}",
        why=f"its values are right on some positions, and {wrong.why}: by detach(), a hook or a backward of its own they depend on other positions"
        if isinstance(wrong, BackwardDiffers)
        else f"what it computes for a position depends on other positions, and not by attention alone: on some of them {wrong.why}",
        fix=(
            'use method="gather", which takes attention that is written out too; or '
            if option.method == "ulysses"
            else ""
        )
        + _FIX,
        name=wrong.name or None,
    )
