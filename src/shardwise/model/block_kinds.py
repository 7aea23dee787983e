"""Which blocks of a list have the same code and sizes, so that what is found in some of them holds for all."""

from typing import Any

from torch import nn

from shardwise.model.blocks import find_block_lists
from shardwise.model.names import canonical_modules, own_attributes
from shardwise.model.read import user_class


def block_kinds(root: nn.Module) -> list[list[str]]:
    """The blocks of the outermost block lists, those of one kind together, by canonical name and in order.

    Two blocks of a list are of one kind if their modules have the same classes, tensors of the same shapes, and equal
    attributes, but for those that hold the number of the block.
    """
    modules = dict(canonical_modules(root))
    groups: list[list[str]] = []
    for blocks in find_block_lists(root, None):
        kinds: list[tuple[int, dict[str, Any], list[str]]] = []
        for number, name in enumerate(blocks.blocks):
            described = _described(modules[name])
            for first, kind, names in kinds:
                if kind.keys() == described.keys() and all(
                    _same(kind[key], first, described[key], number) for key in kind
                ):
                    names.append(name)
                    break
            else:
                kinds.append((number, described, [name]))
        groups += [names for _, _, names in kinds]
    return groups


def _described(block: nn.Module) -> dict[str, Any]:
    """Everything that a block is made of, by its place in the block."""
    found: dict[str, Any] = {}
    for name, module in block.named_modules():
        found[name] = user_class(module)
        for tensors in (module._parameters, module._buffers):
            found |= {f"{name}.{key}": None if x is None else (x.shape, x.dtype) for key, x in tensors.items()}
        found |= {f"{name}.{key}": value for key, value in own_attributes(module).items()}
    return found


def _same(one: Any, number: int, other: Any, other_number: int) -> bool:
    """Whether two attributes are equal, or both the number of their block, counted from 0 or 1."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is int and one - number == other - other_number in (0, 1):
        return True
    try:
        return bool(one == other)
    except Exception:  # such as of tensors of several elements
        return False


def is_in_block(name: str, block: str) -> bool:
    """Whether a tensor or module of this name is within a block."""
    return name.startswith(f"{block}.")


def in_block(name: str, block: str, other: str) -> str:
    """The name of the same place in another block; of what is not in ``block`` its own name."""
    return other + name.removeprefix(block) if name == block or is_in_block(name, block) else name
