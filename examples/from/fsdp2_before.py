import torch
import torch.distributed as dist
from tiny import Model, samples
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = samples()
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler)

losses, mean = [], torch.zeros(())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, batch in enumerate(loader):
        is_last = i % 2 == 1
        model.set_requires_gradient_sync(is_last)
        logits = model(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / 2
        loss.backward()
        mean += loss.detach()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            mean = torch.zeros(())
            if dist.get_rank() == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.4f}")
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
dist.destroy_process_group()
