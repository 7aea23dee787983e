"""Models for parity tests, each with what makes it hard; all built by top-level functions, so that ranks can build them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.run.reference import ReferenceConfig, ReferenceModel
from shardwise.step.loss import call, next_token_loss

VOCAB = 19


@dataclass(frozen=True)
class Case:
    """A model, the batches it eats, and its loss contract."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], dict[str, Tensor]]  # (generator, index) -> micro-batch, unequal tokens
    loss: Any = next_token_loss
    count: Any = None
    forward: Any = call

    def windows(self, num_steps: int, num_micro: int, seed: int = 0) -> list[list[dict[str, Tensor]]]:
        """``num_steps`` windows of ``num_micro`` micro-batches, for all ranks together."""
        generator = torch.Generator().manual_seed(seed)
        return [[self.batch(generator, i) for i in range(num_micro)] for _ in range(num_steps)]


# ---- batches ----------------------------------------------------------------------------------------------------


def tokens(generator: torch.Generator, index: int, batch: int = 2, length: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (batch, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : index % length] = -100  # micro-batch 0 has all its tokens, the next ones fewer and fewer
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def features(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    size = 2 + index % 3
    x = torch.randn(size, 6, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 5, (size,), generator=generator)}


def images(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    size = 2 + index % 3
    x = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.randint(0, 5, (size,), generator=generator)}


def pairs(generator: torch.Generator, index: int) -> dict[str, Tensor]:
    """Source and target sequences for an encoder-decoder."""
    target = tokens(generator, index)
    source = torch.randint(0, VOCAB, (2, 5), generator=generator)
    return {"input_ids": source, "decoder_input_ids": target["input_ids"], "labels": target["labels"]}


def class_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


# ---- models -----------------------------------------------------------------------------------------------------


def reference() -> nn.Module:
    return ReferenceModel(
        ReferenceConfig(vocab=VOCAB, dim=12, num_layers=3, num_heads=2, num_kv_heads=1, ffn=20, max_seq=8)
    )


class ConvNet(nn.Module):
    """Convolutions with batch norm: running statistics, heterogeneous layers in one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(3):
            layers.append(nn.Sequential(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()))
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(6, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.stages(pixel_values).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM, then GRUs in a list: flat weights, hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.grus = nn.ModuleList([nn.GRU(14, 14, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        for gru in self.grus:
            y = y + gru(y)[0]
        return self.head(y[:, -1])


class OddBlock(nn.Module):
    def __init__(self, shared: nn.Linear, dim: int):
        super().__init__()
        self.shared = shared  # one Linear in every block: a tie with as many owners as blocks
        self.own = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.tensor(0.5))  # 0-dim
        self.tiny = nn.Parameter(torch.ones(1, dim))  # dim 0 smaller than the ranks

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.own(self.shared(x))) * self.tiny


class Odd(nn.Module):
    """Ties with three owners, tied embeddings, frozen and 0-dim parameters, a ParameterList, parameters on the root,
    one that is never used, and one used in some micro-batches only."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        shared = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([OddBlock(shared, dim) for _ in range(3)])
        self.free = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(3, dim)), nn.Parameter(torch.tensor(1.1))])
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.never = nn.Parameter(torch.randn(5))
        self.seldom = nn.Parameter(torch.randn(dim))
        self.register_buffer("shift", torch.linspace(0, 1, dim), persistent=False)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scales[0].sum(0) * self.scales[1] + self.shift
        if int(input_ids[0, 0]) % 2:  # differs by micro-batch, so by rank
            x = x + self.seldom
        for block in self.blocks:
            x = block(x)
        for layer in self.free:
            x = torch.tanh(layer(x))
        return self.head(self.frozen(x))


class BranchBlock(nn.Module):
    """A branch that depends on data, inside one unit."""

    def __init__(self, dim: int):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.a if float(x.detach().sum()) > 0 else self.b
        return x + torch.tanh(self.out(branch(x)))


class Branches(nn.Module):
    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList([BranchBlock(dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Each token goes to one expert of a list; an expert without tokens is not called."""

    def __init__(self, dim: int):
        super().__init__()
        self.router = nn.Linear(dim, 4)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                y[mask] = expert(x[mask]) * weights[mask, None]
        return x + y


class ExpertModel(nn.Module):
    """Experts outside any block list, so that a naive rule would make each a unit."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.first, self.second = Experts(dim), Experts(dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.second(self.first(self.embed(input_ids)))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class BranchFirst(nn.Module):
    """A branch that only some ranks take, before the first block: the block's input may need no gradient."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.maybe = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0, 0]) > 0:
            x = self.maybe(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x[:, -1])


class InPlace(nn.Module):
    """The parent works in place on what a unit returns, which for a Linear on 3-D input is a view."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            y = layer(x)
            y += x
            x = torch.tanh(y)
        logits = self.head(x)
        logits *= 0.5
        return logits


def halved_in_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    logits *= 0.5  # on the root's own output
    return logits


# ---- transformers -----------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 0}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def hf(config: str, model: str, **changes: Any) -> nn.Module:
    """A tiny transformers model from its config, without dropout (its masks are not one process's), eager attention."""
    import transformers

    made = getattr(transformers, config)(attn_implementation="eager", **changes)
    for name in list(vars(made)):
        if "drop" in name and isinstance(getattr(made, name), float):
            setattr(made, name, 0.0)
    built = getattr(transformers, model)(made)
    for part in built.modules():  # an encoder-decoder gives each half a configuration of its own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return built


_LLAMA = {**_SMALL, **_TOKENS, "hidden_size": 12, "intermediate_size": 20, "num_key_value_heads": 1}
_BERT = {"hidden_size": 12, "intermediate_size": 20, "max_position_embeddings": 16}
_VIT = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 12, "intermediate_size": 20, "num_labels": 5}
_T5 = {"vocab_size": VOCAB, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 16, **_TOKENS}


def _hf(config: str, model: str, **changes: Any) -> Callable[[], nn.Module]:
    return functools.partial(hf, config, model, **changes)


CASES = {
    case.name: case
    for case in (
        Case("reference", reference, tokens),
        Case("conv", ConvNet, images, loss=class_loss),
        Case("recurrent", Recurrent, features, loss=class_loss),
        Case("odd", Odd, tokens),
        Case("branches", Branches, tokens),
        Case("experts", ExpertModel, tokens),
        Case("branch-first", BranchFirst, features, loss=class_loss),
        Case("inplace", InPlace, tokens, forward=halved_in_place),
        Case("llama", _hf("LlamaConfig", "LlamaForCausalLM", **_LLAMA), tokens),
        Case("gpt2", _hf("GPT2Config", "GPT2LMHeadModel", **_GPT2), tokens),
        Case("qwen3", _hf("Qwen3Config", "Qwen3ForCausalLM", **_LLAMA, head_dim=6), tokens),
        Case("t5", _hf("T5Config", "T5ForConditionalGeneration", **_T5, **_TOKENS), pairs),
        Case("bert", _hf("BertConfig", "BertForMaskedLM", **_SMALL, **_BERT), tokens),
        Case(
            "vit",
            _hf("ViTConfig", "ViTForImageClassification", **_VIT, image_size=8, patch_size=4),
            images,
            loss=class_loss,
        ),
    )
}
