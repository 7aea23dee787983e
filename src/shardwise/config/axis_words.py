"""What other tools, and people, call the axes of a layout, and what to write in their place. Torch-free.

>>> axis_answer("fsdp", 4)
'write dp_shard=4, which shards parameters, gradients and optimizer state (FSDP, ZeRO-3)'
"""

import re
from collections.abc import Mapping

_SHARD = "dp_shard={}, which shards parameters, gradients and optimizer state (FSDP, ZeRO-3)"
_REPLICATE = "dp_replicate={}, which keeps a whole copy of them on each rank (DDP)"

AXIS_ANSWERS: Mapping[str, str] = {
    "dp": f"write {_SHARD}, or {_REPLICATE}",
    "fsdp": f"write {_SHARD}",
    "zero": f"write {_SHARD.replace('{}', '-1')}; with reshard_after_forward=false in sharding it is ZeRO-2",
    "ddp": f"write {_REPLICATE.replace('of them', 'of parameters, gradients and optimizer state')}",
    "hsdp": "write dp_replicate=N,dp_shard=M, which shards over M ranks and keeps N such copies; dp_replicate=-1,dp_shard=node "
    "shards within each node",
    "tp": "write tp={}, which cuts layers over ranks with the same samples (tensor parallelism)",
    "sp": "leave it out, and write tp=N with parallel.tensor_parallel.sequence_parallel=true: the ranks of tp share positions between their layers",
    "ep": "leave it out: there is no expert parallelism yet; dp_shard shards experts as other parameters",
    "cp": "write cp={}, which cuts the positions of every sample over ranks (context parallelism); parallel.context_parallel says how attention exchanges",
    "pp": "leave it out: there is no pipeline parallelism yet; dp_shard and tp spread a model over ranks",
}
"""The field's word for an axis -> what to write, ``{}`` being the degree."""

_SAME: Mapping[str, tuple[str, ...]] = {
    "dp": ("data", "data_parallel", "parallel"),
    "fsdp": ("fsdp2", "fsdp1", "shard", "sharded", "sharding", "data_shard", "full_shard", "fully_shard"),
    "zero": ("zero1", "zero2", "zero3", "deepspeed"),
    "ddp": ("replicate", "replicas", "replica", "data_replicate", "dp_replica", "no_shard"),
    "hsdp": ("hybrid", "hybrid_shard"),
    "tp": ("tensor", "model", "mp"),
    "sp": ("sequence", "seq"),
    "ep": ("expert", "experts", "etp", "expert_tensor"),
    "cp": ("context", "ulysses", "ring"),
    "pp": ("pipeline", "pipe", "vpp"),
}
_PLAIN = {word: axis for axis, words in _SAME.items() for word in (axis, *words)}


def axis_answer(word: str, degree: object = "N") -> str | None:
    """What to write for ``word``, an axis as other tools spell it (``tensor-model-parallel-size``); None: it is not known."""
    plain = re.sub(
        r"\A(parallelism\.)|(_model)?_parallel|_(world_)?(size|degree|dim)\Z", "", word.lower().replace("-", "_")
    )
    found = _PLAIN.get(plain)
    return None if found is None else AXIS_ANSWERS[found].replace("{}", str(degree))
