"""A toy: an axis carved out of fsdp. The rows of each linear layer are spread over ``ep``, whose ranks have other samples: a rank computes its
rows for all of them, and gives the others theirs. What is left of fsdp, ``efsdp``, shards these parameters over a mesh of their own."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.spread.rule import SpreadEntry, rule
from shardwise.techniques.technique import MeshAxis, Option, Technique

TECHNIQUE = Technique(
    name="spread",
    options=(
        Option(
            key="spread",
            hint=Annotated[bool, doc("spread the rows of linear layers over ep")],
            default=False,
            help="spread the rows of linear layers over ep.",
            takes="bool",
        ),
    ),
    axes=(MeshAxis(name="ep", batch=None, cuts_matrices=True),),
    layout_text=lambda layout: f"linear layers are spread over {layout.ep} ranks" if layout.ep > 1 else "",
    entry=SpreadEntry,
    rule=rule,
    act="shardwise.techniques.spread.act:SpreadAct",
)
