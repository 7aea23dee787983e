"""Plans that are given by name, right ones and wrong ones."""

import os
import warnings
from collections.abc import Sequence

import models
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

MLPS = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
SECOND = {"more": "colwise", "less": "rowwise"}  # of Mlp: neither what is registered for it nor all of it


def second_of(module: nn.Module) -> dict[str, str]:
    """A plan made for a module."""
    return SECOND


NOT_A_PLAN = 3


class Mlp(nn.Module):
    """A model that has a plan, which leaves its second half whole."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12)
        self.up, self.down, self.more, self.less = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, input_ids):
        x = torch.tanh(self.embed(input_ids))
        x = torch.tanh(x + self.down(torch.relu(self.up(x))))
        return self.head(torch.tanh(x + self.less(torch.relu(self.more(x)))))


class OfMlp(Mlp):
    """A subclass."""


class Other(Mlp):
    """A subclass with a plan of its own, that does not fit."""


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = OfMlp(), nn.Linear(12, 12)

    def forward(self, input_ids):
        return self.last(torch.tanh(self.inner(input_ids)))


sw.register_tp_plan(Mlp, {"up": "rowwise"})
sw.register_tp_plan(Mlp, {"up": "colwise", "down": "rowwise"})
sw.register_tp_plan(f"{__name__}:Other", {"upp": "colwise"})
REGISTERED = {
    "registered": (Mlp, "auto"),
    "registered for a base class": (OfMlp, None),
    "registered for a part": (Around, None),
    "registered, and not asked for": (Mlp, "all"),
    "registered, and another given": (Mlp, SECOND),
    "of a module": (Mlp, "techniques.tp.plans:second_of"),
    "by path": (Mlp, "techniques.tp.plans:SECOND"),
    "a layer without its other half": (Mlp, {"more": "colwise"}),
    "the wrong way round": (Mlp, {"more": "rowwise", "less": "colwise"}),
    "registered, and wrong": (Other, None),
}

CASES = {
    "auto": ("llama", None),
    "auto beside the model's own": ("mixtral", "auto"),
    "hf": ("llama", "hf"),
    "hf with norms": ("qwen3", "hf"),
    "hf with experts": ("mixtral", "hf"),
    "hf without one": ("gpt2", "hf"),
    "llama": ("llama", "llama"),
    "llama on other names": ("gpt2", "llama"),
    "some layers": ("gpt2", MLPS),
    "by path to something else": ("gpt2", "techniques.tp.plans:NOT_A_PLAN"),
    "one block": ("gpt2", {name.replace("*", "0"): style for name, style in MLPS.items()}),
    "the vocabulary alone, tied": ("gpt2", {"lm_head": "colwise_rep", "transformer.wte": "embedding_rowwise"}),
    "what cannot be cut": ("linears: looks-at-weight", {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}),
    "an embedding by columns": ("linears: kv-2", {"embed": "colwise"}),
    "a head by rows": ("linears: kv-2", {"head": "rowwise"}),
    "no such module": ("gpt2", {"transformer.h.*.mlp.c_fcc": "colwise"}),
    "no such style": ("gpt2", {"transformer.h.*.mlp.c_fc": "colwis"}),
    "a norm": ("gpt2", {"transformer.h.*.ln_1": "colwise"}),
    "two styles": ("gpt2", {**MLPS, "transformer.h.0.mlp.c_fc": "rowwise"}),
    "sequence parallel": ("gpt2", {"transformer.h.*.ln_1": "sequence_parallel"}),
    "nothing": ("gpt2", {}),
    "no such plan": ("gpt2", "lama"),
    "another type": ("gpt2", 3),
}


def described(layout: str, names: Sequence[str] = (*CASES, *REGISTERED)) -> dict[str, str]:
    """What ``describe`` says of each case, or the error."""
    found = {}
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            built, plan = CASES.get(name) or REGISTERED[name]
            try:
                option = sw.TensorParallel(plan=plan) if isinstance(plan, dict) else plan
                model = models.get(built) if isinstance(built, str) else None
                build, example = (model.build, model.windows(1, 1)[0][0]) if model else (built, None)
                found[name] = sw.describe(sw.parallelize(build, world, tensor_parallel=option, example=example))
            except sw.ShardwiseError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def described_by_rank_0(size: int) -> dict[str, str]:
    """The same on rank 0 of so many on one node, whose peers are imagined."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        return described(f"tp={size}")
    finally:
        dist.destroy_process_group()
