"""What becomes of the buffers that ranks write, at a window's end: the policy of each. Torch-free.

By default running statistics of normalisation layers are those of rank 0, or the mean; every other persistent buffer must be
equal on all ranks; and one that is not persistent is each rank's own.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from shardwise.config.suggest import did_you_mean
from shardwise.errors import PlanError, UnsupportedError
from shardwise.recipe import Anatomy
from shardwise.recipe.records import STATISTICS, TensorFact
from shardwise.techniques.data.options import Sharding

_STORAGE_ONLY = re.compile(r"u?int[1-7]|qu?int\w+|bits\w+|float4\w+")  # dtypes
_ITERATED = ("_u", "_v")  # how names of a spectral norm's vectors end


def buffer_policies(anatomy: Anatomy, sharding: Sharding, advancing: Sequence[str]) -> dict[str, str]:
    """Name of a buffer -> its policy, where the options or its layer say one.

    Args:
        anatomy: of the module.
        sharding: whose ``buffers`` is a word for running statistics, or patterns of names of buffers with a word for each, of which
            the first that matches holds.
        advancing: modules with a spectral norm.

    Raises:
        PlanError: a pattern matches no buffer, or its word does not fit the buffer's dtype.
        UnsupportedError: a buffer's dtype is one that torch only stores.
    """
    for name, fact in anatomy.buffers.items():
        if _STORAGE_ONLY.fullmatch(fact.dtype):
            raise UnsupportedError(
                f"a buffer of dtype {fact.dtype}",
                why="torch does not copy, fill or compare such tensors: ranks could not agree on what a forward writes, or put it back",
                fix="keep its bytes in a buffer of torch.uint8; for a quantized tensor its int_repr(), scale and zero point",
                name=name,
            )
    given = sharding.buffers
    by_pattern: Mapping[str, str] = given if isinstance(given, dict) else {}
    found = dict.fromkeys(statistics_of(anatomy, advancing), given if isinstance(given, str) else "rank0")
    named: dict[str, str] = {}
    for pattern, word in by_pattern.items():
        matched = [n for n, b in anatomy.buffers.items() if any(fnmatchcase(x, pattern) for x in (n, *b.aliases))]
        if not matched:
            raise _nothing_named(anatomy, pattern, word)
        for name in matched:
            if name not in named:
                _refuse_unfit(name, anatomy.buffers[name], pattern, word, is_statistic=name in found)
                named[name] = word
    return found | named


def refuse_writes_of_rows(policies: Mapping[str, str], axes: Mapping[str, str] | None) -> None:
    """Raises PlanError for a buffer that ranks write from their positions, if it has no policy, or is summed and nothing says which ranks
    each add a part. ``axes``: as :attr:`~shardwise.recipe.Draft.sum_axes`."""
    if axes is None:
        return
    for name in (name for name, axis in axes.items() if axis != "dp" and name not in policies):
        raise PlanError(
            "a buffer that code writes where sequences are cut over ranks",
            why="it holds what comes of this rank's positions, and a later forward that reads it would compute another thing than one process",
            fix="write it before the blocks, or behind them; or say what becomes of it: Sharding(buffers={"
            f'{name!r}: WORD}}), where WORD is "sum" for counts that are used after the step, and "own" for a cache that each forward '
            "makes anew",
            name=name,
        )
    for name in (name for name, word in policies.items() if word == "sum"):
        if not axes.get(name):
            why = "does not write it" if name not in axes else "adds to it what is no part of what one process adds"
            raise PlanError(
                'a buffer of the policy "sum" where sequences are cut over ranks',
                why=f"the model, run on the positions of one rank, {why}: whether ranks that have one sample each count a part of it is not known",
                fix="add to it sums over positions, or numbers of whole batches, in the forward of training; or give it another policy",
                name=name,
            )


def statistics_of(anatomy: Anatomy, advancing: Sequence[str]) -> list[str]:
    """The buffers that a normalisation layer writes in its forwards: running statistics, and the vectors of a spectral norm."""
    prefixes = tuple(f"{name}." if name else "" for name in advancing)
    return [
        name
        for name in anatomy.buffers
        if (attr := name.rpartition(".")[2]) in STATISTICS
        or (prefixes and name.startswith(prefixes) and attr.endswith(_ITERATED))
    ]


def _refuse_unfit(name: str, fact: TensorFact, pattern: str, word: str, *, is_statistic: bool) -> None:
    is_whole = "float" not in fact.dtype and "complex" not in fact.dtype
    why, fix = "", ""
    if word == "sum" and fact.dtype == "bool":
        why, fix = "a sum of true and false is neither", 'use "max" for true where any rank has it, "min" for all'
    elif word in ("min", "max") and "complex" in fact.dtype:
        why, fix = "complex numbers have no order", 'use "mean", "sum" or "rank0"'
    elif word == "mean" and is_whole and not is_statistic:  # a count of batches is that of rank 0
        why, fix = f"the mean of {fact.dtype} numbers is no {fact.dtype}", 'use "sum" for counts, or "rank0"'
    if why:
        raise PlanError(f"Sharding(buffers={{{pattern!r}: {word!r}}})", why=why, fix=fix, name=name)


def _nothing_named(anatomy: Anatomy, pattern: str, word: str) -> PlanError:
    names = list(anatomy.buffers)
    return PlanError(
        f"Sharding(buffers={{{pattern!r}: {word!r}}})",
        why="it matches no buffer that the module has when it is sharded"
        if names
        else f"{anatomy.module_class} has no buffers when it is sharded",
        fix=did_you_mean(pattern, names, what="buffers")
        if names
        else "register the buffer in the constructor, or leave the pattern out",
    )
