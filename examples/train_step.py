"""Train a model of your own, sharded, with five lines of Shardwise.

python examples/train_step.py                                                # one process
torchrun --standalone --nproc-per-node 2 examples/train_step.py              # two ranks, the same losses
"""

import torch

import shardwise as sw
from shardwise.data.corpus import TokenWindows, pydoc_text


class Model(torch.nn.Module):
    """Any module: nothing here knows of ranks."""

    def __init__(self, vocab: int = 256, dim: int = 64):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, dim)
        self.rnn = torch.nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(dim, vocab)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(input_ids))[0])


def main(num_steps: int = 20) -> float:
    dataset = TokenWindows.from_text(pydoc_text(), seq_len=64)
    with sw.init("dp_shard=-1") as world:
        model = sw.parallelize(Model, world)
        optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = sw.TrainStep(model, optim, max_grad_norm=1.0)
        for window in sw.Loader(dataset, world, global_batch=16, micro_batch=4):
            out = step(window)
            if world.is_main and out.step % 5 == 0:
                print(f"step {out.step}: loss {out.loss:.4f}, grad norm {out.grad_norm:.3f}", flush=True)
            if out.step == num_steps:
                break
        return out.loss


if __name__ == "__main__":
    main()
