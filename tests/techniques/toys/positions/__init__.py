"""A toy: each rank along ``cp`` has some positions of every sample, of a model that mixes none. It splits micro-batches, and hands a schedule
of its own: the forwards of two micro-batches before their backwards."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.positions.rule import PositionsEntry, rule
from shardwise.techniques.technique import MeshAxis, Option, Technique

TECHNIQUE = Technique(
    name="positions",
    options=(
        Option(
            key="positions",
            hint=Annotated[bool, doc("run two forwards before their backwards")],
            default=False,
            help="run two forwards before their backwards.",
            takes="bool",
        ),
    ),
    axes=(MeshAxis(name="cp", batch="positions"),),
    layout_text=lambda layout: f"positions are cut over {layout.cp} ranks" if layout.cp > 1 else "",
    entry=PositionsEntry,
    rule=rule,
    act="shardwise.techniques.positions.act:PositionsAct",
)
