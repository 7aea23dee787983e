import torch
from tiny_llama import build, conversations

import shardwise as sw

world = sw.init("dp_shard=-1", device="cpu")
torch.manual_seed(0)
model = sw.parallelize(build(), world)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 - step / 6)
step = sw.TrainStep(model, optim, scheduler=scheduler, max_grad_norm=1.0)
loader = sw.Loader(conversations(), world, global_batch=16, micro_batch=4, shuffle=False, prepare=sw.shift_labels)

losses = []
for _ in range(2):
    for window in loader:
        out = step(window)
        losses.append(out.loss)
        if world.is_main:
            print(f"step {out.step}: loss {out.loss:.4f}")
weights = sw.full_state_dict(model)
world.close()
