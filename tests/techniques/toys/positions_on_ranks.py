"""On four ranks: an evaluation, and a mesh that is not the recipe's."""

from unittest import mock

from models import Words, batch

import shardwise as sw
from shardwise.world import World


def evaluated(layout):
    """The mean loss and the number of tokens of an evaluation."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(lambda: Words().double(), world)
        data = world.axis("dp")
        found = sw.evaluate(model, [batch(i) for i in range(data.rank, 4, data.size)])
        return found["loss"], found["num_tokens"]


def on_the_mesh_of_dp_shard():
    """As if parameters were cut over dp_shard alone, whatever the layout."""
    wrong = mock.patch.object(World, "sharding_mesh", lambda world, axis="fsdp": world.mesh["dp_shard"])
    with wrong, sw.init("dp_shard=2,cp=2", device="cpu") as world:
        try:
            sw.parallelize(Words, world)
        except sw.PlanError as error:
            return str(error)
        return "nothing was raised"


def own_loop():
    """What a window of the user's own, and ``accumulate``, end in."""
    told = []
    with sw.init("cp=2", device="cpu") as world:
        model = sw.parallelize(Words, world)
        for loop in (
            lambda: [*sw.window(model, [batch(0)]).__enter__()],
            lambda: sw.accumulate(model, is_last=True).__enter__(),
        ):
            try:
                loop()
            except sw.UnsupportedError as error:
                told.append(str(error))
        return told
