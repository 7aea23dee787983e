"""Plans safetensors files: a single file, or a Hugging Face directory of several with an index."""

from collections.abc import Mapping, Sequence

from shardwise.errors import UnsupportedError
from shardwise.recipe.boxes import whole
from shardwise.state.formats.folder import INDEX, index_of, lay_out
from shardwise.state.formats.safetensors import CODES, place_tensors
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece


def plan_safetensors(facts: Mapping[str, Fact], file: str, modules: str | None = None) -> ConversionPlan:
    """Plans one safetensors file with all tensors. ``modules``: the versions of modules, as JSON.

    Raises:
        UnsupportedError: the format does not have the dtype of a tensor; with its name.
    """
    return _plan({file: facts}, [], modules)


def plan_folder(facts: Mapping[str, Fact], max_shard_bytes: int, modules: str | None = None) -> ConversionPlan:
    """Plans a directory as ``transformers`` writes it: one file, or several of at most ``max_shard_bytes`` and an
    index. ``modules``: the versions of modules, as JSON.

    Raises:
        UnsupportedError: as for :func:`plan_safetensors`.
    """
    layout = lay_out({name: fact.num_bytes for name, fact in facts.items()}, max_shard_bytes)
    index = index_of(layout, sum(fact.num_bytes for fact in facts.values()))
    files = {file: {name: facts[name] for name in names} for file, names in layout.items()}
    return _plan(files, [Fixed(INDEX, 0, index)] if index is not None else [], modules)


def _plan(files: Mapping[str, Mapping[str, Fact]], sidecars: list[Fixed], modules: str | None) -> ConversionPlan:
    sizes = {fixed.file: len(fixed.data) for fixed in sidecars}
    heads: list[Fixed] = []
    pieces: list[Piece] = []
    for file, facts in files.items():
        _check_dtypes(facts)
        head, placed, sizes[file] = place_tensors(facts, modules=modules)
        heads.append(Fixed(file, 0, head))
        pieces += [Piece(tensor.name, whole(tensor.shape), tensor.dtype, file, tensor.offset) for tensor in placed]

    def finish(sums: Sequence[int]) -> list[Fixed]:
        return [*heads, *sidecars]

    return ConversionPlan(sizes, tuple(piece for piece in pieces if piece.num_bytes), finish)


def _check_dtypes(facts: Mapping[str, Fact]) -> None:
    for name, fact in facts.items():
        if fact.dtype not in CODES:
            raise UnsupportedError(
                f"a tensor of {fact.dtype} as safetensors",
                why="the format does not have this dtype",
                fix="convert to a torch file or a DCP directory: --to torch, --to dcp",
                name=name,
            )
