import math

import torch
from tiny import Model
from torch.nn.functional import cross_entropy

num_steps, accumulation, micro_batch, length = 6, 4, 4, 12
tokens = torch.randint(61, (4096,), generator=torch.Generator().manual_seed(1))
draws = torch.Generator().manual_seed(2)


def get_batch():
    starts = torch.randint(len(tokens) - length, (micro_batch,), generator=draws)
    x = torch.stack([tokens[i : i + length] for i in starts])
    y = torch.stack([tokens[i + 1 : i + 1 + length] for i in starts])
    return x, y


def get_lr(step):
    return 1e-3 + 0.5 * (1e-2 - 1e-3) * (1 + math.cos(math.pi * step / num_steps))


torch.manual_seed(0)
model = Model()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for step in range(num_steps):
    for group in optim.param_groups:
        group["lr"] = get_lr(step)
    total = 0.0
    for _ in range(accumulation):
        x, y = get_batch()
        logits = model(x)
        loss = cross_entropy(logits.flatten(0, 1), y.flatten()) / accumulation
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    losses.append(total)
    print(f"step {step}: loss {total:.4f}")
weights = model.state_dict()
