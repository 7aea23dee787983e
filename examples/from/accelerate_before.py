import torch
from accelerate import Accelerator
from tiny import Model, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Model()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
total = 6 * accelerator.num_processes  # a prepared scheduler advances once for each process
scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 - step / total)
loader = DataLoader(samples(), batch_size=4, shuffle=False)
model, optim, scheduler, loader = accelerator.prepare(model, optim, scheduler, loader)

losses, mean = [], 0.0
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch["input_ids"])
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            scheduler.step()
            optim.zero_grad()
        mean += accelerator.reduce(loss.detach(), "mean").item() / 2
        if accelerator.sync_gradients:
            losses.append(mean)
            accelerator.print(f"step {len(losses)}: loss {mean:.4f}")
            mean = 0.0
weights = accelerator.get_state_dict(model)
