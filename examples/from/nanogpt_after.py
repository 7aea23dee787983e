import math

import torch
import torch.nn.functional as F
from tiny import Model

import shardwise as sw

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
    return {"idx": x, "labels": y}


def estimate_loss():
    out = {}
    for split in ["train", "val"]:
        batches = [get_batch(split) for _ in range(eval_iters)]
        out[split] = sw.evaluate(model, batches[dp.rank :: dp.size], loss=sw.model_loss)["loss"]
    return out


def get_lr(it):
    return 1e-3 + 0.5 * (1e-2 - 1e-3) * (1 + math.cos(math.pi * it / max_iters))


world = sw.init("dp_shard=-1", device="cpu")
dp = world.axis("dp")
master_process = world.is_main
torch.manual_seed(0)
model = sw.parallelize(GPT(), world)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = sw.TrainStep(model, optimizer, loss=sw.model_loss, max_grad_norm=1.0)

losses, val_losses = [], []
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        estimated = estimate_loss()
        val_losses.append(float(estimated["val"]))
        if master_process:
            print(f"step {it}: train loss {estimated['train']:.4f}, val loss {estimated['val']:.4f}")
    batches = [get_batch("train") for _ in range(gradient_accumulation_steps)]
    lossf = train(batches[dp.rank :: dp.size]).loss
    losses.append(lossf)
    if master_process:
        print(f"iter {it}: loss {lossf:.4f}")
weights = sw.full_state_dict(model)
