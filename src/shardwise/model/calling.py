"""How a model is called on a batch, by the names of its forward's parameters; and a batch for one that is given none."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.model.pytrees import leaves_of, map_leaves

Batch = Mapping[str, Any]
_OWN = (Path(torch.__file__).parent, Path(__file__).parents[1])

_SAMPLES, _ROWS, _COLUMNS = 16, 2, 64
"""Of an example, at most: samples; rows and columns of tokens. They show how code treats them, in memory that does not grow with
the batch; there are enough of them that ReLU hides few outputs at all of them."""

_LARGE, _LARGE_SAMPLES = 1 << 15, 1 << 11
"""Columns times width of a model, and samples of many positions times width, that are not exceeded: the search of a 70B model in
2 x 64 tokens takes a minute and 5 GB."""

FOR_LOSS = {"shift_labels", "num_items_in_batch"}  # what models of transformers pass on to their loss

TARGETS = {"labels", "label", "targets", "target", "y"}  # for the loss, unless it is a parameter of the forward


def call(model: nn.Module, batch: Batch) -> Any:
    """Calls the model on a batch: each key that the forward has a parameter for, by name (labels are for the loss); all
    of them to a forward with ``**kwargs``. Where no key is one of its parameters and it asks for one tensor, the
    batch's only input, in place. With ``position_ids`` a forward that has ``use_cache`` gets False: models of transformers find
    documents packed into one sample by their positions only without a key/value cache, which their default makes.

    Raises:
        UsageError: a parameter would receive nothing, or the batch has more than one input for it; pass ``forward=``.
    """
    args, kwargs = arguments_of(model, batch)
    return model(*args, **kwargs)


def arguments_of(model: nn.Module, batch: Batch, given: Collection[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, in place and by name, with which :func:`call` calls the model. ``given``: parameters of the forward that
    the caller gives itself."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.name not in given]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes_many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in required if p.name not in inputs or p.name not in by_name]
    named = {key: value for key, value in inputs.items() if key in by_name}
    others = [key for key in inputs if key not in by_name]
    options: dict[str, Any] = {"use_cache": False} if "position_ids" in named and "use_cache" in by_name else {}
    rest = [key for key in others if key not in TARGETS and not _is_number(inputs[key])]
    if takes_any and not missing:
        return (), {**options, **inputs}
    # Keys beyond the required parameters are for the loss; if none is required, a key may be a misspelt parameter.
    if named and not missing and (required or not rest):
        return (), {**options, **named}
    in_place = len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY
    if not named and len(rest or others) == 1 and (in_place or (takes_many and not required)):
        return (inputs[(rest or others)[0]],), {}
    raise _unfit_batch(model, inputs, missing, named, rest)


def call_alone(model: nn.Module, batch: Batch) -> Any:
    """Calls the model as :func:`call` does, with labels where its forward cannot be called without: to learn from its code, and
    not for training."""
    if getattr(model, "takes_batch", False):
        return model(batch)
    labels = _labels_asked_for(model, batch)
    args, kwargs = arguments_of(model, batch, given=labels)
    return model(*args, **kwargs, **labels)


def _labels_asked_for(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The labels, under the name of the one parameter for them, where the forward cannot be called without."""
    asked = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.name in TARGETS and (p.name == "labels" or p.name not in batch)
    ]
    return {asked[0]: batch["labels"]} if len(asked) == 1 and "labels" in batch else {}


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a 0-dim tensor, which has no row per sample: a factor of the loss."""
    return isinstance(value, Tensor) and not value.dim()


def _unfit_batch(model: nn.Module, inputs: Batch, missing: list[str], named: Any, rest: list[str]) -> UsageError:
    """The error for a batch whose keys do not match the parameters of the forward."""
    if missing and named:
        why = f"the names do not match: the batch has {sorted(named)}, and nothing for {missing}"
    elif len(missing) == 1 and len(rest) > 1:
        why = f"the names do not match, and any of {sorted(rest)} may be the {missing[0]!r} of the forward"
    else:
        why = "the names do not match" + (", and the forward takes more than one tensor" if len(missing) > 1 else "")
    signature = ", ".join(
        str(p).partition(":")[0].partition("=")[0] for p in inspect.signature(model.forward).parameters.values()
    )
    taken = [*named, *rest] or list(inputs)
    example = ", ".join(f'batch["{key}"]' for key in (taken[:1] if len(missing) <= 1 and not named else taken))
    return UsageError(
        f"a batch with {sorted(inputs)} for {type(model).__name__}.forward({signature})",
        why=f"{why}. The default forward passes keys by name, without labels",
        fix=f"pass forward=lambda model, batch: model({example or 'batch[...]'}), or name the batch's keys as the forward does",
    )


def run_on(example: Batch | None, forward: Callable[[nn.Module, Batch], Any] = call) -> Callable[[nn.Module], Any]:
    """A function that calls a model on ``example``, on the CPU and in the dtype of its parameters; None: on tokens, where its
    forward shows that it takes some.

    The function raises UsageError where it does not.
    """

    def run(model: nn.Module) -> Any:
        if example is None:
            return call(model, _tokens(model))
        dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), None)
        runs = call_alone if forward is call else forward
        there = {"device": "cpu", "dtype": dtype}
        return runs(
            model,
            map_leaves(
                lambda x: x.to(**there) if _casts(x) else x.cpu() if isinstance(x, Tensor) else x, dict(example)
            ),
        )

    return run


def cropped(example: Batch, model: nn.Module) -> Batch | None:
    """The first 16 samples of a batch; where all of its tensors are of one shape ``[rows, columns]`` of integers or booleans
    (tokens, masks, labels), two rows and 64 columns. Fewer columns, and fewer samples of three dims and more, for a wide model.
    None: its tensors differ in their first dim, or some are in containers, or it is as small already.

    Columns are the first ones; the last ones where they have a row of zeros that is not all zeros in the batch: of a mask,
    before the tokens.
    """
    tensors = {key: value for key, value in example.items() if isinstance(value, Tensor) and value.dim()}
    held = leaves_of([value for value in example.values() if not isinstance(value, Tensor)])
    if len({len(value) for value in tensors.values()}) != 1 or any(isinstance(x, Tensor) for x in held):
        return None
    shapes = {tuple(value.shape) for value in tensors.values()}
    if len(shapes) == 1 and len(min(shapes)) == 2 and not any(value.is_floating_point() for value in tensors.values()):
        columns = _columns(_width(model))
        rows = {key: value[:_ROWS] for key, value in tensors.items()}
        first = {key: value[:, :columns] for key, value in rows.items()}
        last = {key: value[:, -columns:] for key, value in rows.items()}
        part = last if _loses_rows(rows, first) and not _loses_rows(rows, last) else first
    else:
        has_positions = any(value.dim() > 2 for value in tensors.values())
        samples = min(_SAMPLES, max(2, _LARGE_SAMPLES // _width(model))) if has_positions else _SAMPLES
        part = {key: value[:samples] for key, value in tensors.items()}
    is_whole = all(part[key].shape == value.shape for key, value in tensors.items())
    return None if is_whole else {**example, **part}


def _columns(width: int) -> int:
    return min(_COLUMNS, max(4, _LARGE // width))


def _width(model: nn.Module) -> int:
    """The smaller side of the widest matrix: the width of the tensors between blocks."""
    return max((min(param.shape[:2]) for param in model.parameters() if param.dim() > 1), default=1)


def _loses_rows(whole: Batch, part: Batch) -> bool:
    """Whether a row of a part is all zeros, and that of the whole is not."""
    return any(bool((whole[key].any(1) & ~value.any(1)).any()) for key, value in part.items())


def by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of a model, those in place by their names where they have some."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    named = [p.name for p in parameters[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(named) < len(args):
        return args, dict(kwargs)
    return (), {**dict(zip(named, args, strict=True)), **kwargs}


def tensors_given(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> set[str]:
    """The names of the parameters of a model's forward that a call gives tensors; a parameter without a name: its place."""
    names = list(inspect.signature(model.forward).parameters)
    given = {names[i] if i < len(names) else str(i): value for i, value in enumerate(args)} | dict(kwargs)
    return {name for name, value in given.items() if isinstance(value, Tensor)}


def _casts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tokens(model: nn.Module) -> dict[str, Tensor]:
    """Tokens for a model with embeddings, whose forward takes ``input_ids`` or asks for one tensor."""
    parameters = inspect.signature(model.forward).parameters
    tables = [child for child in model.modules() if isinstance(child, nn.Embedding)]
    named = [name for name in ("input_ids", "decoder_input_ids") if name in parameters]
    asked = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if getattr(model, "takes_batch", False):
        raise UsageError(
            f"{type(model).__name__}.forward({', '.join(asked)}) without example=",
            why="under tp and cp a model is run once to find what can be cut, and what its loss reads of a batch is not known",
            fix="give it a micro-batch as in training, with the labels: sw.parallelize(model, world, example=batch), such as "
            'batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}',
        )
    if not tables or not (named or len(asked) == 1):
        raise _needs_example(model, asked, has_tables=bool(tables))
    # Not from the shapes of parameters: that they are read would be taken for what the model's code does.
    columns = min(8, _columns(max(table.embedding_dim for table in tables)))
    ids = (torch.arange(2 * columns).view(2, columns) * 7 + 3) % min(table.num_embeddings for table in tables)
    return dict.fromkeys(named or asked, ids)


def _needs_example(model: nn.Module, asked: list[str], *, has_tables: bool) -> UsageError:
    """The error for a model of which it is not known what its forward can be run on: ``asked`` are the arguments it needs."""
    one = asked[0] if len(asked) == 1 else None
    what = f"its {one!r} has" if one else "what it takes has"
    if has_tables:
        why = f"it has an embedding, but takes {' and '.join(asked) or 'no named argument'}: which of them are tokens is not known"
    else:
        why = f"it has no embedding, so {what} a shape and a dtype that are not known"
    wide = next((child.in_features for child in model.modules() if isinstance(child, nn.Linear)), None)
    shown = "torch.randn(16, 8)" if wide is None else f"torch.randn(16, {wide})"
    tensors = ", ".join(f'"{name}": {shown}' for name in asked or ["x"])
    return UsageError(
        f"{type(model).__name__}.forward({', '.join(asked)}) without example=",
        why=f"under tp and cp a model is run once to find what can be cut; {why}",
        fix=f"give it a micro-batch of the shapes and dtypes of training: sw.parallelize(model, world, example={{{tensors}}})",
    )


def line_of(error: BaseException) -> str:
    """The innermost line of the traceback outside torch and Shardwise, as a line of a message; "" if there is none."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((Path(error.filename), error.lineno))
    user = [
        place
        for place in frames
        if not str(place[0]).startswith("<") and not any(place[0].is_relative_to(folder) for folder in _OWN)
    ]
    if not user:
        return ""
    file, line = user[-1]
    with contextlib.suppress(ValueError):
        file = file.relative_to(Path.cwd())
    return f"\n       at {file}, line {line}"


def methods_called(module: nn.Module, name: str) -> list[Callable[[], Any]]:
    """The bound methods ``name`` of the outermost modules that have one; those call the ones inside them if they
    want."""
    method = getattr(module, name, None)
    if callable(method):
        return [method]
    return [found for child in module.children() for found in methods_called(child, name)]
