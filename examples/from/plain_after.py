import math

import torch
from tiny import Model
from torch.nn.functional import cross_entropy

import shardwise as sw

num_steps, accumulation, micro_batch, length = 6, 4, 4, 12
tokens = torch.randint(61, (4096,), generator=torch.Generator().manual_seed(1))
draws = torch.Generator().manual_seed(2)


def get_batch():
    starts = torch.randint(len(tokens) - length, (micro_batch,), generator=draws)
    x = torch.stack([tokens[i : i + length] for i in starts])
    y = torch.stack([tokens[i + 1 : i + 1 + length] for i in starts])
    return {"input_ids": x, "labels": y}


def get_lr(step):
    return 1e-3 + 0.5 * (1e-2 - 1e-3) * (1 + math.cos(math.pi * step / num_steps))


world = sw.init("dp_shard=-1", device="cpu")
dp = world.axis("dp")
torch.manual_seed(0)
model = sw.parallelize(Model(), world)
optim = sw.local_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

losses = []
for step in range(num_steps):
    for group in optim.param_groups:
        group["lr"] = get_lr(step)
    total = torch.zeros(())
    batches = [get_batch() for _ in range(accumulation)]  # every rank draws all, and keeps its own
    with sw.window(model, batches[dp.rank :: dp.size]) as window:
        for batch in window:
            logits = model(batch["input_ids"])
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            loss = loss / window.num_tokens
            loss.backward()
            total += loss.detach()
    sw.clip_grad_norm_(model, 1.0)
    optim.step()
    optim.zero_grad()
    losses.append(dp.reduce(total).item())
    if world.is_main:
        print(f"step {step}: loss {losses[-1]:.4f}")
weights = sw.full_state_dict(model)
