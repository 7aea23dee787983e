"""A toy: low-rank adapters beside every nn.Linear, whose own weights are frozen. Adds parameters before the module is read."""

from collections.abc import Mapping
from typing import Annotated, Any

from shardwise.config.record import doc
from shardwise.recipe import Draft
from shardwise.techniques.adapter.options import Adapter
from shardwise.techniques.technique import Option, Technique


def rule(draft: Draft, _facts: Mapping[str, Any], *, adapter: Adapter | None) -> None:
    if adapter is not None:
        added = [name for name in draft.anatomy.params if name.endswith(".low")]
        draft.note("adapter", f"rank {adapter.rank}: beside {len(added)} linear layers", option="adapter.rank")


TECHNIQUE = Technique(
    name="adapter",
    options=(
        Option(
            key="adapter",
            hint=Annotated[Adapter | None, doc("low-rank adapters beside every linear layer; null: none")],
            help="low-rank adapters beside every linear layer.",
            takes="Adapter | None",
        ),
    ),
    rule=rule,
    prepare="shardwise.techniques.adapter.prepare:prepare",
)
