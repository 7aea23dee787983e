"""Configurations of other systems as ours: the import of :mod:`shardwise.dialects`, checked as ``shardwise train`` checks a run file.
Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.config.loader import load_values
from shardwise.dialects.answers import Imported, imported
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig


def from_config(
    *sources: Any,
    dialect: str | None = None,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    allow: Sequence[str] = (),
    exact: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Imported:
    """A configuration of another system as one of ours: every key is answered, none is dropped without a word.

    Each key is *kept*, *changed* (with what is different), or *dropped* (with why it is not needed); a default there that is not ours
    is written out. A key that would silently train something else, or is not known, ends the import.

    Args:
        sources: files (YAML, JSON, TOML), mappings, or objects of other libraries, which are known by the name of their class
            (``TrainingArguments``, ``FullyShardedDataParallelPlugin``, ...). Several are one configuration.
        dialect: whose the first source is; None: by its keys.
        ranks: ranks of all machines, where the source does not say it.
        ranks_per_node: ranks of one machine.
        allow: keys, or sections, to leave out where they would be refused.
        exact: keep their learning rate curve where ours only follows it within two steps.
        environ: an environment whose variables count too, as ``accelerate launch`` sets them.

    Raises:
        ConfigError: keys that are refused, with what to write for each; ``given`` names them.

    Example:
        >>> made = from_config({"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True}, dialect="fsdp1")
        >>> made.layout, made.run["parallel"]["sharding"]
        ('dp_shard=-1', {'reshard_after_forward': False, 'offload': True})
    """
    made = imported(
        *sources,
        dialect=dialect,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        allow=tuple(allow),
        exact=exact,
        environ=environ,
    )
    try:
        return replace(made, config=load_values(made.run, RunConfig, origin=made.dialect).config)
    except ConfigError as error:
        keys = [key for ours, keys in made.sources.items() if _is_about(ours, error) for key in keys]
        if keys:
            error.given = f"{', '.join(dict.fromkeys(keys))}: {error.given}"
            error.args = (error.given,)
        raise


def _is_about(ours: str, error: ConfigError) -> bool:
    """Whether an error of the run file is about one of our keys."""
    section, _, last = ours.rpartition(".")
    words = (
        ours,
        f"({last}=",
        f" {last}=",
        f"{section.rpartition('.')[2].capitalize()}({last}=",
        f"{last.capitalize()}(",
    )
    return any(word in str(error) for word in words)
