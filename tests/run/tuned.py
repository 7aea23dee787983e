"""Runs with frozen parameters, parameter groups and each optimizer, and what plain torch makes of them."""

import torch
import torch.nn.functional as F
from step import plain
from torch import nn

import shardwise as sw
from shardwise.config.loader import Loaded
from shardwise.run.build import build_model, make_step
from shardwise.run.config import RunConfig, load_config
from shardwise.run.optim import make_scheduler

VOCAB, DIM = 16, 8


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(3)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build():
    torch.manual_seed(7)
    return Tied().double()


SETTINGS = {
    "frozen": ["model.freeze=[embed.*, 'blocks.0.*']"],
    "train only": ["model.train_only=['blocks.*.bias']"],
    "groups": [
        "optim.groups={'head.*': {lr_scale: 0.5}, 'blocks.0.1.bias': {lr: 0.1}, '*.bias': {lr: 0.2, weight_decay: 0.3}}",
        "optim.decay_on=matrices",
    ],
    "sgd": ["optim.name=sgd", "optim.groups={'*.1.*': {weight_decay: 0}, 'embed.*': {lr: 0.02}}"],
    "names": ["optim.decay_on=names", "optim.groups={'blocks.0.*': {lr_scale: 0.5}}"],
    "adafactor": ["optim.name=adafactor", "optim.decay_on=matrices"],
    "muon": ["optim.name=muon", "optim.decay_on=matrices"],
}


def config_of(name, layout="dp_shard=1") -> Loaded[RunConfig]:
    words = [
        f"model.build={__file__}:build",
        "parallel.init=rank0",
        f"parallel.layout={layout}",
        "optim.lr=0.05",
        "train.max_grad_norm=null",
    ]
    return load_config(
        None, [*words, "schedule.name=wsd", "schedule.warmup_ratio=0.25", "train.steps=4", *SETTINGS[name]]
    )


def groups_in_torch(name, model):
    """The parameter groups, written by hand."""
    named = dict(model.named_parameters())
    trained = {
        "frozen": [n for n in named if not n.startswith(("embed", "blocks.0."))],
        "train only": [n for n in named if n.endswith("bias")],
    }.get(name, list(named))
    for key, param in named.items():
        param.requires_grad_(key in trained)
    groups = []
    for key in trained:
        group = {"params": [named[key]], "lr": 0.05, "weight_decay": 0.1}
        if name == "groups":
            if named[key].dim() < 2:
                group["weight_decay"] = 0.0
            if key == "embed.weight":
                group["lr"] = 0.025
            elif key == "blocks.0.1.bias":
                group["lr"] = 0.1
            elif key.endswith("bias"):
                group |= {"lr": 0.2, "weight_decay": 0.3}
        if name == "sgd" and ".1." in key:
            group["weight_decay"] = 0.0
        if name == "sgd" and key == "embed.weight":
            group["lr"] = 0.02
        if name == "names" and (key.endswith("bias") or ".0.weight" in key):  # those of LayerNorm, which no name shows
            group["weight_decay"] = 0.0
        if name == "names" and key.startswith("blocks.0."):
            group["lr"] = 0.025
        if name in ("adafactor", "muon") and named[key].dim() < 2:
            group["weight_decay"] = 0.0
        groups.append(group)
    return groups


class Both:
    """Muon for the matrices of blocks, AdamW for the rest: two optimizers of torch."""

    def __init__(self, groups):
        hidden = [group for group in groups if group["params"][0].shape == (DIM, DIM)]
        others = [group for group in groups if group["params"][0].shape != (DIM, DIM)]
        self.parts = (
            torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95)),
        )
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()

    def step(self):
        for part in self.parts:
            part.step()


def windows():
    return [[plain_batch(4 * step + i) for i in range(4)] for step in range(4)]


def plain_batch(seed):
    ids = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, 1)
    labels[0, : seed % 5] = -100
    return {"input_ids": ids, "labels": labels}


def in_torch(name):
    """Parameters after four steps in one process; the learning rate rises to its height in one step, and falls in the last."""
    model = build()
    groups = groups_in_torch(name, model)
    optim = {
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(groups),
        "muon": lambda: Both(groups),
    }.get(name, lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95)))()
    base = [group["lr"] for group in optim.param_groups]
    for factor, window in zip((0.5, 1.0, 1.0, 0.1), windows(), strict=True):
        for group, rate in zip(optim.param_groups, base, strict=True):
            group["lr"] = factor * rate
        optim.zero_grad()
        total = sum(
            F.cross_entropy(model(b["input_ids"]).flatten(0, 1), b["labels"].flatten(), reduction="sum") for b in window
        )
        (total / sum((b["labels"] != -100).sum() for b in window)).backward()
        optim.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def rates(schedule, steps, lr=1.0):
    """The learning rate of each step of a run."""
    optim = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(schedule, optim, steps)
    found = []
    for _ in range(steps):
        found.append(optim.param_groups[0]["lr"])
        optim.step()
        scheduler.step()
    return found


def in_a_run(name, layout):
    """The same by the configuration of a run, on this rank of ``layout``; and what was trained."""
    config = config_of(name, layout).config
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        model = build_model(config, world)
        step = make_step(config, model)
        for window in windows():
            step(plain.mine(window, world))
        return sw.full_state_dict(model), sorted(n for n, p in model.named_parameters() if p.requires_grad)
