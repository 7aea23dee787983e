"""Transforms: the user's own functions that change a module before it is read and sharded."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from shardwise.config.record import Options, doc
from shardwise.config.target import check_target, looks_like_target
from shardwise.recipe import Draft
from shardwise.techniques.technique import Option, Technique
from shardwise.techniques.transforms.options import Chosen, choose


def _rule(draft: Draft, _facts: Mapping[str, Any], *, transforms: Sequence[Chosen]) -> None:
    for each in transforms:
        draft.note("transform", str(each), option="transforms")


def _as_list(value: Any) -> Any:
    """A single entry as a list of one; a list unchanged."""
    return (value,) if isinstance(value, str | Mapping | Options) or callable(value) else value


def _check_early(origins: Mapping[str, str], *, transforms: Sequence[Any]) -> None:
    """Refuses an entry ``pkg.mod:function`` that does not exist; plain names are known only to the ranks."""
    for entry in transforms:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if isinstance(name, str) and looks_like_target(name):
            check_target(name, what="parallel.transforms", origin=origins["parallel.transforms"])


TECHNIQUE = Technique(
    name="transforms",
    options=(
        Option(
            key="transforms",
            hint=Annotated[
                tuple[str | dict[str, Any], ...],
                doc(
                    "your own changes of the module, in order: names, pkg.mod:function, or mappings with a name and options"
                ),
            ],
            default=(),
            takes="Given",
            help="functions registered with :func:`shardwise.transform`, by name or config or themselves, run in this order before "
            "anything else.",
            settle=choose,
            from_python=_as_list,
            holds_functions=True,
        ),
    ),
    rule=_rule,
    prepare="shardwise.techniques.transforms.prepare:prepare",
    check_early=_check_early,
)
