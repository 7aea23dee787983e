"""A toy: rows of a linear layer behind a norm are cut over the ``pp`` axis. Each rank computes its own output features from the whole
input, so that what comes back to the norm is a part of its gradient."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.rows.rule import RowsEntry, edit, rule
from shardwise.techniques.technique import MeshAxis, Option, Technique

TECHNIQUE = Technique(
    name="rows",
    options=(
        Option(
            key="rows",
            hint=Annotated[bool, doc("cut the rows of linear layers that follow a norm over pp")],
            default=False,
            help="cut the rows of linear layers that follow a norm over pp.",
            takes="bool",
        ),
    ),
    axes=(MeshAxis(name="pp", batch="same", cuts_matrices=True),),
    entry=RowsEntry,
    rule=rule,
    edit=edit,
    probe="shardwise.techniques.rows.probe:probe",
    act="shardwise.techniques.rows.act:RowsAct",
)
