"""Values of models that are cut over tp: initial ones, checkpoints and weights under other layouts, files of Hugging Face models."""

import json
from pathlib import Path

import models
import torch
from techniques.tp.searches import searched_once

import shardwise as sw
from shardwise.parallel import runtime_of


def build_double(name: str):
    return models.get(name).build().double()


def initial(name: str, layout: str, **options):
    """The values of a model right after ``parallelize``: (name, sum, first values) of each tensor, from rank 0."""
    model = models.get(name)
    with sw.init(layout, device="cpu", seed=5) as world:
        with searched_once((initial, name)):
            module = sw.parallelize(model.build, world, example=model.windows(1, 1)[0][0], **options)
        return {key: value.clone() for key, value in sw.full_state_dict(module).items()}


def of_a_module(name: str, layout: str):
    """Whether a module that has values keeps those of rank 0."""
    model = models.get(name)
    with sw.init(layout, device="cpu", seed=5) as world:
        torch.manual_seed(world.rank)
        module = model.build()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        with searched_once((of_a_module, name)):
            after = sw.full_state_dict(sw.parallelize(module, world, example=model.windows(1, 1)[0][0]))
        return all(torch.equal(after[key], before[key]) for key in after)


def train(name: str, layout: str, root: str, stop: int, **options):
    """Trains up to step ``stop`` from what is in ``root``, where it leaves a checkpoint; the losses, from the first step on."""
    model = models.get(name)
    windows = model.windows(6, 4)
    with sw.init(layout, device="cpu", seed=5) as world:
        with searched_once((train, name)):
            module = sw.parallelize(build_double(name), world, example=windows[0][0], **options)
        step = sw.TrainStep(module, torch.optim.AdamW(module.parameters(), lr=0.01), max_grad_norm=1.0)
        losses, axis = [], world.axis("dp")
        with sw.CheckpointManager(root, step, keep=None) as ckpt:
            if Path(root).exists() and any(Path(root).iterdir()):
                ckpt.load()
            while runtime_of(module).step < stop:
                losses.append(step(windows[runtime_of(module).step][axis.rank :: axis.size]).loss)
            ckpt.save()
        return losses


def exported(name: str, layout: str, path: str):
    """Writes the weights of a Hugging Face model and reads them into a new one, cut in another way; the largest difference."""
    from transformers import AutoModelForCausalLM

    model = models.get(name)
    with sw.init(layout, device="cpu", seed=5) as world:
        with searched_once((exported, name)):
            module = sw.parallelize(model.build, world, example=model.windows(1, 1)[0][0])
        sw.save_weights(module, path)
        whole, config = sw.full_state_dict(module), json.loads((Path(path) / "config.json").read_text())
        plain = AutoModelForCausalLM.from_pretrained(path)
        differs = [key for key, value in whole.items() if not torch.equal(plain.state_dict()[key], value)]
        with searched_once((exported, name)):
            again = sw.parallelize(model.build, world, example=model.windows(1, 1)[0][0], init="load")
        sw.load_weights(again, path)
        loaded = sw.full_state_dict(again)
        differs += [key for key in whole if not torch.equal(loaded[key], whole[key])]
        return differs, {key: value for key, value in config.items() if "head" in key}, dict(vars(plain.config))


def generated(name: str, layout: str, **options):
    """Tokens that a Hugging Face model generates, with a cache and without."""
    model = models.get(name)
    with sw.init(layout, device="cpu", seed=5) as world:
        module = sw.parallelize(model.build, world, example=model.windows(1, 1)[0][0], **options).eval()
        ids = model.windows(1, 1)[0][0]["input_ids"]
        kinds = ({"use_cache": True}, {"use_cache": False}, {"use_cache": True, "num_beams": 2})
        return [module.generate(ids, max_new_tokens=6, do_sample=False, **kind).tolist() for kind in kinds]


def evaluated(name: str, layout: str):
    model = models.get(name)
    batches = model.windows(1, 4)[0]
    with sw.init(layout, device="cpu", seed=5) as world:
        module = sw.parallelize(model.build, world, example=batches[0])
        axis = world.axis("dp")
        return sw.evaluate(module, batches[axis.rank :: axis.size])


def off_by(name: str, layout: str, init: str | None = None, in_eval: bool = False):
    """How far a model that ``parallelize`` builds is from one with its values, in rank 0's outputs; and what is cut of it.
    ``in_eval``: in eval mode, without gradients."""
    model = models.get(name)
    batch = model.windows(1, 1)[0][0]
    with sw.init(layout, device="cpu", seed=5) as world, torch.set_grad_enabled(not in_eval):
        module = sw.parallelize(model.build, world, init=init).train(not in_eval)
        output, values, text = module(batch["input_ids"]), sw.full_state_dict(module), sw.describe(module)
        if not world.is_main:
            return None
        whole = model.build().train(not in_eval)
        whole.load_state_dict(values)
        return float((whole(batch["input_ids"]) - output).abs().max()), text
