"""Fine-tune a Hugging Face model directory, sharded, and open what comes out with the stock library.

python examples/small_model.py runs/small                                              # any model directory will do
python examples/finetune.py runs/small runs/tuned
torchrun --standalone --nproc-per-node 2 examples/finetune.py runs/small runs/tuned

Each rank reads its own bytes of the files and writes its own bytes of the new ones; no rank ever holds the model.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise as sw

CONTEXT = 64


def build(source: str = "runs/small") -> nn.Module:
    """The model that a directory describes, without its weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))


def tokens(source: str) -> torch.Tensor:
    """What to learn: the source of a module of Python's library, in tokens of the model's own tokenizer. The model of
    small_model.py has none: its tokens are bytes."""
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    if any((Path(source) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return torch.tensor(
            AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False, verbose=False)["input_ids"]
        )
    size = AutoConfig.from_pretrained(source).vocab_size
    if size != 256:
        raise SystemExit(
            f"{source} has no tokenizer, and its vocabulary of {size} tokens is not that of bytes: save its tokenizer there"
        )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def samples(source: str, num: int = 256) -> list[dict[str, torch.Tensor]]:
    """Sequences of CONTEXT tokens; the loader makes the labels."""
    row = tokens(source)
    starts = range(0, min(num * CONTEXT, len(row) - CONTEXT), CONTEXT)
    return [{"input_ids": row[start : start + CONTEXT]} for start in starts]


def main(source: str, dest: str, num_steps: int = 40) -> tuple[float, float]:
    with sw.init("dp_shard=-1") as world:
        model = sw.parallelize(lambda: build(source), world, init="load")
        report = sw.load_weights(model, source)
        if world.is_main:
            print(report)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = sw.TrainStep(model, optim, loss=sw.next_token_loss, max_grad_norm=1.0)
        losses: list[float] = []
        dataset = samples(source)
        while len(losses) < num_steps:
            for window in sw.Loader(dataset, world, global_batch=16, micro_batch=8):
                losses.append(float(step(window).loss))
                if len(losses) == num_steps:
                    break
        sw.save_weights(model, dest)

        model.eval()
        prompt = dataset[0]["input_ids"].unsqueeze(0).to(world.device)
        with torch.no_grad():
            sharded = model(prompt).logits.cpu()
        if world.is_main:  # the stock library, on its own: one process, no sharding
            stock = AutoModelForCausalLM.from_pretrained(dest).eval()
            with torch.no_grad():
                difference = float((stock(prompt.cpu()).logits - sharded).abs().max())
            print(
                f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; opened by transformers, outputs differ by {difference:.1e}"
            )
            assert difference < 1e-4
        return losses[0], losses[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a model directory")
    parser.add_argument("dest", help="the directory to write")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (40)")
    args = parser.parse_args()
    if not Path(args.source).is_dir():
        parser.error(f"{args.source} is no directory: python examples/small_model.py {args.source} makes one")
    main(args.source, args.dest, args.steps)
