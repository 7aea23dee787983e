"""On four ranks: a checkpoint of parameters on a mesh of their own, continued under other layouts."""

import torch
from models import Words, batch

import shardwise as sw


def losses(folder, layout, spread, *, first):
    """Two steps under ``layout``; saved after the first one, or begun from what is there. The losses, and the
    axes over which a layer is cut."""
    with sw.init(layout, device="cpu") as world:
        model = sw.parallelize(lambda: Words().double(), world, spread=spread)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = sw.TrainStep(model, optim, max_grad_norm=0.5)
        found = []
        with sw.CheckpointManager(folder, step, async_save=False) as manager:
            if first:
                found.append(step([batch(world.rank)]).loss)
                manager.save()
            else:
                manager.load()
            found += [step([batch(4 + world.rank)]).loss, step([batch(8 + world.rank)]).loss]
        return found, [cut.axis for cut in sw.recipe_of(model).params["a.weight"].cuts]
