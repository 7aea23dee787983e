"""What the run-time object of a model uses, and others make: the data-parallel engine, gradients that are not final, and the like."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError


class Engine(Protocol):
    """What a data-parallel engine (DDP, FSDP2) does during training."""

    @property
    def hides_outputs(self) -> bool:
        """Whether the model was compiled as a whole, so that its graph has no marks of outputs."""

    def begin(self, *, reuses: bool, gathers_once: bool, marks_parts: bool) -> None:
        """Called when a window starts; backwards may come to parameters until :meth:`end`. ``reuses``: nothing writes parameters between
        its micro-batches, so that where they are whole they are cast once (a ``TrainStep``). ``gathers_once``: and those of the root are
        gathered once. ``marks_parts``: outputs of the model's parts show in the graph too, not only the model's own."""

    def set_last(self, is_last: bool) -> None:
        """Sets whether the next backward is of the window's last micro-batch: gradients may be summed over the ranks from then on."""

    def set_micro_batch(self, micro_batch: int | None) -> None:
        """Sets which micro-batch the next forward or backward is of, where others run between the two; None: the last one that began,
        or none."""

    def set_padding(self, padding: bool) -> None:
        """Sets whether gradients of the next backwards count as 0: of a micro-batch that exists only as padding."""

    def note_added(self, params: Sequence[nn.Parameter]) -> None:
        """Called after something was added to the gradients of ``params`` in a window, by no backward."""

    def complete(self, place: str) -> None:
        """Called after the last backward of a window: sums its gradients over the ranks. Those that :meth:`late` has flags of, and what
        :meth:`used` says, follow in the next exchange. ``place`` is for messages."""

    def used(self) -> Tensor | None:
        """uint8 flag per trainable parameter, in the order of ``Runtime.trainable``: it got a gradient on this rank
        since :meth:`begin`. None: gradients are not summed over ranks, and unused ones are None already."""

    def late(self) -> Tensor | None:
        """A uint8 flag: this rank has gradients that came after the others of a window were sent, and :meth:`complete` did not sum.
        None: there never are any."""

    def flat_gradients(self) -> Sequence[Tensor]:
        """Between :meth:`complete` and :meth:`end`: flat tensors of which all gradients are views, and which have zeros where a
        parameter is unused. Empty: there are none."""

    def add_late(self, used: Sequence[float], place: str) -> None:
        """Adds the sums over the ranks of such gradients to ``.grad``. ``used``: how many ranks set each flag of :meth:`used`."""

    def entered(self) -> list[str]:
        """Units entered since :meth:`begin`, in order: they must be the same on every rank, or collectives mismatch."""

    def has_gradients(self) -> bool:
        """Whether a backward has come to parameters on this rank since :meth:`begin`."""

    def holds(self) -> bool:
        """Whether there are gradients of this window that are not in ``.grad``."""

    def end(self) -> None:
        """Called when a window has ended: ranks have exchanged the results of :meth:`used` and :meth:`entered`."""

    def explain(self, error: BaseException) -> ShardwiseError | None:
        """The ShardwiseError for an error of torch, if its cause is known; else None."""

    def abandon(self) -> None:
        """Called when a window ended in an exception: forgets its unfinished work."""

    def drop_gathered(self) -> None:
        """Called before shards are written: gathered parameters left by a forward must not be used again."""

    def watch_writes(self, compares: bool) -> None:
        """Begins to look for forwards that write or replace what was gathered; with ``compares`` the next one by values too."""

    def lost_writes(self) -> Sequence[Tensor]:
        """The parameters for which that was seen."""

    def gathered(self) -> Sequence[tuple[Tensor, Tensor]]:
        """``(what forward computes with, parameter)`` of each parameter that it computes with a gathered copy of, as far
        as there is one."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: the modules hold full parameters, and forwards gather nothing. All ranks enter and leave it
        together."""


class OpenGradients(Protocol):
    """Gradients of a model that are not final yet: :class:`shardwise.step.accumulation.Accumulation`.

    Attributes:
        of: what they are of: a window, of a loop or of a ``TrainStep``, micro-batches of ``accumulate``, or either of another model.
        is_open: whether a backward may come to the parameters now.
        in_micro_batch: whether a micro-batch of a window runs.
        is_padding: whether gradients of the next backwards count as 0.
        num_penalties: how often a penalty was added.
        has_begun: whether a backward has run since they were opened.
        has_others: whether a backward has come to this model, or another open one, that was not a ``TrainStep``'s own.
    """

    of: Literal["window", "step", "accumulate", "another model"]
    is_open: bool
    in_micro_batch: bool
    is_padding: bool
    num_penalties: int
    has_others: bool

    @property
    def has_begun(self) -> bool: ...

    def zero_grad(self, params: Mapping[int, Any], set_to_none: bool) -> None:
        """Called before ``zero_grad()``, with the parameters (by id), and whether gradients become None."""

    def note_left(self) -> None:
        """Called after a backward of the user's own loop."""

    def refuse_edited(self) -> None:
        """Called before one: raises UsageError for a gradient that was changed since the last."""


class Pending(Protocol):
    """The source of values of a model that waits to be loaded, for the tensors that loading does not bring."""

    def write_rest(self, runtime: Any, local: Mapping[str, Tensor]) -> None:
        """Writes these tensors: canonical name -> this rank's part of it."""


class ShownClasses(Protocol):
    """The parameters of which a rank has plain parts: while the user's code runs their classes refuse to give numbers of
    a part."""

    def torchs(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: parameters have torch's own classes, of which attributes are read in less time."""

    def stepping(self, optim: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Context manager: an optimizer steps. Its state refuses too afterwards."""

    def mark_state(self, optim: torch.optim.Optimizer) -> None:
        """Makes the state of an optimizer refuse, where it is of parts. Called when it was loaded."""


class CutSequence(Protocol):
    """The sequences of a model of whose output each rank has some positions."""

    def part_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's positions of a micro-batch, of each tensor that has the samples and positions of the model's last forwards."""

    def cut(self, value: Any, dim: int) -> Any:
        """This rank's positions of a tensor along ``dim``, or of a micro-batch."""

    def halves(
        self, output: Any, batch: Mapping[str, Any], cut: Collection[str]
    ) -> "list[tuple[Any, dict[str, Any]]] | None":
        """Output and micro-batch of two halves of this rank's positions; ``cut``: the entries that are of these. None: it has less than two."""

    def join(self, x: Tensor, dim: int) -> Tensor:
        """All positions of what each rank has of its own, with gradients."""
