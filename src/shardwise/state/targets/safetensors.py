"""Plans safetensors files: a single file, a Hugging Face directory, or a checkpoint of weights only, from which no run can
resume: such a directory, and a manifest with a checksum of every block."""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import UnsupportedError
from shardwise.recipe.boxes import whole
from shardwise.state.file_layout import FileLayout, planned_files
from shardwise.state.formats.folder import INDEX
from shardwise.state.formats.safetensors import CODES
from shardwise.state.integrity.manifest import MANIFEST, FileFact, Manifest
from shardwise.state.integrity.sums import Sums, put_together
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece
from shardwise.world import package_versions


def plan_safetensors(
    facts: Mapping[str, Fact], max_shard_bytes: int, modules: str | None, stem: str = "model"
) -> ConversionPlan:
    """Plans a directory as ``transformers`` writes it: one file, or several of at most ``max_shard_bytes`` and an
    index. ``modules``: the versions of modules, as JSON. ``stem``: beginning of the files' names."""
    for name, fact in facts.items():
        if fact.dtype not in CODES:
            raise UnsupportedError(
                f"a tensor of {fact.dtype} as safetensors",
                why="the format does not have this dtype",
                fix="convert to a torch file or a DCP directory: --to torch, --to dcp",
                name=name,
            )
    files = planned_files(facts, max_shard_bytes=max_shard_bytes, modules=modules, stem=stem)
    index = FileLayout(files, {}).index()
    fixed = [Fixed(file.name, 0, file.head) for file in files]
    fixed += [Fixed(INDEX, 0, index)] if index is not None else []
    sizes = {file.name: file.size for file in files} | ({INDEX: len(index)} if index is not None else {})
    placed = [(file.name, tensor) for file in files for tensor in file.tensors if tensor.num_bytes]
    pieces = [Piece(tensor.name, whole(tensor.shape), tensor.dtype, file, tensor.offset) for file, tensor in placed]
    return ConversionPlan(sizes, tuple(pieces), lambda sums: list(fixed))


def plan_checkpoint(
    facts: Mapping[str, Fact], max_shard_bytes: int, step: int, modules: str | None = None
) -> ConversionPlan:
    """Plans a checkpoint of weights only: such a directory, and its manifest. ``step``: windows that they were trained for."""

    def manifest(sizes: Mapping[str, int], sums: Sums) -> Fixed:
        found = put_together(sizes, [sums.partial_sums()])
        content = Manifest(
            step=step,
            layout="",
            num_ranks=0,
            fingerprint="",
            versions=package_versions(),
            files={file: FileFact(size, found[file]) for file, size in sizes.items()},
        )
        return Fixed(MANIFEST, 0, content.to_bytes())

    return replace(plan_safetensors(facts, max_shard_bytes, modules), summed=True, manifest=manifest)
