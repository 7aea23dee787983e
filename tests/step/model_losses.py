"""Steps with ``loss=sw.model_loss``, of models that compute their loss in each of the ways that there are."""

import types
import warnings

import torch
import torch.nn.functional as F
from models.batches import VOCAB
from models.hugging_face import hf
from step import plain
from torch import nn

import shardwise as sw
from shardwise.model.lift import LiftFloat32


class OwnLoss(nn.Module):
    """A language model as scripts have it: ``forward(idx, targets)`` -> logits and a loss.

    Args:
        mean: over which items: of tokens, of the means of samples, or none (a sum).
        returns: how the loss is returned.
        ignored: the label that the loss leaves out.
        shifts: whether it compares each label with the logits one place before.
    """

    def __init__(self, mean="tokens", returns="tuple", ignored=-100, shifts=False, head=True):
        super().__init__()
        self.mean, self.returns, self.ignored, self.shifts = mean, returns, ignored, shifts
        self.wte = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(2))
        self.lm_head = nn.Linear(12, VOCAB)
        if not head:
            nn.init.zeros_(self.lm_head.weight)
            nn.init.zeros_(self.lm_head.bias)

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.blocks:
            x = x + block(x.cumsum(1) / 4)
        logits = self.lm_head(x)
        loss = None if targets is None else self.loss(logits, targets) + self.extra(x)
        return {
            "tuple": (logits, loss),
            "object": types.SimpleNamespace(logits=logits, loss=loss),
            "mapping": {"loss": loss, "logits": logits},
            "loss": loss,
            "none": (logits, None),
            "two": (logits, loss, loss),
        }[self.returns]

    def loss(self, logits, targets):
        if self.shifts == "roll":
            targets = targets.roll(-1, 1)
        elif self.shifts:
            logits, targets = logits[:, :-1], targets[:, 1:]
        if self.mean == "view":
            return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
        if self.mean == "view of a sum":
            return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), reduction="sum")
        if self.mean == "weights":
            weights = torch.linspace(0.1, 3, VOCAB, dtype=logits.dtype)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weights)
        each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=self.ignored, reduction="none")
        valid = targets != self.ignored
        if self.mean == "samples" or (self.mean == "samples in training" and self.training):
            return (each.sum(1) / valid.sum(1).clamp(min=1)).mean()
        if self.mean == "sum":
            return each.sum()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignored)

    def extra(self, x):
        return 0.3 * x.mean((0, 1)).square().sum() if self.mean == "pairs" else 0.0


class Asking(OwnLoss):
    """It cannot be called without targets."""

    def forward(self, idx, targets):
        return super().forward(idx, targets)


def llama():
    from models import get

    return get("llama").build()


def vit():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 12, "intermediate_size": 20}
    return hf("ViTConfig", "ViTForImageClassification", image_size=8, patch_size=4, num_labels=5, **sizes)


MODELS = {
    "tuple": OwnLoss,
    "mapping": lambda: OwnLoss(returns="mapping"),
    "loss alone": lambda: OwnLoss(returns="loss"),
    "asking for targets": Asking,
    "transformers": llama,
    "images": vit,
}


def tokens(seed, ignored):
    """Two samples; the labels of the first ``ignored`` positions of the first one, or of both, do not count."""
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))
    labels = ids[:, 1:].clone()
    labels[0, :ignored] = -100
    labels[1, : max(0, ignored - 6)] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def images(seed, _):
    generator = torch.Generator().manual_seed(seed)
    count = 1 + seed % 3
    pixels = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (count,), generator=generator)}


def windows(name):
    """Three windows of four micro-batches with unequal counts, the last of each with none."""
    make = images if name == "images" else tokens
    return [[make(10 * step + i, ignored) for i, ignored in enumerate((0, 3, 5, 12))] for step in range(3)]


def logits_of(model, batch):
    """The logits, by a call without labels where the model has them then."""
    if "pixel_values" in batch:
        return model(pixel_values=batch["pixel_values"]).logits
    if not isinstance(model, OwnLoss):
        return model(input_ids=batch["input_ids"]).logits
    kept, model.returns = model.returns, "tuple"
    logits = model(batch["input_ids"], batch["labels"])[0]
    model.returns = kept
    return logits


def in_one_process(name):
    """Losses, parameters and gradients of plain torch: the cross entropy of all tokens of a window, divided by their number."""
    torch.manual_seed(5)
    model = MODELS[name]().double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], {}
    for window in windows(name):
        optim.zero_grad()
        with LiftFloat32():
            total = sum(
                F.cross_entropy(logits_of(model, b).flatten(0, -2), b["labels"].flatten(), reduction="sum")
                for b in window
            )
            loss = total / sum((b["labels"] != -100).sum() for b in window)
            loss.backward()
        losses.append(float(loss.detach()))
        grads = plain.gradients(model)
        optim.step()
    return losses, plain.values(model), grads


def trained(name, layout, **options):
    """The same with ``sw.model_loss`` on this rank of ``layout``; and the loss of an evaluation of the first window."""
    torch.manual_seed(5)
    model = MODELS[name]().double()
    with sw.init(layout, device="cpu", timeout_s=60) as world, LiftFloat32():  # transformers computes losses in float32
        example = windows(name)[0][1]
        model = sw.parallelize(model, world, example=example, sharding=sw.Sharding(min_unit_bytes=0), **options)
        before = sw.evaluate(model, plain.mine(windows(name)[0], world), loss=sw.model_loss)["loss"]
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sw.model_loss)
        losses = [step(plain.mine(window, world)).loss for window in windows(name)]
        state = sw.full_state_dict(model)
    return before, losses, state


def padded(seed, batch, label, first_full=True):
    """Samples of unequal lengths: labels beyond them are ``label``, or hidden by a mask where that is "mask"."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, 7), generator=generator)
    beyond = torch.arange(6)[None] >= torch.randint(1, 7, (batch, 1), generator=generator)
    beyond &= torch.tensor(not (first_full and seed < 10))
    labels = ids[:, 1:].clone()
    if label == "mask":
        return {"idx": ids[:, :-1].contiguous(), "labels": labels, "attention_mask": (~beyond).long()}
    return {"idx": ids[:, :-1].contiguous(), "labels": labels if label is None else labels.masked_fill(beyond, label)}


class Masked(OwnLoss):
    """Its mean is over the attention mask."""

    def forward(self, idx, attention_mask, targets=None):
        logits, _ = super().forward(idx)
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return logits, (each * attention_mask).sum() / attention_mask.sum()


def says_of_padded(label, *, batch=4, precision=None, kind=OwnLoss, **settings):
    """What five steps say of samples of unequal lengths: the error, warnings, or nothing."""
    torch.manual_seed(1)
    options = {} if precision is None else {"precision": precision}
    with sw.init("dp_shard=1", device="cpu") as world, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = sw.parallelize(kind(**settings), world, **options)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sw.model_loss)
        for number in range(5):
            try:
                step([padded(10 * number + i, batch, label) for i in range(2)])
            except sw.ShardwiseError as error:
                return f"{type(error).__name__}: {error}"
    return " | ".join(str(one.message) for one in warned)


def says(count=None, forward=None, windows=5, ignored=3, layout="dp_shard=1", **settings):
    """What a step says of a model that computes its loss in another way: the error and the window of it, or warnings."""
    torch.manual_seed(3)
    more = {} if forward is None else {"forward": forward}
    with (
        sw.init(layout, device="cpu", timeout_s=30) as world,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        model = sw.parallelize(OwnLoss(**settings), world)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.TrainStep(model, optim, loss=sw.model_loss, count=count, **more)
        for number in range(windows):
            try:
                # Labels that do not count come late, in no window in which the loss would be tried once more anyhow.
                step([tokens(world.rank + 2 * number, ignored if number >= 3 else 0)])
            except sw.ShardwiseError as error:
                return number, f"{type(error).__name__}: {error}"
    return windows, " | ".join(str(one.message) for one in warned)
