"""Outermost lists of blocks, and whether every rank is sure to enter each block."""

from torch import nn

from shardwise.anatomy.code import Entries, read_entries, unwrap_module
from shardwise.anatomy.names import canonical_children, canonical_modules
from shardwise.recipe.records import BlockList

__all__ = ["find_block_lists"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_ITERATION = ("__iter__", "__getitem__", "__len__", "values", "items", "keys", "children", "named_children")

Found = list[tuple[str, list[tuple[str, nn.Module]]]]  # (name of the list, (name, block) of each block)


def find_block_lists(root: nn.Module, skipped: dict[str, str] | None = None) -> tuple[BlockList, ...]:
    """The outermost block lists of ``root``, in registration order.

    Args:
        root: any module, on any device.
        skipped: modules seen not to be entered when an example was run, with what was seen; None = no example run.
            An example can show that a block is skipped; that it never is, only the code can show, or, where there is
            no code to read, an example in which each block ran.
    """
    root = unwrap_module(root)
    found: Found = []
    _find(root, "", found, set())
    entries = read_entries(root, {id(block): block for _, blocks in found for _, block in blocks})
    containers = dict(canonical_modules(root))
    return tuple(_judged(name, containers[name], blocks, entries, skipped) for name, blocks in found)


def _find(module: nn.Module, name: str, found: Found, seen: set[int]) -> None:
    """Adds the outermost lists at or below ``module``: containers with at least two children that hold parameters."""
    if id(module) in seen or not _has_parameters(module):
        return
    seen.add(id(module))
    children = [(f"{name}.{key}" if name else key, child) for key, child in canonical_children(module)]
    if isinstance(module, _CONTAINERS):
        blocks = [(full, child) for full, child in children if _has_parameters(child) and id(child) not in seen]
        # A ModuleDict of embeddings, blocks and a norm, or a list of pairs: the lists in it hold the blocks.
        holds_lists = any(_is_plain_list(block) for _, block in blocks)
        if len(blocks) > 1 and not holds_lists:
            unique = {id(block): (full, block) for full, block in reversed(blocks)}
            seen.update(unique)
            found.append((name, list(unique.values())[::-1]))
            return
    for full, child in children:
        _find(child, full, found, seen)


def _is_plain_list(module: nn.Module) -> bool:
    """A list that nobody can call, so that only its elements are entered."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _judged(
    name: str,
    container: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    entries: Entries,
    skipped: dict[str, str] | None,
) -> BlockList:
    own = [
        n
        for n in _ITERATION
        if not getattr(getattr(type(container), n, None), "__module__", "torch").startswith("torch")
    ]
    doubts = (_doubt(full, block, entries, skipped) for full, block in blocks)
    doubt = next((doubt for doubt in doubts if doubt is not None), None)
    doubt = doubt or (
        f"{type(container).__name__}.{own[0]} may give its elements in an order of its own" if own else None
    )
    return BlockList(
        name=name,
        blocks=tuple(full for full, _ in blocks),
        always_entered=doubt is None,
        why=doubt or "blocks of an outermost list, entered in every forward",
    )


def _doubt(name: str, block: nn.Module, entries: Entries, skipped: dict[str, str] | None) -> str | None:
    """Why ``block`` may be skipped; None if every rank is sure to enter it."""
    if id(block) in entries.maybe:
        return entries.maybe[id(block)]
    if skipped is not None and name in skipped:
        return f"{name} {skipped[name]}"
    if id(block) in entries.unread:
        if skipped is not None:
            return None  # no source, but the example entered it
        return f"{entries.unread[id(block)]}; pass example= or units= to say which modules are entered in every forward"
    return None if id(block) in entries.sure else "its parent's forward does not plainly iterate over it or call it"


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
