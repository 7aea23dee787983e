"""Where the stream between layers that are cut may be on some positions of each rank: proved by running a copy of the module."""

import functools
from collections.abc import Collection
from typing import Any

from torch import nn

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.model.block_kinds import is_in_block
from shardwise.model.blocks import find_block_lists
from shardwise.model.calling import line_of
from shardwise.model.names import canonical_tensors
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.row_facts import Differs
from shardwise.model.stream_rows import NeedsWhole, StreamFacts
from shardwise.techniques.row_search import is_of_a_run
from shardwise.techniques.sequences import Arguments, arguments_of, constants_of, sequences_in
from shardwise.techniques.technique import Example
from shardwise.techniques.tp.search.region_records import Found
from shardwise.techniques.tp.search.stream_search import StreamSearch

_WHAT = "TensorParallel(sequence_parallel=True)"


def add_sequence(facts: dict[str, Any], module: nn.Module, example: Example, degree: int, found: Found) -> StreamSearch:
    """Adds what sequence parallelism changes to ``facts`` of what is cut. Returns the search that has found it."""
    what = f"{_WHAT} of a {type(module).__name__}"
    if not find_block_lists(module):
        raise UnsupportedError(
            what,
            why="it has no list of blocks: sequences are cut where the first of them is entered",
            fix="keep the repeated layers in an nn.ModuleList or nn.Sequential; or leave sequence_parallel out",
        )
    arguments = example.shows(functools.partial(arguments_of, module))
    try:
        search, sequence = _found(module, arguments, degree, found, facts)
    except ShardwiseError:
        raise
    except _NoStream as wrong:
        raise UnsupportedError(what, why=wrong.why, fix="leave sequence_parallel out for this model") from None
    except Differs as wrong:
        raise UnsupportedError(
            what,
            why=f"there is no place where the positions of all ranks could be joined before the layers that are cut: on some of them {wrong.why}",
            fix=_fix(wrong),
            name=wrong.name or None,
        ) from None
    except Exception as error:
        raise UnsupportedError(
            what,
            why=f"it was to be run on some rows of a sequence: {type(error).__name__}: {first_line(error)}{line_of(error)}",
            fix="pass example= with a micro-batch as training gives it; it must run on the CPU, and in float64",
        ) from error
    on_rows = [*sequence.on_rows, *_unused(search, sequence)]
    _add(facts, search, sequence, on_rows)
    sequences = search.sequences
    samples = max(search.num_samples, 1)
    x = dict(keyed_leaves(arguments))[sequences.path]
    samples_given = x.shape[1 - sequences.dims[sequences.path][0]]
    facts["sequence"] = {
        "source": sequences.path,
        "dim": sequences.dims[sequences.path][0],
        "extra": search.extra,
        "constants": constants_of(arguments),
        "ends": sequence.ends,
        "draws": sequence.draws,
        "moved": sequence.moved // samples,
        "example": [samples_given, sequences.length],
    }
    return search


def _found(
    module: nn.Module, arguments: Arguments, degree: int, found: Found, facts: dict[str, Any]
) -> tuple[StreamSearch, StreamFacts]:
    wrong: list[Differs] = []
    unfit: UnsupportedError | None = None
    for sequences in sequences_in(arguments):
        search = StreamSearch(
            module,
            sequences,
            degree,
            "contiguous",
            found=found,
            cut=frozenset(facts["cuts"]),
            partial=frozenset(facts["partial"]),
        )
        try:
            sequence = search.run()
        except Differs as each:
            wrong.append(each)
            continue
        except UnsupportedError as each:
            if not is_of_a_run(each):
                raise
            unfit = unfit or each
            continue
        assert isinstance(sequence, StreamFacts)
        if sequence.scatters:
            return search, sequence
        of_values = [each for each in search.met if not isinstance(each, NeedsWhole)]
        if not search.has_streams:
            why = f"no argument of its blocks is as long as that of the model, {sequences.path}: which of their dims is that of positions is not known"
            wrong.append(_NoStream("", why))
        elif not search.has_regions:
            wrong.append(_NoStream("", "no layers of its blocks are cut over tp"))
        else:
            wrong.append(
                next(iter([*of_values[-1:], *search.met]), Differs("", "no output of its layers is summed to rows"))
            )
    raise next(iter(wrong), unfit or _NoStream("", "none of its arguments has positions"))


class _NoStream(Differs):
    """Blocks have no stream that could be cut, or no layers beside which it could be."""


def _fix(wrong: Differs) -> str:
    """What can be done about code that is not the same on some positions."""
    if "does not run on rows" in wrong.why:
        return (
            "compute what has all positions, such as an embedding of the tokens, before the blocks, and pass it to them as an argument; or "
            "leave sequence_parallel out"
        )
    return (
        "put the code that is not the same on some positions (it looks at all of them, writes a buffer, or has a backward or a hook of its own) "
        "into a module of its own, beside the layers that are cut: that runs on all positions; or leave sequence_parallel out"
    )


def _unused(search: StreamSearch, found: StreamFacts) -> list[str]:
    """Parameters of blocks that no run has used, such as those of an expert that got no tokens, beside which all others are used on rows."""
    names = [name for name, _, _ in canonical_tensors(search.module, "_parameters")]
    used = found.on_rows.keys() | found.with_whole.keys() | search.cut
    result = []
    for name in names:
        block = next((block for block in found.cut if is_in_block(name, block)), None)
        around = name.rpartition(".")[0]
        while name not in used and block is not None and len(around) > len(block):
            beside = {other for other in used if is_in_block(other, around)}
            if beside:
                result += [name] if beside <= found.on_rows.keys() - found.with_whole.keys() else []
                break
            around = around.rpartition(".")[0]
    return result


def _add(facts: dict[str, Any], search: StreamSearch, found: StreamFacts, on_rows: Collection[str]) -> None:
    for _, _, args in facts["edits"]:
        weight = args.get("weight")
        if weight in found.gathers:
            args["gathers"] = found.gathers[weight]
        if weight in found.scatters:
            args["scatters"] = found.scatters[weight]
        if found.direct.get(weight) and (weight in search.starts()):
            args["is_joined"] = True
    facts["partial"] = list(dict.fromkeys([*facts["partial"], *on_rows]))
    edits = [
        (
            name,
            "sequence_cut",
            {"calls": calls, "known": search.known.get(name, []), "parts": found.parts.get(name, [])},
        )
        for name, calls in found.cut.items()
    ]
    edits += [(name, "sequence_site", {"dims": dims}) for name, dims in found.sites.items() if dims]
    edits += [(name, "sequence_join", {"dims": dims}) for name, dims in found.join.items()]
    edits += [(name, "sequence_island", {"inputs": i, "outputs": o}) for name, (i, o) in found.islands.items()]
    if found.draws:
        edits += [(name, "sequence_drops", {"dims": dims}) for name, dims in found.drops.items()]
    facts["edits"] += [[*edit] for edit in edits]
