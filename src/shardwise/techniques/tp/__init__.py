"""Tensor parallelism: linear layers cut over ranks that work on the same data, found in the model's own code."""

from shardwise.techniques.technique import Technique
from shardwise.techniques.tp.rule import TensorParallelEntry, lines, rule

__all__ = ["TECHNIQUE"]

TECHNIQUE = Technique(
    name="tp",
    options=(),
    axes=("tp",),
    entry=TensorParallelEntry,
    rule=rule,
    lines=lines,
    probe="shardwise.techniques.tp.probe:probe",
    act="shardwise.techniques.tp.act:TensorParallelAct",
)
