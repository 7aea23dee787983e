"""A checkpoint as a target: a Hugging Face directory, and a manifest with a checksum of every block. No run goes on
from it."""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.state.integrity.manifest import MANIFEST, FileFact, Manifest
from shardwise.state.integrity.sums import Sums, put_together
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed
from shardwise.state.targets.safetensors import plan_folder
from shardwise.world import package_versions

__all__ = ["plan_checkpoint"]


def plan_checkpoint(facts: Mapping[str, Fact], max_shard_bytes: int, step: int) -> ConversionPlan:
    """Weights as those of a checkpoint.

    Args:
        facts: what is written.
        max_shard_bytes: size of a file of weights at most.
        step: windows that they were trained.

    Raises:
        UnsupportedError: a dtype that safetensors does not have, by name.
    """

    def manifest(sizes: Mapping[str, int], sums: Sums) -> Fixed:
        found = put_together(sizes, [sums.told()])
        content = Manifest(
            step=step,
            layout="",
            num_ranks=0,
            fingerprint="",
            versions=package_versions(),
            files={file: FileFact(size, found[file]) for file, size in sizes.items()},
        )
        return Fixed(MANIFEST, 0, content.to_bytes())

    return replace(plan_folder(facts, max_shard_bytes), summed=True, manifest=manifest)
