"""What ranks do in the tests of one CUDA device: several ranks on it, over gloo, as nccl takes one rank for each device."""

import models
import torch

import shardwise as sw
from shardwise.verify.sharded import share_of

__all__ = ["fused_losses", "trained_beside_plain"]

DEVICE = "cuda:0"


def _moved(windows: list) -> list:
    """Windows of micro-batches on the device; numbers in float64."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.to(DEVICE, torch.float64 if x.is_floating_point() else x.dtype)

    return [[{key: moved(value) for key, value in batch.items()} for batch in window] for window in windows]


def _count(model: models.Model, batch: dict) -> int:
    return int((batch["labels"] != -100).sum()) if model.count is None else model.count(batch)


def trained_beside_plain(name: str, layout: str, fused: bool = False, **options) -> tuple[float, float]:
    """The largest difference of a loss or a parameter after two windows, relative to its largest number, to plain torch on the
    same device in float64; and the share of the parameters that this rank holds."""
    model = models.get(name)
    with sw.init(layout, device=DEVICE, backend="gloo", seed=3) as world:
        torch.manual_seed(0)
        plain = model.build().double().to(DEVICE)
        torch.manual_seed(0)
        module = model.build().double()
        num_data = world.axis("dp").size
        given = _moved(model.windows(2, 2 * num_data))
        example = {key: value.cpu() for key, value in given[0][0].items()}
        module = sw.parallelize(module, world, example=example, **options)
        step = sw.TrainStep(
            module,
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
            loss=model.loss,
            count=model.count,
            forward=model.forward,
            max_grad_norm=1.0,
            fused=fused,
        )
        losses = [step([dict(batch) for batch in share_of(window, world)]).loss for window in given]
        optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        wanted = []
        for window in given:
            tokens = sum(_count(model, batch) for batch in window)
            sums = [model.loss(model.forward(plain, batch), batch) / tokens for batch in window]
            wanted.append(float(sum(value.detach() for value in sums)))
            sum(sums).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
        state = sw.full_state_dict(module) or {}
        found = [abs(one - other) / abs(other) for one, other in zip(losses, wanted, strict=True)]
        for name, param in plain.named_parameters():
            if name in state:
                most = float(param.detach().abs().max())
                found.append(float((state[name] - param.detach().cpu()).abs().max()) / max(most, 1e-300))
        held = sum(param.numel() for param in module.parameters()) / sum(param.numel() for param in plain.parameters())
        return max(found), held


def fused_losses(layout: str) -> list[float]:
    """The losses of four windows of the reference model in bf16: with logits, and with the loss that holds none."""
    model = models.get("linears: kv-2")
    found = []
    for fused in (False, True):
        with sw.init(layout, device=DEVICE, backend="gloo", seed=3) as world:
            module = sw.parallelize(model.build, world, precision="bf16", example=model.windows(1, 1)[0][0])
            step = sw.TrainStep(module, torch.optim.SGD(module.parameters(), lr=0.1), fused=fused)
            windows = [
                [{key: value.to(DEVICE) for key, value in batch.items()} for batch in window]
                for window in model.windows(4, 2)
            ]
            found.append([step(window).loss for window in windows])
    return found
