"""Refuses ``data.seq_len`` beyond the positions of any model, built on meta and run on tokens there: shapes, and indices of positions,
show what no values are needed for. Of a model directory its files show it, in the launcher (:mod:`shardwise.run.preflight`)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ShardwiseError
from shardwise.model.calling import call
from shardwise.run.build import build_plain
from shardwise.run.config import RunConfig
from shardwise.run.preflight import too_long

_OF_SIZES = (
    "must match the size of tensor", "broadcast", "exceeds dimension size", "out of range", "block size", "sequence length",
)  # fmt: skip
"""What errors say of a sequence that is too long, of torch and of models that look for themselves."""


def check_positions_of_model(config: RunConfig) -> None:
    """The same of any model that is fed tokens, tried on meta; the random numbers of the process do not change."""
    if config.data.build is not None or config.train.forward is not None or config.model.build is None:
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = build_plain(config)
    except ShardwiseError:
        return  # said again, by every rank, where the model is built
    except Exception:
        return  # a constructor that looks at values cannot be built on meta
    most = most_positions(module.eval(), config.data.seq_len)
    if most is not None:
        raise too_long(config, f"model.build={config.model.build!r}", most, "")


def most_positions(module: nn.Module, seq_len: int) -> int | None:
    """How many tokens a model on meta takes, where it takes some and not ``seq_len``; None: it takes as many, or that does not show."""
    if takes(module, seq_len) is not False or not takes(module, 1):
        return None
    most, too_many = 1, seq_len
    while too_many - most > 1:
        middle = (most + too_many) // 2
        fits = takes(module, middle)
        if fits is None:
            return None
        most, too_many = (middle, too_many) if fits else (most, middle)
    return most


class _BeyondTableError(Exception):
    """An index of a position that a table does not have."""


class _Positions(TorchFunctionMode):
    """Within: the largest number in each result of ``torch.arange``, and in what is made of it by views and sums, is known, and looking it up in
    a table that is too short raises."""

    def __init__(self) -> None:
        super().__init__()
        self._largest: dict[int, tuple[Tensor, int]] = {}  # by id, with the tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is torch.arange:
            self._note(output, output.shape[0] - 1 if len(args) < 2 else self._end(args, output))
        elif func in (F.embedding, torch.embedding, torch.nn.functional.embedding):
            index, table = (args[0], args[1]) if func is F.embedding else (args[1], args[0])
            self._look(index, table)
        elif name in ("__getitem__", "index_select") and args:
            for index in args[1] if isinstance(args[1], tuple) else args[1:]:
                self._look(index, args[0])
        known = [self._largest[id(x)][1] for x in args if isinstance(x, Tensor) and id(x) in self._largest]
        if known and isinstance(output, Tensor) and not output.is_floating_point() and output.dtype != torch.bool:
            added = [x for x in args if isinstance(x, int) and not isinstance(x, bool)] if "add" in name else []
            self._note(output, max(known) + sum(added))
        return output

    @staticmethod
    def _end(args: Any, output: Tensor) -> int:
        start, step = args[0], args[2] if len(args) > 2 else 1
        return int(start + (output.shape[0] - 1) * step) if isinstance(start, int) and isinstance(step, int) else -1

    def _note(self, tensor: Tensor, largest: int) -> None:
        self._largest[id(tensor)] = tensor, largest

    def _look(self, index: Any, table: Any) -> None:
        found = self._largest.get(id(index))
        if found is not None and isinstance(table, Tensor) and table.dim() and found[1] >= table.shape[0]:
            raise _BeyondTableError(f"{found[1]} in a table of {table.shape[0]}")


def takes(module: nn.Module, num_tokens: int) -> bool | None:
    """Whether a model on meta runs on so many tokens; None: that does not show without values."""
    tokens = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.long, device="meta")}
    try:
        with torch.no_grad(), torch.device("meta"), _Positions():
            call(module, tokens)
    except (_BeyondTableError, AssertionError, IndexError):
        return False
    except Exception as error:  # of the model's own code: a shape that does not fit, or a value that is looked at
        return False if any(words in str(error) for words in _OF_SIZES) else None
    return True
