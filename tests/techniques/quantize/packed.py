"""What ranks run in the tests of weights in 4 bits."""

import hashlib
from unittest import mock

import models
import torch
from torch import nn

import shardwise as sw
from shardwise._torch.dtensor import local_tensor
from shardwise.parallel import runtime_of
from shardwise.state.to_rank0 import full_tensors

UNITS = sw.Sharding(min_unit_bytes=0)
PARTS = ("weight_nf4", "weight_nf4_scales", "weight_nf4_outer", "weight_nf4_mean")


def digests(layout, name, builds, **options):
    """Of each tensor of a packed model with DoRA adapters, in full on rank 0; how many weights in bytes tp cuts; and the bytes of them here."""
    with sw.init(layout, device="cpu", seed=7) as world:
        model = models.get(name)
        if not builds:
            torch.manual_seed(1)
        module = sw.parallelize(
            model.build if builds else model.build(),
            world,
            example=model.windows(1, 1)[0][0],
            lora=sw.LoRA(rank=2, dora=True),
            quantize="nf4",
            **({"sharding": UNITS} if "dp_shard" in layout else {}),
            **options,
        )
        recipe = sw.recipe_of(module)
        cut = sum(any(cut.axis == "tp" for cut in p.cuts) for p in recipe.params.values() if p.codec is not None)
        held = sum(local_tensor(p).nbytes for key, p in module.named_parameters() if "weight_nf4" in key)
        return {key: hashlib.md5(value).hexdigest() for key, value in _bytes_of(module).items()}, cut, held


def _bytes_of(module):
    runtime = runtime_of(module)
    found = full_tensors(runtime, [*runtime.recipe.params, *runtime.recipe.buffers])
    return {key: value.contiguous().flatten().view(torch.uint8).numpy().tobytes() for key, value in found.items()}


def memory_of_step(layout, name):
    """Dtypes of parameters under bf16, and a finite loss that falls."""
    with sw.init(layout, device="cpu", seed=0) as world:
        model = models.get(name)
        module = sw.parallelize(
            model.build,
            world,
            example=model.windows(1, 1)[0][0],
            lora=sw.LoRA(rank=4, dropout=0.1),
            quantize="nf4",
            precision="bf16",
            sharding=UNITS,
        )
        before = {key: local_tensor(p).clone() for key, p in module.named_parameters() if not p.requires_grad}
        step = sw.TrainStep(
            module,
            torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2),
            loss=model.loss,
            count=model.count,
            forward=model.forward,
        )
        axis = world.axis("dp")
        window = model.windows(1, 2 * axis.size)[0][axis.rank :: axis.size]
        losses = [step(window).loss for _ in range(8)]
        same = all(torch.equal(local_tensor(p), before[key]) for key, p in module.named_parameters() if key in before)
        return losses, same, {key: str(p.dtype) for key, p in module.named_parameters()}, sw.describe(module)


class Wide(nn.Module):
    """Blocks of which almost all are weights of linear layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gathered_bytes(options):
    """Bytes that a forward of all blocks gathers, for each of ``options``."""
    inner, found = torch.distributed.all_gather_single, []

    def counting(output, *args, **kwargs):
        found[-1] += output.numel() * output.itemsize
        return inner(output, *args, **kwargs)

    with sw.init("dp_shard=2", device="cpu", seed=0) as world:
        for each in options:
            example = {"x": torch.randn(2, 512)}
            module = sw.parallelize(Wide, world, sharding=UNITS, precision="bf16", example=example, **each)
            found.append(0)
            with mock.patch.object(torch.distributed, "all_gather_single", counting), torch.no_grad():
                module(**example)
    return found


def weight_outside(layout):
    """The error of reading a packed weight outside of a forward, and of setting it."""
    with sw.init(layout, device="cpu", seed=0) as world:
        module = sw.parallelize(models.get("llama").build, world, lora=sw.LoRA(rank=2), quantize="nf4", sharding=UNITS)
        layer, found = module.model.layers[0].mlp.up_proj, []
        for act in (lambda: layer.weight, lambda: setattr(layer, "weight", 1)):
            try:
                act()
                found.append("")
            except sw.UsageError as error:
                found.append(str(error))
        return found
