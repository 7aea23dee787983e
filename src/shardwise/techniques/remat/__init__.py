"""Activation checkpointing: blocks are recomputed in backward instead of keeping their activations."""

from collections.abc import Mapping
from typing import Annotated, Any

from shardwise.config.record import doc
from shardwise.techniques.remat.options import Remat, remat_of
from shardwise.techniques.remat.rule import edit
from shardwise.techniques.technique import Option, Technique


def _in_proof(times: int, *, remat: Remat | None) -> Mapping[str, Any]:
    """The same choice: as many times the bytes."""
    if remat is None or remat.budget is None:
        return {}
    return {"remat": Remat(budget=times * int(remat.budget), targets=remat.targets, every=remat.every)}


TECHNIQUE = Technique(
    name="remat",
    options=(
        Option(
            key="remat",
            hint=Annotated[
                str | Remat | None,
                doc(
                    "none; full: run each block again in backward instead of keeping what it computed; selective: keep the "
                    "costly part; a size, 8GiB: run again what does not fit"
                ),
            ],
            takes="str | Remat | None",
            help='``"full"``: every block runs again in backward instead of keeping what it computed; ``"selective"``: but for '
            'its matrix products and attention; a size, ``"8GiB"``: as much of them as does not fit; or a :class:`~shardwise.Remat`.',
            settle=remat_of,
        ),
    ),
    edit=edit,
    in_proof=_in_proof,
    act="shardwise.techniques.remat.act:RematAct",
)
