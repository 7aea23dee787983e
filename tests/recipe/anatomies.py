"""Anatomies written by hand: a recipe needs no module, and no torch."""

from shardwise.recipe import Anatomy, BlockList, TensorFact

MIB = 1 << 20


def fact(*shape: int, dtype: str = "float32", trainable: bool = True, aliases: tuple[str, ...] = ()) -> TensorFact:
    """A parameter."""
    return TensorFact(shape=shape, dtype=dtype, trainable=trainable, aliases=aliases)


def tower(count: int = 4, rows: int = 256, **more: TensorFact) -> Anatomy:
    """``count`` blocks of ``rows`` KiB each, an embedding and a head; ``more`` parameters, ``__`` for dots."""
    blocks = [f"blocks.{i}" for i in range(count)]
    params = {"embed.weight": fact(100, 8)}
    params |= {f"{block}.weight": fact(rows, 256) for block in blocks}
    params |= {"head.weight": fact(100, 8)}
    params |= {name.replace("__", "."): value for name, value in more.items()}
    classes = {"": "Tower", "embed": "Embedding", "blocks": "ModuleList", "head": "Linear"}
    classes |= dict.fromkeys(blocks, "Block")
    lists = (BlockList(name="blocks", blocks=tuple(blocks)),)
    return Anatomy(module_class="Tower", params=params, buffers={}, lists=lists, classes=classes)
