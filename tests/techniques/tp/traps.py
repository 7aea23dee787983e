"""Runs on ranks of models that are cut over tp."""

import models
import torch
import torch.nn.functional as F
from models.batches import VOCAB
from torch import Tensor, nn

import shardwise as sw

NAME = "linears: kv-1"


def rows_of_ranks() -> Tensor:
    """The numbers of the rows of a fused q|k|v layer that this rank has."""
    model = models.get("linears: qkv").build()
    bias = model.blocks[0].attention.projections[0].bias
    with torch.no_grad():
        bias.copy_(torch.arange(len(bias)))
    with sw.init("tp=2", device="cpu") as world:
        sw.parallelize(model, world)
        return model.blocks[0].attention.projections[0].bias.detach().long()


def is_tied(name: str) -> bool:
    with sw.init("tp=2", device="cpu") as world:
        model = sw.parallelize(models.get(name).build, world)
        assert model.embed.weight.shape[0] in (VOCAB // 2, VOCAB - VOCAB // 2)
        return model.head.weight is model.embed.weight


def _losses(model: nn.Module, windows: list) -> list[Tensor]:
    """Sums of cross entropy, all computed before the first backward."""
    return [
        F.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        for batch in windows
    ]


def plain_loss() -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one process, in float64."""
    record = models.get(NAME)
    torch.manual_seed(0)
    model = record.build().double()
    (loss,) = _losses(model, record.windows(1, 1)[0])
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


def loss_in_a_loop() -> tuple[float, dict[str, Tensor]]:
    """The same under tp, in a loop of one's own."""
    record = models.get(NAME)
    torch.manual_seed(0)
    model = record.build().double()
    with sw.init("tp=2", device="cpu") as world:
        sw.parallelize(model, world)
        with sw.window(model, record.windows(1, 1)[0]) as w:
            for batch in w:
                (loss,) = _losses(model, [batch])
                loss.backward()
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        before = sw.full_state_dict(model)
        optim.step()
        after = sw.full_state_dict(model)
        before, after = world.broadcast((before, after))
        return loss.item(), {name: before[name] - after[name] for name in before}


def values_of_replicated() -> dict[str, Tensor]:
    """The values of what every rank has whole, of a module that each rank has made with numbers of its own."""
    with sw.init("tp=2", device="cpu") as world:
        torch.manual_seed(world.rank)
        model = models.get(NAME).build()
        for param in model.parameters():
            nn.init.normal_(param)
        shapes = {name: param.shape for name, param in model.named_parameters()}
        sw.parallelize(model, world)
        return {name: param.detach().clone() for name, param in model.named_parameters() if param.shape == shapes[name]}
