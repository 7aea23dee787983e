"""Parts of packed weights of every width, cut by rows, by inputs and by both: the bytes and values are those of the whole."""

from types import SimpleNamespace

import pytest
import torch

from shardwise.layout import Layout
from shardwise.model import nf4
from shardwise.recipe.boxes import index_of
from shardwise.recipe.cuts import extents, local_shape
from shardwise.recipe.records import Codec, Cut, Param
from shardwise.techniques.quantize.codec import codecs_of

ROWS, INPUTS = Cut(axis="tp", dim=0), Cut(axis="tp", dim=1)
FSDP = Cut(axis="fsdp", dim=0)


def recipe_of(shape, layout, cuts):
    """A recipe of one packed weight, as far as its codec asks for it."""
    packing = nf4.Packing.of(shape)
    common = {
        "dtype": "uint8",
        "trainable": False,
        "aliases": (),
        "unit": "",
        **dict.fromkeys(("storage", "compute", "reduce"), "uint8"),
    }

    def param(part, size, cuts):
        codec = Codec(kind="nf4", of="weight", shape=shape, dtype="float32", part=part)
        return Param(shape=size, cuts=cuts, codec=codec, **common)

    of_scales = tuple(cut for cut in cuts if cut.axis == "fsdp")  # over tp they are whole
    params = {
        "weight_nf4": param("codes", packing.codes_shape, cuts),
        "weight_nf4_scales": param("scales", packing.scales_shape, of_scales),
    }
    return SimpleNamespace(params=params, grid=layout)


def empty(recipe, rank):
    coord = recipe.grid.coord(rank)
    local = {name: torch.full(local_shape(p, coord), 255, dtype=torch.uint8) for name, p in recipe.params.items()}
    num = nf4.Packing.of(recipe.params["weight_nf4"].codec.shape).num_blocks
    return {**local, "weight_nf4_outer": torch.empty(-(-num // 256)), "weight_nf4_mean": torch.empty(())}


FEW = (2, 3, 5, 31, 33, 63, 64, 65, 70, 192)
EVERY = (*range(2, 71), 128, 192, 320)


@pytest.mark.parametrize(
    "widths", [pytest.param(FEW, id="few"), pytest.param(EVERY, id="every", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("cuts", [(ROWS,), (INPUTS,), (INPUTS, FSDP), (ROWS, FSDP)], ids=str)
def test_parts_of_every_width_are_those_of_the_whole(cuts, widths):
    for width in widths:
        for tp in (1, 2, 3):
            layout = Layout(tp=tp, dp_shard=1 + len(cuts) // 2)
            weight = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
            packed = dict(zip(("", "_scales", "_outer", "_mean"), nf4.pack(weight), strict=True))
            whole = {f"weight_nf4{suffix}": part for suffix, part in packed.items()}
            values = nf4.unpack(*whole.values(), nf4.Packing.of((5, width)), torch.float32)
            recipe = recipe_of((5, width), layout, cuts)
            ranks = [(codecs_of(recipe, rank)["weight"], empty(recipe, rank)) for rank in range(layout.size)]

            def read(box, weight=weight):
                return weight[index_of(box)].clone()

            maxima = torch.stack([codec.measure(read, local, "here") for codec, local in ranks]).amax(0)
            for rank, (codec, local) in enumerate(ranks):
                codec.encode(read, local, maxima, "here")
                for name, param in recipe.params.items():
                    for piece in extents(param, layout.coord(rank)):
                        assert torch.equal(local[name][piece.local_index], whole[name][piece.full_index]), (width, tp)
                assert torch.equal(local["weight_nf4_outer"], whole["weight_nf4_outer"])
                assert torch.equal(local["weight_nf4_mean"], whole["weight_nf4_mean"])
                here = codec.values_here(lambda names, compute, whole=whole: compute(whole[names[0]]), local)()
                for piece, _ in codec.pieces(rank):
                    assert torch.equal(here[piece.local_index], values[piece.full_index]), (width, tp, rank)
            again = ranks[0][0].encode_whole(read, "here")
            assert all(torch.equal(again[name], part) for name, part in whole.items())
            assert torch.equal(ranks[0][0].decode(again), values)
