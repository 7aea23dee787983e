"""The check of the loss runs the model a few times more, through the one function that runs it, or not at all where it cannot be run alone."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from step import model_losses
from step.model_losses import OwnLoss, tokens

import shardwise as sw
from shardwise.parallel import runtime_of
from shardwise.step import forward as forward_module


class Latent(OwnLoss):
    """It draws a latent variable, in eval mode too."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, loss + 0.01 * torch.randn(())


class Dropping(OwnLoss):
    """Dropout by code of its own, as scripts have it."""

    def loss(self, logits, targets):
        return super().loss(F.dropout(logits, 0.2, self.training), targets)


def own_sum(output, batch):
    return F.cross_entropy(output[0].flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def of_pairs(output):
    features = F.normalize(output[0].flatten(1), dim=1)
    return F.cross_entropy(4 * features @ features.T, torch.arange(len(features)), reduction="sum")


def with_labels(model, batch):
    return model(batch["input_ids"], batch["labels"])


def sum_by_forward(model, batch):
    return own_sum(model(batch["input_ids"]), batch)


def mean_by_forward(model, batch):
    return with_labels(model, batch)[1]


def stepped(build, windows=((0, 3),), *, runs_alone=None, evaluates=False, **options):
    """Runs of the model beside those of micro-batches in each window, and what is said: warnings, an error, ``describe``."""
    torch.manual_seed(3)
    told, extra, calls, plain = [], [], [0], forward_module.output_on

    def counting(*args):
        calls[0] += 1
        return plain(*args)

    forward_module.output_on = counting
    try:
        with sw.init("dp_shard=1", device="cpu") as world, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = sw.parallelize(build(), world)
            runtime_of(model).cannot_run_alone = runs_alone
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
            for number, ignored in enumerate(windows):
                batches, calls[0] = [tokens(10 * number + i, each) for i, each in enumerate(ignored)], 0
                try:
                    if evaluates:
                        sw.evaluate(model, batches, **options)
                    else:
                        step(batches)
                except sw.ConfigError as error:
                    told.append(error.given)
                extra.append(calls[0] - len(batches))
            return extra, told + [str(one.message) for one in warned], sw.describe(model)
    finally:
        forward_module.output_on = plain


CASES = {
    "a sum of the output": ({"loss": own_sum}, OwnLoss, 0),
    "a loss of pairs of samples": ({"loss": lambda output, batch: of_pairs(output)}, OwnLoss, 0),
    "a sum that the forward computes": ({"loss": None, "forward": sum_by_forward}, OwnLoss, 3),
    "the model's own mean": ({"loss": sw.model_loss}, OwnLoss, 4),
    "the model's own mean, without logits": ({"loss": sw.model_loss}, lambda: OwnLoss(returns="loss"), 6),
    "the model's own mean, with dropout of its own": ({"loss": sw.model_loss}, Dropping, 5),
}


@pytest.mark.parametrize("evaluates", [False, True], ids=["step", "evaluate"])
@pytest.mark.parametrize("case", CASES)
def test_the_model_runs_a_few_times_more_in_the_first_window(case, evaluates):
    options, build, num = CASES[case]
    num = 4 if evaluates and build is Dropping else num  # it draws nothing in eval mode
    extra, told, _ = stepped(build, ((0, 3), (2, 4)) if not evaluates else ((0, 3),), evaluates=evaluates, **options)
    assert extra == [num, 0][: len(extra)] and not told


@pytest.mark.parametrize(
    "options", [{"loss": None, "forward": mean_by_forward}, {"loss": sw.model_loss}, {"loss": sw.model_loss, "x": 1}]
)
@pytest.mark.parametrize("evaluates", [False, True], ids=["step", "evaluate"])
def test_a_model_that_cannot_be_run_alone_is_not_and_describe_says_so(options, evaluates):
    options = dict(options)
    build = (lambda: OwnLoss(mean="sum")) if options.pop("x", None) else OwnLoss
    why = "its layers are in stages on other ranks"
    extra, told, text = stepped(build, ((0, 3), (2, 4)), runs_alone=why, evaluates=evaluates, **options)
    assert extra == [0, 0] and not told
    assert f"loss check: the model is not run to try its loss: {why}" in text


def test_a_loss_of_the_output_is_tried_where_the_model_cannot_be_run_alone():
    extra, told, _ = stepped(OwnLoss, runs_alone="a schedule", loss=lambda output, batch: own_sum(output, batch) / 9)
    assert extra == [0] and not told  # a sum, scaled
    mean = lambda output, batch: own_sum(output, batch) / (batch["labels"] != -100).sum()  # noqa: E731
    assert stepped(OwnLoss, runs_alone="a schedule", loss=mean)[:2] == ([0], ["a loss that takes a mean"])


def test_a_mean_that_is_random_in_eval_mode_too_is_said_not_to_be_tried():
    _, told, _ = stepped(Latent, loss=sw.model_loss)
    assert len(told) == 1 and "could not be tried" in told[0] and "random numbers in eval mode too" in told[0]


class Leaving(OwnLoss):
    """Its forward leaves a penalty on the model for the loss."""

    def forward(self, idx, targets=None):
        output = super().forward(idx, targets)
        self.left = {"sum": output[0].square().sum(), "mean": output[0].square().mean()}
        return output


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_what_the_forward_leaves_for_the_loss_is_tried_with_its_own_run(how):
    models = []

    def build():
        models.append(Leaving())
        return models[0]

    _, told, _ = stepped(build, loss=lambda output, batch: own_sum(output, batch) + models[0].left[how])
    assert told == (
        []
        if how == "sum"
        else ["a loss whose 'loss' is a sum with something added to it that is no sum, such as a mean"]
    )


def test_a_batch_without_rows_is_said_not_to_be_tried():
    with sw.init("dp_shard=1", device="cpu") as world, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = sw.parallelize(torch.nn.Linear(1, 1), world)
        options = {
            "count": lambda batch: 1,
            "forward": lambda model, batch: model(batch["x"].view(1, 1)).square().sum(),
        }
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=None, **options)
        assert step([{"x": torch.tensor(2.0)}]).loss > 0
    assert ["could not be tried on a micro-batch twice over" in str(one.message) for one in told] == [True]


def test_a_sum_that_leaves_out_labels_at_random_is_no_mean():
    def loss(output, batch):
        kept = torch.rand(batch["labels"].shape) < 0.8
        return own_sum(output, {"labels": batch["labels"].where(kept, -100)})

    assert not stepped(OwnLoss, ((0,),) * 20, loss=loss)[1]


@pytest.mark.parametrize("returns", ["tuple", "loss"])
@pytest.mark.parametrize("mean", ["tokens", "sum"])
def test_a_shift_is_seen_with_logits_and_without(mean, returns):
    number, text = model_losses.says(shifts=True, mean=mean, returns=returns)
    assert number == 0 and "which shifts labels itself" in text
