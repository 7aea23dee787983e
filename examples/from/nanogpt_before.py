import math

import torch
import torch.nn.functional as F
from tiny import Model

max_iters, gradient_accumulation_steps, batch_size, block_size = 6, 4, 4, 12
eval_interval, eval_iters = 3, 5
tokens = torch.randint(61, (4096,), generator=torch.Generator().manual_seed(1))
splits = {"train": tokens[:3584], "val": tokens[3584:]}
draws = torch.Generator().manual_seed(2)


class GPT(Model):
    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def get_batch(split):
    data = splits[split]
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=draws)
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    return 1e-3 + 0.5 * (1e-2 - 1e-3) * (1 + math.cos(math.pi * it / max_iters))


master_process = True
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses, val_losses = [], []
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        estimated = estimate_loss()
        val_losses.append(float(estimated["val"]))
        if master_process:
            print(f"step {it}: train loss {estimated['train']:.4f}, val loss {estimated['val']:.4f}")
    lossf = 0.0
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
        lossf += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(lossf)
    if master_process:
        print(f"iter {it}: loss {lossf:.4f}")
weights = model.state_dict()
