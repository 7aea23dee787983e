"""The share of parameters that stays unsharded on every rank, for each transformers family with its default
configuration; no weights are made.

    python tools/units_table.py                 # the table, on the terminal
    python tools/units_table.py --write         # into docs/units.md
    python tools/units_table.py OPTForCausalLM  # of some
    python tools/units_table.py --json FILE     # family -> [share of the root unit, of it embeddings, units, seconds]
    python tools/units_table.py --before FILE   # with the shares of such a file beside them: docs/data/units-before.json, of when
                                                # units were found by reading the code of forwards

A family is its class with the default configuration, on one of 8192 imagined ranks. No time is given where that rank's part is
too large for this machine: experts are cut by their number. *Root* is the share of parameters in the root unit, which stays
gathered from forward to backward; *embeddings* that of tables and heads in it, which no list of blocks can hold.
"""

import argparse
import gc
import importlib.metadata
import json
import math
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stamp import stamped
from torch import nn

import shardwise as sw
from shardwise import Precision, Sharding
from shardwise.layout import Layout
from shardwise.model import read_anatomy
from shardwise.parallel import recipe_of
from shardwise.recipe import ROOT
from shardwise.techniques.fold import make_recipe

ROOT_FOLDER = Path(__file__).parents[1]
PAGE, BEFORE = ROOT_FOLDER / "docs" / "units.md", ROOT_FOLDER / "docs" / "data" / "units-before.json"
RANKS, MEMORY = 8192, 18 * 2**30  # bytes of address space

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
    """Share of the root unit, share of embeddings and heads in it, number of units, seconds of parallelize, the constructor included."""
    import transformers

    cls: Any = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        try:
            model = _sharded(cls)
            recipe, seconds = recipe_of(model), time.perf_counter() - start
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            with torch.device("meta"):
                model = cls(cls.config_class())
            recipe = make_recipe(
                read_anatomy(model), Layout(dp_shard=8), precision=Precision(), sharding=Sharding(engine="fsdp2")
            )
            seconds = math.nan
    sizes = {param: math.prod(record.shape) for param, record in recipe.params.items()}
    root = {param for param, record in recipe.params.items() if record.unit == ROOT}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables |= {id(p) for p in head.parameters()} if head is not None else set()
    named = {id(p): n for n, p in model.named_parameters()}
    held = root & {named[key] for key in tables if key in named}
    total = sum(sizes.values())
    return [sum(sizes[n] for n in root) / total, sum(sizes[n] for n in held) / total, len(recipe.units), seconds]


def _sharded(cls: Any) -> Any:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=RANKS)
    try:
        with sw.init("dp_shard=-1", device="cpu") as world:
            return sw.parallelize(
                lambda: cls(cls.config_class()), world, init="load", sharding=Sharding(engine="fsdp2")
            )
    finally:
        dist.destroy_process_group()


def main() -> int:
    """Prints or writes the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="write the table of all, with what was before, into docs/units.md"
    )
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found, unfit = {}, {}
    for name in options.families:
        try:
            gc.collect()  # models are in rings
            found[name] = measured(name)
        except Exception as error:
            unfit[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {unfit[name]}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(found))
        return 0
    old = BEFORE if options.write else options.before
    lines = table(found, json.loads(old.read_text(encoding="utf-8")) if old else {})
    print("\n".join(lines))
    if options.write:
        if {*found, *unfit} != set(FAMILIES) or len(unfit) > 1:
            raise SystemExit("nothing written: the page is of all families")
        version = importlib.metadata.version("transformers")
        lines += [
            "",
            *(
                f"`{name}` is not made from its default configuration by transformers {version} (`{why}`)."
                for name, why in unfit.items()
            ),
        ]
        start, end = "<!-- units -->\n", "<!-- /units -->"
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
        text = stamped("docs/units.md", "\n".join(lines))
        PAGE.write_text(before + start + text + end + rest.partition(end)[2], encoding="utf-8")
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
            "-" if math.isnan(seconds) else f"{seconds:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
