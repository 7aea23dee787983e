"""Mixed precision: the dtypes in which parameters are stored and computed with, and their gradients summed."""

from typing import Annotated

from shardwise.config.record import doc
from shardwise.techniques.precision.options import Precision, from_torch, precision_of
from shardwise.techniques.precision.rule import PrecisionEntry, edit, rule
from shardwise.techniques.technique import Option, Technique

TECHNIQUE = Technique(
    name="precision",
    options=(
        Option(
            key="precision",
            hint=Annotated[
                str | Precision | None, doc("bf16, fp16, fp32, fp64, or a dtype each; null: as the model is")
            ],
            takes="str | Precision | torch.dtype | MixedPrecisionPolicy | None",
            help='None = the module as it is; ``"fp32"``, ``"bf16"`` and ``"fp16"`` (stored and reduced in fp32, '
            "computed in that), or a :class:`~shardwise.Precision`. Torch's dtypes are taken as their words, its "
            "``MixedPrecisionPolicy`` as ``fully_shard`` takes it for every unit, inputs of units cast among it.",
            settle=precision_of,
            from_python=from_torch,
        ),
    ),
    entry=PrecisionEntry,
    rule=rule,
    edit=edit,
    adjust="shardwise.techniques.precision.adjust:adjust",
    act="shardwise.techniques.precision.act:PrecisionAct",
    leaves_proof=lambda _: "",  # the proof computes in float64
    without="leave it out: both sides compute in float64, where a fault cannot pass for rounding",
)
