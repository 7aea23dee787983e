import torch
from tiny import Model, samples

import shardwise as sw

world = sw.init("dp_shard=-1", device="cpu")
torch.manual_seed(0)
model = sw.parallelize(Model(), world)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 - step / 6)
step = sw.TrainStep(model, optim, scheduler=scheduler, max_grad_norm=1.0)
loader = sw.Loader(samples(), world, global_batch=16, micro_batch=4, shuffle=False)

losses = []
for _ in range(2):
    for window in loader:
        out = step(window)
        losses.append(out.loss)
        if world.is_main:
            print(f"step {out.step}: loss {out.loss:.4f}")
weights = sw.full_state_dict(model)
