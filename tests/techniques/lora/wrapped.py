"""Models that their user has wrapped by PEFT, and what ranks do with them."""

import functools
import warnings
from pathlib import Path

import models
import torch
from techniques.lora import adapters, experts

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
    return drawn(module)


def drawn(module):
    """``module``, all tensors of whose adapters are drawn."""
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


def logits(module, name, *, training=False):
    with torch.set_grad_enabled(training):
        return module.train(training)(**{k: v for k, v in batch_of(name).items() if k != "labels"}).logits


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


def in_4_bits(name="llama", options=(), **bits):
    """A model in 4 bits by bitsandbytes, with adapters of PEFT."""
    import bitsandbytes
    import peft
    from torch import nn

    model = models.get(name).build()
    model.is_loaded_in_4bit = True  # as transformers says
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and path != "lm_head":
            kind = {"quant_type": "nf4", "compress_statistics": True, **bits}
            packed = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.float32, **kind
            )
            packed.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, **kind)
            packed.bias = layer.bias
            outer, _, attr = path.rpartition(".")
            setattr(model.get_submodule(outer), attr, packed.to("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = peft.get_peft_model(
            model, peft.LoraConfig(r=2, lora_alpha=5, target_modules="all-linear", **dict(options))
        )
    return drawn(module)


def put_in(kind):
    """A model into which PEFT has put adapters in other ways."""
    import peft

    model = experts.mixtral() if kind == "parameters" else models.get("llama").build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "parameters":
            targets = ["experts.gate_up_proj", "experts.down_proj"]
            return drawn(
                peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
            )
        if kind == "injected":  # without a class of PEFT around it
            module = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), model)
            for key, param in module.named_parameters():
                param.requires_grad_("lora_" in key)
            return drawn(module)
        if kind == "ia3":
            config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
            return peft.get_peft_model(model, config)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_bias=kind == "bias")
        module = peft.get_peft_model(model, config)
        first, second = (layer.self_attn.q_proj for layer in module.base_model.model.model.layers[:2])
        if kind == "shared":
            first.lora_A["default"].weight = second.lora_A["default"].weight
        if kind == "scaled":
            first.set_scale("default", 7.0)
        if kind == "several":
            module.add_adapter("other", config)
            module.base_model.set_adapter(["default", "other"])
        return drawn(module)


def said(kind, folder, layout=None):
    """``describe`` of such a model, and the errors of what would write it."""
    layout = layout or ("tp=2" if kind == "parameters" else "dp_shard=2")
    with sw.init(layout, device="cpu", seed=0) as world:
        module = sw.parallelize(put_in(kind), world, example=batch_of("mixtral" if kind == "parameters" else "llama"))
        texts = []
        for call in (sw.save_adapter, sw.save_weights):
            try:
                call(module, Path(folder, call.__name__))
            except sw.UnsupportedError as error:
                texts.append(str(error))
        return sw.describe(module), texts


def changed():
    """The errors of forwards after PEFT's functions have changed the model, and of one that PEFT has wrapped later."""
    import peft

    found = []
    with sw.init("dp_shard=1", device="cpu", seed=0) as world:
        module = sw.parallelize(wrapped(), world, example=batch_of("llama"))
        layer = module.base_model.model.model.layers[1].mlp.up_proj
        for change in (lambda: layer.set_scale("default", 7.0), lambda: layer.merged_adapters.append("default")):
            change()
            try:
                logits(module, "llama")
            except sw.UsageError as error:
                found.append(str(error))
        module = sw.parallelize(models.get("llama").build(), world, example=batch_of("llama"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            later = peft.get_peft_model(module, peft.LoraConfig(target_modules=["q_proj"]))
        for each in (later, module):
            try:
                with sw.window(each, [batch_of("llama")]):
                    pass
            except sw.UsageError as error:
                found.append(str(error))
    return found


def for_a_run(**_):
    """A model for bytes, which its own code has wrapped."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM(LlamaConfig(vocab_size=257, num_key_value_heads=2, **sizes))
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
