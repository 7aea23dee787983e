"""Plans that are given by name, right ones and wrong ones."""

import warnings

import models
from torch import nn

import shardwise as sw

MLPS = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}


def mlps_of(module: nn.Module) -> dict[str, str]:
    """A plan made for a module."""
    return MLPS


NOT_A_PLAN = 3

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
    "of a module": ("gpt2", "techniques.tp.plans:mlps_of"),
    "by path": ("gpt2", "techniques.tp.plans:MLPS"),
    "by path to something else": ("gpt2", "techniques.tp.plans:NOT_A_PLAN"),
    "one block": ("gpt2", {name.replace("*", "0"): style for name, style in MLPS.items()}),
    "the vocabulary alone, tied": ("gpt2", {"lm_head": "colwise_rep", "transformer.wte": "embedding_rowwise"}),
    "a layer without its other half": ("gpt2", {"transformer.h.*.mlp.c_fc": "colwise"}),
    "the wrong way round": ("gpt2", {"transformer.h.*.mlp.c_fc": "rowwise", "transformer.h.*.mlp.c_proj": "colwise"}),
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


def described(layout: str) -> dict[str, str]:
    """What ``describe`` says of each case, or the error."""
    found = {}
    with sw.init(layout, device="cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, (name, plan) in CASES.items():
            model = models.get(name)
            try:
                option = sw.TensorParallel(plan=plan) if isinstance(plan, dict) else plan
                example = model.windows(1, 1)[0][0]
                found[case] = sw.describe(sw.parallelize(model.build, world, tensor_parallel=option, example=example))
            except sw.ShardwiseError as error:
                found[case] = f"{type(error).__name__}: {error}"
    return found
