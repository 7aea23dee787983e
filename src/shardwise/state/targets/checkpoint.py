"""Plans a checkpoint of weights only: a Hugging Face directory, and a manifest with a checksum of every block. No run
can resume from it."""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.state.integrity.manifest import MANIFEST, FileFact, Manifest
from shardwise.state.integrity.sums import Sums, put_together
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed
from shardwise.state.targets.safetensors import plan_folder
from shardwise.world import package_versions


def plan_checkpoint(
    facts: Mapping[str, Fact], max_shard_bytes: int, step: int, modules: str | None = None
) -> ConversionPlan:
    """Plans the files of a checkpoint with weights only.

    Args:
        facts: name -> shape and dtype.
        max_shard_bytes: largest size of a file of weights.
        step: number of windows that they were trained for.
        modules: the versions of modules, as JSON.

    Raises:
        UnsupportedError: safetensors does not have the dtype of a tensor; with its name.
    """

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

    return replace(plan_folder(facts, max_shard_bytes, modules), summed=True, manifest=manifest)
