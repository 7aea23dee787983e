import torch
from safetensors.torch import load_file
from tiny_llama import conversations
from tiny_qlora import ADAPTER, BASE, build

import shardwise as sw

world = sw.init("dp_shard=-1", device="cpu")
model = sw.parallelize(build, world, lora=sw.LoRA.of(ADAPTER), quantize="nf4", init="load")
sw.load_weights(model, BASE)
sw.load_adapter(model, ADAPTER)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
step = sw.TrainStep(model, optim, max_grad_norm=1.0)
loader = sw.Loader(conversations(), world, global_batch=16, micro_batch=4, shuffle=False, prepare=sw.shift_labels)

losses = []
for _ in range(2):
    for window in loader:
        losses.append(step(window).loss)
        if world.is_main:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}")
sw.save_adapter(model, "adapter")
weights = load_file("adapter/adapter_model.safetensors") if world.is_main else {}
world.close()
