"""Outermost lists of blocks, and whether every rank is sure to enter each block."""

from torch import nn

from shardwise.anatomy.calls import EACH, Entered, Path, entered_children
from shardwise.recipe.records import BlockList

__all__ = ["find_block_lists"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward: their parent calls the children


def find_block_lists(root: nn.Module, skipped: dict[str, str] | None = None) -> tuple[BlockList, ...]:
    """The outermost block lists of ``root``, in registration order.

    Args:
        root: any module, on any device.
        skipped: modules seen not to be entered when an example was run, with what was seen; None = no example run.
            An example can show that a block is skipped; that it never is, only the code can show, or, where there is
            no code to read, an example in which each block ran.
    """
    found: list[BlockList] = []
    _Finder(found, skipped).visit(root, "", set(), doubt=None)
    return tuple(found)


class _Finder:
    def __init__(self, found: list[BlockList], skipped: dict[str, str] | None):
        self.found, self.skipped = found, skipped
        self.seen: set[int] = set()

    def visit(self, module: nn.Module, name: str, from_above: set[Path], doubt: str | None) -> None:
        """``from_above``: paths below ``module`` that an ancestor's forward surely enters by itself."""
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        entered = entered_children(module)
        entered.sure |= from_above
        if isinstance(module, nn.Sequential):
            self._list(module, name, (), entered, doubt)
            return
        for key, child in module.named_children():
            self._child(child, f"{name}.{key}" if name else key, (key,), entered, doubt)

    def _child(self, child: nn.Module, name: str, path: Path, entered: Entered, doubt: str | None) -> None:
        if not _has_parameters(child):
            return
        if isinstance(child, _CONTAINERS) or (*path, EACH) in entered.sure | entered.maybe.keys():
            self._list(child, name, path, entered, doubt)
            return
        below = {known[len(path) :] for known in entered.sure if known[: len(path)] == path and len(known) > len(path)}
        reached = path in entered.sure or bool(below)
        self.visit(child, name, below, doubt or (None if reached else self._doubt(entered, path, name)))

    def _list(self, module: nn.Module, name: str, path: Path, entered: Entered, doubt: str | None) -> None:
        children = [(f"{name}.{key}" if name else key, key, child) for key, child in module.named_children()]
        blocks = [(full, key, child) for full, key, child in children if _has_parameters(child)]
        if blocks and all(isinstance(child, _CONTAINERS) for _, _, child in blocks):
            for full, _, child in blocks:  # a list of lists: its inner lists hold the blocks
                self._list(child, full, (*path, EACH), entered, doubt)
            return
        each_sure = (*path, EACH) in entered.sure or all((*path, key) in entered.sure for _, key, _ in blocks)
        doubt = doubt or (None if each_sure else self._doubt(entered, (*path, EACH), name))
        doubt = doubt or self._seen_skipped([full for full, _, _ in blocks])
        if len(blocks) < 2:
            for full, key, child in blocks:
                self.visit(child, full, set(), doubt if (*path, key) not in entered.sure else None)
            return
        why = "blocks of an outermost list, entered in every forward" if doubt is None else doubt
        names = tuple(full for full, _, _ in blocks)
        self.found.append(BlockList(name=name, blocks=names, always_entered=doubt is None, why=why))

    def _doubt(self, entered: Entered, path: Path, name: str) -> str | None:
        if path in entered.maybe:
            return entered.maybe[path]
        if entered.unread is not None:
            if self.skipped is not None and not any(s == name or s.startswith(f"{name}.") for s in self.skipped):
                return None  # no source, but the example entered all of it
            return f"{entered.unread}; pass example= or units= to say which modules are entered in every forward"
        by_key = [p for p in entered.maybe if p[: len(path) - 1] == path[:-1]]
        if by_key:
            return entered.maybe[by_key[0]]
        return "its parent's forward does not plainly iterate over it or call it"

    def _seen_skipped(self, names: list[str]) -> str | None:
        for name in names:
            if self.skipped and name in self.skipped:
                return f"{name} {self.skipped[name]}"
        return None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
