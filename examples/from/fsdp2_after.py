import torch
from tiny import Model, samples

import shardwise as sw

world = sw.init("dp_shard=-1", device="cpu")
torch.manual_seed(0)
model = sw.parallelize(Model(), world, sharding=sw.Sharding(units=("blocks.*",)))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = sw.Loader(samples(), world, global_batch=16, micro_batch=4, shuffle=False)
step = sw.TrainStep(model, optim, max_grad_norm=1.0)

losses = []
for _ in range(2):
    for window in loader:
        out = step(window)
        losses.append(out.loss)
        if world.is_main:
            print(f"step {out.step}: loss {out.loss:.4f}")
weights = sw.full_state_dict(model)
world.close()
