"""Reads a module, on meta or not, into an :class:`~shardwise.recipe.Anatomy`: tensors, ties, block lists."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from shardwise.errors import UnsupportedError, UsageError, first_line
from shardwise.model.adapted import Adapted, adapted_layers
from shardwise.model.blocks import find_block_lists, has_no_forward
from shardwise.model.calling import call_alone, line_of, run_on
from shardwise.model.isolated import Isolated
from shardwise.model.module_state import Attributes, HookState, ModuleState, ParameterState, TensorAttributes
from shardwise.model.names import canonical_modules, canonical_tensors, unwrap_module
from shardwise.model.packed import PackedLinear, packed_layers
from shardwise.model.pytrees import map_leaves
from shardwise.model.trial import Trial
from shardwise.recipe.records import Anatomy, Codec, TensorFact
from shardwise.world.rng import set_streams, streams


def read_anatomy(module: nn.Module, *, example: Mapping[str, Any] | None = None) -> Anatomy:
    """The structure of ``module`` as an Anatomy. Does not change the module, and needs no process group.

    Args:
        module: any module; parameters may be on meta.
        example: one micro-batch (``str -> Tensor``), run once without gradients to see in which order blocks are
            entered; None: the order of their lists.

    Raises:
        UnsupportedError: a lazy parameter that has no shape yet.
        UsageError: an example that the module cannot be run with.
    """
    refuse_lazy(module)
    params = _tensors(module, "_parameters")
    buffers = _tensors(module, "_buffers")
    run = _entered(module, example) if example is not None else None
    classes = {name: user_class(child) for name, child in canonical_modules(module)}
    return Anatomy(
        module_class=user_class(unwrap_module(module)).__name__,
        params=params,
        buffers=buffers,
        lists=find_block_lists(module, run),
        classes={name: cls.__name__ for name, cls in classes.items()},
        class_paths={name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in classes.items()},
        module_aliases=_module_aliases(module),
        containers=tuple(name for name, child in canonical_modules(module) if has_no_forward(child)),
        adapted=tuple(adapted_layers(module)),
        codecs=_codecs(module),
    )


def _codecs(module: nn.Module) -> dict[str, Codec]:
    """What the bytes of parameters stand for."""
    found = {}
    for name, layer in packed_layers(module).items():
        of = f"{name}.weight" if name else "weight"
        for part, stored in (("codes", f"{of}_nf4"), ("scales", f"{of}_nf4_scales")):
            found[stored] = Codec(
                kind="nf4", of=of, shape=layer.packing.shape, dtype=dtype_name(layer.weight_dtype), part=part
            )
    return found


def refuse_lazy(module: nn.Module) -> None:
    """Raises UnsupportedError for a parameter or buffer of a lazy module that has no shape yet."""
    for kind in ("_parameters", "_buffers"):
        for name, owner, attr in canonical_tensors(module, kind):
            tensor = getattr(owner, kind)[attr]
            if is_lazy(tensor):
                raise UnsupportedError(
                    f"a lazy {type(owner).__name__}",
                    why="it has no shape before the first forward, so it cannot be cut",
                    fix="run one batch through the plain module before parallelize, or give the sizes to its constructor",
                    name=name,
                )


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    return getattr(torch, name)


def _tensors(root: nn.Module, kind: str) -> dict[str, TensorFact]:
    names: dict[int, list[str]] = {}
    facts: dict[int, tuple[Tensor, bool]] = {}
    for name, module, attr in canonical_tensors(root, kind):
        tensor = getattr(module, kind)[attr]
        names.setdefault(id(tensor), []).append(name)
        facts[id(tensor)] = (tensor, attr not in module._non_persistent_buffers_set)
    return {
        names[key][0]: TensorFact(
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            trainable=kind == "_parameters" and tensor.requires_grad,
            persistent=persistent,
            aliases=tuple(names[key][1:]),
        )
        for key, (tensor, persistent) in facts.items()
    }


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers PreTrainedModel. Checked by name: transformers need not be installed."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(model).__mro__
    )


def user_class(module: nn.Module) -> type:
    """The class that the user wrote, below those that FSDP2 and ``torch.nn.utils.parametrize`` put on top of it."""
    mro = type(module).__mro__
    cls = mro[2] if len(mro) > 2 and mro[1].__name__ == "FSDPModule" else mro[0]
    cls = next(c for c in cls.__mro__ if not issubclass(c, Adapted | PackedLinear))
    return cls.__mro__[1] if is_parametrized(module) and cls.__name__.startswith("Parametrized") else cls


def _module_aliases(root: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first[id(child)] for name, child in canonical_modules(root) if first.setdefault(id(child), name) != name
    }


def _entered(module: nn.Module, example: Mapping[str, Any]) -> dict[str, int]:
    """Module name -> position in the order in which a run of ``example`` first entered the modules."""
    entered: dict[str, int] = {}

    def note(name: str) -> None:
        entered.setdefault(name, len(entered))

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    modules = [child for _, child in canonical_modules(module)]
    states = [ModuleState(modules), ParameterState(modules), TensorAttributes(modules), *map(Attributes, modules)]
    there = map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(example))
    isolated = Isolated(module, lambda model: call_alone(model, there))
    rng, hooks = streams(torch.device("cpu")), HookState(modules)
    for name, child in canonical_modules(module):
        child.register_forward_pre_hook(lambda *_, name=name: note(name))
    try:
        with torch.no_grad(), isolated.noting(""):
            isolated(module)
    except Exception as error:
        if device.type == "meta":  # a forward may make tensors on the CPU
            with contextlib.suppress(UnsupportedError):
                return {name: i for i, name in enumerate(Trial(module, run_on(example)).entered())}
        raise UsageError(
            f"example={{{', '.join(example)}}} for {type(module).__name__}",
            why=f"the model does not run with it{' on meta, without values' if device.type == 'meta' else ''}: "
            f"{first_line(error, type(error).__name__)}{line_of(error)}",
            fix="give what forward takes, by its names; or leave it out: the order of blocks is then seen when the "
            "model first runs",
        ) from error
    finally:
        set_streams(rng, torch.device("cpu"))
        with contextlib.ExitStack() as stack:  # all of them, whichever raises
            for each in (isolated, hooks, *reversed(states)):
                stack.callback(each.restore)
    return entered
