"""Reads a module, on meta or not, into an :class:`~shardwise.recipe.Anatomy`: tensors, ties, block lists."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from shardwise.anatomy.blocks import find_block_lists
from shardwise.anatomy.code import unwrap_module
from shardwise.anatomy.names import canonical_modules, canonical_tensors
from shardwise.errors import UnsupportedError
from shardwise.recipe.records import Anatomy, TensorFact

__all__ = ["dtype_name", "dtype_of", "is_pretrained", "read_anatomy", "refuse_lazy", "user_class"]


def read_anatomy(module: nn.Module, *, example: Mapping[str, Tensor] | None = None) -> Anatomy:
    """What ``module`` is made of. Nothing of it is changed; no rank needs to be anywhere.

    Args:
        module: any module; parameters may be on meta.
        example: one micro-batch (``str -> Tensor``), run once without gradients to see which blocks are entered.

    Raises:
        UnsupportedError: a lazy parameter that has no shape yet.
    """
    refuse_lazy(module)
    params = _tensors(module, "_parameters")
    buffers = _tensors(module, "_buffers")
    skipped = _skipped_by(module, example) if example is not None else None
    classes = {name: user_class(child) for name, child in canonical_modules(module)}
    return Anatomy(
        module_class=user_class(unwrap_module(module)).__name__,
        params=params,
        buffers=buffers,
        lists=find_block_lists(module, skipped),
        classes={name: cls.__name__ for name, cls in classes.items()},
        class_paths={name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in classes.items()},
        containers=tuple(name for name, child in canonical_modules(module) if _has_no_forward(child)),
    )


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


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers' own. Told by name: transformers need not be there."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(model).__mro__
    )


def user_class(module: nn.Module) -> type:
    """The class the user wrote, below those that FSDP2 and ``torch.nn.utils.parametrize`` put over it."""
    mro = type(module).__mro__
    cls = mro[2] if len(mro) > 2 and mro[1].__name__ == "FSDPModule" else mro[0]
    return cls.__mro__[1] if is_parametrized(module) and cls.__name__.startswith("Parametrized") else cls


def _skipped_by(module: nn.Module, example: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Modules that a run of ``example`` did not enter. None if the example cannot be run (on meta, most branches that
    depend on values cannot): then only the code is believed."""
    entered: set[str] = set()
    handles = [
        child.register_forward_pre_hook(lambda _m, _a, name=name: entered.add(name))
        for name, child in canonical_modules(module)
    ]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    rng = torch.get_rng_state()
    try:
        with torch.no_grad():
            module(**{k: v.to(device) for k, v in example.items() if k != "labels"})
    except NotImplementedError:
        return None  # a value was asked for on meta
    except RuntimeError:
        if device.type == "meta":
            return None
        raise
    finally:
        for handle in handles:
            handle.remove()
        torch.set_rng_state(rng)
        for name, buffer in module.named_buffers():
            if name in before and buffer.device.type != "meta":
                buffer.copy_(before[name])
    names = [name for name, child in canonical_modules(module) if next(child.parameters(), None) is not None]
    return {name: "was skipped when the example was run" for name in names if name not in entered}
