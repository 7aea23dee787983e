"""``fused=True``: the loss of a language model is computed where its head is called, so that its logits are never held."""

import difflib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise._torch.autograd import without_subclasses
from shardwise.errors import UnsupportedError, UsageError
from shardwise.layout import overlap
from shardwise.model import canonical_modules
from shardwise.parallel import Runtime, runtime_of
from shardwise.step.linear_loss import Share, of_share
from shardwise.step.loss import Batch, logits_of, next_token_loss


def fused_forward(
    model: nn.Module, fused: bool | str, loss: Any, forward: Callable[[nn.Module, Batch, Any], Any]
) -> "FusedForward":
    """The forward of ``model`` that returns :func:`next_token_loss` and holds no logits.

    Args:
        model: from ``parallelize``.
        fused: True, or the name of the head.
        loss: the loss that was asked for.
        forward: ``forward(model, batch, state)`` -> the output of the model.

    Raises:
        UsageError: another loss than ``next_token_loss``, no head, or several.
        UnsupportedError: a head that is more than a linear layer, or is compiled.
    """
    if loss is not next_token_loss:
        raise UsageError(
            f"fused={fused!r} with a loss that is not sw.next_token_loss",
            why="the loss is computed in place of the logits, which a loss of your own would be given",
            fix="leave loss= out; or leave fused= out, and call sw.linear_cross_entropy in your loss, on what the head is given",
        )
    name = _named_head(model, fused) if isinstance(fused, str) else _head_of(model)
    return FusedForward(forward, name, runtime_of(model))


class FusedForward:
    """Calls a model and returns the summed cross entropy of its next tokens; see :func:`fused_forward`."""

    def __init__(self, forward: Callable[[nn.Module, Batch, Any], Any], name: str, runtime: Runtime):
        self._forward, self._name, self._runtime = forward, name, runtime
        self._head = dict(canonical_modules(runtime.module))[name]
        self._refuse_unfit(runtime)
        self._share = _share_of(runtime, f"{name}.weight")

    def __call__(self, model: nn.Module, batch: Batch, state: Any) -> Tensor:
        losses: list[Tensor] = []
        head, inner = self._head, self._head.forward

        def forward(hidden: Tensor) -> Tensor:
            labels = self._runtime.for_loss(self._runtime.micro_batch)["labels"]
            hidden = hidden if labels.numel() else hidden.flatten(0, -2)[:0]  # no position is this rank's
            if hidden.shape[:-1].numel() != labels.numel() or losses:
                raise UsageError(
                    f"fused: the head is called {'twice' if losses else f'with {list(hidden.shape)}, for labels {list(labels.shape)}'}",
                    why="the loss is computed in the one call of the head, with a label for each position",
                    fix="leave fused= out",
                    name=self._name,
                )
            bias: Any = head.bias
            loss = of_share(hidden, head.weight, labels, bias, self._share)  # type: ignore[arg-type]
            losses.append(loss)
            return _as_output(loss, self._name)

        was_own = "forward" in vars(head)
        head.forward = forward
        try:
            output = self._forward(model, batch, state)
        finally:
            if was_own:
                head.forward = inner
            else:
                del head.forward
        found = output if isinstance(output, Tensor) else logits_of(output)
        if not losses or type(found) is not _HeadLoss:
            raise UsageError(
                f"fused: the output of the model is a {type(found).__name__}, and not what its head returned",
                why="the loss is computed in place of the logits"
                + ("; this forward did not call the head" if not losses else ", and something was made of them"),
                fix='name the layer whose output the model returns: fused="lm_head"; or leave fused= out',
                name=self._name,
            )
        return _plain(found)

    def _refuse_unfit(self, runtime: Runtime) -> None:
        head, name = self._head, self._name
        if any(edit.action == "compile" and _is_in(name, edit.module) for edit in runtime.recipe.edits):
            raise UnsupportedError(
                "fused, with a head that is compiled",
                why="the loss takes the place of the head's forward, in a graph that is compiled already",
                fix='compile the blocks alone: compile="blocks"; or leave fused= out',
                name=name,
            )
        own = vars(head).get("forward")
        is_plain = type(head).forward is nn.Linear.forward and "weight" in head._parameters
        if not is_plain or (own is not None and not getattr(own, "is_layer_of_rank", False)):
            raise UnsupportedError(
                f"fused, with a head that is a {type(head).__name__}"
                + (" whose forward was replaced" if own is not None else ""),
                why="the loss multiplies by its weight itself, and this is more than a linear layer",
                fix="leave fused= out",
                name=name,
            )


def _is_in(name: str, module: str) -> bool:
    return module in ("", name) or name.startswith(f"{module}.")


def _named_head(model: nn.Module, name: str) -> str:
    modules = dict(canonical_modules(model))
    if name not in modules:
        close = (
            difflib.get_close_matches(name, modules, 3) or [n for n, m in modules.items() if type(m) is nn.Linear][-3:]
        )
        raise UsageError(
            f"fused={name!r}",
            why="the model has no module of this name",
            fix=f"use one of its linear layers: {', '.join(map(repr, close))}; or fused=True",
        )
    return name


def _head_of(model: nn.Module) -> str:
    """The module that makes logits: as a Hugging Face model says, or the linear layer with as many outputs as an embedding
    has rows."""
    modules = dict(canonical_modules(model))
    ask = getattr(model, "get_output_embeddings", None)
    said = ask() if callable(ask) else None
    rows = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    found = [
        name
        for name, module in modules.items()
        if module is said or (said is None and isinstance(module, nn.Linear) and module.out_features in rows)
    ]
    if len(found) != 1:
        what = f"{len(found)} such layers: {', '.join(found)}" if found else "no such layer"
        raise UsageError(
            f"fused=True for a {type(model).__name__}",
            why=f"its head is sought as a linear layer with as many outputs as an embedding has rows, and it has {what}",
            fix='name the layer that makes the logits: fused="head"',
        )
    return found[0]


def _share_of(runtime: Runtime, weight: str) -> Share | None:
    """This rank's share of the classes of a head; None: it has all. Units gather what data parallelism cuts."""
    param = next(param for name, param in runtime.recipe.params.items() if weight in (name, *param.aliases))
    cuts = [cut for cut in param.cuts if not overlap(cut.axis, "fsdp")]
    if not cuts:
        return None
    if len(cuts) > 1 or cuts[0].dim != 0 or cuts[0].parts:
        raise UnsupportedError(
            f"fused, with a head that is cut along dim {cuts[0].dim} over {cuts[0].axis}",
            why="the loss needs whole rows of its weight, one for each class",
            fix="leave fused= out",
            name=weight,
        )
    return Share.along(runtime.world.axis(cuts[0].axis), param.shape[0])


class _HeadLoss(Tensor):
    """The loss, where the model's code has the logits. It goes through as it is; what would make other numbers of it raises
    an error."""

    of_head: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = getattr(func, "__name__", str(func))
        mine = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, _HeadLoss)), None)
        if what in _CASTS and mine is not None:
            return mine  # the loss is in float32, and stays
        if what not in _LOOKS or func in _DATA or (what == "register_hook" and not _is_of_units(args[1])):
            raise UsageError(
                f"fused: {'.data' if func in _DATA else what} of what the head returns",
                why="the model goes on to compute with its logits (scales them, caps them, masks some), and the loss is computed in their place",
                fix="leave fused= out for this model",
                name=getattr(mine, "of_head", None),
            )
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
            # As hooks on outputs of units do, which go on with it.
            return _as_output(result, mine.of_head) if what == "detach" and mine is not None else result


_CASTS = ("to", "float", "type_as", "contiguous")
_LOOKS = (
    "__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "register_hook", "__hash__",
    "detach", "untyped_storage", "data_ptr", "element_size", "_is_view", "is_contiguous", "__repr__", "retain_grad",
    "requires_grad_",
)  # fmt: skip
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


def _is_of_units(hook: Any) -> bool:
    """Whether a hook is one of those with which units are gathered again; others may change the gradients of logits."""
    module = getattr(hook, "__module__", None) or getattr(getattr(hook, "func", None), "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "shardwise")


def _as_output(loss: Tensor, name: str) -> Tensor:
    output = loss.as_subclass(_HeadLoss)
    output.of_head = name
    return output


def _plain(loss: Tensor) -> Tensor:
    with without_subclasses():
        return loss.as_subclass(Tensor)
