"""Configurations of other systems, trained by the run that they are imported as; and each system's own arithmetic in plain torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from run import tuned
from step import plain

import shardwise as sw
from shardwise.config.loader import UNWRITTEN, load_values
from shardwise.dialects.answers import imported
from shardwise.run.build import build_model, make_step
from shardwise.run.config import RunConfig

STEPS, RANKS, MICRO, ACCUMULATED = 6, 2, 2, 2
ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD


@dataclass(frozen=True)
class Case:
    """A configuration, and the system's arithmetic of it, written by hand.

    Attributes:
        values: the configuration.
        optim: class of torch that the system's optimizer is, and its arguments.
        rate: steps done before -> the part of ``lr`` that the next step has.
        decay: of parameters of two dims and more, and of those of one.
        clip: the norm to clip to; None: none.
        is_mean: each micro-batch's mean is divided by their number and averaged over ranks; else one division by all labels.
        micro: micro-batches of a step on a rank.
        lr: of plain torch, where a sentence says that the rate is to be changed.
    """

    values: dict[str, Any]
    optim: type[torch.optim.Optimizer]
    args: dict[str, Any]
    rate: Callable[[int], float] = lambda done: 1.0
    decay: tuple[float, float] = (0.0, 0.0)
    clip: float | None = None
    is_mean: bool = False
    micro: int = ACCUMULATED
    own: dict[str, Any] | None = None  # what a script says


def hf_linear(done):
    return done / 2 if done < 2 else (STEPS - done) / (STEPS - 2)


def hf_cosine(done):
    return 0.0 if done < 1 else 0.5 * (1 + math.cos(math.pi * (done - 1) / (STEPS - 1)))


def log_and_line(done):  # the scheduler moves after the step, and began before its first value
    at = done - 1
    return 0.0 if at < 0 else math.log(at + 1) / math.log(3) if at < 3 else (STEPS - at) / (STEPS - 3)


def line_and_cosine(done):
    at = done - 1
    if at < 2:
        return 0.0 if at < 0 else 0.1 + 0.9 * at / 2
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (at - 2 + 1) / (STEPS - 2)))


def titan_line(done):
    return (done + 1) / 2 if done < 2 else 1.0 if done < STEPS + 1 - 4 else 1 - (done - 2) / 4


def titan_end(done):  # the last half falls as a root
    return 1.0 if done < STEPS + 1 - 3 else 0.2 + 0.8 * (1 - math.sqrt((done - 3) / 3))


def nemo_cosine(done):
    if done <= 2:
        return 0.1 + 0.9 * done / 2
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - 2) / (STEPS - 2)))


def nemo_wsd(done):
    if done <= 1:
        return 0.1 + 0.9 * done
    return 1.0 if done <= 3 else 0.01 + 0.99 * (2 * 0.5 ** ((done - 3) / 3) - 1)


def optimus_wsd(done):
    return done / 2 + (1 - done / 2) / 100 if done < 2 else 1.0 if done < 3 else 0.1 + 0.9 * (1 - (done - 3) / 3)


def ml_line(done):
    return max(1e-4, (STEPS - done) / STEPS)


HF = {"output_dir": "o", "max_steps": STEPS, "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATED}  # fmt: skip
TITAN = {
    "job": {},
    "training": {"steps": STEPS, "local_batch_size": MICRO, "global_batch_size": RANKS * MICRO * ACCUMULATED, "max_norm": 0.2},
}  # fmt: skip
TUNE = {
    "model": {"_component_": "torchtune.models.x"}, "checkpointer": {"checkpoint_dir": "m"}, "tokenizer": {"path": "t"}, "loss": {"_component_": "CrossEntropyLoss"},
    "batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATED, "epochs": 1, "max_steps_per_epoch": STEPS, "dtype": "fp32", "device": "cpu",
}  # fmt: skip
NEMO = {
    "step_scheduler": {"global_batch_size": RANKS * MICRO * ACCUMULATED, "local_batch_size": MICRO, "max_steps": STEPS},
    "model": {"pretrained_model_name_or_path": "m"}, "distributed": {"strategy": "fsdp2"},
}  # fmt: skip
DEEPSPEED = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATED}
OPTIMUS = {"common": {"output_path": "o"}, "model": {"_name": "m"}, "model_transforms": [{"_name": "fully_shard", "use_hybrid_sharding": False}], "data": {"train_datasets": {"transform": {"batch_size": MICRO}}}}  # fmt: skip
ML = {"trainer": {"mixed_precision": {"enabled": False}}, "model": {"name": "m"}, "task": {"name": "t", "dataloader": {"train": {"batch_size": MICRO}}, "finished": {"max_steps": STEPS}}}  # fmt: skip

CASES = {
    "transformers adamw": Case(
        {**HF, "learning_rate": 0.02, "weight_decay": 0.3, "adam_beta2": 0.97, "max_grad_norm": 0.2, "warmup_steps": 2},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.97)}, hf_linear, (0.3, 0.0), 0.2,
    ),
    "transformers adamw of its own eps": Case(
        {**HF, "learning_rate": 0.02, "adam_epsilon": 1e-3, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_ratio": 1 / STEPS, "max_grad_norm": 0},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-3}, hf_cosine, (0.1, 0.0),
    ),
    "transformers sgd": Case(
        {**HF, "optim": "sgd", "learning_rate": 0.3, "weight_decay": 0.1, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.03}},
        SGD, {"lr": 0.3}, lambda done: 0.9 * (1 - done / STEPS) ** 2 + 0.1, (0.1, 0.0), 1.0,
    ),
    "trl": Case(
        {**HF, "learning_rate": 0.02, "max_length": 32, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.999)}, lambda done: done / 2 if done < 2 else 1 / math.sqrt(done / 2), (0.0, 0.0), 1.0,
    ),
    "oumi": Case(
        {"model": {"model_name": "m"}, "fsdp": {"enable_fsdp": True}, "training": {"max_steps": STEPS, "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATED,
            "learning_rate": 0.02, "weight_decay": 0.2, "adam_beta1": 0.8, "max_grad_norm": 0.3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}},
        ADAMW, {"lr": 0.02, "betas": (0.8, 0.999)}, lambda done: min(1.0, done / 2), (0.2, 0.0), 0.3,
    ),
    "deepspeed adamw": Case(
        {**DEEPSPEED, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.2, "optimizer": {"type": "Adam", "params": {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.3}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": STEPS}}},
        ADAMW, {"lr": 0.02, "betas": (0.8, 0.9)}, log_and_line, (0.3, 0.3), 0.2, is_mean=True,
    ),
    "deepspeed adam with decay in the gradient": Case(
        {**DEEPSPEED, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.3, "adam_w_mode": False}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "total_num_steps": STEPS}}},
        ADAM, {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-6}, line_and_cosine, (0.3, 0.3), is_mean=True,
    ),
    "deepspeed sgd": Case(
        {**DEEPSPEED, "zero_optimization": {"stage": 0}, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}},
        SGD, {"lr": 0.1, "momentum": 0.9}, decay=(0.1, 0.1), is_mean=True,
    ),
    "torchtitan adamw": Case(
        {**TITAN, "optimizer": {"lr": 0.02}, "lr_scheduler": {"warmup_steps": 2}},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.95)}, titan_line, (0.1, 0.1), 0.2,
    ),
    "torchtitan adam": Case(
        {**TITAN, "optimizer": {"name": "Adam", "lr": 0.02, "weight_decay": 0.2}, "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.5, "decay_type": "sqrt", "min_lr_factor": 0.2}},
        ADAM, {"lr": 0.02, "betas": (0.9, 0.95)}, titan_end, (0.2, 0.2), 0.2,
    ),
    "torchtune adamw": Case(
        {**TUNE, "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.02, "fused": True}, "lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 1}},
        ADAMW, {"lr": 0.02}, hf_cosine, (0.01, 0.01),
    ),
    "torchtune adagrad": Case(
        {**TUNE, "optimizer": {"_component_": "torch.optim.Adagrad", "lr": 0.05, "weight_decay": 0.1, "lr_decay": 0.1}, "clip_grad_norm": 0.5},
        torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}, decay=(0.1, 0.1), clip=0.5,
    ),
    "torchtune sgd": Case(
        {**TUNE, "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.5, "nesterov": True}},
        SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True},
    ),
    "torchtune nadam": Case(
        {**TUNE, "optimizer": {"_component_": "torch.optim.NAdam", "betas": [0.8, 0.9], "eps": 1e-4, "lr": 0.02}},
        torch.optim.NAdam, {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-4},
    ),
    "nemo adam": Case(
        {**NEMO, "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.02, "weight_decay": 0.1}, "lr_scheduler": {"lr_decay_style": "cosine", "lr_warmup_steps": 2}},
        ADAM, {"lr": 0.02, "betas": (0.9, 0.999)}, nemo_cosine, (0.1, 0.1), 1.0,
    ),
    "nemo adamw": Case(
        {**NEMO, "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.02, "betas": [0.9, 0.9], "amsgrad": True}, "clip_grad_norm": {"max_norm": 0.1},
            "lr_scheduler": {"lr_decay_style": "WSD", "lr_warmup_steps": 1, "wsd_decay_steps": 3, "lr_wsd_decay_style": "exponential"}},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.9), "amsgrad": True}, nemo_wsd, (0.01, 0.01), 0.1,
    ),
    "optimus adamw": Case(
        {**OPTIMUS, "optimization": {"iterations": STEPS, "acc_steps": ACCUMULATED, "clip_grad_norm": 0.3, "optimizer": {"_name": "adamw", "lr": 0.02, "weight_decay": 0.1, "amsgrad": True}},
            "lr_scheduler": {"_name": "wsd", "warmup_steps": 2, "fract_decay": 0.5, "final_lr_factor": 0.1}},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.999), "amsgrad": True}, optimus_wsd, (0.1, 0.1), 0.3, is_mean=True,
    ),
    "ml adam": Case(
        {**ML, "optimizer": {"name": "adam", "lr": 0.02, "weight_decay": 0.2}, "lr_scheduler": {"name": "linear", "warmup_steps": 0, "total_steps": STEPS}},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-5}, ml_line, (0.2, 0.0), 10.0, is_mean=True, micro=1,
    ),
    "ml sgd": Case(
        {**ML, "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}, "lr_scheduler": {"name": "constant"}, "trainer": {"mixed_precision": {"enabled": False}, "clip_grad_norm": 0.1}},
        SGD, {"lr": 0.1, "momentum": 0.9}, clip=0.1, is_mean=True, micro=1,
    ),
    "fabric": Case(
        {"strategy": "fsdp", "devices": RANKS, "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": 0.2, "max_steps": STEPS, "precision": "64-true"},
        ADAMW, {"lr": 0.02, "betas": (0.9, 0.999)}, clip=0.2, decay=(0.1, 0.1), is_mean=True,
        own={"optim": {"lr": 0.02, "betas": [0.9, 0.999], "weight_decay": 0.1}, "schedule": {"name": "constant", "warmup_steps": 0}},
    ),
    "accelerate": Case(
        {"distributed_type": "FSDP", "num_processes": RANKS, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True}},
        SGD, {"lr": 0.1, "momentum": 0.9}, is_mean=True,
        own={"optim": {"name": "sgd", "momentum": 0.9, "lr": 0.1, "weight_decay": 0.0}, "schedule": {"name": "constant", "warmup_steps": 0}, "train": {"steps": STEPS, "max_grad_norm": None}},
    ),
}  # fmt: skip


def windows(case):
    """The micro-batches of each step, of all ranks; with equally many labels where the system takes means of means."""
    made = [[tuned.plain_batch(8 * step + n) for n in range(RANKS * case.micro)] for step in range(STEPS)]
    if case.is_mean:
        for batch in (batch for window in made for batch in window):
            batch["labels"] = batch["input_ids"].roll(-1, 1)
    return made


def config_of(case, dialect):
    made = imported(case.values, dialect=dialect, ranks=RANKS, ranks_per_node=RANKS, exact=True)
    said = {at: {key: value for key, value in keys.items() if value != UNWRITTEN} for at, keys in made.run.items()}
    data = said.get("data", {})
    if "global_batch" in data:
        assert (data["global_batch"], data["micro_batch"]) == (RANKS * MICRO * case.micro, MICRO)
    parallel = {**{key: value for key, value in said["parallel"].items() if key != "precision"}, "init": "rank0"}
    run = {**{key: said.get(key, {}) for key in ("optim", "schedule", "train")}, "parallel": parallel}
    run |= case.own or {}
    run["model"] = {"build": f"{tuned.__file__}:build"}
    run["train"] = {key: value for key, value in run["train"].items() if key not in ("epochs", "deterministic")}
    return load_values({key: value for key, value in run.items() if value}, RunConfig, origin=dialect).config


def in_runs(names):
    """Losses, norms and parameters of each case, on this rank of two."""
    return {name: in_a_run(CASES[name], name.split()[0]) for name in names}


def in_a_run(case, dialect):
    config = config_of(case, dialect)
    with sw.init(config.parallel.layout, device="cpu", timeout_s=60, seed=7) as world:
        model = build_model(config, world)
        step = make_step(config, model)
        outs = [step(plain.mine(window, world)) for window in windows(case)]
        return [out.loss for out in outs], [out.grad_norm for out in outs], sw.full_state_dict(model)


def in_torch(case):
    """The same in one process, by the system's arithmetic."""
    model = tuned.build()
    groups = [{"params": [p], "weight_decay": case.decay[int(p.dim() < 2)]} for p in model.parameters()]
    optim = case.optim(groups, **case.args)
    losses, norms = [], []
    for done, window in enumerate(windows(case)):
        for group in optim.param_groups:
            group["lr"] = case.args["lr"] * case.rate(done)
        optim.zero_grad()
        sums = [
            F.cross_entropy(model(b["input_ids"]).flatten(0, 1), b["labels"].flatten(), reduction="sum") for b in window
        ]
        labels = [(b["labels"] != -100).sum() for b in window]
        means = [total / number / len(window) for total, number in zip(sums, labels, strict=True)]
        loss = sum(means) if case.is_mean else sum(sums) / sum(labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or math.inf)
        optim.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}
