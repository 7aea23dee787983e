"""How much of each transformers family is whole on every rank at once, by its configuration as it comes; no weights are made.

    python tools/units_table.py                 # the table, on the terminal
    python tools/units_table.py OPTForCausalLM  # of some
    python tools/units_table.py --json FILE     # family -> [share of the root unit, of it embeddings, units, seconds]
    python tools/units_table.py --before FILE   # with the shares of such a file beside them: docs/data/units-before.json, of when
                                                # units were found by reading the code of forwards

A family is its class with the default configuration, built on meta. *Root* is the share of parameters in the root unit, which stays
gathered from forward to backward; *embeddings* that of tables and heads in it, which no list of blocks can hold.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.anatomy import read_anatomy
from shardwise.config.options import Precision, Sharding
from shardwise.layout import Layout
from shardwise.recipe import ROOT, make_recipe

FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "GPTJForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "CohereForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "MptForCausalLM",
    "GraniteForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
    "DbrxForCausalLM",
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "DistilBertForMaskedLM",
    "DebertaV2ForMaskedLM",
    "ElectraForMaskedLM",
    "ModernBertForMaskedLM",
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "MarianMTModel",
    "WhisperForConditionalGeneration",
    "Wav2Vec2ForCTC",
    "HubertForCTC",
    "ASTForAudioClassification",
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "SwinForImageClassification",
    "ConvNextForImageClassification",
    "Dinov2ForImageClassification",
    "SegformerForSemanticSegmentation",
    "CLIPModel",
    "SiglipModel",
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "JambaForCausalLM",
    "RwkvForCausalLM",
)


def measured(name: str) -> list[float]:
    """Share of the root unit, share of embeddings and heads in it, number of units, seconds from class to recipe."""
    import transformers

    cls: Any = getattr(transformers, name)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = cls(cls.config_class())
    start = time.perf_counter()
    anatomy = read_anatomy(model)
    recipe = make_recipe(anatomy, Layout(dp_shard=8), precision=Precision(), sharding=Sharding(engine="fsdp2"))
    seconds = time.perf_counter() - start
    sizes = {param: fact.numel for param, fact in anatomy.params.items()}
    root = {param for param, record in recipe.params.items() if record.unit == ROOT}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables |= {id(p) for p in head.parameters()} if head is not None else set()
    named = {id(p): n for n, p in model.named_parameters()}
    held = root & {named[key] for key in tables if key in named}
    total = sum(sizes.values())
    return [sum(sizes[n] for n in root) / total, sum(sizes[n] for n in held) / total, len(recipe.units), seconds]


def main() -> int:
    """Prints or writes the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    found = {}
    for name in options.families:
        try:
            found[name] = measured(name)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(found))
        return 0
    before = json.loads(options.before.read_text()) if options.before else {}
    for line in table(found, before):
        print(line)
    return 0


def table(found: dict[str, list[float]], before: dict[str, list[float]]) -> list[str]:
    """Lines of Markdown."""
    head = ["family", *(["root before"] if before else []), "root", "of it embeddings", "units", "s"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, (root, embeddings, units, seconds) in found.items():
        old = [f"{100 * before[name][0]:.0f} %" if name in before else "-"] if before else []
        cells = [
            f"`{name}`",
            *old,
            f"{100 * root:.0f} %",
            f"{100 * embeddings:.0f} %",
            f"{units:.0f}",
            f"{seconds:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
