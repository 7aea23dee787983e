"""Refuses stored weights of which shapes, dtypes or values do not fit the model's, before any value is copied."""

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch

from shardwise.errors import CheckpointError
from shardwise.model import dtype_of
from shardwise.model.tensors import bytes_of
from shardwise.recipe.boxes import Box, blocks
from shardwise.state.files import BUFFER, OpenFiles
from shardwise.state.match_names import Matched, Wanted
from shardwise.state.report import shortened
from shardwise.state.stored import Source, TensorSource, is_rounded

Cast = bool | Literal["lossless"]
"""Which values of another dtype are converted: all, none, or those of which every value exists in the model's dtype."""

Boxes = Callable[[str, TensorSource], list[Box]]  # tensor -> boxes of it that this rank reads to check values


def refuse_unfit(
    matched: Matched, wanted: Mapping[str, Wanted], source: Source, *, cast: Cast, rounded: Collection[str]
) -> None:
    """Raises CheckpointError for an empty source, a tensor of another shape, and one of a dtype that ``cast`` does not convert.
    Those of ``rounded`` may always be."""
    if wanted and not source.tensors:
        raise CheckpointError(
            f"weights from {source.place}",
            why="it is empty: there is no tensor in it",
            fix="give one with tensors; where rank 0 alone has them, pass shared_files=False",
        )
    shapes = [n for n, s in matched.tensors.items() if s.shape != wanted[n].shape]
    if shapes:
        name = shapes[0]
        raise CheckpointError(
            f"{source.place}: shape {list(matched.tensors[name].shape)}{_called(matched, name)}",
            why=f"the model has {list(wanted[name].shape)} there{_and_more(len(shapes), 'do not fit')}",
            fix='build the model as these weights are; or leave tensors out: strict=False, rename=[("pattern", None)]',
            name=name,
            misfit="shape",
        )
    dtypes = [
        name
        for name, stored in matched.tensors.items()
        if not may_be(stored.dtype, wanted[name].dtype, cast=name in rounded or cast)
    ]
    if dtypes:
        name = dtypes[0]
        if matched.tensors[name].dtype.startswith("float8"):
            raise CheckpointError(
                f"{source.place}: dtype {matched.tensors[name].dtype}{_called(matched, name)}",
                why=f"the model stores {wanted[name].dtype}, and numbers of one byte are those of quantised weights, which are right only "
                "with the scales beside them (quantization_config in the directory's config.json)",
                fix="load weights of the model that are not quantised, or multiply them by their scales first",
                name=name,
            )
        raise CheckpointError(
            f"{source.place}: dtype {matched.tensors[name].dtype}{_called(matched, name)}",
            why=f"the model stores {wanted[name].dtype}{_and_more(len(dtypes), 'differ')}"
            + (", and values would be rounded" if cast == "lossless" else ""),
            fix="pass cast=True to convert (between floating dtypes of 2 bytes and more), or build the model in that dtype",
            name=name,
            misfit="dtype",
        )


def refuse_none(matched: Matched, source: Source) -> None:
    """Raises CheckpointError if no name of the source is one of the model's."""
    if not matched.tensors:
        raise CheckpointError(
            f"weights from {source.place}",
            why=f"none of its {len(source.tensors)} names is one of the model's: {shortened(list(source.tensors))}",
            fix='map names with rename=[("pattern", "replacement")]',
            misfit="names",
        )


def may_be(there: str, here: str, *, cast: Cast) -> bool:
    """Whether values of dtype ``there`` may be loaded as ``here``: with ``cast`` they may be rounded, but never become
    integers, or lose an imaginary part or their scale."""
    if there == here or cast is False:
        return there == here
    both = (is_rounded(there) and is_rounded(here)) or (dtype_of(there).is_complex and dtype_of(here).is_complex)
    return both and (cast is True or torch.promote_types(dtype_of(there), dtype_of(here)) == dtype_of(here))


def _called(matched: Matched, name: str) -> str:
    return f" (called {matched.names[name]} there)" if matched.names[name] != name else ""


def _and_more(count: int, what: str) -> str:
    return f"; {count} tensors {what}" if count > 1 else ""


def refuse_untied(matched: Matched, source: Source, files: OpenFiles, boxes: Boxes) -> None:
    """Raises CheckpointError for different tensors in the source for two names that the model ties: one of them would be lost."""
    for home, others in matched.doubles.items():
        first = matched.tensors[home]
        for name, other in others.items():
            if (
                other.shape == first.shape
                and all(  # bit by bit: NaN is equal to itself, so that what was saved can be loaded
                    torch.equal(
                        bytes_of(first.load(files, part)), bytes_of(other.load(files, part).to(dtype_of(first.dtype)))
                    )
                    for box in boxes(home, first)
                    for part in blocks(box, BUFFER // 8)
                )
            ):
                continue
            raise CheckpointError(
                f"{source.place}: {matched.names[home]} and {name} differ",
                why="the model ties these names: it has one tensor for both",
                fix=f"build the model without that tie, or leave one out: rename=[({'^' + name.replace('.', chr(92) + '.') + '$'!r}, None)]",
                name=home,
                misfit="double",
            )


def refuse_nonfinite(matched: Matched, source: Source, files: OpenFiles, boxes: Boxes) -> None:
    """Raises CheckpointError for values that are NaN or infinite."""
    for name, stored in matched.tensors.items():
        if not (dtype_of(stored.dtype).is_floating_point or dtype_of(stored.dtype).is_complex):
            continue
        for part in (part for box in boxes(name, stored) for part in blocks(box, BUFFER // 8)):
            values = stored.load(files, part)
            bad = values.numel() - int(torch.isfinite(values if values.itemsize > 1 else values.float()).sum())
            if bad:
                raise CheckpointError(
                    f"{source.place}: {bad} values that are NaN or infinite",
                    why="check_finite=True was asked for",
                    fix="use weights of an earlier step",
                    name=name,
                )
