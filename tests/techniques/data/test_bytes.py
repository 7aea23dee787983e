"""What the recipe says a rank holds, known before a process starts, is what its memory holds."""

import models
import pytest

import shardwise as sw
from shardwise import Sharding
from shardwise._torch.dtensor import local_tensor
from shardwise.layout import layout_of


def held(layout: str, case: str) -> tuple[int, int, int]:
    """Bytes that the recipe says for this rank, of its parameters, and of the memory below them."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(models.get(case).build, world, sharding=Sharding(min_unit_bytes=0))
        local = [local_tensor(param).detach() for param in model.parameters()]
        memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local if part.numel()}
        planned = sw.recipe_of(model).at(world.rank).num_bytes()
        return planned, sum(part.nbytes for part in local), sum(memory.values())


@pytest.mark.quick("reference", "odd")
@pytest.mark.parametrize("case", ["reference", "odd", "conv", "experts", "llama", "t5"])
def test_a_rank_holds_the_bytes_that_the_recipe_says(ranks, case):
    whole = sum(param.nbytes for param in models.get(case).build().parameters())
    for layout in ("dp_shard=2", "dp_replicate=2"):
        degree = layout_of(layout, 2).dp_shard
        for planned, held_now, memory in ranks.run(held, 2, layout, case):
            assert planned == held_now
            # FSDP2 pads a shard to the largest of the ranks: less than a row each.
            assert held_now <= memory <= held_now + (0 if degree == 1 else 0.2 * whole)
            assert planned == whole if degree == 1 else planned < 0.75 * whole
