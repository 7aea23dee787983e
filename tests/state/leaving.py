"""What ranks do with checkpoints without the frozen base."""

import json
import warnings
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


def stepped(model: Any) -> Any:
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return sw.TrainStep(model, optim, loss=loss, forward=forward, count=count)


def named_base(model: Any, root: str, frozen: str = "leave", *, is_due: bool = True) -> str:
    """The base that a new checkpoint names, after a window in a run that resumes if it can; or the error of saving."""
    step = stepped(model)
    with sw.CheckpointManager(root, step, async_save=False, frozen=frozen) as manager:
        try:
            manager.load()
            step([{"input_ids": IDS[:1]}])
            path = manager.save_every(1 if is_due else 1000)
        except (sw.ConfigError, sw.CheckpointError) as error:
            return str(error)
        file = path / "training/frozen.json" if path is not None else None
        return json.loads(file.read_text())["folder"] if file is not None and file.exists() else "none"


def named_by_adapter(model: Any, folder: str) -> tuple[str | None, str]:
    """The base that an adapter's files name, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path = sw.save_adapter(model, folder)
    text = json.loads((path.parent / "adapter_config.json").read_text())["base_model_name_or_path"]
    return text, "".join(str(w.message) for w in told if w.category is UserWarning)


def other_values(folder: str, part: str, root: str) -> dict[str, Any]:
    """What is said of a base some of whose values did not come from its directory, or are other ones by now."""
    with sw.init("dp_shard=2", device="cpu") as world:
        found: dict[str, Any] = {}
        model = model_beside(world, folder, None)
        sw.load_weights(model, part, strict=False)
        found["part"] = named_base(model, f"{root}/a"), named_by_adapter(model, f"{root}/adapter")
        sw.save_weights(model, f"{root}/weights")
        sw.load_weights(model, folder, strict=False)
        found["again"] = named_base(model, f"{root}/b"), named_by_adapter(model, f"{root}/adapter")
        frozen = dict(model.named_parameters())["model.norm.weight"]
        frozen.data.mul_(2)  # in no version of the parameter
        found["first"] = named_base(model, f"{root}/c", is_due=False), ("", "")
        found["loaded"] = named_base(model, f"{root}/b"), ("", "")
        found["data"] = named_base(model, f"{root}/c"), named_by_adapter(model, f"{root}/adapter")
        full = sw.full_state_dict(model)
        sw.load_weights(model, folder, strict=False)
        sw.load_full_state_dict(model, full)
        found["full"] = named_base(model, f"{root}/d"), named_by_adapter(model, f"{root}/adapter")
        found["nowhere"] = named_base(model_beside(world, None, None), f"{root}/e"), ("", "")
        return found


def goes_on(layout: str, folder: str | None, root: str, frozen: str) -> tuple[str, tuple[str | None, str]]:
    """What a run in ``root`` names as its base: of its new checkpoint, and of its adapters."""
    with sw.init(layout, device="cpu") as world:
        model = model_beside(world, folder, None)
        return named_base(model, root, frozen), named_by_adapter(model, f"{root}-adapter")


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
