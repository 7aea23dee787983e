"""Frozen weights in 4 bits: NF4, in the format of bitsandbytes, with the same bytes under every layout."""

from typing import Annotated, Literal

from shardwise.config.record import doc
from shardwise.techniques.quantize.options import Quantize, quantize_of
from shardwise.techniques.quantize.rule import lines, rule
from shardwise.techniques.technique import Option, Technique

TECHNIQUE = Technique(
    name="quantize",
    options=(
        Option(
            key="quantize",
            hint=Annotated[
                Literal["none", "nf4"] | Quantize | None, doc("nf4: store frozen linear weights in 4 bits; null: none")
            ],
            takes="str | Quantize | None",
            help='``"nf4"``: frozen weights of linear layers are stored in 4 bits; or a :class:`~shardwise.Quantize`.',
            settle=quantize_of,
        ),
    ),
    rule=rule,
    lines=lines,
    prepare="shardwise.techniques.quantize.prepare:prepare",
    act="shardwise.techniques.quantize.act:QuantizeAct",
)
