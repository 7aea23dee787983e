"""The regions of a whole model: searched in a few blocks of each kind, and the same in the others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.errors import UnsupportedError
from shardwise.model.block_kinds import block_kinds
from shardwise.model.certificate import find_certified
from shardwise.model.layers import Layer, Trial
from shardwise.model.regions import Found, Region

__all__ = ["search"]

_SEARCHED = 2  # blocks of a kind: what one hands on to the next would show


def search(module: nn.Module, call: Callable[[nn.Module], Any], degree: int) -> tuple[Found, dict[str, Layer]]:
    """The regions of ``module`` for ``degree`` ranks that share its layers, and its layers by the names of their
    weights.

    Args:
        module: any module, on meta or not; it is not changed.
        call: ``call(copy)`` runs a copy of it once on an example and returns its output.
        degree: how many ranks share a layer.

    Raises:
        UnsupportedError: the module cannot be copied, or does not run.
    """
    others = {blocks[0]: blocks[_SEARCHED:] for blocks in block_kinds(module) if len(blocks) > _SEARCHED}
    if others:
        try:
            trial = Trial(module, call, without=frozenset(name for names in others.values() for name in names))
            repeated = _repeated(find_certified(trial, degree), trial.layers, block_kinds(module))
        except UnsupportedError:  # its code counts its blocks
            repeated = None
        if repeated is not None:
            return repeated
    trial = Trial(module, call)
    return find_certified(trial, degree), dict(trial.layers)


def _repeated(found: Found, layers: dict[str, Layer], kinds: list[list[str]]) -> tuple[Found, dict[str, Layer]] | None:
    """What was found, in the blocks that were left out too; None if a region is in several blocks, or the blocks that
    were searched differ."""
    regions, left, all_layers = list(found.regions), dict(found.left), dict(layers)
    for blocks in (blocks for blocks in kinds if len(blocks) > _SEARCHED):
        of_each = []
        for block in blocks[:_SEARCHED]:
            inside = [region for region in found.regions if any(_is_in(name, block) for name in _names(region))]
            if not all(_is_in(name, block) for region in inside for name in _names(region)):
                return None
            of_each.append([_moved(region, block, blocks[0]) for region in inside])
        if any(other != of_each[0] for other in of_each[1:]):
            return None
        for block in blocks[_SEARCHED:]:
            regions += [_moved(region, blocks[0], block) for region in of_each[0]]
            for weight, why in found.left.items():
                if _is_in(weight, blocks[0]):
                    left[_name(weight, blocks[0], block)] = why
            for layer in layers.values():
                if _is_in(layer.weight, blocks[0]):
                    bias = layer.bias and _name(layer.bias, blocks[0], block)
                    moved = layer._replace(weight=_name(layer.weight, blocks[0], block), bias=bias)
                    all_layers[moved.weight] = moved
    return Found(regions, left), all_layers


def _names(region: Region) -> list[str]:
    """All that a region has names of."""
    settings = [f"{module}." for module, _ in region.settings]
    return [f"{region.module}.", *region.columns, *region.rows, *region.whole, *region.tensors, *settings]


def _is_in(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _name(name: str, block: str, other: str) -> str:
    """The same place in another block."""
    return other + name.removeprefix(block) if name == block or _is_in(name, block) else name


def _moved(region: Region, block: str, other: str) -> Region:
    """The same region in another block."""

    def moved(name: str) -> str:
        return _name(name, block, other)

    return replace(
        region,
        module=moved(region.module),
        columns={moved(name): cut for name, cut in region.columns.items()},
        rows=tuple(map(moved, region.rows)),
        whole=tuple(map(moved, region.whole)),
        inner=tuple(map(moved, region.inner)),
        tensors={moved(name): cut for name, cut in region.tensors.items()},
        settings={(moved(module), attr): value for (module, attr), value in region.settings.items()},
    )
