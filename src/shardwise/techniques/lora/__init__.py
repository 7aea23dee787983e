"""LoRA: low-rank adapters beside the linear layers of a model whose own weights are frozen."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.lora.options import LoRA, lora_of
from shardwise.techniques.lora.rule import LoRAEntry, lines, rule
from shardwise.techniques.technique import Option, Technique

TECHNIQUE = Technique(
    name="lora",
    options=(
        Option(
            key="lora",
            hint=Annotated[
                LoRA | None, doc("train low-rank adapters beside frozen linear layers, as {rank: 16}; null: none")
            ],
            takes="LoRA | None",
            help="a :class:`~shardwise.LoRA`: low-rank adapters beside linear layers are trained, and the layers' own weights are frozen.",
            settle=lora_of,
        ),
    ),
    entry=LoRAEntry,
    rule=rule,
    lines=lines,
    prepare="shardwise.techniques.lora.prepare:prepare",
    probe="shardwise.techniques.lora.probe:probe",
    values_of_proof="shardwise.techniques.lora.prepare:values_of_proof",
    act="shardwise.techniques.lora.act:LoRAAct",
)
