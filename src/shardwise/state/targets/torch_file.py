"""Plans a file for ``torch.load(weights_only=True)``, also with ``mmap=True``."""

import sys
import zlib
from collections.abc import Mapping, Sequence

from shardwise.recipe import DTYPE_BYTES
from shardwise.recipe.boxes import row_strides, whole
from shardwise.state.formats.torch_file import STORAGES
from shardwise.state.targets.archives import PlannedArchive
from shardwise.state.targets.pickling import ORDERED_DICT, Global, Made, Persistent, pickled
from shardwise.state.targets.plan import ConversionPlan, Fact, Fixed, Piece

__all__ = ["described", "plan_torch_file", "small_records"]

_CLASSES = {dtype: name for name, dtype in STORAGES.items()}


def plan_torch_file(facts: Mapping[str, Fact], file: str, ties: Mapping[str, str]) -> ConversionPlan:
    """Plans one torch file with all tensors.

    Args:
        facts: name -> shape and dtype.
        file: its name.
        ties: name -> the earlier name whose storage it shares.
    """
    own = [name for name in facts if name not in ties]
    keys = {name: str(number) for number, name in enumerate(own)}
    state = {name: described(fact, keys[ties.get(name, name)]) for name, fact in facts.items()}
    archive = PlannedArchive()
    small = {"data.pkl": pickled(state), **small_records()}
    for name, data in small.items():
        archive.add(name, len(data))
    starts = {name: archive.add(f"data/{keys[name]}", facts[name].num_bytes) for name in own}
    written = [name for name in own if facts[name].num_bytes]
    pieces = tuple(Piece(name, whole(facts[name].shape), facts[name].dtype, file, starts[name]) for name in written)

    def finish(sums: Sequence[int]) -> list[Fixed]:
        of_values = {f"data/{keys[name]}": value for name, value in zip(written, sums, strict=True)}
        parts = archive.parts({**{name: zlib.crc32(data) for name, data in small.items()}, **of_values})
        return [
            Fixed(file, *part) for part in (*parts, *((archive.begin_of(name), data) for name, data in small.items()))
        ]

    return ConversionPlan({file: archive.size}, pieces, finish, summed=True)


def small_records() -> dict[str, bytes]:
    """The small records that say how to read the others: version and byte order."""
    return {"byteorder": sys.byteorder.encode(), "version": b"3\n"}


def described(fact: Fact, key: str) -> Made:
    """The description in torch's pickles of a row-major tensor that is all of storage ``key``."""
    shape, numel = fact.shape, fact.num_bytes // DTYPE_BYTES[fact.dtype]
    rest = (0, shape, row_strides(shape), False, Made(ORDERED_DICT, ()))
    kind = _CLASSES.get(fact.dtype)
    if kind is not None:
        storage = Persistent(("storage", Global("torch", kind), key, "cpu", numel))
        return Made(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *rest))
    # Newer dtypes have no storage class: an untyped storage, and the dtype separately.
    storage = Persistent(("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", fact.num_bytes))
    return Made(Global("torch._utils", "_rebuild_tensor_v3"), (storage, *rest, Global("torch", fact.dtype)))
