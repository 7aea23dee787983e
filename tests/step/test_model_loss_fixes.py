"""What errors about a model's own loss say to do: each is done, and the numbers are those of plain torch on all tokens."""

import re

import pytest
import torch
import torch.nn.functional as F
from models.batches import VOCAB
from step import plain
from step.model_losses import Masked, OwnLoss, padded, tokens

import shardwise as sw
from shardwise.errors import ConfigError, UsageError


class Named(OwnLoss):
    """Its forward takes its inputs, and its labels, by other names."""

    def forward(self, input_ids, scale=None, label=None):
        return super().forward(input_ids, label)


class AsTransformers(OwnLoss):
    """It returns what models of transformers do, in which the loss is the first entry."""

    def forward(self, input_ids, labels=None):
        from transformers.modeling_outputs import CausalLMOutput

        logits, loss = super().forward(input_ids, labels)
        return CausalLMOutput(loss=loss, logits=logits)


class Nested(OwnLoss):
    """Nothing says which of its parameters are the labels."""

    def forward(self, idx, wanted=None):
        return super().forward(idx, wanted)


def weights():
    return torch.linspace(0.1, 3, VOCAB, dtype=torch.float64)


def windows(label=-100):
    if label is None:
        return [[padded(10 * step + i, 2, -100) for i in range(2)] for step in range(3)]
    if label != -100:
        return [[padded(10 * step + i, 3, label, first_full=False) for i in range(2)] for step in range(3)]
    return [[tokens(10 * step + i, 3 * i) for i in range(2)] for step in range(3)]


def total_of(model, batch, ignored=-100, weight=None):
    """The sum over the tokens of a micro-batch, by plain torch."""
    inputs = batch.get("input_ids", batch.get("idx"))
    x = model.wte(inputs)
    for block in model.blocks:
        x = x + block(x.cumsum(1) / 4)
    logits, labels = model.lm_head(x).flatten(0, 1), batch["labels"].flatten()
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"].flatten() == 0, ignored)
    return F.cross_entropy(logits, labels, ignore_index=ignored, weight=weight, reduction="sum")


def by_samples(model, batch):
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(batch["labels"]))]
    return sum(total_of(model, row) / (row["labels"] != -100).sum().clamp(min=1) for row in rows)


def trained_plain(build, given, total, count):
    torch.manual_seed(3)
    model = build().double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in given:
        (sum(total(model, batch) for batch in window) / sum(float(count(batch)) for batch in window)).backward()
        optim.step()
        optim.zero_grad()
    return plain.values(model)


def trained(build, given, **options):
    with sw.init("dp_shard=1", device="cpu") as world:
        torch.manual_seed(3)
        model = sw.parallelize(build().double(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for window in given:
            step(window)
        return {name: sw.full_tensor(p).detach().clone() for name, p in model.named_parameters()}


def valid(batch):
    return (batch["labels"] != -100).sum()


def asked(build, given, error=ConfigError, **options):
    with pytest.raises(error) as caught:
        trained(build, given, **options)
    return str(caught.value)


def with_labels(model, batch):
    return model(batch["input_ids"], batch["labels"])


RETURNS = {
    "tuple": (lambda: OwnLoss(mean="sum"), "[1]"),
    "object": (lambda: OwnLoss(mean="sum", returns="object"), ".loss"),
    "mapping": (lambda: OwnLoss(mean="sum", returns="mapping"), "['loss']"),
    "loss alone": (lambda: OwnLoss(mean="sum", returns="loss"), ")"),
    "transformers": (lambda: AsTransformers(mean="sum"), "labels=batch['labels'])['loss']"),
    "other names": (lambda: Named(mean="sum", returns="object"), "label=batch['labels']).loss"),
}


@pytest.mark.parametrize("returns", RETURNS)
def test_a_sum_is_taken_as_the_error_says(returns):
    build, take = RETURNS[returns]
    text = asked(build, windows(), loss=sw.model_loss)
    said = re.search(r"it is a sum already: loss=None, forward=(lambda .*?); or take the loss", text).group(1)
    assert said.endswith(take)
    found = trained(build, windows(), loss=None, forward=eval(said))
    plain.assert_close(found, trained_plain(build, windows(), total_of, valid))
    if returns != "loss alone":
        logits = trained(build, windows(), loss=lambda output, batch: sw.next_token_loss(logits_of(output), batch))
        plain.assert_close(logits, found)


def logits_of(output):
    return output[0] if isinstance(output, tuple) else output["logits"] if isinstance(output, dict) else output.logits


# name -> model, batches, options that are refused, words of the error, options that it says, plain sum and count
SAID = {
    "means of samples": (
        lambda: OwnLoss(mean="samples"), windows(None), {}, "count=lambda batch: len(batch['labels'])",
        {"count": lambda batch: len(batch["labels"])}, by_samples, lambda batch: len(batch["labels"]),
    ),
    "a count too many": (
        OwnLoss, windows(None), {"count": lambda batch: len(batch["labels"])}, "leave count= out", {}, total_of, valid,
    ),
    "labels of -1": (
        lambda: OwnLoss(ignored=-1), windows(-1), {}, "count=lambda batch: (batch['labels'] >= 0).sum()",
        {"count": lambda batch: (batch["labels"] >= 0).sum()},
        lambda model, batch: total_of(model, batch, ignored=-1), lambda batch: (batch["labels"] >= 0).sum(),
    ),
    "a mask": (
        Masked, windows("mask"), {}, "count=lambda batch: batch['attention_mask'].sum()",
        {"count": lambda batch: batch["attention_mask"].sum()}, total_of, lambda batch: batch["attention_mask"].sum(),
    ),
    "labels that are shifted twice": (
        lambda: OwnLoss(shifts=True), windows(), {}, "use loss=sw.next_token_loss, which takes the logits",
        {"loss": lambda output, batch: sw.next_token_loss(output[0], batch)}, total_of, valid,
    ),
    "a sum of labels that are shifted twice": (
        lambda: OwnLoss(shifts=True, mean="sum"), windows(), {}, "use loss=sw.next_token_loss, which takes the logits",
        {"loss": lambda output, batch: sw.next_token_loss(output[0], batch)}, total_of, valid,
    ),
    "an output of transformers as the loss": (
        AsTransformers, windows(), {"loss": None, "forward": with_labels}, "loss=sw.model_loss", {"loss": sw.model_loss}, total_of, valid,
    ),
    "two numbers": (
        lambda: OwnLoss(returns="two"), windows(), {}, "take it out: forward=lambda model, batch: model(...)[1]",
        {"forward": lambda model, batch: with_labels(model, batch)[1]}, total_of, valid,
    ),
    "no loss": (
        lambda: OwnLoss(returns="none"), windows(), {}, "give a loss of your own: loss=lambda output, batch: ...",
        {"loss": lambda output, batch: sw.next_token_loss(output[0], batch)}, total_of, valid,
    ),
    "labels by another name": (
        Nested, windows(), {}, 'forward=lambda model, batch: model(batch["input_ids"], batch["labels"])',
        {"forward": with_labels}, total_of, valid,
    ),
    "the model's output as the loss": (
        OwnLoss, windows(), {"loss": None, "forward": with_labels}, "for a mean that the model computes: loss=sw.model_loss",
        {"loss": sw.model_loss, "forward": with_labels}, total_of, valid,
    ),
    "an object as the loss": (
        lambda: OwnLoss(returns="object"), windows(), {"loss": None, "forward": with_labels}, "loss=sw.model_loss",
        {"loss": sw.model_loss}, total_of, valid,
    ),
    "a mapping as the loss": (
        lambda: OwnLoss(returns="mapping"), windows(), {"loss": None, "forward": with_labels}, "loss=sw.model_loss",
        {"loss": sw.model_loss}, total_of, valid,
    ),
    "a mapping of a sum as the loss": (
        lambda: OwnLoss(mean="sum", returns="mapping"), windows(), {"loss": None, "forward": with_labels},
        'take the loss alone: output["loss"]',
        {"loss": lambda output, batch: output["loss"], "forward": with_labels}, total_of, valid,
    ),
    "its mean as a loss of one's own": (
        lambda: OwnLoss(returns="object"), windows(), {"loss": lambda output, batch: output.loss, "forward": with_labels},
        "For a mean that the model computes itself: loss=sw.model_loss", {"loss": sw.model_loss}, total_of, valid,
    ),
    "its loss without labels": (
        OwnLoss, windows(), {"loss": lambda output, batch: output[1]}, "pass loss=sw.model_loss", {}, total_of, valid,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_an_error_says_is_done(case):
    build, given, refused, words, said, total, count = SAID[case]
    assert words in asked(build, given, (ConfigError, UsageError), **{"loss": sw.model_loss, **refused})
    found = trained(build, given, **{"loss": sw.model_loss, **said})
    plain.assert_close(found, trained_plain(build, given, total, count))


def test_weights_of_classes_are_counted_as_the_warning_says():
    build = lambda: OwnLoss(mean="weights")  # noqa: E731
    given = [[padded(10 * step + i, 2, None) for i in range(2)] for step in range(3)]
    with pytest.warns(UserWarning, match=r"count=lambda batch: weights\[batch\['labels'\]\].sum\(\)"):
        trained(build, given, loss=sw.model_loss)
    found = trained(build, given, loss=sw.model_loss, count=lambda batch: weights()[batch["labels"]].sum())
    wanted = trained_plain(
        build, given, lambda m, b: total_of(m, b, weight=weights()), lambda b: weights()[b["labels"]].sum()
    )
    plain.assert_close(found, wanted)


def auxiliary(output, batch, scale):
    total = sw.next_token_loss(output[0], batch)
    return total + 0.01 * output[0].square().mean() * scale


def test_a_mean_beside_a_sum_is_multiplied_as_the_error_says():
    text = asked(OwnLoss, windows(), loss=lambda output, batch: auxiliary(output, batch, 1))
    assert "total + 0.01 * auxiliary * (batch['labels'] != -100).sum()" in text
    found = trained(OwnLoss, windows(), loss=lambda output, batch: auxiliary(output, batch, valid(batch)))

    def total(model, batch):
        return auxiliary(model(batch["input_ids"]), batch, valid(batch))

    plain.assert_close(found, trained_plain(OwnLoss, windows(), total, valid))


def test_a_metric_that_is_a_mean_is_summed_as_the_error_says():
    def loss(how):
        def call(output, batch):
            right = (output[0].argmax(-1) == batch["labels"]).double()
            return {"loss": sw.next_token_loss(output[0], batch), "right": getattr(right + 0.5, how)()}

        return call

    assert "return the sum: {'right': (...).sum()} instead of .mean()" in asked(OwnLoss, windows(), loss=loss("mean"))
    found = trained(OwnLoss, windows(), loss=loss("sum"))
    plain.assert_close(found, trained_plain(OwnLoss, windows(), total_of, valid))
