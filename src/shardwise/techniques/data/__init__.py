"""Data parallelism: parameters sharded over the ranks (FSDP2) or full copies (DDP), the order of units, buffers."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.data.options import DDP, Sharding
from shardwise.techniques.data.rule import DataEntry, heading, layout_text, rule
from shardwise.techniques.technique import MeshAxis, Option, Technique

TECHNIQUE = Technique(
    name="data",
    options=(
        Option(
            key="sharding",
            hint=Annotated[Sharding, doc("how data-parallel ranks share the model")],
            default=Sharding(),
            takes="Sharding | None",
            help="engine, units, resharding, offload, prefetch and accumulation; None = all automatic.",
            record=(Sharding, 'units=("Block",)'),
        ),
        Option(
            key="ddp",
            hint=Annotated[DDP, doc("how replicas reduce gradients, where the engine is ddp")],
            default=DDP(),
            takes="DDP | None",
            help="how replicas sum their gradients; None = in buckets of 25 MiB.",
            record=(DDP, "bucket_cap_mb=50"),
        ),
    ),
    axes=(
        MeshAxis(name="dp_replicate", batch="samples"),
        MeshAxis(name="dp_shard", batch="samples", cuts_matrices=True),
    ),
    layout_text=layout_text,
    entry=DataEntry,
    rule=rule,
    lines=heading,
    probe="shardwise.techniques.data.probe:probe",
    act="shardwise.techniques.data.act:DataAct",
)
