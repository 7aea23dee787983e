import torch
from lightning_fabric import Fabric
from tiny import Model, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = Model()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optim = fabric.setup(model, optim)
loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4, shuffle=False))

losses, mean = [], 0.0
for _ in range(2):
    for i, batch in enumerate(loader):
        is_accumulating = i % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(batch["input_ids"])
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            fabric.backward(loss / 2)
        mean += fabric.all_reduce(loss.detach(), reduce_op="mean").item() / 2
        if not is_accumulating:
            fabric.clip_gradients(model, optim, max_norm=1.0)
            optim.step()
            optim.zero_grad()
            losses.append(mean)
            fabric.print(f"step {len(losses)}: loss {mean:.4f}")
            mean = 0.0
weights = model.module.state_dict()
