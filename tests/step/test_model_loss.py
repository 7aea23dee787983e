"""``loss=sw.model_loss``: models that compute their loss themselves train with the numbers of plain torch on all tokens, under
every layout; a loss that is no mean over what is counted, or labels that are shifted twice, are refused."""

import pytest
import torch
from step import model_losses

import shardwise as sw

LAYOUTS = {"dp_shard=1": 1, "dp_replicate=2": 2, "dp_shard=2": 2, "dp_replicate=2,dp_shard=2": 4, "tp=2": 2}
RUN = {("tuple", layout) for layout in LAYOUTS} | {
    ("asking for targets", "tp=2"),
    ("transformers", "dp_shard=2"),
    ("transformers", "tp=2"),
    ("mapping", "dp_replicate=2"),
    ("loss alone", "dp_shard=2"),
    ("images", "dp_replicate=2"),
}


@pytest.mark.quick("tuple-dp_replicate=2", "tuple-tp=2", "loss alone-dp_shard=2", "transformers-dp_shard=2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in RUN else pytest.mark.soak)
        for name in model_losses.MODELS
        for layout in LAYOUTS
        if (name, layout) not in {("images", "tp=2"), ("loss alone", "tp=2")}
    ],
)
def test_the_numbers_are_those_of_plain_torch(ranks, name, layout):
    losses, values, grads = model_losses.in_one_process(name)
    results = ranks.run(model_losses.trained, LAYOUTS[layout], name, layout)
    for before, found, _ in results:
        assert before == pytest.approx(losses[0], rel=1e-12)
        assert found == pytest.approx(losses, rel=1e-12)
    state = results[0][2]
    for key, value in values.items():
        scale = max(float(value.abs().max()), float(grads[key].abs().max()), 1e-3)  # a bias of keys has no gradient
        assert float((state[key] - value).abs().max()) <= 1e-12 * scale, key


@pytest.mark.quick("{'remat': 'full'}")
@pytest.mark.parametrize("options", [{"remat": "full"}, {"compile": sw.Compile(backend="aot_eager")}], ids=str)
def test_with_other_options(ranks, options):
    losses, _, _ = model_losses.in_one_process("tuple")
    for _, found, _ in ranks.run(model_losses.trained, 2, "tuple", "dp_shard=2", **options):
        assert found == pytest.approx(losses, rel=1e-12)


def test_a_forward_and_a_count_of_the_users():
    def forward(model, batch):
        return model(batch["input_ids"], batch["labels"])

    assert model_losses.says(forward=forward) == (5, "")
    assert model_losses.says(mean="samples", count=lambda batch: len(batch["labels"])) == (5, "")
    # Labels in the places of their tokens, that the model shifts, counted as it does.
    assert model_losses.says(shifts=True, count=lambda batch: (batch["labels"][:, 1:] != -100).sum()) == (5, "")


def test_a_loss_that_ignores_another_label_is_given_no_other():
    assert model_losses.says(ignored=0) == (5, "")


@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_shard=2"])
def test_a_loss_that_is_another_mean_is_refused_when_it_shows(ranks, layout):
    for says in ranks.run(model_losses.says, LAYOUTS[layout], mean="samples", layout=layout):
        assert says[0] == 3  # where all samples have as many tokens, both means are one
        assert "the mean of the means of samples" in says[1] and "count=lambda batch: len(batch['labels'])" in says[1]


def test_a_count_that_is_another_than_the_means_is_refused():
    number, text = model_losses.says(count=lambda batch: len(batch["labels"]))
    assert number == 4 and "the mean over labels that are not -100" in text and "leave count= out" in text


WRONG = {
    "labels of -1": ((-1,), {"ignored": -1}, "the mean over labels that are not negative"),
    "labels of -1, one sample": ((-1,), {"ignored": -1, "batch": 1}, "the mean over labels that are not negative"),
    "a mask": (("mask",), {"kind": model_losses.Masked}, "count=lambda batch: batch['attention_mask'].sum()"),
    "a mask, one sample": (("mask",), {"kind": model_losses.Masked, "batch": 1}, "the mean over attention_mask"),
    "class weights": ((None,), {"mean": "weights"}, "count=lambda batch: weights[batch['labels']].sum()"),
    "class weights, one sample": ((None,), {"mean": "weights", "batch": 1}, "weights[batch['labels']].sum()"),
    "class weights, a head of zeros": ((None,), {"mean": "weights", "head": False}, "weights[batch['labels']].sum()"),
    "class weights in bf16": ((None,), {"mean": "weights", "precision": "bf16"}, "weights[batch['labels']].sum()"),
    "a roll": ((None,), {"shifts": "roll"}, "which shifts labels itself"),
    "views of a sum": ((None,), {"mean": "view of a sum"}, "it is a sum already"),
    "another mean in training": ((-100,), {"mean": "samples in training"}, "the mean of the means of samples"),
    "means of samples in bf16": ((-100,), {"mean": "samples", "precision": "bf16"}, "the mean of the means of samples"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mean_over_something_else_is_not_trained_silently(name):
    args, settings, words = WRONG[name]
    assert words in model_losses.says_of_padded(*args, **settings)


@pytest.mark.quick("view-None", "tokens-bf16")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("mean", ["view", "tokens"])
def test_a_right_mean_is_not_refused(mean, precision):
    label = None if mean == "view" else -100
    for batch in (1, 4):
        assert model_losses.says_of_padded(label, mean=mean, precision=precision, batch=batch) == ""


def test_a_sum_is_refused():
    number, text = model_losses.says(mean="sum")
    assert number == 0 and "it is a sum already: loss=None" in text


@pytest.mark.parametrize("head", [True, False])
def test_labels_are_not_shifted_twice(head):
    number, text = model_losses.says(shifts=True, head=head)
    # A head of zeros has the same loss for every label: it shows after the first step.
    assert number == (0 if head else 1) and "which shifts labels itself" in text and "loss=sw.next_token_loss" in text


def test_what_is_added_for_pairs_of_samples_is_warned_of():
    number, text = model_losses.says(mean="pairs")
    assert number == 5 and "not quite a mean over what is counted" in text


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ("none", "model_loss of a tuple of a tensor [2, 6, 19], None"),
        ("two", "model_loss of a tuple with 2 numbers"),
    ],
)
def test_an_output_without_one_loss_is_refused(returns, words):
    assert words in model_losses.says(returns=returns)[1]


def test_a_model_that_takes_no_labels_is_refused():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Embedding(19, 19)

        def forward(self, input_ids):
            return self.head(input_ids)

    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(Plain(), world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sw.model_loss)
        with pytest.raises(sw.UsageError, match=r"Plain.forward\(input_ids\)[\s\S]*none of its parameters"):
            step([model_losses.tokens(0, 0)])
