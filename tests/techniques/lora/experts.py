"""Models with stacked experts, and with parameters in no layer, for the tests of their adapters."""

import warnings

import torch
from models.hugging_face import DECODER, hf
from safetensors.torch import load_file
from techniques.lora import adapters
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.techniques.lora.prepare import prepare

STACKS = ("gate_up_proj", "down_proj")
SMALL = {**DECODER, "num_hidden_layers": 2, "num_experts_per_tok": 2}
IDS = torch.arange(24).view(2, 12) % 17


def mixtral(how="eager"):
    return hf("MixtralConfig", "MixtralForCausalLM", **SMALL, num_local_experts=4, experts_implementation=how)


def qwen3_moe():
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "experts_implementation": "eager"}
    return hf("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **SMALL, **sizes)


def batched():
    return mixtral("batched_mm")


def grouped():
    return mixtral("grouped_mm")


FAMILIES = {"mixtral": mixtral, "qwen3-moe": qwen3_moe}


def whole(build, lora):
    """A model with drawn adapters, in one process."""
    torch.manual_seed(1)
    return adapters.drawn(prepare(build().double(), None, None, lora=lora))


def in_peft(name):
    """PEFT's name of an adapter's parameter: the second parameter of experts is its outer one."""
    for part in "AB":
        name = name.replace(f".lora_{part}.default.down_proj.", f".lora_{part}.default.")
        name = name.replace(f".lora_{part}.default.gate_up_proj.", f".base_layer.lora_{part}.default.")
    return f"base_model.model.{name}"


class Stack(nn.Module):
    """Experts, of which all get every position, and a matrix; ``how`` says who reads them, and how."""

    def __init__(self, how="own"):
        super().__init__()
        self.how, self.weights, self.bare = how, nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = torch.einsum("eoi,...i->...o", self.weights, x) / 4
        return functional.linear(y, self._parameters["bare"] if self.how == "its parameter" else self.bare)


class Outer(nn.Module):
    parameters_with_adapters = ("stack.weights", "bare")

    def __init__(self, how="own"):
        super().__init__()
        self.stack, self.up = Stack(how), nn.Linear(8, 8)

    def forward(self, x):
        y = self.stack(self.up(x))
        if self.stack.how == "a layer outside":
            return functional.linear(y, self.stack.bare)
        return y @ self.stack.weights[0] if self.stack.how == "an index outside" else y


class Twice(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.bare = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x, depth):
        y = functional.linear(x, self.bare)
        return functional.linear(self(y, depth - 1), self.bare) if depth else y


class Checkpoints(nn.Module):
    """Computes a part of its forward again in its backward."""

    def __init__(self):
        super().__init__()
        self.bare = nn.Parameter(torch.randn(8, 8))

    def part(self, x):
        return functional.linear(x, self.bare).tanh()

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


class TurnedStack(nn.Module):
    is_transposed = True

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 12) / 4), nn.Parameter(torch.randn(3, 12, 8) / 4)

    def forward(self, x):
        return torch.einsum("...i,eio,eoj->...j", x, self.up, self.down)


class Turned(nn.Sequential):
    """Experts that lie as those of gpt-oss: ``[experts, in, out]``."""

    parameters_with_adapters = ("up", "down")

    def __init__(self):
        super().__init__(nn.Linear(8, 8), TurnedStack(), nn.Linear(8, 8))

    def forward(self, x):
        return super().forward(x)


class Encoder(nn.Module):
    """Attention whose projections are one parameter, and a layer that it does not call."""

    parameters_with_adapters = ("in_proj_weight",)

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x)


def rows(steps, num):
    random = torch.Generator().manual_seed(3)
    return [[{"x": torch.randn(2, 3 + i, 8, generator=random)} for i in range(num)] for _ in range(steps)]


def count(batch):
    return batch["x"].shape[1]


def loss(output, batch):
    return output.exp().sum()


def read_outside(how):
    """The error of adapters of parameters which other code reads."""
    with sw.init("dp_shard=2", device="cpu", seed=0) as world:
        lora = sw.LoRA(rank=2, experts=Outer.parameters_with_adapters)
        try:
            sw.parallelize(Outer(how), world, example={"x": torch.randn(4, 8)}, lora=lora)
        except sw.UnsupportedError as error:
            return str(error)
        return ""


def left_plain():
    """What a description says of experts without adapters, and the error of putting them into 4 bits."""
    with sw.init("dp_shard=1", device="cpu", seed=0) as world:
        module = sw.parallelize(mixtral(), world, example={"input_ids": IDS}, lora=sw.LoRA(rank=2))
        said = next(line for line in sw.describe(module).splitlines() if "experts" in line)
        try:
            sw.parallelize(mixtral(), world, lora=sw.LoRA(rank=2), quantize=sw.Quantize(targets=("down_proj",)))
        except sw.PlanError as error:
            return said, str(error)
        return said, ""


def of_attention(layout, folder):
    """Saves adapters of attention, loads them, and merges them: the warnings; the answers before, after, and of the merged weights."""
    with sw.init(layout, device="cpu", seed=0) as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x, lora = rows(1, 1)[0][0]["x"].double(), sw.LoRA(rank=2, alpha=3, targets=("self_attn", "linear1"))
        torch.manual_seed(1)
        module = sw.parallelize(Encoder().double(), world, example={"x": x}, lora=lora)
        sw.load_full_state_dict(module, whole(Encoder, lora).state_dict())
        sw.save_adapter(module, f"{folder}/adapter")
        sw.save_weights(module, f"{folder}/merged")
        torch.manual_seed(1)
        again = sw.parallelize(Encoder().double(), world, example={"x": x}, lora=sw.LoRA.of(f"{folder}/adapter"))
        sw.load_adapter(again, f"{folder}/adapter")
        merged = Encoder().double()
        merged.load_state_dict(load_file(f"{folder}/merged/model.safetensors"))
        texts = [str(each.message) for each in said if "counts that of out_proj" in str(each.message)]
        return texts, [each(x=x).detach() for each in (module, again, merged)]
