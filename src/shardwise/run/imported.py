"""Configurations of other systems as ours: the import of :mod:`shardwise.dialects`, checked as ``shardwise train`` checks a run file.
Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.config.keywords import public_call
from shardwise.config.loader import UNWRITTEN, load_values
from shardwise.dialects.answers import Imported, imported
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.run.config import RunConfig

_STAND_INS = {"checkpoint.every": 1}  # whose default, none, makes other keys wrong


@public_call()
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
    if isinstance(allow, str):
        raise ConfigError(f"allow={allow!r}", why="it takes names of keys, several", fix=f"write allow=[{allow!r}]")
    made = imported(
        *sources,
        dialect=dialect,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        allow=tuple(allow),
        exact=exact,
        environ=environ,
    )
    return checked(made)


def checked(made: Imported) -> Imported:
    """With the run file as ``train`` would read it once what it leaves open is written.

    Raises:
        ConfigError: ``train`` would refuse it, whatever is written; ``given`` names the keys of the source.
    """
    try:
        return replace(made, config=load_values(_written(made.run), RunConfig, origin=made.dialect).config)
    except ShardwiseError as error:
        named = [one.key for one in made.findings if one.given and any(_is_about(ours, error) for ours in one.ours)]
        about = ", ".join(dict.fromkeys(named)) or made.dialect
        raise ConfigError(f"{about}: {error.given}", why=error.why, fix=error.fix) from None


def _written(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """With what stands for the keys that are left open: their default, or a value that no other key contradicts."""
    plain = {
        key: _written(value, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else _STAND_INS.get(prefix + key, UNWRITTEN)
        if value == UNWRITTEN
        else value
        for key, value in values.items()
    }
    return {key: value for key, value in plain.items() if value != UNWRITTEN}


def _is_about(said: str, error: ShardwiseError) -> bool:
    """Whether an error of the run file is about one of our keys, or names its value."""
    ours, _, value = said.partition("=")
    section, _, last = ours.rpartition(".")
    heads = (section.rpartition(".")[2].capitalize(), last.capitalize())
    words = (ours, f"({last}=", f" {last}=", f"{heads[0]}({last}=", f"{heads[1]}(")
    is_value = not value.replace(".", "").isdigit() and value in error.given.split()
    return is_value or any(word in str(error) for word in words)
