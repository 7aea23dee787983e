"""Tensor parallelism: linear layers cut over ranks that work on the same data, found in the model's own code."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.technique import MeshAxis, Option, Technique
from shardwise.techniques.tp.options import TensorParallel, tensor_parallel_of
from shardwise.techniques.tp.rule import TensorParallelEntry, layout_text, lines, rule

TECHNIQUE = Technique(
    name="tp",
    options=(
        Option(
            key="tensor_parallel",
            hint=Annotated[
                str | TensorParallel | None,
                doc(
                    "which layers are cut over tp: auto: all that can be; hf: as the model's own tp_plan names; llama: by Llama's names"
                ),
            ],
            takes="str | TensorParallel | None",
            help='which layers are cut over ``tp``: ``"auto"``, all that can be; ``"hf"``, those of the model\'s own ``tp_plan``; or a '
            ":class:`~shardwise.TensorParallel` with a plan.",
            settle=tensor_parallel_of,
        ),
    ),
    axes=(MeshAxis(name="tp", batch="same", cuts_matrices=True),),
    layout_text=layout_text,
    entry=TensorParallelEntry,
    rule=rule,
    lines=lines,
    probe="shardwise.techniques.tp.probe:probe",
    act="shardwise.techniques.tp.act:TensorParallelAct",
)
