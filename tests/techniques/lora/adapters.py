"""What ranks run in the tests of adapters."""

import math
import tempfile

import models
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise._torch import collectives
from shardwise._torch.dtensor import local_tensor
from shardwise.model.adapted import adapter_switches, adapters_as
from shardwise.techniques.lora.prepare import prepare, values_of_proof
from shardwise.techniques.lora.rule import LoRAEntry

RANK = 4
UNITS = sw.Sharding(min_unit_bytes=0)


def drawn(module, seed=3):
    """``module`` with all tensors of its adapters drawn."""
    torch.manual_seed(seed)
    values_of_proof(module)
    return module


def with_biases(name):
    """A model whose biases, which transformers begins with at 0, are drawn: adapters leave them frozen."""
    module = models.get(name).build()
    with torch.no_grad():
        for key, param in module.named_parameters():
            if key.endswith("bias"):
                param.normal_(std=0.5)
    return module


def whole(name, lora):
    """A model with drawn adapters, in one process."""
    torch.manual_seed(1)
    return drawn(prepare(models.get(name).build().double(), None, None, lora=lora))


def sums_per_micro_batch(layout, name, lora):
    """How many sums over tp a forward and its backward make; how many parameters are cut; and what share of all numbers is held."""
    count = [0]
    inner = collectives.sum_over

    def counting(x, group):
        count[0] += 1
        return inner(x, group)

    from shardwise.techniques.tp import exchanges

    exchanges.sum_over = counting
    try:
        with sw.init(layout, device="cpu", seed=0) as world:
            model = models.get(name)
            batch = model.windows(1, 1)[0][0]
            torch.manual_seed(1)
            options, module = {} if lora is None else {"lora": lora}, model.build().double()
            if lora is None:  # as with adapters nothing of the base is trained, but for the norms
                for key, param in module.named_parameters():
                    param.requires_grad_("norm" in key)
            module = sw.parallelize(module, world, example=batch, **options)
            step = sw.TrainStep(
                module,
                torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1),
                loss=model.loss,
                count=model.count,
                forward=model.forward,
            )
            count[0] = 0
            step([batch])
            recipe = sw.recipe_of(module)
            held = sum(local_tensor(p).numel() for p in module.parameters())
            share = held / sum(math.prod(p.shape) for p in recipe.params.values())
            return count[0], sum(any(cut.axis == "tp" for cut in p.cuts) for p in recipe.params.values()), share
    finally:
        exchanges.sum_over = inner


def first_values(layout, name, lora, builds):
    """Rank 0's full tensors of the adapters."""
    with sw.init(layout, device="cpu", seed=7) as world:
        build = models.get(name).build
        if not builds:
            torch.manual_seed(1)
        module = sw.parallelize(
            build if builds else build(), world, example=models.get(name).windows(1, 1)[0][0], lora=lora
        )
        return {key: value for key, value in sw.full_state_dict(module).items() if "lora_" in key}


def base_answer(layout, name, lora):
    """The answer of the base alone, and with the adapters, from a sharded model."""
    with sw.init(layout, device="cpu", seed=0) as world:
        model = models.get(name)
        torch.manual_seed(1)
        module = sw.parallelize(
            model.build().double(), world, example=model.windows(1, 1)[0][0], lora=lora, sharding=UNITS
        )
        sw.load_full_state_dict(module, whole(name, lora).state_dict())
        with torch.no_grad():
            answer = model.forward(module, model.windows(1, 1)[0][0])
            with sw.adapter_off(module):
                base = model.forward(module, model.windows(1, 1)[0][0])
        return [x.logits if hasattr(x, "logits") else x for x in (base, answer)]


def trained_beside(layout, remat):
    """The gradients of what is trained beside adapters, of a loss of the base's answer."""
    with sw.init(layout, device="cpu", seed=0) as world:
        model = models.get("llama")
        batch = model.windows(1, 1)[0][0]
        lora = sw.LoRA(rank=2, train=("*norm*",))
        torch.manual_seed(1)
        module = sw.parallelize(model.build().double(), world, example=batch, lora=lora, remat=remat, sharding=UNITS)
        sw.load_full_state_dict(module, whole("llama", lora).state_dict())
        with sw.window(module, [batch]) as window:
            for each in window:
                switches = adapter_switches(module.modules())
                with adapters_as(switches, [True] * len(switches)):
                    output = model.forward(module, each)
                (model.loss(output, each) / window.num_tokens).backward()
        return {name: sw_full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def sw_full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def stored(layout, parts):
    """Dtypes of base and adapters under mixed precision, and the loss of a step."""
    with sw.init(layout, device="cpu", seed=0) as world:
        model = models.get("llama")
        precision = sw.Precision(storage="fp32", compute="bf16", reduce="fp32", parts=parts)
        module = sw.parallelize(
            model.build,
            world,
            example=model.windows(1, 1)[0][0],
            lora=sw.LoRA(rank=2),
            precision=precision,
            sharding=UNITS,
        )
        step = sw.TrainStep(
            module,
            torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1),
            loss=model.loss,
            count=model.count,
            forward=model.forward,
        )
        loss = step(model.windows(1, world.axis("dp").size)[0][world.axis("dp").rank :: world.axis("dp").size]).loss
        return {name: (param.dtype, param.grad is None) for name, param in module.named_parameters()}, loss


class DropsHalf(nn.Module):
    """Two layers, of which tp cuts the first by its outputs, the second by its inputs."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(1 + self.up(x).square())  # of which no number is 0


def dropped(layout):
    """On each rank: which inputs of A of ``down``, and of ``up``, were dropped in a training forward."""
    with sw.init(layout, device="cpu", seed=0) as world:
        torch.manual_seed(1)
        lora = sw.LoRA(rank=2, dropout=0.5)
        module = sw.parallelize(DropsHalf(), world, example={"x": torch.ones(4, 64)}, lora=lora)
        masks = []
        inner = functional.dropout

        def watching(x, p=0.5, training=True, inplace=False):
            y = inner(x, p, training, inplace)
            masks.append((y == 0) & (x != 0))
            return y

        functional.dropout = watching
        try:
            for _ in range(2):
                module(x=torch.ones(4, 64))
        finally:
            functional.dropout = inner
        return masks


class Branching(nn.Module):
    """Uses the weight of a layer in another way where it computes in float32, which no run in float64 shows."""

    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        narrow = x.dtype == torch.float32
        if narrow and self.how == "up":
            hidden = torch.einsum("oi,bi->bo", self.up.weight, x) + self.up.bias
        else:
            hidden = self.up(x)
        if narrow and self.how == "down":
            return torch.einsum("oi,bi->bo", self.down.weight, hidden.relu()) + self.down.bias
        return functional.linear(hidden.relu(), self.down.weight, self.down.bias)


def branching(how):
    """The error of a first forward; "" if there is none."""
    with sw.init("tp=2", device="cpu", seed=0) as world:
        module = sw.parallelize(Branching(how), world, example={"x": torch.randn(4, 16)})
        try:
            module(x=torch.arange(64.0).reshape(4, 16) / 64)
        except sw.UnsupportedError as error:
            return str(error)
        return ""


def merged_or_not(kind):
    """The error of merging an adapter into a layer of this class; "" if there is none."""
    from techniques.lora import test_adapters

    cls = nn.Linear if kind == "Linear" else getattr(test_adapters, kind)
    with sw.init("dp_shard=1", device="cpu", seed=0) as world, tempfile.TemporaryDirectory() as folder:
        module = sw.parallelize(
            nn.Sequential(cls(8, 8)), world, example={"input": torch.randn(2, 8)}, lora=sw.LoRA(rank=2, targets="0")
        )
        try:
            sw.save_weights(module, folder)
        except sw.UnsupportedError as error:
            return str(error)
        return ""


def late_reader():
    """The error of adapters in a model whose third block reads its weight past the layer."""
    from techniques.lora.test_adapters import ReadsLate

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(ReadsLate(i) for i in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    with sw.init("dp_shard=2", device="cpu", seed=0) as world:
        try:
            sw.parallelize(Model(), world, example={"x": torch.randn(2, 8)}, lora=sw.LoRA(rank=2))
        except sw.UnsupportedError as error:
            return str(error)
        return ""


def resumed(folder, options):
    """Saves a model with adapters of the first options; the errors of resuming it with each of the others, and of loading its weights."""
    found = []
    with sw.init("dp_shard=2", device="cpu", seed=0) as world:
        for number, given in enumerate(options):
            lora = sw.LoRA(rank=2, **given)
            module = sw.parallelize(DropsHalf(), world, example={"x": torch.ones(4, 64)}, lora=lora)
            optim = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            step = sw.TrainStep(module, optim, loss=lambda out, batch: out.sum(), count=lambda batch: 4)
            with sw.CheckpointManager(folder, step) as saved:
                try:
                    if number == 0:
                        step([{"x": torch.ones(4, 64)}])
                        saved.save()
                        saved.wait()
                    else:
                        saved.load()
                    found.append("")
                except sw.CheckpointError as error:
                    found.append(str(error))
                try:
                    found.append(str(sw.load_weights(module, folder) and ""))
                except sw.CheckpointError as error:
                    found.append(str(error))
    return found


def cuts_of_head(layout, name, lora):
    """Part of the head with an adapter -> whether it is cut over tp."""
    with sw.init(layout, device="cpu", seed=0) as world:
        model = models.get(name)
        module = sw.parallelize(model.build(), world, example=model.windows(1, 1)[0][0], lora=lora)
        recipe = sw.recipe_of(module)
        (head,) = recipe.entry("lora", LoRAEntry).layers
        return {
            key.removeprefix(f"{head}.").split(".")[0]: any(cut.axis == "tp" for cut in param.cuts)
            for key, param in recipe.params.items()
            if key.startswith(f"{head}.") and not key.endswith(".bias")
        }
