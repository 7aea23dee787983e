"""Labels of a language model: making and shifting them, counting the valid ones, and detecting labels that are not
shifted.

Collators of Hugging Face and TRL return ``labels`` as a copy of ``input_ids`` (prompt and padding -100) and leave the
shift to the model's own loss. Trained on them with a loss that expects aligned labels, a model learns to copy its
input. One batch does not always show it: a run of one token equals itself shifted, and a batch may have few labels. So
the labels of all micro-batches and ranks are compared together.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.data.batch import IGNORED, MicroBatch, is_padding
from shardwise.data.positions import shorten
from shardwise.errors import ConfigError

Batch = Mapping[str, Tensor]

_FEWEST = 8  # labelled positions needed: fewer of a masked language model may all have kept their tokens
_FEWEST_SHIFTED = 3  # inputs may have noise on purpose: one changed label may happen to be the next token


def make_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Makes next-token labels where there are none: T+1 tokens become T inputs and the T tokens that follow them.

    ``input_ids`` [B, T+1] becomes ``input_ids`` [B, T] and ``labels`` [B, T], where ``labels[b, t]`` is the target of
    ``logits[b, t]``. Whatever else has the T+1 positions (masks of any shape, positions, embeddings), known by its key, loses the
    last one too; what belongs to another sequence or to a sample, numbers and lists stay. A target that ``attention_mask`` hides gets the label -100, which no loss counts. A batch that already has ``labels``,
    which must be aligned, is returned unchanged; so is one without ``input_ids``.

    Args:
        batch: a micro-batch.

    Raises:
        ConfigError: ``input_ids`` is not [B, T+1] with T >= 1; or it cannot be decided whether a tensor has these positions.
    """
    if "labels" in batch or "input_ids" not in batch:
        return dict(batch)
    return _shifted(batch, batch["input_ids"], "make_labels")


def shift_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shifts labels by one for next-token prediction: does what :func:`make_labels` does, and also shifts ``labels``
    [B, T+1] that are a copy of ``input_ids`` (prompt and padding -100), as collators of Hugging Face and TRL return
    them.

    The result has ``input_ids[:, :-1]`` and ``labels[:, 1:]``.

    Args:
        batch: ``input_ids`` [B, T+1], perhaps ``labels`` of the same shape, and whatever else the model reads.

    Raises:
        ConfigError: there is no ``input_ids``, it is not [B, T+1] with T >= 1, ``labels`` have another shape, or they are visibly
            shifted already: at least three labels differ from the input at their position, and each label is the next
            input; or it cannot be decided whether a tensor has the positions of ``input_ids``.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        held = f"the keys {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ConfigError(
            f"shift_labels of {held}, without a tensor input_ids",
            why="it shifts labels against the tokens of that name: as they are, a model would learn to copy its input",
            fix='name them so: {"input_ids": tokens, "labels": tokens}, and call the model by TrainStep(forward=lambda model, batch: '
            'model(batch["input_ids"])); or shift labels yourself: labels = tokens[:, 1:], tokens = tokens[:, :-1]',
        )
    ids, labels = batch["input_ids"], batch.get("labels")
    if labels is None:
        return _shifted(batch, ids, "shift_labels")
    if labels.shape != ids.shape:
        raise ConfigError(
            f"shift_labels of labels of shape {list(labels.shape)} beside input_ids of shape {list(ids.shape)}",
            why="it shifts labels that stand at the places of their tokens, one for each",
            fix="leave labels that are no next tokens as they are: sw.Loader(...) without prepare=",
        )
    shifted = _shifted(batch, labels, "shift_labels")
    _refuse_shifted(ids, labels)
    return shifted


def _shifted(batch: Mapping[str, Tensor], tokens: Tensor, by: str) -> dict[str, Tensor]:
    """``batch`` without its last position, and ``tokens`` [B, T+1] without the first as its labels."""
    ids = batch["input_ids"]
    if ids.dim() != 2 or ids.shape[1] < 2:
        raise ConfigError(
            f"input_ids of shape {list(ids.shape)}",
            why="labels are made by shifting sequences [B, T+1] by one, and need at least two tokens a sequence",
            fix="give samples of seq_len + 1 tokens, or add aligned labels to the batch (prepare=None)",
        )
    out = shorten(batch, by)
    labels = tokens[:, 1:].long().clone()  # a copy: masking labels in place must not change the inputs
    if getattr(batch.get("attention_mask"), "shape", None) == ids.shape:
        labels = labels.masked_fill(batch["attention_mask"][:, 1:] == 0, IGNORED)
    out["labels"] = labels
    if isinstance(batch, MicroBatch):  # from a Loader: a padding must stay a padding
        return MicroBatch(out, index=batch.index, padding=batch.padding, window=batch.window)
    return out


def valid_labels(batch: Batch) -> Tensor:
    """The default count of a micro-batch: its labels that are not -100.

    Raises:
        ConfigError: the batch has no labels.
    """
    if "labels" not in batch:
        raise ConfigError(
            f"a batch with the keys {sorted(batch)} and no count=",
            why="the loss is divided by the number of valid tokens (or samples) of all ranks, and nothing says how many "
            "this batch has",
            fix=f"pass count=lambda batch: {_example_of_count(batch)} (what one sum of your loss runs over), or give labels"
            + ("; targets are named labels, which sw.model_loss gives a forward as its targets" * ("targets" in batch)),
        )
    return (batch["labels"] != IGNORED).sum()


def _example_of_count(batch: Batch) -> str:
    name = next((name for name, value in batch.items() if isinstance(value, Tensor) and value.dim()), "x")
    return f'batch["{name}"].numel()' if name == "input_ids" else f'batch["{name}"].shape[0]'


def _refuse_shifted(tokens: Tensor, labels: Tensor) -> None:
    """Raises ConfigError if ``labels`` [B, T] are visibly the tokens after ``tokens`` [B, T] already; never for a copy
    of ``tokens``, in which no label differs."""
    if _are_next_tokens(tokens, labels):
        raise ConfigError(
            "shift_labels of labels that are shifted already",
            why="every label is the next token of input_ids; shifted once more, each position would be trained on the token after next",
            fix="leave them as they are: sw.Loader(...) without prepare=, or no second sw.shift_labels(batch)",
        )


def _are_next_tokens(tokens: Tensor, labels: Tensor) -> bool:
    here, following = labels[:, :-1], tokens[:, 1:]
    labelled = here != IGNORED
    differing = (labelled & (here != tokens[:, :-1])).sum()
    return int(differing) >= _FEWEST_SHIFTED and not bool((labelled & (here != following)).any())


def refuse_second_shift(module: nn.Module, _: Any, kwargs: Mapping[str, Any]) -> None:
    """A forward pre-hook for causal language models of transformers, which shift the labels they receive: raises
    ConfigError if the labels are visibly the next tokens already."""
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.dim() != 2 or labels.shape != ids.shape:
        return
    if kwargs.get("shift_labels") is labels:
        return  # sw.model_loss says that they are shifted; whether the model heeds it is tried there
    if _are_next_tokens(ids, labels):
        raise ConfigError(
            f"labels that are shifted already, given to {type(module).__name__}",
            why="every label is the next token of input_ids, and this model shifts labels once more: each position would be trained on the token "
            "after next",
            fix="leave labels out of the call, and take the loss of its logits: F.cross_entropy(output.logits.flatten(0, 1), "
            'batch["labels"].flatten(), reduction="sum"); or give it labels at the places of their own tokens: sw.Loader(..., '
            'prepare=lambda batch: {**batch, "labels": batch["input_ids"]})',
        )


def shifts_labels(module: nn.Module) -> bool:
    """Whether ``module`` is a causal language model of transformers, whose own loss shifts labels."""
    return hasattr(module, "loss_function") and type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def compare_labels(seen: Tensor | None, batches: Iterable[Batch], counter: Any) -> Tensor:
    """Three counts, float64 [3], to be summed over the ranks: labelled positions, those whose label differs from the
    input there, and those whose next input differs from their own. Zeros if ``counter`` is the user's own or ``seen``
    is None."""
    found: list[Tensor] = []
    if counter is valid_labels and seen is not None:
        own = [(_tokens_of(batch), batch) for batch in batches if not is_padding(batch)]
        found = [_compared(tokens, batch["labels"]) for tokens, batch in own if tokens is not None]
    return torch.stack(found).sum(0) if found else torch.zeros(3, dtype=torch.float64)


def judge_labels(seen: Tensor | None, summed: Tensor, where: str) -> Tensor | None:
    """Decides from the sums of :func:`compare_labels` over the ranks whether labels are not shifted; the same on all
    ranks.

    Args:
        seen: what this function returned before; zeros [3] at first.
        summed: the counts of the batches since, summed over the ranks.
        where: where these batches are, for the message.

    Returns:
        the counts so far, for the next call; None if the labels are fine and no more need be compared.

    Raises:
        ConfigError: all labels are the inputs at their own positions.
    """
    if seen is None:
        return None
    seen = seen + summed
    labelled, differing, telling = (int(number) for number in seen.tolist())
    if labelled < _FEWEST or not (differing or telling):
        return seen
    if not differing:
        raise ConfigError(
            f"labels that equal input_ids at all {labelled} labelled positions ({where})",
            why="labels[b, t] is compared with logits[b, t] and must be the token after input_ids[b, t] (or the tokens by another name); as they are, the model "
            "learns to copy its input (collators of Hugging Face and TRL leave the shift to the model)",
            fix="shift them once: sw.Loader(..., prepare=sw.shift_labels), or batch = sw.shift_labels(batch) in a loop of your own; "
            "if this is intended, pass your own count: where the model itself shifts them, "
            'count=lambda batch: (batch["labels"][:, 1:] != -100).sum(); where it learns to copy, [:, 1:] is left out',
        )
    return None


def _tokens_of(batch: Batch) -> Tensor | None:
    """The tokens that labels may be the next ones of: ``input_ids``, else the one tensor of integers of their shape."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or not labels.dim() or labels.is_floating_point():
        return None
    names = (
        ["input_ids"] if "input_ids" in batch else [name for name in batch if name != "labels" and "mask" not in name]
    )
    found = [x for name in names if isinstance(x := batch[name], Tensor) and x.shape == labels.shape]
    tokens = [x for x in found if not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)]
    return tokens[0] if len(tokens) == 1 else None


def _compared(tokens: Tensor, labels: Tensor) -> Tensor:
    labelled = labels != IGNORED
    # Where a token is followed by itself, a label that equals it may be the next token as well.
    turns = labelled[..., :-1] & (tokens[..., 1:] != tokens[..., :-1])
    return torch.stack([labelled.sum(), (labelled & (labels != tokens)).sum(), turns.sum()]).double()
