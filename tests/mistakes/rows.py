"""What a row of docs/mistakes.md is: one mistake, as a script in plain torch and as the same script with Shardwise, and how both are run.

A row is a subclass of :class:`Mistake` in one of the modules that :data:`THEMES` names. Its docstring is the first column of the page. What
comes of the second script is found, never declared: an error of ours, a warning of ours, the numbers of one process, or nothing at all, which
is "silent" and fails the test.
"""

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardwiseError

__all__ = [
    "THEMES",
    "Mistake",
    "Outcome",
    "Plain",
    "alike",
    "cells",
    "command",
    "measure",
    "off",
    "read_page",
    "row_of",
    "rows",
]

THEMES = {  # module in this folder -> heading of its part of the page
    "labels": "Labels and tokens",
    "losses": "Losses and figures",
    "loops": "Loops, accumulation, clipping",
    "models": "Models: wrapping, sharing, random numbers",
    "options": "Options and precision",
    "data": "Data",
    "checkpoints": "Checkpoints and weights",
}


@dataclass(frozen=True)
class Plain:
    """What a script in plain torch came to.

    Attributes:
        text: what it measured, in few digits: the second column of the page.
        off: how far that is from what was meant, relatively; a mistake that costs nothing fails the test.
    """

    text: str
    off: float


@dataclass(frozen=True)
class Outcome:
    """What came of the script with Shardwise: "refused", "warned", "right" or "silent"; and its third column."""

    kind: str
    text: str


class Mistake:
    """A row; see the module's docstring.

    Attributes:
        ranks: on how many ranks both scripts run; ``plain_ranks`` and ``our_ranks`` where they differ.
        says: words that our error or warning must have, so that another one does not pass for it; "": the numbers must be right.
        versus_one: ``ours`` returns values instead, and is run once more on one rank: what it returns there is what they are compared with.
        gate: how far from one process "right" may be, relatively.
        against: what ``ours`` compares with, where that is not one process.
    """

    ranks: ClassVar[int] = 1
    plain_ranks: ClassVar[int | None] = None
    says: ClassVar[str] = ""
    versus_one: ClassVar[bool] = False
    gate: ClassVar[float] = 1e-12
    against: ClassVar[str] = "from one process"

    def plain(self) -> Plain:
        """The script in plain torch, inside a process group where there are several ranks. What rank 0 returns is shown."""
        raise NotImplementedError

    def ours(self) -> Any:
        """The script with Shardwise. Returns how far its numbers are from those of one process, or infinity where nothing can be compared."""
        raise NotImplementedError


def rows() -> dict[str, type[Mistake]]:
    """Every row by the name of its class, in the order of the page."""
    found: dict[str, type[Mistake]] = {}
    for theme in THEMES:
        module = importlib.import_module(f"mistakes.{theme}")
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, Mistake) and value.__module__ == module.__name__:
                assert name not in found, name
                found[name] = value
    return found


def measure(run: Callable[..., list], name: str) -> tuple[Plain, Outcome]:
    """Runs both scripts of the row ``name`` by ``RankPool.run``.

    Raises:
        AssertionError: plain torch was not silent, or the mistake cost nothing there.
    """
    row = row_of(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        folder.mkdir()
        plain, said = run(_plainly, row.plain_ranks or row.ranks, name, str(folder))[0]
    assert not said, f"{name}: plain torch said {said}"
    assert plain.off >= 0.01, f"{name}: the mistake costs nothing in plain torch: {plain}"
    with tempfile.TemporaryDirectory() as folder:
        answers = run(_with_ours, row.ranks, name, folder)
    if row.versus_one and all(text is None for text, _, _ in answers):
        with tempfile.TemporaryDirectory() as folder:
            ((_, _, alone),) = run(_with_ours, 1, name, folder)
        answers = [(text, told, off(found, alone)) for text, told, found in answers]
    return plain, _outcome(row, answers)


def row_of(name: str) -> type[Mistake]:
    return rows()[name]


def _outcome(row: type[Mistake], answers: list) -> Outcome:
    """Of all ranks: an error on one of them is one; numbers are right where all are."""
    assert row.__doc__ is not None
    errors = [text for text, _, _ in answers if text is not None]
    told = [text for _, texts, _ in answers for text in texts]
    for kind, texts in (("refused", errors), ("warned", told)):
        for text in texts:
            if row.says and row.says in text:
                return Outcome(kind, _shown(text))
    worst = max((error for _, _, error in answers if error is not None), default=float("inf"))
    if not errors and not row.says and worst <= row.gate:
        return Outcome("right", f"at most {row.gate:.0e} {row.against}")
    return Outcome("silent", f"{worst:.1e} {row.against}; errors {[text[:300] for text in errors]}; warnings {told}")


def _shown(text: str) -> str:
    """The first line, cut where a word ends."""
    line = text.strip().splitlines()[0]
    return line if len(line) <= 170 else line[:170].rsplit(" ", 1)[0] + " ..."


def _plainly(name: str, folder: str) -> tuple[Plain, list[str]]:
    row = row_of(name)()
    with _inside(folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if (size := int(os.environ["WORLD_SIZE"])) > 1:
            # Not by the port: the ranks are warm, and a store there may still have the addresses of the group before.
            store = dist.FileStore(str(Path(folder).with_name("store")), size)
            dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)
            dist.barrier()  # a rank that ends at once would close connections that another is still making
        try:
            plain = row.plain()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return plain, [str(each.message) for each in caught]


def _with_ours(name: str, folder: str) -> tuple[str | None, list[str], Any]:
    """The text of an error of ours, the texts of warnings that our code gave, and how far off the numbers are."""
    row, told = row_of(name)(), []
    given = warnings.warn

    def warn(message: Any, *args: Any, **kwargs: Any) -> None:
        # Whose warning it is cannot be seen from what is caught: its place is the user's line.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("shardwise"):
            told.append(str(message).replace(folder, "."))
        given(message, *args, **kwargs)

    with _inside(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn = warn  # type: ignore[assignment]
        try:
            return None, told, row.ours()
        except ShardwiseError as error:
            text = str(error) if isinstance(error, CommandError) else f"{type(error).__name__}: {error}"
            return text.replace(folder, "."), told, None
        finally:
            warnings.warn = given


@contextlib.contextmanager
def _inside(folder: str) -> Any:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- for the scripts ---------------------------------------------------------------------------------------------------------


def off(found: Any, wanted: Any) -> float:
    """The largest difference of two numbers, tensors, or mappings or lists of them, relative to the largest wanted element."""
    pairs = list(_pairs(found, wanted))
    scale = max(float(b.abs().max()) for _, b in pairs if b.numel())
    return max(float((a - b).abs().max()) for a, b in pairs if b.numel()) / max(scale, 1e-300)


def _pairs(found: Any, wanted: Any) -> Iterable[tuple[Tensor, Tensor]]:
    if isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
        for name, value in wanted.items():
            yield from _pairs(found[name], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), (found, wanted)
        for a, b in zip(found, wanted, strict=True):
            yield from _pairs(a, b)
    else:
        assert wanted is not None and found is not None, (found, wanted)
        a, b = (
            each.detach() if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64)
            for each in (found, wanted)
        )
        assert a.shape == b.shape, (a.shape, b.shape)
        yield a.double(), b.double()


def command(*words: str) -> float:
    """``shardwise WORDS``: what it says where it refuses. Returns 0.0 if it ends well."""
    from shardwise.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(list(words))
    if status:
        raise CommandError(said.getvalue())
    return 0.0


class CommandError(ShardwiseError):
    """What the command wrote to stderr, with its exit status 2."""

    def __init__(self, text: str):
        super().__init__(text, why="", fix="")
        self.text = text

    def __str__(self) -> str:
        return self.text


def cells(name: str, plain: Plain, ours: Outcome) -> tuple[str, str, str]:
    """The first three columns of a row, as they stand in the page."""
    mistake = " ".join((row_of(name).__doc__ or "").split())
    return tuple(
        text.replace("|", "\\|").replace("*", "\\*") for text in (mistake, plain.text, f"{ours.kind}: {ours.text}")
    )  # type: ignore[return-value]


def read_page(text: str) -> dict[str, tuple[str, str, str]]:
    """The cells of every row of the page, by the name of the row, which is in the fourth column."""
    split = (
        re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
        for line in text.splitlines()
        if line.startswith("| ")
    )
    return {each[3].strip("`"): (each[0], each[1], each[2]) for each in split if each[3].startswith("`")}


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def alike(a: str, b: str, tolerance: float = 0.1) -> bool:
    """Whether two texts have the same words, and numbers that differ by a tenth at most: another torch may round otherwise."""
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    pairs = zip(map(float, _NUMBER.findall(a)), map(float, _NUMBER.findall(b)), strict=True)
    return all(abs(x - y) <= tolerance * max(abs(x), abs(y)) for x, y in pairs)
