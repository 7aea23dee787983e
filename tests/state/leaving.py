"""What ranks do with checkpoints without the frozen base."""

from typing import Any

import torch
from state.adapting import IDS, VOCAB, base, count, forward, loss, option, sharded

import shardwise as sw
from shardwise.state.left_base import digests, frozen_names


def model_beside(world: sw.World, folder: str | None, quantize: str | None) -> Any:
    model = sharded("lora", world, seed=1 if folder is None else 2, quantize=quantize)
    if folder is not None:
        sw.load_weights(model, folder)
    return model


def run(
    layout: str, folder: str | None, root: str, windows: int, resumes: bool, quantize: str | None = None, frozen="leave"
) -> tuple[list[float], str]:
    """The losses of a run that saves a checkpoint after its first window; and the error, if it does not resume."""
    with sw.init(layout, device="cpu") as world:
        model = model_beside(world, folder, quantize)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        step = sw.TrainStep(model, optim, loss=loss, forward=forward, count=count, max_grad_norm=1.0)
        manager = sw.CheckpointManager(root, step, async_save=False, frozen=frozen)
        losses: list[float] = []
        try:
            if resumes:
                manager.load()
        except sw.CheckpointError as error:
            return losses, str(error)
        dp = world.axis("dp")
        for i in range(step.num_steps, windows):
            rows = [{"input_ids": (IDS[j : j + 1] + i) % VOCAB} for j in range(2)]
            losses.append(step(rows[dp.rank :: dp.size]).loss)
            if step.num_steps == (2 if resumes else 1):
                manager.save()
        return losses, ""


def digests_of(layout: str, folder: str, quantize: str | None) -> dict[str, str]:
    with sw.init(layout, device="cpu") as world:
        runtime = sw_runtime(model_beside(world, folder, quantize))
        return digests(runtime, frozen_names(runtime))


def sw_runtime(model: Any) -> Any:
    from shardwise.parallel import runtime_of

    return runtime_of(model)


def unread(folder: str, checkpoint: str) -> tuple[str, Any, Any]:
    """The error of loading such a checkpoint as weights; the values after what its error says, and those of the run."""
    with sw.init("dp_shard=1", device="cpu") as world:
        model = model_beside(world, folder, None)
        try:
            sw.load_weights(model, checkpoint)
        except sw.CheckpointError as error:
            text = str(error)
        sw.load_weights(model, checkpoint, strict=False)
        return text, sw.full_state_dict(model), option("lora").rank


def refused(folder: str, options: dict[str, Any]) -> str:
    """The error of a manager of a model that is trained in full."""
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(base("lora"), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, forward=forward, count=count)
        try:
            sw.CheckpointManager(folder, step, **options)
        except sw.ConfigError as error:
            return str(error)
        return ""
