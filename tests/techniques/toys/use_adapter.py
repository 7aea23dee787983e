"""On two ranks: everything that a script sees of the adapter."""

import inspect
import json

from models import Words

import shardwise as sw
from shardwise.techniques.adapter.options import Adapter

with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world:
    model = sw.parallelize(Words, world, adapter=Adapter(rank=2))
    recipe = sw.recipe_of(model)
    try:
        sw.parallelize(Words, world, adapter=Adapter(rank=2 + world.rank))
        differs = "nothing was raised"
    except sw.ShardwiseError as error:
        differs = f"{type(error).__name__}: {error}"
    if world.is_main:
        out = {
            "described": sw.describe(model),
            "trained": [name for name, param in model.named_parameters() if param.requires_grad],
            "again": sw.Recipe.from_json(recipe.to_json()) == recipe,
            "signature": str(inspect.signature(sw.parallelize)),
            "differs": differs,
        }
        with open("out.json", "w") as file:
            json.dump(out, file)
