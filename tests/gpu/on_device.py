"""What ranks do in the tests of one CUDA device: several ranks on it, over gloo, as nccl takes one rank for each device."""

import pathlib
import tempfile
import traceback
from typing import Any

import models
import torch
from step import linear_losses
from techniques.tp import dropping

import shardwise as sw
from shardwise.errors import RankError
from shardwise.verify.sharded import share_of

__all__ = ["all_of"]


def all_of(cases: list[tuple[str, tuple, dict]], device: str) -> list[Any]:
    """The result of each case, ``(function, args, options)``, or the end of its traceback. One start of the ranks serves them
    all: importing torch takes longer than most cases."""
    found: list[Any] = []
    for name, args, options in cases:
        try:
            found.append(globals()[name](*args, device=device, **options))
        except Exception:  # of a case; the next ones still run
            found.append(traceback.format_exc()[-1500:])
    return found


def _moved(windows: list, device: str) -> list:
    """Windows of micro-batches on the device; numbers in float64."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, torch.float64 if x.is_floating_point() else x.dtype)

    return [[{key: moved(value) for key, value in batch.items()} for batch in window] for window in windows]


def _count(model: models.Model, batch: dict) -> int:
    return int((batch["labels"] != -100).sum()) if model.count is None else model.count(batch)


def beside_plain(name: str, layout: str, device: str, fused: bool = False, **options) -> tuple[float, float]:
    """The largest difference of a loss or a parameter after two windows, relative to its largest number, to plain torch on the
    same device in float64; and the share of the parameters that this rank holds. A checkpoint is written and read between."""
    model = models.get(name)
    with sw.init(layout, device=device, backend="gloo", seed=3) as world:
        torch.manual_seed(0)
        plain = model.build().double().to(device)
        torch.manual_seed(0)
        module = model.build().double()
        num_data = world.axis("dp").size
        given = _moved(model.windows(2, 2 * num_data), device)
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


def weights_out_and_in(layout: str, device: str) -> bool:
    """Whether a file of weights, written from this device and read under another layout, has every bit."""
    with sw.init(layout, device=device, backend="gloo") as world:
        module = sw.parallelize(models.get("linears: kv-2").build, world)
        (folder,) = set(world.gather(tempfile.mkdtemp() if world.is_main else None)) - {None}
        sw.save_weights(module, pathlib.Path(folder) / "weights")
        want = sw.full_state_dict(module)
        again = sw.parallelize(models.get("linears: kv-2").build, world, init="load")
        sw.load_weights(again, pathlib.Path(folder) / "weights")
        got = sw.full_state_dict(again)
        return not world.is_main or all(torch.equal(value, got[name]) for name, value in want.items())


def fused_losses(layout: str, device: str) -> list[list[float]]:
    """The losses of four windows of the reference model in bf16: with logits, and with the loss that holds none."""
    model = models.get("linears: kv-2")
    found = []
    for fused in (False, True):
        with sw.init(layout, device=device, backend="gloo", seed=3) as world:
            module = sw.parallelize(model.build, world, precision="bf16", example=model.windows(1, 1)[0][0])
            step = sw.TrainStep(module, torch.optim.SGD(module.parameters(), lr=0.1), fused=fused)
            windows = [
                [{key: value.to(device) for key, value in batch.items()} for batch in window]
                for window in model.windows(4, 2)
            ]
            found.append([step(window).loss for window in windows])
    return found


def masks(device: str, **options) -> tuple:
    return dropping.train("tp=2", False, device=device, backend="gloo", **options)


def losses_over_ranks(device: str) -> float:
    return max(linear_losses.over_ranks("tp=2", linear_losses.CASES, device=device, backend="gloo").values())


def other_inputs(device: str) -> str:
    """What a forward says that gets other inputs on each rank."""
    with sw.init("tp=2", device=device, backend="gloo") as world:
        module = sw.parallelize(models.get("linears: kv-2").build, world)
        batch = models.get("linears: kv-2").windows(1, 2)[0][world.rank]
        try:
            module(**{key: value.to(device) for key, value in batch.items() if key != "labels"})
        except RankError as error:
            return str(error)
        return "nothing"
