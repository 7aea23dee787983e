"""A small language model, trained for a minute by stock transformers alone and saved as a model directory.

python examples/small_model.py runs/small                 # about a minute
python examples/small_model.py runs/small --steps 20      # seconds

Its tokens are bytes. It stands for any published model: nothing here knows of Shardwise.
"""

import argparse
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64


def text() -> torch.Tensor:
    """The bytes of Python's help topics."""
    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def main(dest: str, num_steps: int) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    sizes = {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 2 * CONTEXT}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tokens, loss = text(), torch.zeros(())
    for step in range(1, num_steps + 1):
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (16,))
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts]).long()
        loss = model(batch, labels=batch).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {num_steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(dest)
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", help="the directory to write")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps (800)")
    args = parser.parse_args()
    print(f"loss {main(args.dest, args.steps):.4f} nats/byte, saved in {args.dest}")
