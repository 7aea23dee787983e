"""What torchrun's ranks run in a test: two worlds one after the other, three steps, then rank 1 stops."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.run.reference import ReferenceConfig, ReferenceModel

folder = Path(sys.argv[1])
(folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
gathered = []
for turn in range(2):
    with sw.init("dp_shard=2", device="cpu", timeout_s=8) as world:
        gathered.append(world.gather((turn, world.rank)))
world = sw.init("dp_shard=2", device="cpu", timeout_s=8)
config = ReferenceConfig(vocab=32, dim=8, num_layers=3, num_heads=2, num_kv_heads=1, ffn=8, max_seq=8)
model = sw.parallelize(lambda: ReferenceModel(config), world)
step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
data = [torch.arange(i, i + 6) % 32 for i in range(12)]
losses = [step(window).loss for window in sw.Loader(data, world, global_batch=4, micro_batch=1)]
found = {
    "source": world.source,
    "place": [world.rank, world.local_rank, world.size],
    "losses": losses,
    "gathered": gathered,
}
(folder / f"{world.rank}.json").write_text(json.dumps(found))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
