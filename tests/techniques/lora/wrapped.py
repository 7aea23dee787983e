"""Models that their user has wrapped by PEFT, and what ranks do with them."""

import functools
import warnings
from pathlib import Path

import models
import torch
from techniques.lora import adapters

import shardwise as sw
from shardwise._torch import collectives

TARGETS = {"llama": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"]}
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}, "dropout": {"lora_dropout": 0.3}}


def wrapped(name="llama", options=()):
    """A model with adapters of PEFT, all of whose tensors are drawn."""
    import peft

    options = {"r": 2, "lora_alpha": 5, "target_modules": TARGETS.get(name), **dict(options)}
    model = models.get(name).build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Conv1D, and of versions to come
        module = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for key, param in module.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(param, 1.0 if "magnitude" in key else 0.0, 0.2)
    return module


def building(name, **options):
    """Builds it; to be sent to ranks."""
    return functools.partial(wrapped, name, tuple(options.items()))


def sums(layout, name, options):
    """How many sums over tp a window makes, and how many parameters are cut."""
    from shardwise.techniques.tp import exchanges

    count, inner = [0], collectives.sum_over

    def counting(x, group):
        count[0] += 1
        return inner(x, group)

    exchanges.sum_over = counting
    try:
        with sw.init(layout, device="cpu", seed=0) as world:
            model = models.get(name)
            batch = model.windows(1, 1)[0][0]
            module = sw.parallelize(wrapped(name, options).double(), world, example=batch)
            optim = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            step = sw.TrainStep(module, optim, loss=model.loss, count=model.count, forward=model.forward)
            count[0] = 0
            step([batch])
            recipe = sw.recipe_of(module)
            return count[0], sum(any(cut.axis == "tp" for cut in p.cuts) for p in recipe.params.values())
    finally:
        exchanges.sum_over = inner


def batch_of(name):
    return models.get(name).windows(1, 1)[0][0]


def logits(module, name):
    with torch.no_grad():
        return module.eval()(**{k: v for k, v in batch_of(name).items() if k != "labels"}).logits


def _sharded(world, name, options, **more):
    more.setdefault("sharding", adapters.UNITS if world.axis("fsdp").size > 1 else None)
    return sw.parallelize(wrapped(name, options).double(), world, example=batch_of(name), **more)


def files(layout, folder, name, options, **more):
    """Writes the adapters, merged weights and the base; the answer, also of the base, and the errors."""
    with sw.init(layout, device="cpu", seed=0) as world:
        module = _sharded(world, name, options, **more)
        found = {"answer": logits(module, name)}
        with sw.adapter_off(module):
            found["base"] = logits(module, name)
        sw.save_adapter(module, Path(folder, "adapter"))
        sw.save_weights(module, Path(folder, "merged"))
        sw.save_weights(module, Path(folder, "base"), merge=False)
        found["state"] = sw.full_state_dict(module)
        return found


def loaded(layout, folder, name, options, **more):
    """The answer of a model with other values, after its base and its adapters were loaded."""
    with sw.init(layout, device="cpu", seed=0) as world:
        torch.manual_seed(9)
        module = _sharded(world, name, options, **more)
        for _, param in module.named_parameters():
            with torch.no_grad():
                sw_local = getattr(param, "to_local", lambda param=param: param)()
                sw_local.add_(0.01 if param.is_floating_point() else 0)
        report = str(sw.load_weights(module, Path(folder, "base")))
        sw.load_adapter(module, Path(folder, "adapter"))
        return logits(module, name), report


def resumed(layout, folder, name, options, resumes, **more):
    """Losses of three windows, a checkpoint after the first."""
    with sw.init(layout, device="cpu", seed=0) as world:
        module, model = _sharded(world, name, options, **more), models.get(name)
        optim = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
        step = sw.TrainStep(module, optim, loss=model.loss, count=model.count, forward=model.forward)
        manager, dp, losses = sw.CheckpointManager(folder, step, async_save=False), world.axis("dp"), []
        if resumes:
            manager.load()
        for window in model.windows(3, 2)[step.num_steps :]:
            losses.append(step(window[dp.rank :: dp.size]).loss)
            if step.num_steps == 1:
                manager.save()
        return losses
