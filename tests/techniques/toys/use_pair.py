"""On two ranks: weights that are pairs are loaded from plain values, trained beside, saved as plain values, and kept in checkpoints."""

import json

import torch
from models import Words, batch

import shardwise as sw


def error(found, wanted):
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-9)) for name, value in wanted.items()
    )


def trained(world, module, folder, load):
    optim = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    step = sw.TrainStep(module, optim)
    with sw.CheckpointManager(folder, step, async_save=False) as manager:
        if load:
            manager.load()
        else:
            step([batch(world.rank)])
            manager.save()
        return step([batch(2 + world.rank)]).loss


with sw.init("dp_shard=2", device="cpu", timeout_s=60) as world:
    torch.manual_seed(3)
    plain = Words()
    torch.save(plain.state_dict(), f"plain{world.rank}.pt")
    model = sw.parallelize(Words, world, pair=True, init="load", sharding=sw.Sharding(min_unit_bytes=0))
    report = sw.load_weights(model, "plain0.pt")
    full = sw.full_state_dict(model)
    sw.save_weights(model, "paired")
    again = sw.parallelize(Words, world, sharding=sw.Sharding(min_unit_bytes=0))
    sw.load_weights(again, "paired")
    back = sw.full_state_dict(again)
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        answers = [model(ids), plain(ids)]
    losses = [trained(world, model, "kept", False)]
    other = sw.parallelize(Words, world, pair=True, sharding=sw.Sharding(min_unit_bytes=0))
    losses.append(trained(world, other, "kept", True))
    if world.is_main:
        out = {
            "names": sorted(full) == sorted(plain.state_dict()),
            "dtypes": {name: str(param.dtype) for name, param in model.named_parameters()},
            "full": error(full, plain.state_dict()),
            "saved": error(back, full),
            "answers": error({"": answers[0]}, {"": answers[1]}),
            "losses": losses,
        }
        with open("out.json", "w") as file:
            json.dump(out, file)
