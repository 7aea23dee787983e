"""``torch.compile`` of single blocks."""

from typing import Annotated, Literal

from shardwise.config.record import doc
from shardwise.techniques.compile.options import Compile, compile_of
from shardwise.techniques.compile.rule import edit
from shardwise.techniques.technique import Option, Technique


def _leaves_proof(device: str) -> str | None:
    return None if device == "cpu" else "compile, which would compile for the CPU"


TECHNIQUE = Technique(
    name="compile",
    options=(
        Option(
            key="compile",
            hint=Annotated[
                Literal["none", "blocks"] | Compile | None, doc("blocks: torch.compile each block; null: none")
            ],
            takes="str | Compile | None",
            help='``"blocks"``: ``torch.compile`` of every block; or a :class:`~shardwise.Compile`.',
            settle=compile_of,
        ),
    ),
    edit=edit,
    act="shardwise.techniques.compile.act:CompileAct",
    leaves_proof=_leaves_proof,
)
