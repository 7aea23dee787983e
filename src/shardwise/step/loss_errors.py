"""What the check of the loss says: its errors and warnings, and the one of all ranks."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.config.caller import level_of_caller
from shardwise.config.suggest import first_few
from shardwise.errors import ConfigError, RankError, ShardwiseError, UsageError, first_line
from shardwise.parallel import Runtime

_MEANS = {  # what a mean may run over -> what it is, and what to do
    "samples": ("the mean of the means of samples", "count samples: count=lambda batch: len(batch['labels'])"),
    "labels": ("the mean over labels that are not -100", "leave count= out: these labels are counted by default"),
    "not negative": (
        "the mean over labels that are not negative",
        "use -100 for labels that do not count; or count=lambda batch: (batch['labels'] >= 0).sum()",
    ),
    "mask": ("the mean over attention_mask", "pass count=lambda batch: batch['attention_mask'].sum()"),
    "sum": ("the sum", "it is a sum already: loss=None, {said}"),
}


def agreed_problem(runtime: Runtime, problem: ShardwiseError | None) -> ShardwiseError:
    """The error of the loss to raise on this rank: its own, else that of another rank. All ranks must call it."""
    found = runtime.world.agreement.gather(problem, "naming a fault of the loss")
    ranks = tuple(rank for rank, error in enumerate(found) if error is not None)
    error = problem or found[ranks[0]]
    if problem is not None or isinstance(error, ConfigError):  # a mean is one on every rank, whichever rank found it
        return error
    return RankError(
        f"rank {', '.join(map(str, ranks))} could not run backward",
        why=error.given,
        fix="see the error of that rank",
        ranks=ranks,
    )


def no_sum(name: str, growth: Any) -> ConfigError:
    if growth.kind == "part":
        return ConfigError(
            f"a loss whose {name!r} is a sum with something added to it that is no sum, such as a mean",
            why=f"one, two and three copies of the micro-batch give {growth.once:.6g}, {growth.twice:.6g} and {growth.thrice:.6g}: "
            f"{growth.once * growth.rest:.6g} stays the same. All of it is divided by the tokens of all ranks, so this part would "
            "weigh less the more tokens there are, and depend on the number of micro-batches",
            fix="multiply a mean by what is counted in the micro-batch: total + 0.01 * auxiliary * (batch['labels'] != -100).sum(); "
            "a penalty on weights: weight_decay= of the optimizer, or sw.parameter_penalty in a loop of your own",
        )
    shown = f"the micro-batch twice over gives {growth.twice:.6g}, once {growth.once:.6g}: a sum would double"
    if name == "loss":
        return ConfigError(
            "a loss that takes a mean",
            why=f"{shown}. Means of unequal micro-batches and ranks cannot be combined into the right gradient",
            fix='use reduction="sum"; Shardwise divides by the tokens of all ranks. For a mean that the model computes itself: loss=sw.model_loss',
        )
    return ConfigError(
        f"a loss whose {name!r} is a mean, or another value that is no sum",
        why=f"{shown}. Every entry is added up over micro-batches and ranks and divided by the tokens of all, so this one would "
        "be reported wrong",
        fix=f"return the sum: {{{name!r}: (...).sum()}} instead of .mean(); leave out what is no sum over tokens",
    )


def other_mean(
    name: str, parts: Sequence[float], counts: Sequence[float], expected: float, both: float, said: str
) -> ConfigError:
    is_what, fix = _MEANS[name]
    return ConfigError(
        "loss=sw.model_loss, where the model's loss is no mean over what is counted",
        why=f"two parts of a micro-batch with {counts[0]:g} and {counts[1]:g} counted have the losses {parts[0]:.6g} and {parts[1]:.6g}. Together "
        f"{expected:.6g} would be the mean over both, and the model gives {both:.6g}: {is_what}. Gradients would depend on how samples are "
        "grouped",
        fix=f"{fix.format(said=said)}; or take the loss from the logits: loss=sw.next_token_loss",
    )


def shifted(kind: str, *, by_logits: bool) -> ConfigError:
    return ConfigError(
        f"loss=sw.model_loss with {kind}, which shifts labels itself",
        why=(
            "its loss is the cross entropy of labels[:, 1:] and logits[:, :-1]"
            if by_logits
            else "its loss does not change with the label of the first position, so labels[:, 1:] is compared with logits[:, :-1]"
        )
        + ". Labels here are shifted already (labels[b, t] is the target of logits[b, t]): each position would be trained on the token after next",
        fix="use loss=sw.next_token_loss, which takes the logits; or compare labels[:, t] with logits[:, t] in the model's forward",
    )


def warn_of_other_terms(parts: Sequence[float], expected: float, both: float) -> None:
    _warn(
        f"the model's loss is not quite a mean over what is counted: on two parts of a micro-batch it is {parts[0]:.6g} and {parts[1]:.6g}, together "
        f"{both:.6g} where their mean is {expected:.6g}. What is added to it (a router's loss, a loss of pairs of samples) depends on how "
        "samples are grouped into micro-batches. If it is a mean over other items (cross entropy with class weights divides by the weights of the "
        "labels), pass their number: count=lambda batch: weights[batch['labels']].sum()"
    )


def warn_of_buffers(names: list[str], *, is_main: bool) -> None:
    _warn(
        f"the loss writes {first_few(names)}, a buffer that the model does not have: each rank writes it from its own data, nothing "
        "compares the ranks, and it is in no checkpoint. Put the loss in the model, before parallelize: "
        'model = sw.TaskModel(model, loss), and say what the ranks make of it together: Sharding(buffers={"*.center": "mean"})',
        is_main,
    )


def too_large(tensor: Tensor) -> UsageError:
    return UsageError(
        f"a loss that writes a tensor of its own, of {tensor.nbytes >> 20} MiB",
        why="the loss is tried on copies of the first micro-batches, and what it writes is put back after that: of tensors that it keeps, "
        "64 MiB at most",
        fix="make it a buffer of the model, before parallelize: model = sw.TaskModel(model, loss); or write it after the step",
    )


def warn_of_square(name: str) -> None:
    """Warns of a loss that pairs each sample with each other one."""
    _warn(
        f"the {name} grows with the square of the number of samples: four times as large for a micro-batch twice over, nine times for three copies. "
        "Where an output of shape [N, 1] meets a target of shape [N], torch makes [N, N] of them: output.squeeze(-1). A loss of pairs of samples is "
        "meant so, and depends on the size of a micro-batch"
    )


def warn_untried(error: Exception | None, *, is_mean: bool = False, is_main: bool = True) -> None:
    text = first_line(error, type(error).__name__)
    if "does not require grad" in text:
        text = "its forward takes a gradient itself, and is tried without gradients"
    of_mean = "model's loss", "parts of a micro-batch", "it is a mean over what is counted"
    of_sum = "loss", "a micro-batch twice over", 'it is a sum: a mean would train wrong (use reduction="sum")'
    whose, what, which = of_mean if is_mean else of_sum
    _warn(f"the {whose} could not be tried on {what} ({text}), so nothing tells whether {which}", is_main)


def _warn(text: str, is_main: bool = True) -> None:
    if is_main:
        warnings.warn(text, stacklevel=level_of_caller())
