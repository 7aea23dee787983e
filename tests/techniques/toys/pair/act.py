"""How pairs are made of plain values, and read as such: what loading and saving ask."""

from dataclasses import dataclass
from functools import partial

import torch

from shardwise.recipe import extents, owners
from shardwise.recipe.boxes import whole
from shardwise.techniques.pair.prepare import HIGH, LOW, halves
from shardwise.techniques.technique import Act, StoredPart


@dataclass(frozen=True, eq=False)
class PairedWeight:
    """One weight, as a PackedTensor."""

    recipe: object
    rank: int
    high: str
    low: str
    kind: str = "pair"
    dtype: str = "float32"

    @property
    def parts(self):
        return {"high": self.high, "low": self.low}

    @property
    def shape(self):
        return self.recipe.params[self.high].shape

    def pieces(self, rank):
        param, coord = self.recipe.params[self.high], self.recipe.grid.coord(rank)
        return [*zip(extents(param, coord), owners(param, coord), strict=True)]

    def measure(self, read, local, place):
        return torch.zeros(1)  # nothing of the whole weight must be known

    def encode(self, read, local, maxima, place):
        for piece, _ in self.pieces(self.rank):
            for name, half in zip(self.parts.values(), halves(read(piece.box).float()), strict=True):
                local[name][piece.local_index].copy_(half)

    def encode_whole(self, read, place):
        return dict(zip(self.parts.values(), halves(read(whole(self.shape)).float()), strict=True))

    def decode(self, values):
        return values[self.high].cpu().float() + values[self.low].cpu().float()

    def values_here(self, whole, local):
        return partial(self.decode, local)

    def stored(self, local):
        return {f"_{role}": StoredPart(self.shape, name) for role, name in self.parts.items()}


class PairAct(Act):
    def codecs(self, runtime):
        recipe, rank = runtime.recipe, runtime.world.rank
        layers = [name.removesuffix(HIGH) for name in recipe.params if name.endswith(f".{HIGH}")]
        return {f"{layer}weight": PairedWeight(recipe, rank, f"{layer}{HIGH}", f"{layer}{LOW}") for layer in layers}

    def packed_names(self, names):
        return [name for name in names if name.endswith((f".{HIGH}", f".{LOW}"))]
