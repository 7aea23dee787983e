"""A toy: the weights of linear layers are frozen, and each is stored as the sum of two tensors of float16. Files have plain values."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.technique import Option, Technique

TECHNIQUE = Technique(
    name="pair",
    options=(
        Option(
            key="pair",
            hint=Annotated[bool, doc("store the weights of linear layers, frozen, as pairs of float16")],
            default=False,
            help="store the weights of linear layers, frozen, as pairs of float16.",
            takes="bool",
        ),
    ),
    prepare="shardwise.techniques.pair.prepare:prepare",
    act="shardwise.techniques.pair.act:PairAct",
)
