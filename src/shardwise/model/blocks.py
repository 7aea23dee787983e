"""Finds the outermost block lists of a model (its repeated layers) from its structure alone."""

from collections.abc import Mapping

from torch import nn

from shardwise.model.names import canonical_children, unwrap_module
from shardwise.recipe.records import BlockList

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Found = list[tuple[str, list[tuple[str, nn.Module]]]]  # (name of the list, (name, block) of each block)


def find_block_lists(root: nn.Module, run: Mapping[str, int] | None = None) -> tuple[BlockList, ...]:
    """The outermost block lists of ``root``, in registration order.

    Args:
        root: any module, on any device.
        run: module name -> position in the order in which an example first entered the modules. Blocks and lists are
            then sorted by it, those that it did not enter last.
    """
    found: Found = []
    _find(unwrap_module(root), "", found, set())
    lists = [BlockList(name=name, blocks=tuple(full for full, _ in blocks)) for name, blocks in found]
    if run is None:
        return tuple(lists)
    at = {name: run.get(name, len(run)) for found in lists for name in found.blocks}
    ordered = [BlockList(name=item.name, blocks=tuple(sorted(item.blocks, key=at.__getitem__))) for item in lists]
    return tuple(sorted(ordered, key=lambda item: at[item.blocks[0]]))


def has_no_forward(module: nn.Module) -> bool:
    """Whether ``module`` has no forward: a plain list, or a holder of parameters."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _find(module: nn.Module, name: str, found: Found, seen: set[int]) -> None:
    """Adds the outermost lists at or below ``module``: containers with at least two children that hold parameters, and an
    ``nn.ModuleList`` with one that has modules of its own, as in a model of one layer, if there is none in that."""
    if id(module) in seen or not _has_parameters(module):
        return
    seen.add(id(module))
    children = [(f"{name}.{key}" if name else key, child) for key, child in canonical_children(module)]
    is_one, blocks = False, []
    if isinstance(module, _CONTAINERS):
        # Of a list of lists the modules that are called. A ModuleDict of embeddings, blocks and a norm has its blocks
        # in a list inside it.
        is_list = isinstance(module, nn.ModuleList)
        blocks = [block for full, child in children for block in (_called(full, child) if is_list else [(full, child)])]
        blocks = [(full, child) for full, child in blocks if _has_parameters(child) and id(child) not in seen]
        is_called = not any(has_no_forward(block) for _, block in blocks)
        is_one = is_list and is_called and len(blocks) == 1 and len([*canonical_children(blocks[0][1])]) > 1
        if len(blocks) > 1 and is_called:
            unique = {id(block): (full, block) for full, block in reversed(blocks)}
            seen.update(unique)
            found.append((name, list(unique.values())[::-1]))
            return
    num = len(found)
    for full, child in children:
        _find(child, full, found, seen)
    if is_one and len(found) == num:
        found.append((name, blocks))


def _called(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that a loop over a list calls: if ``module`` is itself a plain list (a norm, attention, a
    feed-forward), its elements."""
    if not isinstance(module, nn.ModuleList) or not has_no_forward(module):
        return [(name, module)]
    return [block for key, child in canonical_children(module) for block in _called(f"{name}.{key}", child)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
