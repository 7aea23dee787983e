"""Comparisons of what a run on some rows of sequences has with what one on all of them had."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from shardwise.model.layers import LayerCalls
from shardwise.model.pytrees import keyed_leaves
from shardwise.model.row_facts import Differs
from shardwise.model.tensors import version_of
from shardwise.model.trial import Trial

_LAST = 8  # tensors that were compared: more would keep alive what a large model is done with
_ALLOWED = 1e-11  # relative to the largest number of a tensor


class ComparedRows(LayerCalls):
    """A run on some rows of sequences of ``length`` (``rows`` None: on all of them)."""

    def __init__(self, trial: Trial, length: int, rows: Tensor | None):
        super().__init__(trial.name_of)
        self._trial, self._length, self._rows = trial, length, rows
        self._num_rows = length if rows is None else len(rows)
        self._compared = deque[tuple[Tensor, Tensor, tuple[int, int]]](maxlen=_LAST)  # and equal, with their versions

    def _dim_of(self, name: str, x: Tensor, whole: Tensor) -> int:
        at = [dim for dim, (mine, all_) in enumerate(zip(x.shape, whole.shape, strict=True)) if mine != all_]
        if len(at) != 1 or whole.shape[at[0]] != self._length:
            raise Differs(
                name, f"a tensor {tuple(whole.shape)} has positions beside other things in one dim, or in several"
            )
        return at[0]

    def _is_same(self, mine: Any, full: Any) -> bool:
        of_all = dict(keyed_leaves(full))
        try:
            for path, x in keyed_leaves(mine):
                if isinstance(x, Tensor):
                    self._compare("", path, x, of_all.get(path))
        except Differs:
            return False
        return True

    def _compare(self, name: str, what: str, mine: Tensor, full: Any) -> None:
        """Raises Differs unless ``mine`` is this rank's rows of ``full``, along any dims, or all of it."""
        if not isinstance(full, Tensor):
            raise Differs(name, f"{what} is a tensor on rows alone")
        if mine.is_meta or full.is_meta:
            return
        versions = version_of(mine), version_of(full)
        if any(x is mine and y is full and then == versions for x, y, then in self._compared):
            return  # what one module returns the next one is called with
        whole = self.rows_of(full, mine.shape)
        if whole is None:
            raise Differs(name, f"{what} has the shape {tuple(mine.shape)}, for {tuple(full.shape)} of all positions")
        if torch.equal(mine, whole):
            self._compared.append((mine, full, versions))
            return
        if not mine.is_floating_point() or mine.dtype != whole.dtype:
            raise Differs(name, f"{what} differs")
        off = _largest(mine - whole)
        if not off <= _ALLOWED * _largest(whole):  # of a rank's rows, which are fewer
            off /= max(_largest(full), 1e-300)
            if not off <= _ALLOWED:
                raise Differs(name, f"{what} is off by {off:.1e}")
        self._compared.append((mine, full, versions))

    def rows_of(self, full: Tensor, shape: Any) -> Tensor | None:
        """This rank's rows of ``full``, along each dim in which ``shape`` is another, also where samples and positions lie in one dim;
        None: it has no such shape."""
        if full.dim() != len(shape) or self._rows is None:
            return full if full.shape == shape else None
        for dim, (mine, all_) in enumerate(zip(shape, full.shape, strict=True)):
            if mine != all_:
                times, rest = divmod(all_, self._length)
                if rest or mine != times * self._num_rows:
                    return None
                at = self._rows if times == 1 else (torch.arange(times)[:, None] * self._length + self._rows).flatten()
                full = full.index_select(dim, at)
        return full


def _largest(x: Tensor) -> float:
    """The largest absolute number of a tensor."""
    return float(torch.linalg.vector_norm(x.detach(), float("inf"))) if x.numel() else 0.0
