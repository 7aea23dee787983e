"""Context parallelism: each rank along ``cp`` has some positions of every sample, and attention looks at the keys of all."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.cp.options import ContextParallel, context_parallel_of
from shardwise.techniques.cp.rule import ContextParallelEntry, layout_text, lines, rule
from shardwise.techniques.technique import MeshAxis, Option, Technique

TECHNIQUE = Technique(
    name="cp",
    options=(
        Option(
            key="context_parallel",
            hint=Annotated[
                str | ContextParallel | None,
                doc(
                    "how attention gets the keys of all positions over cp: gather: it gathers them; ulysses: queries, keys and values "
                    "change from positions to heads and back; auto: the one that sends less"
                ),
            ],
            takes="str | ContextParallel | None",
            help='how attention gets the keys of all positions over ``cp``: ``"gather"``, ``"ulysses"`` or ``"auto"``; or a '
            ":class:`~shardwise.ContextParallel`.",
            settle=context_parallel_of,
        ),
    ),
    axes=(MeshAxis(name="cp", batch="positions"),),
    layout_text=layout_text,
    entry=ContextParallelEntry,
    rule=rule,
    lines=lines,
    probe="shardwise.techniques.cp.probe:probe",
    act="shardwise.techniques.cp.act:ContextParallelAct",
)
